"""An engine that says what a test's function of the path says, and the episodes made with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from areal_async.base.records import Task
from areal_async.base.versions import VersionTag
from areal_async.trajectory import Episode, EpisodeBuilder, Sampling, SegmentKind
from rollout_service.engines.base import GenerateRequest, GenerateResult
from rollout_service.workflows import Context, PolicyEngine, Renderer
from tests.unit.rollout.fakes import LetterTokenizer, said
from tests.waiting import LIMIT_S

EOS = "\x03"


class Letters(LetterTokenizer):
    """One id per character; `\\x03` is the end of a turn, and special."""

    all_special_ids = (3,)
    eos_token_id = 3

    def __init__(self, template: str | None = None) -> None:
        self.chat_template = template

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        return "".join(chr(i) for i in ids if not (skip_special_tokens and i in self.all_special_ids))

    def apply_chat_template(self, messages: list[dict[str, Any]], **how: Any) -> Any:
        import jinja2

        text = jinja2.Environment().from_string(self.chat_template or "").render(messages=messages, **how)
        return {"input_ids": [ord(c) for c in text]} if how.get("tokenize") else text


class ScriptedEngine:
    """`say(text of the path)` is the reply; it ends at a stop string, at `max_new_tokens`, or with eos."""

    def __init__(self, say: Callable[[str], str], tick: Callable[[], Awaitable[None]] | None = None) -> None:
        self.version = VersionTag("policy", 0, 7)
        self.said: list[tuple[GenerateRequest, GenerateResult]] = []
        self._say = say
        self._tick = tick

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if self._tick is not None:
            await self._tick()
        sampling = request.sampling
        text = self._say("".join(map(chr, np.asarray(request.prompt_ids).tolist())))
        ends = [(text.index(stop), stop) for stop in sampling.stop if stop in text]
        reason, shown, whole = "stop", text, text + EOS
        if ends:
            at, stop = min(ends)
            shown, whole = text[:at], text[: at + len(stop)]
        if len(whole) > sampling.max_new_tokens:
            reason, whole = "length", whole[: sampling.max_new_tokens]
            shown = whole
        ids = [ord(c) for c in whole]
        logprobs = -(np.array(ids) / 1000 + len(self.said)).astype(np.float32)
        result = said(ids, self.version, shown, reason, logprobs)
        self.said.append((request, result))
        return result


def play(
    workflow: Any,
    say: Callable[[str], str],
    task: Task | None = None,
    *,
    template: str | None = None,
    max_new_tokens: int = 64,
    seed: int = 5,
    sample: int = 0,
    tick: Callable[[], Awaitable[None]] | None = None,
) -> tuple[Episode, ScriptedEngine]:
    """The episode of one run of `workflow`, and the engine that was asked."""
    engine = ScriptedEngine(say, tick)

    async def main() -> Episode:
        builder = EpisodeBuilder("job", "t", "t#0", sample)
        sampling = Sampling(max_new_tokens=max_new_tokens)
        lead: Any = PolicyEngine(engine, Renderer(Letters(template)), sampling)  # type: ignore[arg-type]
        ctx = Context({"policy": lead}, builder, episode_id="t#0.0", seed=seed, sample=sample)
        async with asyncio.timeout(LIMIT_S):
            await workflow(ctx, task or Task("hash:0:0", "Q:"))
        return builder.build()

    return asyncio.run(main()), engine


def texts(episode: Episode, kind: SegmentKind | None = None) -> list[str]:
    """The text of each segment (of a kind), in order."""
    table = episode.segments
    return [
        "".join(map(chr, episode.units.token_id[o : o + n].tolist()))
        for o, n, k in zip(table.offset, table.length, table.kind, strict=True)
        if kind is None or k == kind
    ]


def assert_rows_are_exact(episode: Episode, engine: ScriptedEngine) -> None:
    """Every call's path is what the engine was given and said, and each sampled unit is in one row."""
    from areal_async.trajectory import training_rows

    assert len(episode.header.calls) == len(engine.said)
    by_path = {
        (tuple(np.asarray(q.prompt_ids).tolist()), tuple(a.token_ids.tolist()), q.sampling.seed)
        for q, a in engine.said
    }
    for call in episode.header.calls:
        whole = episode.token_ids(call.segment).tolist()
        n = int(episode.segments.length[call.segment])
        assert (tuple(whole[:-n]), tuple(whole[-n:]), call.sampling.seed) in by_path
    rows = training_rows(episode)
    trained = sorted(float(p) for row in rows for p in row.logprobs[row.mask == 1])
    assert trained == sorted(float(p) for _, a in engine.said for p in a.logprobs)
