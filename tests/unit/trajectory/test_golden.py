"""Bytes written once and kept: every later version must read them, and write the same.

`tests/golden/trajectory_v1.bin` is an episode with branches, tools, media, several versions and epochs, and
two optional columns; `trajectory_v1.json` is what it says. The reader below follows the tables of
`docs/buffer.md` with nothing but struct and a msgpack parser, as one in another language would.
The files change only together with TRAJECTORY_SCHEMA.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_async.trajectory import Episode, pack, unpack, untrainable

GOLDEN = Path(__file__).parents[2] / "golden"
CODES = {
    "f16": "e",
    "f32": "f",
    "f64": "d",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u8": "B",
    "u16": "H",
}


@pytest.fixture(scope="module")
def blob() -> bytes:
    return (GOLDEN / "trajectory_v1.bin").read_bytes()


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return json.loads((GOLDEN / "trajectory_v1.json").read_text())


def read_by_the_book(blob: bytes) -> dict[str, Any]:
    magic, schema, n_frames, size, crc, zero = struct.unpack_from("<4sHHQII", blob, 0)
    assert (magic, schema, zero) == (b"ATRJ", 1, 0)
    assert size == len(blob)
    assert crc == zlib.crc32(blob[24:])
    frames = []
    for i in range(n_frames):
        offset, length = struct.unpack_from("<QQ", blob, 24 + 16 * i)
        assert offset % 8 == 0
        frames.append(blob[offset : offset + length])
    head = msgspec.msgpack.decode(frames[0])
    s, u = head["segments"], head["units"]
    segments = {"anchor": struct.unpack_from(f"<{s}q", frames[1], 0)}
    for k, name in enumerate(("parent", "kind", "agent", "turn", "offset", "length", "flags")):
        segments[name] = struct.unpack_from(f"<{s}i", frames[1], 8 * s + 4 * s * k)
    segments["reward"] = struct.unpack_from(f"<{s}f", frames[1], 36 * s)
    units = {}
    for frame, (name, code) in zip(
        frames[2:6], [("token_id", "i"), ("logprob", "f"), ("version", "i"), ("mask", "B")], strict=True
    ):
        units[name] = struct.unpack(f"<{u}{code}", frame)
    columns = {}
    for frame, (name, kind, width) in zip(frames[6:], head["columns"], strict=True):
        flat = struct.unpack(f"<{u * max(width, 1)}{CODES[kind]}", frame)
        columns[name] = [flat[i * width : (i + 1) * width] for i in range(u)] if width else flat
    return plain({"header": head["header"], "segments": segments, "units": units, "columns": columns})


def as_read_by_us(episode: Episode) -> dict[str, Any]:
    names = ("anchor", "parent", "kind", "agent", "turn", "offset", "length", "flags", "reward")
    segments = {name: getattr(episode.segments, name).tolist() for name in names}
    units = {n: getattr(episode.units, n).tolist() for n in ("token_id", "logprob", "version", "mask")}
    columns = {name: column.tolist() for name, column in episode.units.columns.items()}
    header = msgspec.to_builtins(episode.header)
    return plain({"header": header, "segments": segments, "units": units, "columns": columns})


def plain(value: Any) -> Any:
    """Lists for tuples, and a word for NaN, so that == compares."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def test_the_kept_bytes_say_what_they_said(blob, expected):
    episode = unpack(blob)
    assert as_read_by_us(episode) == expected["episode"]
    facts = {name: getattr(episode, name) for name in ("episode_id", "n_units", "n_sampled", "versions")}
    header = {n: getattr(episode.header, n) for n in ("job", "task_id", "group_id", "sample", "attempt")}
    told = {"size_bytes": len(blob), "untrainable": untrainable(episode)}
    assert plain(header | facts | told) == expected["summary"]


def test_a_reader_of_the_documented_layout_reads_the_same(blob, expected):
    assert read_by_the_book(blob) == expected["episode"]


def test_the_kept_episode_written_again_says_the_same(blob, expected):
    """A header that may have more fields is written with a longer count of them, else byte for byte."""
    again = pack(unpack(blob))
    assert read_by_the_book(again) == expected["episode"]
    assert len(again) == len(blob)
    assert pack(unpack(again)) == again
