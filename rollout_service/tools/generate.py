"""`areal-async generate`: answers of a model or checkpoint to a prompt."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.cli.tools import AnswersRequest, plain, print_json, run_tool
from areal_async.service.context import ServiceContext
from areal_async.trajectory import EpisodeBuilder
from rollout_service.evaluator import lone_engine, prepare_evaluation
from rollout_service.process import make_renderer, sampling_of
from rollout_service.tools.serving import ModelFolder, lone_evaluator, target_of
from rollout_service.workflows import Context, PolicyEngine


async def answers(voice: PolicyEngine, request: AnswersRequest, prompt: str) -> list[dict[str, Any]]:
    """Return the requested number of answers to a prompt, each with text, finish reason and number of
    tokens."""
    chat = [{"role": "system", "content": request.system}] if request.system is not None else []
    asked: Any = prompt if request.raw else [*chat, {"role": "user", "content": prompt}]

    async def answer(sample: int) -> dict[str, Any]:
        name = f"generate-{sample}"
        builder = EpisodeBuilder("generate", name, name, sample)
        voices = {builder.policies[0]: voice}
        ctx = Context(voices, builder, episode_id=name, seed=request.seed, sample=sample)
        reply = await ctx.generate(asked, train=False)
        return {"text": reply.text, "finish_reason": reply.finish_reason, "tokens": len(reply.token_ids)}

    return await asyncio.gather(*map(answer, range(request.n)))


def main(request: AnswersRequest) -> None:
    prompt = request.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().rstrip("\n")
    if not prompt:
        mistake = Mistake("PROMPT", "it is empty", "Give a text")
        raise ConfigError("the command line", [mistake])
    with target_of(request.target) as target:
        sections = {"evaluation": {"engine": request.engine}}
        with lone_evaluator(target, request, sections) as ctx:
            asyncio.run(_serve(ctx, target.model, request, prompt))


async def _serve(ctx: ServiceContext, model: Path, request: AnswersRequest, prompt: str) -> None:
    job = ctx.job
    prepare_evaluation(job)
    engine = lone_engine(ctx, max(1, request.n))
    render = make_renderer(job.model, job.rollout.template_args, pixels=job.rollout.images.pixels)
    if not request.raw and getattr(render.tokenizer, "chat_template", None) is None:
        mistake = Mistake("PROMPT", "the model's tokenizer has no chat template", "Add --raw for plain text")
        raise ConfigError("the command line", [mistake])
    try:
        await engine.start(ModelFolder(model, job.policy))
        voice = PolicyEngine(engine, render, sampling_of(job.evaluation_sampling))
        found = await answers(voice, request, prompt)
        if request.as_json:
            print_json({"prompt": prompt, "answers": found})
        else:
            print("\n---\n".join(plain(answer["text"]) for answer in found))
    finally:
        await engine.stop()


if __name__ == "__main__":
    run_tool(AnswersRequest, main)
