"""Runs whose folder or checkpoints are in a store. A run is claimed, mirrored while it runs, and fetched.

The lock of a run folder works on one host only. Between hosts, a mark in the store replaces it: the host of a
live run updates the mark regularly. A host that resumes a run of another host watches the mark for `WATCH_S`.
If the mark changes, the other host still runs the job, and the resume is refused."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from areal_async.base.errors import RunError, RunFolderError
from areal_async.base.log import get_logger
from areal_async.base.own_files import private_files, read_record
from areal_async.config.content import BY_TRAINER, run_url, store_url
from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.launch.folders import LOCK, TOPOLOGY, supervisor_of
from areal_async.storage.mirror import EVERY_S, FINISH_S, MARK, Mirror, MirrorMark, mark_there
from areal_async.storage.remote import Remote, StorageError
from areal_async.storage.transfer import fetch
from areal_async.storage.urls import is_url, joined, local_path, url_problem

WATCH_S = 3 * EVERY_S
INTERRUPTED_S = 60.0  # Longest time for the last mirroring of a run that did not finish
OF_THIS_HOST = frozenset({LOCK, TOPOLOGY, "buffer", *BY_TRAINER})
"""Entries of a run folder that are not mirrored.

The lock and the topology belong to this host. The buffer's Redis files are useful only as a complete set, and
each checkpoint contains them. The remaining entries are not mirrored because the trainer itself writes them
to the store."""
WORK = frozenset({"checkpoints", "model", "adapter", "batches"})
"""Folders that are deleted only on request."""
TO_RESUME = frozenset({"job.yaml", "metrics.jsonl", "published.jsonl"})
"""Files that are copied to the store beside the checkpoints if the run folder itself is not mirrored."""

log = get_logger("supervisor")


@contextmanager
def mirrored(job: JobConfig, run_dir: Path, *, overwrite: bool, resume: bool) -> Iterator[None]:
    """Keep the store's copy of the run up to date inside this block, if the job has a store.

    Raises `RunFolderError` if another host runs the run, or if the store has work of another run without
    `resume` or `overwrite`. Raises `RunError` if the remaining files cannot be stored at the end."""
    mirrors = [Mirror(run_dir, url, wanted=wanted) for url, wanted in _places(job).items()]
    with _as_run_errors():
        for mirror in mirrors:
            _claim(mirror.url, overwrite=overwrite, resume=resume)
    finished = False

    def end(mirror: Mirror) -> None:
        _end(mirror, run_dir, finished)

    with ExitStack() as stack:
        for mirror in mirrors:
            with _as_run_errors():
                mirror.start()
            stack.callback(end, mirror)
        yield
        finished = True


def _places(job: JobConfig) -> dict[str, Callable[[str], bool]]:
    """Return the URLs to which the run folder is mirrored, each with a function that selects files by
    name."""
    run, store = run_url(job), store_url(job)
    places: dict[str, Callable[[str], bool]] = {}
    if run is not None:
        places[run] = lambda name: name.split("/")[0] not in OF_THIS_HOST
    if store is not None and store != run:
        places[store] = lambda name: run is None and name in TO_RESUME
    return places


def _claim(url: str, *, overwrite: bool, resume: bool) -> None:
    mark = mark_there(url)
    if mark is not None and not mark.ended and mark.host != socket.gethostname():
        _watch(url, mark)
    if resume:
        return
    remote = Remote(url)
    files = remote.listing()
    if files and mark is None:
        raise RunFolderError(
            f"{url} is not empty and was not made by a run; nothing in it is touched. Give the job another "
            "name (`job:`), or another `run_dir` or `checkpoint.store`."
        )
    if any(name == "summary.json" or name.split("/")[0] in WORK for name in files) and not overwrite:
        is_done = "summary.json" in files
        go_on = "" if is_done else f"go on with `areal-async resume {url}`, "
        raise RunFolderError(
            f"{url} holds {'a finished' if is_done else 'an unfinished'} run. Give the job another name "
            f"(job=NAME), {go_on}or add --overwrite to delete it and start anew."
        )
    if files:
        remote.remove()


def _watch(url: str, mark: MirrorMark) -> None:
    """Raise `RunFolderError` if the mark of another host still changes."""
    log.info("another host ran this job last; is it still?", host=mark.host, url=url, watched_s=WATCH_S)
    deadline_s = time.monotonic() + WATCH_S
    while time.monotonic() < deadline_s:
        time.sleep(min(1.0, WATCH_S / 4))
        if (now := mark_there(url)) is not None and now != mark and not now.ended:
            raise RunFolderError(
                f"this job is running on {now.host}, which writes to {url}. Wait for it, stop it there, or "
                "give this one another name (job=NAME)."
            )


def _end(mirror: Mirror, run_dir: Path, finished: bool) -> None:
    try:
        mirror.stop(FINISH_S if finished else INTERRUPTED_S)
    except StorageError as error:
        text = f"not all of the run's folder has come to {mirror.url}: {error} It is whole in {run_dir}."
        if finished:
            raise RunError(text) from error
        print(f"warning: {text}", file=sys.stderr, flush=True)  # the reason for the end is printed later


def run_at(target: str | Path) -> Path:
    """Return the run folder or job file that a command names.

    For a URL, the result is the local folder with the fetched files. Raises `RunFolderError`."""
    if not isinstance(target, str | Path):
        raise RunFolderError(f"{target!r:.80} is no run: give the path of its folder or its job file.")
    if isinstance(target, Path) or not is_url(target):
        return Path(target)
    if (problem := url_problem(target)) is not None:
        raise RunFolderError(f"{problem[0]}. {problem[1]}.")
    bring_run(target, folder := local_path(target))
    return folder


def bring_run_of(job: JobConfig) -> None:
    """Fetch the files of the run of `job` from its store, if its folder here is older or missing."""
    folder = job.run_dir / job.job
    if (url := run_url(job)) is not None:
        bring_run(url, folder)
    elif (store := store_url(job)) is not None and not folder.exists():
        with _as_run_errors():
            known = mark_there(store) is not None
        if known:
            bring_run(store, folder)


def bring_run(url: str, folder: Path) -> None:
    """Fetch the run that is mirrored to `url` into `folder`, except for files that its trainer fetches
    itself.

    If the newest mirror was made from this folder, the folder is up to date and stays unchanged. Raises
    `RunFolderError`."""
    with _as_run_errors(), private_files():
        there = mark_there(url)
        if there is None:
            if folder.exists():
                return
            raise RunFolderError(f"there is no run at {url}: it has no {MARK}. Correct the URL.")
        here = read_record(folder / MARK, MirrorMark)
        if (here is not None and here.owner == there.owner) or supervisor_of(folder) is not None:
            return
        fetch(url, folder, leave_out=lambda name: name.split("/")[0] in BY_TRAINER)
        (folder / LOCK).touch(0o600)


def has_checkpoint(run_dir: Path) -> bool:
    """Return whether the store of the job recorded in `run_dir` has a checkpoint of the run. Raises
    `RunFolderError`."""
    store = store_url(load_job(run_dir / "job.yaml", files=False))
    if store is None:
        return False
    with _as_run_errors():
        return any(name.endswith("/manifest.json") for name in Remote(joined(store, "checkpoints")).listing())


@contextmanager
def _as_run_errors() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise RunFolderError(str(error)) from error
