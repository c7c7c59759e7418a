"""The reward `reward_model`: a sequence-classification model, computed in a pool of one worker of its own.

Promises what the pool promises: every call gets its verdict exactly once; texts that wait are computed
together, at most `max_batch`; a batch that runs past the deadline, or whose process dies, is computed again
text by text, and only the text that brings it about again pays. After a death the model is loaded again,
which takes time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from areal_async.config.reward import RewardSection
from areal_async.config.reward_routing import RewardSpec
from reward_service.backends import Call, OnVerdicts, arguments_of
from reward_service.backends.reward_model import START_LIMIT_S, RewardModelArguments
from reward_service.pool.pool import WorkerPool
from reward_service.pool.workers import WorkerLimits
from reward_service.sdk import RewardInput


class RewardModel(WorkerPool):
    """A `ScoringBackend`; `spec.args` are `RewardModelArguments`."""

    def __init__(self, spec: RewardSpec, section: RewardSection) -> None:
        """Raises `RewardLoadError` for arguments that are wrong."""
        arguments = arguments_of(spec, RewardModelArguments)
        super().__init__([spec], workers=1, limits=WorkerLimits(start_s=START_LIMIT_S))
        self.capacity = arguments.max_batch

    @property
    def alive(self) -> int:
        return self.capacity if super().alive else 0

    @property
    def call_seconds(self) -> float:
        """Return the time of a call. A text takes as long as its batch."""
        return super().call_seconds * self.capacity

    async def submit(
        self, calls: Sequence[Call], on_verdicts: OnVerdicts, *, spec: RewardSpec | None = None
    ) -> None:
        """Queue calls; waits while the queue is full. The model reads texts: episodes need not travel."""
        texts: list[Call] = []
        for call in calls:
            assert isinstance(call, RewardInput)
            texts.append(msgspec.structs.replace(call, blob=b""))
        await super().submit(texts, on_verdicts, spec=spec)
