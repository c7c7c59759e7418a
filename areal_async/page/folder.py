"""What the page reads in a run folder: how the run stands, new records, samples. It writes nothing.

Whatever a reader names is looked up among what is there, so that no path is ever made of it; each answer is
bounded, and goes on from where the last one ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from areal_async.config.errors import ConfigError
from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.config.trainings import FILE_KINDS
from areal_async.errors import ArealError, RunFolderError, WireError
from areal_async.launch.folders import LOCK, check_run_folder, supervisor_of
from areal_async.launch.runs import Run
from areal_async.ownfiles import NotOurs, is_own_folder, open_regular, read_own
from areal_async.page.series import PANELS, rows_of
from areal_async.status.record import RECORDS
from areal_async.status.samples import SampleKind, sample_files

Json = dict[str, Any]

CHUNK_BYTES = 4 << 20  # Most of `metrics.jsonl` that is read for one answer
LAST_BYTES = 256 << 10  # Of its end, where the last records are looked for
SAMPLE_BYTES = 64 << 20  # Largest file of samples that is read
SEARCHED_BYTES = 256 << 20
MOST_FILES, MOST_FOUND, MOST_RUNS = 2000, 200, 1000
HEAD_CHARS = 160

_decoder = msgspec.json.Decoder(dict[str, Any])


class UnknownName(ArealError):
    """What a reader named is not there."""


def runs_in(folder: Path) -> list[Path]:
    """The run folders at `folder`: itself, or those in it, the newest first."""
    if (folder / LOCK).exists():
        return [folder]
    found = [path for path in folder.iterdir() if is_own_folder(path) and (path / LOCK).exists()]
    return sorted(found, key=lambda path: -(path / LOCK).stat().st_mtime)[:MOST_RUNS]


def told_of(folder: Path) -> Json:
    """A run in one line of a list, cheaply: name, state, steps done and when it last wrote something."""
    path = folder / RECORDS
    changed_s = path.stat().st_mtime if path.exists() else (folder / LOCK).stat().st_mtime
    alive = supervisor_of(folder) is not None
    size = path.stat().st_size if path.exists() else 0
    last = _last(folder, size, changed_s)
    ending = last.get("end", {}).get("ending", "")
    return {
        "name": folder.name,
        "state": str(ending).upper() or ("RUNNING" if alive else "KILLED"),
        "step": (last["step"].get("step") or 0) + 1 if "step" in last else 0,
        "reward": last.get("step", {}).get("reward_mean"),
        "accuracy": last.get("evaluation", {}).get("accuracy"),
        "changed_s": changed_s,
        "waits": "",
    }


@lru_cache(maxsize=2 * MOST_RUNS)
def _last(folder: Path, size: int, changed_s: float) -> Mapping[str, Json]:
    """The last record of each kind near the end of a run's records."""
    found: dict[str, Json] = {}
    with suppress(OSError), (folder / RECORDS).open("rb") as file:
        file.seek(max(0, size - LAST_BYTES))
        for record in _whole(file.read(LAST_BYTES)):
            kind = str(record.get("kind"))
            if kind == "resume":
                found.pop("end", None)
            found["step" if kind in FILE_KINDS else kind] = record
    return found


def overview(folder: Path, job: JobConfig | None = None) -> Json:
    """How one run stands: its job, its processes and what they wait for, how it ended, and the panels."""
    job = job or job_of(folder)
    told = told_of(folder)
    alive = told["state"] == "RUNNING"
    told |= {
        "kind": job.kind,
        "steps": job.trainer.steps,
        "bound": job.buffer.max_staleness if job.kind == "rl" else None,
        "policies": list(job.views),
        "alive": alive,
        "panels": [panel._asdict() for panel in PANELS],
        "workers": [],
        "status": None,
        "summary": None,
    }
    if alive:
        try:
            status = msgspec.to_builtins(Run.open(folder).status())
        except (ArealError, WireError, OSError) as error:
            told["waits"] = f"The run does not say how it stands: {error}"
        else:
            told["workers"] = status.pop("services")
            told["status"] = status
            stall = status.get("stall") or {}
            told["waits"] = stall.get("detail") or status.get("message") or status.get("lease_wait") or ""
    else:
        told["workers"] = _workers_at_the_end(folder)
        with suppress(OSError, NotOurs, msgspec.DecodeError):
            told["summary"] = _decoder.decode(read_own(folder / "summary.json", max_bytes=1 << 20))
    return told


def job_of(folder: Path) -> JobConfig:
    """The job of a run, as its folder has it. Raises `RunFolderError`."""
    check_run_folder(folder)
    try:
        return load_job(folder / "job.yaml", [f"run_dir={folder.parent}"], files=False)
    except (OSError, ConfigError) as error:
        raise RunFolderError(f"the job of the run in {folder} cannot be read: {error}") from error


def _workers_at_the_end(folder: Path) -> list[Json]:
    """The processes of a run that has ended, with the busy share of each over its life."""
    records = _records(folder)
    loads: list[Json] = []
    for record in records:
        kind = record.get("kind")
        if kind == "resume":
            loads = []
        elif kind == "load":
            loads.append(record)
    if len(loads) < 2:
        return []
    begun, load = loads[0], loads[-1]
    wall_s = max(1e-9, load["time_s"] - begun["time_s"])
    return [
        {
            "name": name,
            "phase": "ended",
            "busy": min(1.0, sum((told.get("busy_s") or {}).values()) / wall_s) if "busy_s" in told else None,
            "waiting_for": "",
            "cpu_s": told.get("cpu_s"),
            "tokens": told.get("tokens"),
        }
        for name, told in (load.get("services") or {}).items()
    ]


