"""Episodes of a group whose samples are one prompt and one answer each.

Promise: an episode equals the one that `EpisodeBuilder` makes from the same prompt and answer."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from areal_async.trajectory.episode import (
    LOGPROB_SLACK,
    SHORT,
    Episode,
    Trained,
    check_calls,
    check_header,
)
from areal_async.trajectory.layout import (
    F32,
    I32,
    I64,
    NO_ANCHOR,
    TABLE_COLUMNS,
    U8,
    Agent,
    Call,
    EpisodeHeader,
    InvariantError,
    Segments,
    Units,
)

_TABLE = struct.Struct(f"={2 * len(TABLE_COLUMNS)}i")
MAX_PROMPT = 1 << 20  # Units of a prompt far below the limits of an episode
_NO_REWARDS = np.frombuffer(np.full(2, np.nan, F32).tobytes(), F32)
_NO_ANCHORS = np.frombuffer(np.full(2, NO_ANCHOR, I64).tobytes(), I64)


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

    def episode(
        self,
        sample: int,
        call: Call,
        text: str,
        ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        versions: NDArray[np.int32],
        epochs: NDArray[np.int32],
    ) -> Episode:
        """Return the episode of a sample from its answer. The answer has one value per unit in each column,
        and all its units are trained. Raises InvariantError."""
        n, m = len(self.prompt), len(ids)
        columns = (ids, logprobs, versions, epochs)
        if any(c.dtype != of or c.shape != (m,) for c, of in zip(columns, (I32, F32, I32, I32), strict=True)):
            raise InvariantError("the columns of an answer are 1-D, of one length, and of the units' types")
        bits = bytes(n) + b"\x01" * m
        units = Units(
            np.frombuffer(self.prompt.tobytes() + ids.tobytes(), I32),
            np.frombuffer(bits, U8),
            np.frombuffer(bytes(4 * n) + logprobs.tobytes(), F32),
            np.frombuffer(b"\xff" * (4 * n) + versions.tobytes(), I32),
        )
        # Rows of the segment table: parent, kind, agent, turn, offset, length, flags
        table = np.frombuffer(_TABLE.pack(-1, 0, 0, 1, 0, 0, 0, 0, 0, n, n, m, 0, 0), I32)
        header = EpisodeHeader(
            self.job,
            self.task_id,
            self.group_id,
            sample,
            self.attempt,
            policies=[*self.policies],
            agents=[*self.agents],
            calls=[call],
            prompt_text=self.prompt_text,
            response_text=text,
            epochs=_runs(n, epochs.tolist()),
        )
        segments = Segments(table.reshape(len(TABLE_COLUMNS), 2), _NO_REWARDS, _NO_ANCHORS)
        if not self._prompt_fits or not (trained := _trained(m, *(column.tolist() for column in columns))):
            return Episode(header, segments, units)  # It has the limits, and the reasons of refusals
        check_header(header)
        check_calls([call], [1], len(self.policies))
        return Episode.of_checked(header, segments, units, trained)

    @cached_property
    def _prompt_fits(self) -> bool:
        return 0 < len(self.prompt) <= MAX_PROMPT and self.prompt.min() >= 0 and len(self.agents) > 0


def _trained(
    m: int, ids: list[int], logprobs: list[float], versions: list[int], epochs: list[int]
) -> Trained | None:
    """Return the figures of a short answer's units; None if one of them may be invalid."""
    if not 0 < m <= SHORT or not math.isfinite(sum(logprobs)) or max(logprobs) > LOGPROB_SLACK:
        return None
    if min(ids) < 0 or min(versions) < 0 or min(epochs) < 0:
        return None
    return Trained(m, min(versions), max(versions), min(epochs))


def _runs(first: int, epochs: list[int]) -> list[tuple[int, int]]:
    """Return the runs of equal epochs, as (unit, epoch)."""
    starts = [i for i, epoch in enumerate(epochs) if not i or epoch != epochs[i - 1]]
    return [(first + i, epochs[i]) for i in starts]
