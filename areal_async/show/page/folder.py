"""Reader of run folders for the page: status, new records, samples. It writes nothing.

Names from a client are compared with existing names, so no path is built from them. Each answer has a size
limit. The next request continues where the answer ended."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from areal_async.base.errors import ArealError, RunFolderError, WireError
from areal_async.base.mistakes import ConfigError
from areal_async.base.own_files import NotOurs, is_own_folder, open_own, read_own, read_record
from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.config.trainings import FILE_KINDS
from areal_async.launch.folders import LOCK, check_run_folder, supervisor_of
from areal_async.launch.run_handle import Run
from areal_async.service.record import RECORDS
from areal_async.service.samples import FOLDER as SAMPLES
from areal_async.service.samples import SampleKind, sample_files
from areal_async.show.figures import PANELS, rows_of, thinned

Json = dict[str, Any]

CHUNK_BYTES = 4 << 20  # Largest part of `metrics.jsonl` that is read for one answer
MOST_ROWS, LEAST_ROWS = 1000, 50  # Rows per kind, of a whole history and of one answer
LAST_BYTES = 256 << 10  # Bytes at the end of the file that are searched for the last records
SAMPLE_BYTES = 64 << 20  # Largest sample file that is read
SEARCHED_BYTES = 256 << 20
MOST_FILES, MOST_FOUND, MOST_RUNS = 2000, 200, 1000
HEAD_CHARS = 160

_decoder = msgspec.json.Decoder(dict[str, Any])


class UnknownName(ArealError):
    """The requested run or sample does not exist."""


def runs_in(folder: Path) -> list[Path]:
    """Return the run folders at `folder`, newest first. They are `folder` itself, or the run folders in
    it."""
    if (folder / LOCK).exists():
        return [folder]
    places = (folder / name for name in _names_in(folder) if name.isprintable())
    found = {path: _stamp(path / LOCK)[1] for path in places if is_own_folder(path)}
    runs = [path for path, changed_ns in found.items() if changed_ns]
    return sorted(runs, key=lambda path: (-found[path], path.name))[:MOST_RUNS]


def run_in(folder: Path, name: str) -> Path:
    """Return the run folder `name` among the run folders at `folder`. Raises `UnknownName`."""
    for path in runs_in(folder):
        if path.name == name:
            return path
    raise UnknownName(f"there is no run {name!r}")


def _names_in(folder: Path) -> list[str]:
    """Return the names in a folder, including names that cannot be printed. Return [] if the folder has been
    deleted."""
    with suppress(OSError):
        return os.listdir(folder)
    return []


def told_of(folder: Path) -> Json:
    """Return one row of a list: name, state, finished steps and the time of the last change. The function is
    cheap, because it reads only the end of the records."""
    size, changed_ns = _stamp(folder / RECORDS)
    last = _last(folder, size, changed_ns) if size else {}
    if not changed_ns:
        changed_ns = _stamp(folder / LOCK)[1]
    ending = str(last.get("end", {}).get("ending", ""))
    step = last.get("step", {}).get("step")
    counted_from_0 = last.get("step", {}).get("kind") == "step"  # Other trainings count from 1
    return {
        "key": folder.name,
        "name": folder.name,
        "state": ending.upper() or ("RUNNING" if supervisor_of(folder) is not None else "KILLED"),
        "step": step + counted_from_0 if isinstance(step, int) else 0,
        "reward": last.get("step", {}).get("reward_mean"),
        "accuracy": last.get("evaluation", {}).get("accuracy"),
        "changed_s": changed_ns / 1e9,
        "waits": "",
    }


def _stamp(path: Path) -> tuple[int, int]:
    """Return size and modification time (in nanoseconds) of a file, as a cache key. Return zeros if it does
    not exist."""
    with suppress(OSError):
        found = path.stat()
        return found.st_size, found.st_mtime_ns
    return 0, 0


def _records_file(folder: Path) -> BinaryIO:
    """Open the records of a run. Raises OSError, or `NotOurs`, for example for a link."""
    if not is_own_folder(folder):
        raise NotOurs(f"{folder} is no folder of this user's")
    return os.fdopen(open_own(folder / RECORDS), "rb")


@lru_cache(maxsize=2 * MOST_RUNS)
def _last(folder: Path, size: int, changed_ns: int = 0) -> Mapping[str, Json]:
    """Return the last record of each kind before byte `size` of a run's records, from the last bytes only.

    A step of any kind of training has the kind "step". If such a step has an accuracy, it is also an
    evaluation."""
    found: dict[str, Json] = {}
    low = max(0, size - LAST_BYTES)
    with suppress(OSError, NotOurs), _records_file(folder) as file:
        file.seek(low)
        for record in _whole(file.read(size - low)):
            kind = str(record.get("kind"))
            if kind == "resume":
                found |= {"end": {}, "load": {}}  # New processes count from 0 again
            if kind in FILE_KINDS and record.get("accuracy") is not None:
                found["evaluation"] = record
            found["step" if kind in FILE_KINDS else kind] = record
    return found


def overview(folder: Path, job: JobConfig | None = None) -> Json:
    """Return the overview of one run: its job, its processes and the reasons why they wait, its ending, and
    the panels. A queued run has no folder yet."""
    begun = (folder / LOCK).exists()
    told = told_of(folder)
    alive = told["state"] == "RUNNING"
    told |= {
        "steps": None,
        "bound": None,
        "alive": alive,
        "panels": [panel.told() for panel in PANELS],
        "workers": [],
        "status": None,
    }
    if not begun:
        return told
    job = job or job_of(folder)
    told |= {"steps": job.trainer.steps, "bound": job.buffer.max_staleness if job.kind == "rl" else None}
    if alive:
        try:
            status = msgspec.to_builtins(Run(folder, job, None).status())
        except (ArealError, WireError, OSError) as error:
            told["waits"] = f"The run does not say how it stands: {error}"
        else:
            told["workers"] = status.pop("services")
            told["status"] = status
            stall = status.get("stall") or {}
            told["waits"] = stall.get("detail") or status.get("message") or status.get("lease_wait") or ""
    else:
        summary = read_record(folder / "summary.json", dict[str, Any]) or {}
        told["waits"] = str(summary.get("stopped") or "")  # Why a finished run lacks some of its steps
    return told


def job_of(folder: Path) -> JobConfig:
    """Return the job of a run from its folder. Raises `RunFolderError`."""
    check_run_folder(folder)
    return _job_of(folder, *_stamp(folder / "job.yaml"))


@lru_cache(maxsize=64)
def _job_of(folder: Path, size: int, changed_ns: int) -> JobConfig:
    try:
        os.close(open_own(folder / "job.yaml"))  # Refuse a link, because errors would quote its target
        return load_job(folder / "job.yaml", [f"run_dir={folder.parent}"], files=False)
    except (OSError, ConfigError, NotOurs) as error:
        raise RunFolderError(f"the job of the run in {folder} cannot be read: {error}") from error


def records_from(folder: Path, offset: int) -> Json:
    """Return the rows of the records after byte `offset` of `metrics.jsonl`. The answer has the `offset` for
    the next call. A long history is thinned to about `MOST_ROWS` per kind. `reset` means
    that the file was replaced, so the client must start again."""
    content, size = b"", 0
    with suppress(OSError, NotOurs), _records_file(folder) as file:
        size = os.fstat(file.fileno()).st_size
        if 0 <= offset <= size:
            file.seek(offset)
            content = file.read(CHUNK_BYTES)
    if offset > size:
        return {"offset": 0, "rows": [], "more": size > 0, "reset": True}
    whole = content.rfind(b"\n") + 1
    if not whole and len(content) == CHUNK_BYTES:
        whole = len(content)  # A record of this length does not exist, so it is skipped
    following = offset + whole
    most = max(LEAST_ROWS, MOST_ROWS * whole // max(1, size))
    rows, _ = rows_of(_whole(content[:whole]), _last(folder, offset).get("load") or None)
    if len(rows) > most:
        rows = thinned(rows, most)
    return {"offset": following, "rows": rows, "more": following < size and whole > 0, "reset": False}


def _whole(content: bytes) -> Iterator[Json]:
    for line in content.split(b"\n"):
        if line:
            with suppress(msgspec.DecodeError):
                yield _decoder.decode(line)


class SampleFile(NamedTuple):
    """One sample file of a run."""

    policy: str  # Empty in a run with one policy
    kind: SampleKind
    step: int  # Step, or the evaluated version
    path: Path

    @property
    def key(self) -> str:
        return f"{self.policy}/{self.path.name}"


def samples_of(folder: Path) -> dict[str, SampleFile]:
    """Return the sample files of a run by their keys, newest first."""
    folders = {"": folder}
    if is_own_folder(folder) and is_own_folder(folder / "policies"):
        folders |= {name: folder / "policies" / name for name in sorted(_names_in(folder / "policies"))}
    found = [
        SampleFile(policy, kind, step, path)
        for policy, place in folders.items()
        if policy.isprintable() and is_own_folder(place) and is_own_folder(place / SAMPLES)
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
    """Return the episodes of one sample file. Raises `UnknownName`."""
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
    """Return one row of a list of episodes."""
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
    """Return episodes with a text or a name that contains `wanted`, newest first. Case is ignored. Each
    result has the text around the match."""
    found: list[Json] = []
    left = SEARCHED_BYTES
    wanted = wanted.lower()
    for key, file in samples_of(folder).items():
        with suppress(UnknownName):
            content = _read(file.path)
            left -= len(content)
            for index, episode in enumerate(_whole(content)):
                place = _place(episode, wanted)
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
