"""Checkpoints: everything that a trainer needs to go on as if it had never stopped.

`<root>/step-000050/` holds the state after 50 steps: weights, optimizer and random state (written by the back
end, one file per rank), the buffer's ledger as of the same commit, and `manifest.json` with the hash of every
other file. A folder gets its name only when it is complete, so what has a name can be loaded or is refused
as damaged. Nothing is pickled. The newest `keep` checkpoints are kept.

Beside them, `published.jsonl` has what every trainer of the run has published since the newest checkpoint,
with the hash of each version's weights. A trainer that redoes steps compares what it publishes with what its
predecessors had: units sampled from equal weights are still true. A line that a crash cut short is a version
that counts as different, which costs generation and nothing else.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import blake3
import msgspec

from areal_async.rpc.schema import VersionTag
from areal_async.runtime.events import failpoint
from areal_async.runtime.log import get_logger
from trainer_service.disk import WithSchema, replace_folder, room_for
from trainer_service.errors import CheckpointError, DiskFull
from trainer_service.ranks import Ranks

SCHEMA = 2
MANIFEST = "manifest.json"
LEDGER = "ledger.bin"
PUBLISHED = "published.jsonl"

log = get_logger("trainer")


class FileEntry(msgspec.Struct, frozen=True):
    size_bytes: int
    blake3: str


class CheckpointManifest(WithSchema, frozen=True):
    job: str
    policy: str
    step: int
    """Finished steps: the version of the weights."""
    epoch: int
    """The trainer epoch that wrote it."""
    updates: int
    """Optimizer updates made so far."""
    ranks: int
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose files have the hashes of its manifest."""

    folder: Path
    manifest: CheckpointManifest

    def ledger(self) -> bytes:
        return (self.folder / LEDGER).read_bytes() if LEDGER in self.manifest.files else b""


class Checkpoints:
    """The checkpoints of one run. All ranks call `save`, in the same order."""

    def __init__(self, root: Path, *, job: str, policy: str, keep: int, ranks: Ranks) -> None:
        self.root = root
        self._job, self._policy = job, policy
        self._keep = keep
        self._ranks = ranks
        self._written: list[Path] = []

    def went_on_from(self, restored: Path) -> None:
        """Count the checkpoints up to `restored` among those written, so that they are pruned in turn."""
        self._written = [path for path in named_checkpoints(self.root) if path.name <= restored.name]

    def save(
        self, step: int, *, epoch: int, updates: int, ledger: bytes, write: Callable[[Path], None]
    ) -> Path:
        """Write the checkpoint after `step` steps; `write(folder)` adds the back end's files of this rank.

        Raises `DiskFull`; earlier checkpoints are as they were then."""
        folder = self.root / f"step-{step:06d}"
        fresh = self.root / f".step-{step:06d}.tmp"
        ranks = self._ranks
        try:
            with room_for("a checkpoint", self.root):
                if ranks.first:
                    shutil.rmtree(fresh, ignore_errors=True)
                    fresh.mkdir(parents=True)
                ranks.barrier()
                write(fresh)
                ranks.barrier()
                if ranks.first:
                    if ledger:
                        (fresh / LEDGER).write_bytes(ledger)
                    entries = {path.name: _entry(path) for path in sorted(fresh.iterdir())}
                    manifest = CheckpointManifest(
                        SCHEMA, self._job, self._policy, step, epoch, updates, ranks.world, entries
                    )
                    text = msgspec.json.format(msgspec.json.encode(manifest))
                    (fresh / MANIFEST).write_bytes(text + b"\n")
                    failpoint("trainer.mid_checkpoint")
                    replace_folder(fresh, folder)
                    self._prune(folder)
                ranks.barrier()
        except DiskFull:
            shutil.rmtree(fresh, ignore_errors=True)  # its room is what the log needs to say so
            raise
        return folder

    def _prune(self, newest: Path) -> None:
        self._written = [path for path in self._written if path != newest] + [newest]
        for path in self._written[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)
        self._written = self._written[-self._keep :]


def named_checkpoints(root: Path) -> list[Path]:
    """The checkpoint folders under `root`, fewest steps first."""
    found = [path for path in root.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def newest_usable(root: Path, *, job: str, policy: str) -> Checkpoint | None:
    """The newest checkpoint under `root` that is whole; None when there is none at all.

    Raises `CheckpointError`, that of the newest, when there are some and all are damaged."""
    first: CheckpointError | None = None
    for folder in reversed(named_checkpoints(root)):
        try:
            return open_checkpoint(folder, job=job, policy=policy)
        except CheckpointError as error:
            log.warning("checkpoint passed over", folder=str(folder), error=str(error))
            first = first or error
    if first is not None:
        raise first
    return None


def open_checkpoint(folder: Path, *, job: str, policy: str) -> Checkpoint:
    """Read and verify a checkpoint. Raises `CheckpointError` for a damaged one, or one of another job, policy
    or schema."""
    try:
        text = (folder / MANIFEST).read_bytes()
        schema = msgspec.json.decode(text, type=WithSchema).schema
        if schema != SCHEMA:
            raise CheckpointError(
                f"checkpoint {folder} has schema {schema}; this version reads {SCHEMA}: finish the run with "
                "the version that began it"
            )
        manifest = msgspec.json.decode(text, type=CheckpointManifest)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"checkpoint {folder} has no readable {MANIFEST}: {error}") from error
    if manifest.job != job:
        raise CheckpointError(f"checkpoint {folder} is of job {manifest.job!r}, not of {job!r}")
    if manifest.policy != policy:
        raise CheckpointError(
            f"checkpoint {folder} is of policy {manifest.policy!r}, not of {policy!r}: name it in the job "
            f"(policy: {manifest.policy})"
        )
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file() or _entry(path) != entry:
            raise CheckpointError(
                f"checkpoint {folder}: {name} is missing or damaged; use an older checkpoint of the run"
            )
    return Checkpoint(folder, manifest)


def _entry(path: Path) -> FileEntry:
    hasher = blake3.blake3()
    hasher.update_mmap(path)
    return FileEntry(path.stat().st_size, hasher.hexdigest())


class PublishedVersion(msgspec.Struct, frozen=True):
    tag: VersionTag
    weights_hash: str


class PublishedVersions:
    """Belongs to rank 0."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / PUBLISHED
        self.entries: list[PublishedVersion] = []
        for line in self.path.read_bytes().splitlines() if self.path.exists() else ():
            try:
                self.entries.append(msgspec.json.decode(line, type=PublishedVersion))
            except msgspec.DecodeError:
                continue

    @property
    def last_epoch(self) -> int:
        """The newest epoch that published anything; 0 before the first."""
        return max((entry.tag.epoch for entry in self.entries), default=0)

    def add(self, tag: VersionTag, weights_hash: str) -> list[int]:
        """Write down a version that was published; returns the earlier epochs that had published it alike."""
        same = [
            entry.tag.epoch
            for entry in self.entries
            if entry.weights_hash == weights_hash
            and (entry.tag.policy, entry.tag.version) == (tag.policy, tag.version)
            and entry.tag.epoch != tag.epoch
        ]
        entry = PublishedVersion(tag, weights_hash)
        self.entries.append(entry)
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
        return same

    def forget_before(self, version: int) -> None:
        """A checkpoint of `version` is on disk: no earlier one is published again."""
        self.entries = [entry for entry in self.entries if entry.tag.version >= version]
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in self.entries))
        unfinished.replace(self.path)
