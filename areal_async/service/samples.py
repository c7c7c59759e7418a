"""Samples of a run: a few decoded episodes from some of its steps and from every evaluation.

The files are `<run>/samples/step-00000123.jsonl` and `evaluation-00000123.jsonl`. With several policies, they
are in the policy's folder, `<run>/policies/<name>/samples/`. Each line is one episode as a JSON object;
docs/metrics.md describes its fields. As in the records, step 123 starts from version 123.

A file has at most the requested number of episodes, each with at most `MOST_UNITS` units and a few previews
of its images. The folder has at most `MOST_FILES` files and `MOST_BYTES` bytes. Above a limit, every
second file is deleted, first from the older half, so that the files still cover the whole run. Only this user
can read the files (0600), because prompts and answers may be secret."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import numpy as np

from areal_async.base.errors import RunFolderError
from areal_async.base.own_files import write_whole
from areal_async.trajectory import Episode
from areal_async.trajectory.layout import SegmentKind

FOLDER = "samples"
MOST_UNITS = 1 << 16  # Most units of an episode; the rest is omitted
MOST_FILES = 400
MOST_BYTES = 256 << 20
NAME = re.compile(r"(step|evaluation)-([0-9]{8})\.jsonl")
IN_LOG = 160  # Characters of a response in the log
AUTHORS = {
    SegmentKind.PROMPT: "prompt",
    SegmentKind.SAMPLED: "assistant",
    SegmentKind.TOOL: "tool",
    SegmentKind.ENVIRONMENT: "environment",
}
DIGITS = 5  # Digits of a log-prob or an advantage

SampleKind = Literal["step", "evaluation"]
Decode = Callable[[Sequence[int]], str]
"""Function from token ids to text, including special tokens."""


def sample_of(
    episode: Episode,
    decode: Decode,
    *,
    lowest_version: int = 0,
    advantages: Mapping[int, float] | None = None,
    previews: Mapping[str, str] = MappingProxyType({}),
    **said: Any,
) -> dict[str, Any]:
    """Return the JSON object of an episode, one line of a samples file. `said` has further fields for it.

    `advantages` has the advantages of trained units, by their number in the episode. Units of a version below
    `lowest_version` are shown as masked. `previews` has small pictures of its images by digest
    (`data.images.previews_of`). In texts, the placeholder tokens of an image are shortened to one."""
    header, segments, units = episode.header, episode.segments, episode.units
    mask = units.mask.astype(bool) & (units.version >= lowest_version)
    left, told = MOST_UNITS, []
    for index in range(len(segments)):
        begin, length = int(segments.offset[index]), int(segments.length[index])
        own = slice(begin, begin + min(length, left))
        left -= own.stop - own.start
        ids = units.token_id[own].tolist()
        kind = SegmentKind(int(segments.kind[index]))
        known = {token: decode([token]) for token in {*ids}} if kind == SegmentKind.SAMPLED else {}
        own_media = (image for image in header.media if image.segment == index)
        images, shown = sorted(own_media, key=attrgetter("first_unit")), [*ids]
        for image in reversed(images):
            del shown[image.first_unit - begin + 1 : image.first_unit - begin + image.n_units]
        segment: dict[str, Any] = {
            "author": AUTHORS[kind],
            "agent": header.agents[int(segments.agent[index])].name if header.agents else "",
            "turn": int(segments.turn[index]),
            "parent": int(segments.parent[index]),
            "text": decode(shown),
        }
        if images:
            segment["images"] = [image.digest for image in images]
        if kind is SegmentKind.SAMPLED:
            segment |= {
                "tokens": [known[token] for token in ids],
                "version": units.version[own].tolist(),
                "logp": _short(units.logprob[own]),
                "mask": mask[own].astype(int).tolist(),
            }
            if advantages is not None:
                found = [advantages.get(unit, 0.0) for unit in range(own.start, own.stop)]
                segment["advantage"] = _short(np.array(found))
        told.append(segment)
    return {
        **said,
        "group": header.group_id,
        "episode": episode.episode_id,
        "task": header.task_id,
        "finish": header.calls[-1].finish_reason if header.calls else "",
        "units_left_out": max(0, episode.n_units - MOST_UNITS),
        **({"images": previews} if header.media else {}),
        "segments": told,
    }


def _short(values: Any) -> list[float]:
    return [float(value) for value in np.round(np.asarray(values, np.float64), DIGITS)]


def lines_of(samples: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the content of a file with these samples. Values that JSON cannot express are written as
    text."""
    return b"".join(msgspec.json.encode(sample, enc_hook=str) + b"\n" for sample in samples)


def file_name(kind: SampleKind, number: int) -> str:
    return f"{kind}-{number:08d}.jsonl"


def write_samples(folder: Path, name: str, data: bytes) -> Path:
    """Write the samples file `name`, then delete files until the folder is within its limits.

    `folder` is the folder of the run or of one of its policies. Raises OSError, and ValueError for an invalid
    file name."""
    if NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no file of samples")
    place = folder / FOLDER
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = place / name
    write_whole(path, data)
    _thin(place, keep=path)
    return path


def _thin(place: Path, keep: Path) -> None:
    files = sorted(path for path in place.iterdir() if NAME.fullmatch(path.name))
    by_age = sorted(files, key=lambda path: int(path.stem.rpartition("-")[2]))
    sizes = {path: path.stat().st_size for path in by_age}
    while len(sizes) > 1 and (len(sizes) > MOST_FILES or sum(sizes.values()) > MOST_BYTES):
        older = [path for path in sizes if path != keep][: max(2, len(sizes) // 2)]
        for path in older[1::2] or older:
            path.unlink(missing_ok=True)
            del sizes[path]


def sample_files(folder: Path) -> list[tuple[SampleKind, int, Path]]:
    """Return the samples files in the folder of a run or a policy: their kind, step or version, and path.

    The files are in the order of steps. The list is empty if there are no files yet."""
    place, found = folder / FOLDER, []
    for path in place.iterdir() if place.is_dir() else ():
        if match := NAME.fullmatch(path.name):
            kind: SampleKind = "step" if match[1] == "step" else "evaluation"
            found.append((kind, int(match[2]), path))
    return sorted(found, key=lambda entry: (entry[1], entry[0]))


def read_samples(path: str | Path) -> list[dict[str, Any]]:
    """Return the episodes of a samples file. Raises `RunFolderError` if the file is not a samples file."""
    try:
        return [msgspec.json.decode(line, type=dict) for line in Path(path).read_bytes().splitlines() if line]
    except (OSError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"no samples can be read from {path}: {error}. Name a file in the folder samples of a run."
        ) from error


def short_text(sample: Mapping[str, Any]) -> str:
    """Return the sampled text of an episode, on one line and shortened."""
    texts = (segment["text"] for segment in sample["segments"] if segment["author"] == "assistant")
    text = " ".join(" ".join(texts).split())
    return text if len(text) <= IN_LOG else f"{text[: IN_LOG - 1]}…"
