"""A trainer's files in the job's store: its checkpoints, and at the end the trained model.

`checkpoints/step-000050/` below the store's URL has the same files as the folder on disk. Each rank uploads
the files that it wrote, and `manifest.json` is uploaded last. A folder without a manifest is no checkpoint.
If a trainer is killed during the upload, the previous checkpoint remains the newest. Requests to an
unavailable store are repeated for `AWAY_S`, and the trainer's status shows this. If a removal fails, it is
repeated later.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import msgspec

from areal_async.base.log import get_logger
from areal_async.base.retry import Tries
from areal_async.config.content import store_url
from areal_async.config.job import JobConfig
from areal_async.rpc.board import board
from areal_async.storage.remote import Remote, StorageError, tries_for
from areal_async.storage.transfer import fetch, push
from areal_async.storage.urls import joined
from trainer_service.durable_files import FileEntry, hashed_in
from trainer_service.errors import CheckpointError

MANIFEST = "manifest.json"
AWAY_S = 6 * 3600.0  # Time without an answer of the store that ends the trainer, which can be resumed
REMOVE_S = 20.0
MODELS = ("model", "adapter")
STEP = re.compile(r"step-(\d{6,})")

log = get_logger("trainer")


class _ManifestFiles(msgspec.Struct, frozen=True):
    files: dict[str, FileEntry]
    epoch: int = 0


def name_of(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:06d}"


def epoch_in(manifest: bytes) -> int:
    """Return the epoch in a checkpoint's manifest; 0 if it cannot be read."""
    try:
        return msgspec.json.decode(manifest, type=_ManifestFiles).epoch
    except msgspec.DecodeError:
        return 0


class CheckpointStore:
    """The checkpoints below `url`. Any thread may call it. Each method raises `StorageError` unless its
    docstring says otherwise."""

    def __init__(self, url: str, *, tries: Tries | None = None, removing: Tries | None = None) -> None:
        self._url = url
        self._remote = Remote(url, tries or tries_for(url, AWAY_S))
        self._removing = Remote(url, removing or tries_for(url, REMOVE_S))

    @classmethod
    def of(cls, job: JobConfig) -> CheckpointStore | None:
        """Return the store of a job; None if it has none."""
        url = store_url(job)
        return cls(joined(url, "checkpoints")) if url is not None else None

    def url_of(self, step: int) -> str:
        return joined(self._url, name_of(step))

    def put(self, step: int, folder: Path, names: Collection[str]) -> None:
        """Upload these files of the checkpoint in `folder`."""
        self._remote.each(lambda name: self._remote.put(f"{name_of(step)}/{name}", folder / name), names)

    def finish(self, step: int, folder: Path) -> None:
        """Upload the manifest after all other files; this completes the checkpoint."""
        self._remote.put(f"{name_of(step)}/{MANIFEST}", folder / MANIFEST)
        log.info("checkpoint stored", step=step, url=self.url_of(step))

    def whole(self) -> list[int]:
        """Return the steps of the complete checkpoints in the store."""
        return sorted(step for step, names in self._steps().items() if MANIFEST in names)

    def bring(self, step: int, folder: Path) -> None:
        """Download the checkpoint to `folder` and verify the hash of each file. Raises `CheckpointError` if a
        file is missing or damaged."""

        def check(fresh: Path) -> None:
            try:
                manifest = msgspec.json.decode((fresh / MANIFEST).read_bytes(), type=_ManifestFiles)
                bad = [name for name, entry in manifest.files.items() if hashed_in(fresh, name) != entry]
            except (OSError, msgspec.DecodeError) as error:
                raise CheckpointError(f"checkpoint {self.url_of(step)} is incomplete: {error}") from error
            if bad:
                raise CheckpointError(f"checkpoint {self.url_of(step)}: {bad[0]} is damaged")

        with board.waiting("store", f"checkpoint {step} to come from {self._url}"):
            fetch(self.url_of(step), folder, tries_for(self._url, AWAY_S), check=check)

    def epochs(self) -> dict[int, int]:
        """Return step → trainer epoch of the complete checkpoints in the store."""
        return {step: epoch_in(self._remote.read(f"{name_of(step)}/{MANIFEST}")) for step in self.whole()}

    def went_on_from(self, restored: int) -> dict[int, int]:
        """Remove the folders of steps after `restored`, and incomplete folders. Returns `epochs` of the
        remaining ones."""
        for step, names in self._steps().items():
            if step > restored or MANIFEST not in names:
                self.remove(step)
        return {step: epoch for step, epoch in self.epochs().items() if step <= restored}

    def remove(self, step: int) -> bool:
        """Remove a checkpoint. Returns False and logs a warning if the store does not answer or refuses."""
        try:
            # The manifest is removed first, so that no reader finds half a checkpoint.
            self._removing.remove([f"{name_of(step)}/{MANIFEST}", name_of(step)])
        except StorageError as error:
            log.warning("a checkpoint in the store cannot be removed yet", step=step, error=str(error))
            return False
        return True

    def _steps(self) -> dict[int, set[str]]:
        """Return step → names of its files."""
        found: dict[int, set[str]] = {}
        for name in self._remote.listing():
            folder, _, rest = name.partition("/")
            if match := STEP.fullmatch(folder):
                found.setdefault(int(match[1]), set()).add(rest)
        return found


def push_trained(run_dir: Path, job: JobConfig) -> None:
    """Upload the trained model and adapter from the run's folder to the job's store, if it has one."""
    url = store_url(job)
    for name in MODELS:
        if url is not None and (run_dir / name).is_dir():
            there = joined(url, name)
            with board.waiting("store", f"the trained model to be in {there}"):
                push(run_dir / name, there, tries_for(there, AWAY_S))
            log.info("model stored", url=there)
