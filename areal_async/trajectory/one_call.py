"""Episodes of a group whose samples are one prompt and one answer each.

Promise: an episode has the bytes of the one that `EpisodeBuilder` makes from the same prompt and answer. The
bytes are written at once, because the arrays and checks of an `Episode` take several times as long."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_async.trajectory.codec import EpisodeHead, pack_frames, pack_head, unpack
from areal_async.trajectory.episode import LOGPROB_SLACK, SHORT, check_calls, check_header
from areal_async.trajectory.layout import (
    F32,
    I32,
    I64,
    NO_ANCHOR,
    TABLE_COLUMNS,
    Agent,
    Call,
    EpisodeHeader,
    InvariantError,
)

_TABLE = struct.Struct(f"={2 * len(TABLE_COLUMNS)}i")
MAX_PROMPT = 1 << 20  # Units of a prompt far below the limits of an episode
_NO_REWARDS = np.full(2, np.nan, F32).tobytes()
_NO_ANCHORS = np.full(2, NO_ANCHOR, I64).tobytes()


@dataclass(frozen=True)
class PromptedGroup:
    """The parts that all episodes of a group share."""

    job: str
    task_id: str
    group_id: str
    attempt: int
    policies: Sequence[str]
    agents: Sequence[Agent]
    prompt_text: str
    prompt: NDArray[np.int32]

    def blob(self, sample: int, call: Call, text: str, *columns: NDArray[Any]) -> bytes:
        """Return the packed episode of a sample from its answer. `columns` are the ids, log-probs, versions
        and epochs of the answer's units, which are all trained. Raises TrajectoryError."""
        ids, logprobs, versions, epochs = columns
        n, m = len(self.prompt), len(ids)
        if any(c.dtype != of or c.shape != (m,) for c, of in zip(columns, (I32, F32, I32, I32), strict=True)):
            raise InvariantError("the columns of an answer are 1-D, of one length, and of the units' types")
        header = EpisodeHeader(
            *(self.job, self.task_id, self.group_id, sample, self.attempt),
            policies=[*self.policies],
            agents=[*self.agents],
            calls=[call],
            prompt_text=self.prompt_text,
            response_text=text,
            epochs=_runs(n, epochs.tolist()),
        )
        parts = [
            pack_head(EpisodeHead(header, 2, n + m, [])),
            # Rows of the segment table: parent, kind, agent, turn, offset, length, flags
            _NO_ANCHORS + _TABLE.pack(-1, 0, 0, 1, 0, 0, 0, 0, 0, n, n, m, 0, 0) + _NO_REWARDS,
            self.prompt.tobytes() + ids.tobytes(),
            bytes(4 * n) + logprobs.tobytes(),
            b"\xff" * (4 * n) + versions.tobytes(),
            bytes(n) + b"\x01" * m,
        ]
        blob = pack_frames(parts)
        if 0 < m <= SHORT and self._prompt_fits:
            tokens, logps, of, since = [column.tolist() for column in columns]
            good = math.isfinite(sum(logps)) and max(logps) <= LOGPROB_SLACK
            if good and min(*tokens, *of, *since) >= 0:
                check_header(header)
                check_calls([call], [1], len(self.policies))
                return blob
        unpack(blob)  # raises the reason if the answer is not valid
        return blob

    @cached_property
    def _prompt_fits(self) -> bool:
        return 0 < len(self.prompt) <= MAX_PROMPT and self.prompt.min() >= 0 and len(self.agents) > 0


def _runs(first: int, epochs: list[int]) -> list[tuple[int, int]]:
    """Return the runs of equal epochs, as (unit, epoch)."""
    starts = [i for i, epoch in enumerate(epochs) if not i or epoch != epochs[i - 1]]
    return [(first + i, epochs[i]) for i in starts]
