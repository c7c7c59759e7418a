"""The two tables of an episode, as struct-of-arrays. All arrays are read-only."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray

I32 = np.dtype("<i4")
I64 = np.dtype("<i8")
F32 = np.dtype("<f4")
U8 = np.dtype("u1")
U32 = np.dtype("<u4")

COLUMN_DTYPES: Mapping[str, np.dtype] = {
    "f16": np.dtype("<f2"),
    "f32": F32,
    "f64": np.dtype("<f8"),
    "i8": np.dtype("i1"),
    "i16": np.dtype("<i2"),
    "i32": I32,
    "i64": I64,
    "u8": U8,
    "u16": np.dtype("<u2"),
}
"""Element types of optional unit columns, by their name in the codec."""

NO_PARENT = -1
NO_VERSION = -1
NO_ANCHOR = 0
TABLE_COLUMNS = ("parent", "kind", "agent", "turn", "offset", "length", "flags")
CORE_COLUMNS = ("token_id", "logprob", "version", "mask")


class SegmentKind(IntEnum):
    """Who wrote a segment. Only SAMPLED segments may hold units with a version or a mask."""

    PROMPT = 0
    SAMPLED = 1
    TOOL = 2
    ENVIRONMENT = 3


class SegmentFlag(IntFlag):
    """TERMINAL: the environment ended the episode here. TRUNCATED: a limit of ours did (value bootstraps)."""

    TERMINAL = 1
    TRUNCATED = 2


def frozen(array: NDArray) -> NDArray:
    """`array` itself when read-only, else a read-only view of it."""
    if array.flags.writeable:
        array = array.view()
        array.setflags(write=False)
    return array


def _column(row: int, meaning: str) -> Any:
    """A read-only property: one row of the segment table."""

    def column(segments: Segments) -> NDArray[np.int32]:
        return segments.table[row]

    return property(column, doc=meaning)


class Segments:
    """The segment table: S segments, each a delta over the path of its parent.

    table:  i32 [7, S], rows in the order of TABLE_COLUMNS
    reward: f32 [S], NaN where none was given
    anchor: i64 [S], hash of a state key (`anchor_of`), 0 where none
    """

    __slots__ = ("anchor", "reward", "table")

    def __init__(
        self, table: NDArray[np.int32], reward: NDArray[np.float32], anchor: NDArray[np.int64]
    ) -> None:
        self.table = frozen(table)
        self.reward = frozen(reward)
        self.anchor = frozen(anchor)

    def __len__(self) -> int:
        return self.table.shape[1]

    parent = _column(0, "i32 [S]: index of the segment this one continues, -1 for a root.")
    kind = _column(1, "i32 [S]: SegmentKind.")
    agent = _column(2, "i32 [S]: index into EpisodeHeader.agents.")
    turn = _column(3, "i32 [S]: turn number, from 0.")
    offset = _column(4, "i32 [S]: first row of the segment in the unit table.")
    length = _column(5, "i32 [S]: rows of the segment in the unit table.")
    flags = _column(6, "i32 [S]: SegmentFlag bits.")


class Units:
    """The unit table: T units in segment order.

    token_id: i32 [T]
    mask:     u8 [T], 1 = trained
    logprob:  f32 [T], behaviour log-prob, 0 where version is -1
    version:  i32 [T], of the weights that sampled the unit, -1 where none did
    columns:  optional, name -> [T] or [T, width] of a COLUMN_DTYPES type; absent means unknown, not zero
    """

    __slots__ = ("columns", "logprob", "mask", "token_id", "version")

    def __init__(
        self,
        token_id: NDArray[np.int32],
        mask: NDArray[np.uint8],
        logprob: NDArray[np.float32],
        version: NDArray[np.int32],
        columns: Mapping[str, NDArray] | None = None,
    ) -> None:
        self.token_id = frozen(token_id)
        self.mask = frozen(mask)
        self.logprob = frozen(logprob)
        self.version = frozen(version)
        self.columns: dict[str, NDArray] = (
            {name: frozen(column) for name, column in columns.items()} if columns else {}
        )

    def __len__(self) -> int:
        return len(self.token_id)
