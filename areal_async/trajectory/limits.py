"""Caps on what one episode may hold, checked before anything of that size is allocated."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BLOB_BYTES = 1 << 30
MAX_HEAD_BYTES = 1 << 25
MAX_UNITS = 1 << 24
MAX_SEGMENTS = 1 << 16
MAX_COLUMNS = 32
MAX_COLUMN_WIDTH = 4096
MAX_NAME_CHARS = 64
MAX_ROW_UNITS = 1 << 24
MAX_ROW_SEGMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """One set of caps. A service that knows its episodes are small passes tighter ones."""

    blob_bytes: int = MAX_BLOB_BYTES
    """Bytes of a whole packed episode."""
    head_bytes: int = MAX_HEAD_BYTES
    """Bytes of the msgpack head: texts and metadata included."""
    units: int = MAX_UNITS
    segments: int = MAX_SEGMENTS
    columns: int = MAX_COLUMNS
    """Optional unit columns."""
    column_width: int = MAX_COLUMN_WIDTH
    """Values per unit of an optional column."""
    row_units: int = MAX_ROW_UNITS
    """Units of all training rows of one episode together: shared prefixes count once per row."""
    row_segments: int = MAX_ROW_SEGMENTS
    """Segments on the paths of all training rows of one episode together."""


DEFAULT_LIMITS = Limits()
