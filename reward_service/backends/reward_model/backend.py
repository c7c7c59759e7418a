"""The reward `reward_model`: a sequence-classification model in a pool of one worker.

The backend keeps the promises of the pool: every call gets its verdict exactly once. Up to `max_batch`
waiting texts are computed together. If a batch passes the deadline or its process dies, its texts are
computed again one by one. Only a text that fails again gets no score. If the process has died, the model is
loaded again before these texts are computed.
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
    """A `ScoringBackend`. `spec.args` are `RewardModelArguments`."""

    def __init__(self, spec: RewardSpec, section: RewardSection) -> None:
        """Create the backend. Raises `RewardLoadError` for invalid arguments."""
        arguments = arguments_of(spec, RewardModelArguments)
        super().__init__([spec], workers=1, limits=WorkerLimits(start_s=START_LIMIT_S))
        self.capacity = arguments.max_batch

    @property
    def alive(self) -> int:
        return self.capacity if super().alive else 0

    @property
    def call_seconds(self) -> float:
        """Return the recent mean duration of a batch, in seconds. Every text of a batch takes as long as the
        batch."""
        return super().call_seconds * self.capacity

    async def submit(
        self, calls: Sequence[Call], on_verdicts: OnVerdicts, *, spec: RewardSpec | None = None
    ) -> None:
        """Queue calls. Waits while the queue is full. Episodes are not sent to the process, because the model
        reads only texts."""
        texts: list[Call] = []
        for call in calls:
            assert isinstance(call, RewardInput)
            texts.append(msgspec.structs.replace(call, blob=b"", media=[]))
        await super().submit(texts, on_verdicts, spec=spec)
