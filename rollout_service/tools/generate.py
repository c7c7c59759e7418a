"""`areal-async generate`: answers of a model or checkpoint to a prompt, or a chat with it."""

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

Message = dict[str, Any]


class Talker:
    """Client of one engine. In a chat, each question and answer is added to the conversation."""

    def __init__(self, voice: PolicyEngine, request: AnswersRequest) -> None:
        self._voice, self._raw, self._seed, self._asked = voice, request.raw, request.seed, 0
        self._chat: list[Message] = []
        if request.system is not None:
            self._chat.append({"role": "system", "content": request.system})

    async def answers(self, prompt: str, count: int) -> list[dict[str, Any]]:
        """Return `count` answers to a prompt, each with text, finish reason and number of tokens."""
        asked: str | list[Message] = (
            prompt if self._raw else [*self._chat, {"role": "user", "content": prompt}]
        )
        return await asyncio.gather(*(self._answer(asked, sample) for sample in range(count)))

    def keep(self, prompt: str, answer: str) -> None:
        """Continue the chat with this answer."""
        self._chat += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    async def _answer(self, asked: str | list[Message], sample: int) -> dict[str, Any]:
        self._asked += 1
        name = f"generate-{self._asked}"
        builder = EpisodeBuilder("generate", name, name, sample)
        ctx = Context(
            {builder.policies[0]: self._voice}, builder, episode_id=name, seed=self._seed, sample=sample
        )
        reply = await ctx.generate(asked, train=False)
        return {"text": reply.text, "finish_reason": reply.finish_reason, "tokens": len(reply.token_ids)}


def main(request: AnswersRequest) -> None:
    prompt = request.prompt
    talks = prompt is None and sys.stdin.isatty()
    if prompt is None and not talks:
        prompt = sys.stdin.read().rstrip("\n")
    if prompt == "":
        mistake = Mistake("PROMPT", "it is empty", "Give a text, or none to talk in a terminal")
        raise ConfigError("the command line", [mistake])
    with target_of(request.target) as target:
        sections = {"evaluation": {"engine": request.engine}}
        with lone_evaluator(target, request, sections) as ctx:
            asyncio.run(_serve(ctx, target.model, request, prompt))


async def _serve(ctx: ServiceContext, model: Path, request: AnswersRequest, prompt: str | None) -> None:
    job = ctx.job
    prepare_evaluation(job)
    engine = lone_engine(ctx, max(1, request.n))
    render = make_renderer(job.model, job.rollout.template_args)
    if not request.raw and getattr(render.tokenizer, "chat_template", None) is None:
        mistake = Mistake("PROMPT", "the model's tokenizer has no chat template", "Add --raw for plain text")
        raise ConfigError("the command line", [mistake])
    try:
        await engine.start(ModelFolder(model, job.policy))
        talker = Talker(PolicyEngine(engine, render, sampling_of(job.evaluation_sampling)), request)
        if prompt is not None:
            answers = await talker.answers(prompt, request.n)
            if request.as_json:
                print_json({"prompt": prompt, "answers": answers})
            else:
                print("\n---\n".join(plain(answer["text"]) for answer in answers))
            return
        print("Talk to the model; Ctrl-D ends it.", file=sys.stderr)
        while (said := await asyncio.to_thread(_asked)) is not None:
            if said:
                (answer,) = await talker.answers(said, 1)
                print(plain(answer["text"]))
                talker.keep(said, answer["text"])
    finally:
        await engine.stop()


def _asked() -> str | None:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None


if __name__ == "__main__":
    run_tool(AnswersRequest, main)
