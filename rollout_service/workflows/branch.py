"""Branches of an episode, paths that go on from a segment which others share; and the seeds of calls."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from areal_async.trajectory import SegmentKind

if TYPE_CHECKING:
    from rollout_service.workflows.context import Context
    from rollout_service.workflows.tools import Tool, ToolReply
    from rollout_service.workflows.turns import Prompt, Reply


class Branch:
    """Made by `ctx.fork`. `segment` is where it is: each method goes on from there and moves it.

    The episode's response text is not set here: the workflow knows which branch is the answer
    (`ctx.builder.text(response=…)`)."""

    def __init__(self, ctx: Context, segment: int, seed: int) -> None:
        self.segment = segment
        self._ctx = ctx
        self._seed = seed
        self._calls = 0
        self._anchor: str | bytes | None = None

    async def generate(
        self, prompt: Prompt | None = None, *, agent: int = 0, turn: int = 0, train: bool = True, **how: Any
    ) -> Reply:
        """As `ctx.generate`, from where the branch is."""
        rewritten = how.pop("rewritten", "error")
        if prompt is not None:
            self.observe(SegmentKind.ENVIRONMENT, prompt, agent=agent, turn=turn, rewritten=rewritten)
        anchor, self._anchor = self._anchor, None
        seed = self._next_seed()
        reply = await self._ctx.sampled(self.segment, agent, turn, seed, how, anchor, train=train)
        self.segment = reply.segment
        return reply

    def observe(self, kind: SegmentKind, content: Prompt, **how: Any) -> int:
        """As `ctx.observe`, from where the branch is."""
        self.segment = self._ctx.observe(kind, content, parent=self.segment, **how)
        return self.segment

    async def tool(self, name: str | Tool, arguments: str | Mapping[str, Any], **how: Any) -> ToolReply:
        """As `ctx.tool`, from where the branch is."""
        reply = await self._ctx.tool(name, arguments, parent=self.segment, **how)
        self.segment = reply.segment
        return reply

    def reward(self, value: float) -> None:
        """The reward of the segment where the branch is."""
        self._ctx.reward(value, segment=self.segment)

    def anchor(self, key: str | bytes) -> None:
        """Name the state before what the branch samples next."""
        self._anchor = key

    def fork(self, n: int) -> list[Branch]:
        """Branches that go on from where this one is."""
        return [Branch(self._ctx, self.segment, self._next_seed()) for _ in range(n)]

    def _next_seed(self) -> int:
        self._calls += 1
        return call_seed(self._seed, 0, 0, self._calls - 1)


def call_seed(group_seed: int, sample: int, attempt: int, call: int) -> int:
    """63 bits for one call of one episode, a function of its arguments alone."""
    parts = (group_seed, sample, attempt, call)
    digest = hashlib.blake2b(b"".join(p.to_bytes(8, "little") for p in parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