def _records(folder: Path) -> Iterator[Json]:
    with suppress(OSError), os.fdopen(open_regular(folder / RECORDS), "rb") as file:
        for line in file:
            yield from _whole(line)


def records_from(folder: Path, offset: int) -> Json:
    """The rows of the records from a byte of `metrics.jsonl` on: `offset` of the answer is where to go on.
    `reset` says that the file is another than the reader knew, so that it begins again."""
    content, size = b"", 0
    with suppress(FileNotFoundError), os.fdopen(open_regular(folder / RECORDS), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if 0 <= offset <= size:
            file.seek(offset)
            content = file.read(CHUNK_BYTES)
    if offset > size:
        return {"offset": 0, "rows": [], "more": size > 0, "reset": True}
    whole = content.rfind(b"\n") + 1
    if not whole and len(content) == CHUNK_BYTES:
        whole = len(content)  # no record is as long: it is passed over
    following = offset + whole
    rows, _ = rows_of(_whole(content[:whole]), _load_before(folder, offset))
    return {"offset": following, "rows": rows, "more": following < size and whole > 0, "reset": False}


@lru_cache(maxsize=256)
def _load_before(folder: Path, offset: int) -> Json | None:
    """The last `load` record that ends before a byte, which with its record after it makes a row."""
    low = max(0, offset - LAST_BYTES)
    with suppress(OSError), os.fdopen(open_regular(folder / RECORDS), "rb") as file:
        file.seek(low)
        for record in reversed([*_whole(file.read(offset - low))]):
            if record.get("kind") == "resume":
                return None
            if record.get("kind") == "load":
                return record
    return None


def _whole(content: bytes) -> Iterator[Json]:
    for line in content.split(b"\n"):
        if line:
            with suppress(msgspec.DecodeError):
                yield _decoder.decode(line)


class SampleFile(NamedTuple):
    """One file of samples of a run."""

    policy: str  # Empty in a run of one policy
    kind: SampleKind
    step: int  # Or the version that was evaluated
    path: Path

    @property
    def key(self) -> str:
        return f"{self.policy}/{self.path.name}"


def samples_of(folder: Path) -> dict[str, SampleFile]:
    """The files of samples of a run by their keys, the newest first."""
    folders = {"": folder}
    with suppress(OSError):
        folders |= {path.name: path for path in sorted((folder / "policies").iterdir())}
    found = [
        SampleFile(policy, kind, step, path)
        for policy, place in folders.items()
        for kind, step, path in sample_files(place)
    ]
    found.sort(key=lambda file: (-file.step, file.kind, file.policy))
    return {file.key: file for file in found[:MOST_FILES]}


def list_samples(folder: Path) -> list[Json]:
    return [
        {"key": key, "policy": file.policy, "kind": file.kind, "step": file.step}
        for key, file in samples_of(folder).items()
    ]


def episodes_in(folder: Path, key: str) -> list[Json]:
    """The episodes of one file of samples. Raises `UnknownName`."""
    file = samples_of(folder).get(key)
    if file is None:
        raise UnknownName(f"there are no samples {key!r}")
    return [*_whole(_read(file.path))]


def _read(path: Path) -> bytes:
    try:
        return read_own(path, max_bytes=SAMPLE_BYTES)
    except (OSError, NotOurs) as error:
        raise UnknownName(f"samples cannot be read: {error}") from error


def summary_of(episode: Mapping[str, Any], index: int) -> Json:
    """An episode in one line of a list."""
    segments = episode.get("segments") or []
    first = next((text_of(each) for each in segments if each.get("author") != "system"), "")
    kept = ("task", "group", "episode", "data_source", "reward", "rewards", "verdict", "finish", "version")
    return {
        "index": index,
        **{name: episode.get(name) for name in kept},
        "head": first[:HEAD_CHARS],
        "tokens": sum(len(each.get("tokens") or ()) for each in segments),
        "turns": sum(each.get("author") == "assistant" for each in segments),
    }


def text_of(segment: Mapping[str, Any]) -> str:
    return str(segment.get("text") or "".join(map(str, segment.get("tokens") or ())))


def search_samples(folder: Path, wanted: str) -> list[Json]:
    """Episodes with a text or a name that holds `wanted`, in any case, the newest first, with the place."""
    found: list[Json] = []
    left = SEARCHED_BYTES
    for key, file in samples_of(folder).items():
        with suppress(UnknownName):
            content = _read(file.path)
            left -= len(content)
            for index, episode in enumerate(_whole(content)):
                place = _place(episode, wanted.lower())
                if place:
                    found.append({"key": key, "place": place, **summary_of(episode, index)})
        if left < 0 or len(found) >= MOST_FOUND:
            break
    return found[:MOST_FOUND]


def _place(episode: Mapping[str, Any], wanted: str) -> str:
    names = (str(episode.get(name) or "") for name in ("task", "group", "ground_truth", "verdict"))
    texts: Iterable[str] = (*map(text_of, episode.get("segments") or []), *names)
    for text in texts:
        at = text.lower().find(wanted)
        if at >= 0:
            return text[max(0, at - 40) : at + len(wanted) + 40]
    return ""
