"""Checkpoints: everything that a trainer needs to continue as if it had never stopped.

`<root>/step-000050/` contains the state after 50 steps. The back end writes weights, optimizer and random
state, in separate files for each rank. The folder also has the buffer's ledger as of the commit of the last
of these steps, and `manifest.json` with the hash of every other file. A folder gets its final name only when
it is complete. So a folder with that name can either be loaded, or has been damaged later and is refused.
Nothing is pickled.

The step only waits until its state is copied into host memory. A thread on each rank writes and hashes that
rank's files while training continues. Rank 0 gathers the hashes, writes the manifest and names the folder.
One checkpoint is written at a time; a second one waits for it.

A trainer also saves its state in shared memory, in case only its process dies. That state is also such a
folder, but without the ledger. `saved_states.py` decides when each kind is written.

The newest `keep` checkpoints are kept, and the `keep_best` best by held-out accuracy (`to_keep`).

If the job has a store (`checkpoint_store.py`), each rank also uploads its files, and rank 0 uploads the
manifest last. Only then does the checkpoint count as durable. An unavailable store delays the next
checkpoint, but not the steps before it.

Ranks on several hosts share no disk, so only the store has complete checkpoints. Local files are removed
after the upload. A state in memory is distributed: each host's folder has the files of its own ranks. Rank
0's host names its folder first, then the other hosts name theirs. The previous state stays until all hosts
have done so. A state in memory is used only if all hosts have it with equal manifests, and each host has all
files that its ranks read.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from areal_async.base.events import failpoint
from areal_async.base.log import get_logger
from areal_async.base.loop_thread import Background, in_thread
from areal_async.base.metrics import busy
from areal_async.config.trainings import FILE_KINDS
from areal_async.rpc.board import board
from trainer_service.checkpoint_store import MANIFEST, CheckpointStore, epoch_in, name_of
from trainer_service.durable_files import (
    FileEntry,
    WithSchema,
    hashed_in,
    replace_folder,
    room_for,
    write_hashed,
)
from trainer_service.errors import CheckpointError, DiskFull, TrainerError
from trainer_service.ranks import Ranks, join_ranks

SCHEMA = 3
LEDGER = "ledger.bin"
ROUND_S = 2.0  # Interval at which ranks with written files ask for the others

Save = Callable[[Path], Callable[[], Mapping[str, FileEntry]]]
"""Function that copies the state for a folder. It returns a function that writes this rank's files there."""

log = get_logger("trainer")


class CheckpointManifest(WithSchema, frozen=True):
    job: str
    policy: str
    step: int
    """Number of finished steps, which is the version of the weights."""
    epoch: int
    """Epoch of the trainer that wrote the checkpoint."""
    updates: dict[str, int]
    """Number of changes of each model so far, by the model's name in the back end."""
    ranks: int
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint with a verified hash for each file."""

    folder: Path
    manifest: CheckpointManifest

    def ledger(self) -> bytes:
        return (self.folder / LEDGER).read_bytes() if LEDGER in self.manifest.files else b""


@dataclass(frozen=True)
class TrainerState:
    """A trainer's state after `step` steps, to write as a checkpoint."""

    step: int
    epoch: int
    updates: Mapping[str, int]
    save: Save
    ledger: Callable[[], bytes] = bytes
    """Function that returns the ledger. A thread of rank 0 calls it after all ranks have written their files,
    and it may wait."""
    durable: Callable[[], None] = lambda: None
    """Function that the same thread calls once the folder has its final name."""

    @property
    def name(self) -> str:
        return name_of(self.step)


class RankOutcome(msgspec.Struct, frozen=True):
    """Result of a rank's work on a checkpoint: the files that it wrote, the manifest, or an error."""

    files: dict[str, FileEntry] = {}
    manifest: bytes = b""
    error: str = ""
    disk_full: bool = False


MEASURING = ("evaluation", *FILE_KINDS)  # Kinds of records with held-out accuracies


class Measured(msgspec.Struct, frozen=True):
    """A held-out accuracy of the weights `(epoch, version)`."""

    epoch: int
    version: int
    accuracy: float


def measured_in(records: Iterable[Mapping[str, Any]], policy: str) -> Iterator[Measured]:
    """Yield the held-out accuracies in the records of a run, from the evaluator or from training on files."""
    for record in records:
        known = record["kind"] in MEASURING and record.get("accuracy") is not None
        if known and record["policy"] == policy:
            version = record["version" if record["kind"] == "evaluation" else "step"]
            yield Measured(record.get("epoch", 0), version, record["accuracy"])


def accuracies(written: Mapping[int, int], measured: Iterable[Measured]) -> dict[int, float]:
    """Return the known accuracies of the checkpoints in `written` (step → trainer epoch).

    A measurement in a later trainer epoch is valid, because a trainer that resumed from the checkpoint may
    have made it. A measurement in an earlier epoch is not valid, because that epoch had other weights."""
    return {
        each.version: each.accuracy
        for each in measured
        if each.version in written and each.epoch >= written[each.version]
    }


@dataclass(frozen=True)
class Retention:
    """Rule for the checkpoints to keep: the newest ones (`newest`), and the best ones by held-out accuracy
    (`best`). Only rank 0 calls the two functions below, and only if `best` is not 0."""

    newest: int
    best: int = 0
    measured: Callable[[], Iterable[Measured]] = tuple
    """Function that returns the accuracies known so far."""
    pending: Callable[[], Collection[int]] = tuple
    """Function that returns the versions with a pending evaluation."""


class Checkpoints:
    """The checkpoints of one run. All ranks create it and call `begin` and `wait` in the same order. With
    `in_memory`, `root` is in shared memory."""

    def __init__(
        self,
        root: Path,
        *,
        job: str,
        policy: str,
        ranks: Ranks,
        keep: Retention,
        in_memory: bool = False,
        store: CheckpointStore | None = None,
    ) -> None:
        self.root = root
        self.size_bytes = 0
        """Total size of the newest written checkpoint, on rank 0."""
        self.cost_s = 0.0
        """Cost of the newest written checkpoint on this rank: the time that it blocked the step, plus the CPU
        time of the thread that wrote it."""
        self._wrote_s = 0.0
        self._in_memory = in_memory
        self._store = store
        self._job, self._policy = job, policy
        self._keep, self.ranks = keep, ranks
        self._side = ranks.side()
        self._work = Background("checkpoint")
        self._written: dict[int, int] = {}
        """Step → trainer epoch of the checkpoints of this run."""
        if ranks.many_hosts and store is None and not in_memory:
            raise TrainerError(
                "the ranks of the trainer are on several hosts, which share no disk: name a place for "
                "checkpoints that all of them reach (checkpoint.store)"
            )
        if ranks.first_here:
            for unfinished in root.glob(".step-*.tmp"):
                shutil.rmtree(unfinished, ignore_errors=True)
        ranks.barrier()

    def went_on_from(self, restored: Checkpoint) -> None:
        """Register the existing checkpoints up to `restored`, so that they are pruned later like new ones."""
        if self.ranks.many_hosts:
            self._remove_here(but=restored.folder.name if restored.folder.parent == self.root else "")
        for folder in named_checkpoints(self.root):
            if folder.name <= restored.folder.name:
                self._written[step_of(folder)] = epoch_of(folder)
        if (store := self._store) is not None:
            there = self.ranks.on_first(lambda: store.went_on_from(restored.manifest.step))
            self._written = (there or {}) | self._written

    def begin(self, state: TrainerState) -> None:
        """Wait until the previous checkpoint is written, and start to write another. Returns when the state
        may change again. Raises the error of the previous checkpoint."""
        begun_s = time.monotonic()
        state = replace(state, updates=dict(state.updates))
        if self.is_writing:
            log.warning("the checkpoint before is still being written", step=state.step)
        self.wait()
        fresh = self.root / f".{state.name}.tmp"
        with busy("checkpoint"):
            write = state.save(fresh)
        blocked_s = time.monotonic() - begun_s

        def work() -> None:
            files = self._gathered(state.step, fresh, write)
            folder: Path | None = None
            if self._in_memory and self.ranks.many_hosts:
                folder = self._name_on_all(state, fresh, lambda: self._name(fresh, state, files or {}))
            elif files is not None:
                folder = self._name(fresh, state, files)
            elif self.ranks.many_hosts and not self.ranks.beside_first:
                self._remove_here()  # the store has the whole checkpoint
            if files is not None:
                state.durable()
                self.size_bytes = sum(entry.size_bytes for entry in files.values())
                (log.debug if self._in_memory else log.info)(
                    "state left in memory" if self._in_memory else "checkpoint written",
                    step=state.step,
                    folder=str(folder),
                    size_bytes=self.size_bytes,
                    blocked_s=round(blocked_s, 3),
                    written_s=round(time.monotonic() - begun_s, 3),
                )
                self.prune()
                if self.ranks.many_hosts and not self._in_memory:
                    self._remove_here()
            self.cost_s = blocked_s + self._wrote_s

        self._work.begin(work)

    @property
    def newest(self) -> int:
        """Step of the newest registered checkpoint, on rank 0; 0 for none."""
        return max(self._written, default=0)

    @property
    def is_writing(self) -> bool:
        """Whether this rank's part of a checkpoint is still being written."""
        return self._work.is_running

    def wait(self) -> None:
        """Wait until no rank is writing. Raises `DiskFull` and other write errors. Earlier checkpoints are
        unchanged then."""
        with board.waiting("checkpoint", "the newest checkpoint to be written"):
            self.ranks.together(self._work.wait)

    def check(self) -> None:
        """Raise the error if this rank could not write a checkpoint."""
        self._work.check()

    def prune(self) -> None:
        """Remove checkpoints that the retention rule no longer keeps. Rank 0 calls it while nothing is
        written."""
        keep, best = self._keep, self._keep.best
        # The order matters: an evaluation that ends in between is then in one of the two.
        pending = keep.pending() if best else ()
        accuracy = accuracies(self._written, keep.measured() if best else ())
        kept = to_keep(self._written, accuracy, pending, keep=keep.newest, keep_best=best)
        for step in sorted(self._written.keys() - kept):
            shutil.rmtree(self.root / name_of(step), ignore_errors=True)
            if self._store is None or self._store.remove(step):
                del self._written[step]

    def _gathered(
        self, step: int, fresh: Path, write: Callable[[], Mapping[str, FileEntry]]
    ) -> dict[str, FileEntry] | None:
        """Return the files of all ranks on rank 0 once they are written; None on other ranks.

        No rank waits for a slow one within a single collective. If a rank cannot write, all ranks raise an
        error. It is `DiskFull` if the disk of any rank was full, and the unfinished files are then already
        removed. Otherwise a rank raises its own error, or `TrainerError` with the error of another rank."""

        def mine() -> RankOutcome:
            with room_for("a checkpoint", self.root):
                fresh.mkdir(parents=True, exist_ok=True)
                written = dict(write())
            self._wrote_s = time.thread_time()
            if self._store is not None:
                self._store.put(step, fresh, written)
            return RankOutcome(written)

        result, over = in_thread(mine), b""
        told: list[bytes] = []
        while not over:
            wait([result], None if self.ranks.world == 1 else ROUND_S)
            told = self._side.gather(_outcome(result) if result.done() else b"")
            # All ranks share the folder, so it is removed only after the last rank has stopped writing.
            ended = _together(told, fresh) if told and all(told) else None
            over = self._side.broadcast(msgspec.msgpack.encode(ended) if ended is not None else b"")
        all_of = msgspec.msgpack.decode(over, type=RankOutcome)
        if all_of.disk_full:
            if self.ranks.many_hosts and self.ranks.first_here:
                shutil.rmtree(fresh, ignore_errors=True)
            raise DiskFull(all_of.error) from result.exception()
        if all_of.error:
            result.result()
            raise TrainerError(all_of.error)
        return dict(sorted(all_of.files.items())) if self.ranks.first else None

    def _name(self, fresh: Path, state: TrainerState, files: dict[str, FileEntry]) -> Path:
        """Add rank 0's own files to the files of all ranks, and name the folder."""
        try:
            with room_for("a checkpoint", self.root):
                if copy := state.ledger():
                    files[LEDGER] = write_hashed(fresh / LEDGER, [copy])
                updates, world = dict(state.updates), self.ranks.world
                manifest = CheckpointManifest(
                    SCHEMA, self._job, self._policy, state.step, state.epoch, updates, world, files
                )
                text = msgspec.json.format(msgspec.json.encode(manifest))
                (fresh / MANIFEST).write_bytes(text + b"\n")
                failpoint("trainer.mid_state" if self._in_memory else "trainer.mid_checkpoint")
                replace_folder(fresh, folder := self.root / state.name)
        except DiskFull:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        self._written[state.step] = state.epoch
        if self._store is not None:
            self._store.put(state.step, folder, {LEDGER} & files.keys())
            failpoint("trainer.mid_store")
            self._store.finish(state.step, folder)
        return folder

    def _name_on_all(self, state: TrainerState, fresh: Path, name: Callable[[], Path]) -> Path:
        """Name the folder on every host. All ranks call it, and it returns when all hosts are done.

        Only rank 0 calls `name`, which may wait for the commit of the step. An error on one rank is raised on
        all."""
        first, folder, told = self.ranks.first, self.root / state.name, b""
        result = in_thread(lambda: RankOutcome(manifest=(name() / MANIFEST).read_bytes())) if first else None
        while not told:
            if result is not None:
                wait([result], ROUND_S)
                told = _outcome(result, "rank 0: ") if result.done() else b""
            told = self._side.broadcast(told if first else None)
        named, failed = msgspec.msgpack.decode(told, type=RankOutcome), ""
        if named.error:
            if not self.ranks.beside_first:
                shutil.rmtree(fresh, ignore_errors=True)
            if result is not None:
                result.result()
            raise (DiskFull if named.disk_full else TrainerError)(named.error)
        if self.ranks.first_here and not first:
            try:
                (fresh / MANIFEST).write_bytes(named.manifest)
                failpoint("trainer.mid_state")
                replace_folder(fresh, folder)
            except OSError as error:
                failed = f"rank {self.ranks.rank}: {folder} cannot be written: {error}"
        # Remove older folders only now: until all hosts have this one, the older is the newest common one.
        failed = next((text.decode() for text in self._side.gather(failed.encode()) if text), "")
        failed = self._side.broadcast(failed.encode() if first else None).decode()
        if failed:
            raise TrainerError(failed)
        if not self.ranks.beside_first:
            self._remove_here(but=folder.name)
        return folder

    def _remove_here(self, but: str = "") -> None:
        """Remove all folders on this host except `but`; for ranks on several hosts."""
        for folder in self.root.glob("*step-*") if self.ranks.first_here else ():
            if folder.name != but and folder.is_dir():
                shutil.rmtree(folder, ignore_errors=True)


def _outcome(result: Future[RankOutcome], rank: str = "") -> bytes:
    error = result.exception()
    if error is None:
        return msgspec.msgpack.encode(result.result())
    text = rank + (str(error) or type(error).__name__)
    return msgspec.msgpack.encode(RankOutcome(error=text, disk_full=isinstance(error, DiskFull)))


def _together(told: list[bytes], fresh: Path) -> RankOutcome:
    """Return the files of all ranks, or the error of one rank. Rank 0 calls it when all ranks have
    finished."""
    each_of = [msgspec.msgpack.decode(data, type=RankOutcome) for data in told]
    failed = [(not each.disk_full, rank) for rank, each in enumerate(each_of) if each.error]
    if not failed:
        return RankOutcome({name: entry for each in each_of for name, entry in each.files.items()})
    rank = min(failed)[1]
    error, disk_full = each_of[rank].error, each_of[rank].disk_full
    if disk_full:
        shutil.rmtree(fresh, ignore_errors=True)  # the log needs the freed space to report the error
    return RankOutcome(error=f"rank {rank}: {error}" if len(told) > 1 else error, disk_full=disk_full)


def to_keep(
    steps: Collection[int],
    accuracy: Mapping[int, float],
    pending: Collection[int],
    *,
    keep: int,
    keep_best: int,
) -> set[int]:
    """Return the steps of the checkpoints to keep.

    These are the newest `keep` and the `keep_best` most accurate; ties go to the newer. Checkpoints whose
    evaluation is `pending` are kept too, because they may be among the best."""
    ordered = sorted(steps)
    kept = set(ordered[-keep:])
    if keep_best:
        known = [step for step in ordered if step in accuracy]
        kept |= set(sorted(known, key=lambda step: (accuracy[step], step))[-keep_best:])
        kept |= set(ordered) & set(pending)
    return kept


def epoch_of(folder: Path) -> int:
    """Return the epoch in a checkpoint's manifest; 0 if it cannot be read."""
    return epoch_in(_read(folder / MANIFEST))


def named_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoint folders under `root`, in ascending order of steps."""
    found = [path for path in root.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


@dataclass(frozen=True)
class CheckpointReader:
    """Reader that finds, verifies and opens the checkpoints of a job's policy. All `ranks` make the same
    calls."""

    job: str
    policy: str
    ranks: Ranks = field(default_factory=partial(join_ranks, 0, 1))
    reads: Callable[[Collection[str]], Collection[str]] | None = None
    """Function that selects the files that this rank reads from the names of all files. None if the rank
    reads all of them."""

    def newest_of_all(self, root: Path, store: CheckpointStore | None) -> Checkpoint | None:
        """Return the newest checkpoint in `root` or in `store`.

        A newer checkpoint in the store is first downloaded to this host; with several hosts, each rank
        downloads it to its own host. A local checkpoint that the store lacks is uploaded. If ranks are on
        several hosts, only checkpoints in the store count."""
        if store is None:
            return self.newest(root)
        ranks = self.ranks
        failed: CheckpointError | None = None
        local: Checkpoint | None = None
        try:
            if not ranks.many_hosts:
                local = self.newest(root)
        except CheckpointError as error:
            failed = error
        there = ranks.share(ranks.on_first(store.whole), list[int])
        for step in sorted(there, reverse=True):
            if local is not None and step <= local.manifest.step:
                break
            folder = root / name_of(step)
            said = ranks.together(partial(_brought, store, step, folder))
            try:
                if ranks.largest(bool(said)):
                    raise CheckpointError(said or f"checkpoint {store.url_of(step)} is damaged")
                return self.open(folder)
            except CheckpointError as error:
                log.warning("checkpoint passed over", folder=store.url_of(step), error=str(error))
                failed = failed or error
        if local is None and failed is not None:
            raise failed
        if local is not None and local.manifest.step not in there:
            names = sorted(local.manifest.files)[ranks.rank :: ranks.world]
            ranks.together(lambda: store.put(local.manifest.step, local.folder, names))
            ranks.on_first(lambda: store.finish(local.manifest.step, local.folder))
        return local

    def newest(self, root: Path) -> Checkpoint | None:
        """Return the newest undamaged checkpoint under `root`; None if there is no checkpoint.

        All ranks use rank 0's list, and each verifies a share of the files. On several hosts, they use the
        checkpoints that all hosts have, and each rank verifies the files that it reads. If all checkpoints
        are damaged, the `CheckpointError` of the newest one is raised."""
        names = [folder.name for folder in named_checkpoints(root)]
        names = (
            self._on_all_hosts(root, names) if self.ranks.many_hosts else self.ranks.share(names, list[str])
        )
        first: CheckpointError | None = None
        for name in reversed(names):
            try:
                return self.open(root / name)
            except CheckpointError as error:
                log.warning("checkpoint passed over", folder=str(root / name), error=str(error))
                first = first or error
        if first is not None:
            raise first
        return None

    def _on_all_hosts(self, root: Path, names: Collection[str]) -> list[str]:
        """Return the checkpoints of `names` under `root` that every host has with the same manifest."""
        mine = {name: blake3(_read(root / name / MANIFEST)).hexdigest() for name in names}
        gathered = self.ranks.side().gather(msgspec.json.encode(mine))
        found = [msgspec.json.decode(data, type=dict[str, str]) for data in gathered]
        on_all = [name for name in names if all(each.get(name) == mine[name] for each in found)]
        return self.ranks.share(on_all, list[str])

    def open(self, folder: Path) -> Checkpoint:
        """Read and verify a checkpoint.

        Ranks share the verification. On several hosts, each rank verifies the files that it reads. Raises
        `CheckpointError` if the checkpoint is damaged or belongs to another job, policy or schema."""
        ranks = self.ranks
        text = ranks.broadcast_bytes(_read(folder / MANIFEST) if ranks.first else b"")
        try:
            schema = msgspec.json.decode(text, type=WithSchema).schema
            if schema != SCHEMA:
                raise CheckpointError(
                    f"checkpoint {folder} has schema {schema}; this version reads {SCHEMA}: finish the run "
                    "with the version that began it"
                )
            manifest = msgspec.json.decode(text, type=CheckpointManifest)
        except msgspec.DecodeError as error:
            raise CheckpointError(f"checkpoint {folder} has no readable {MANIFEST}: {error}") from error
        if manifest.job != self.job:
            raise CheckpointError(f"checkpoint {folder} is of job {manifest.job!r}, not of {self.job!r}")
        if manifest.policy != self.policy:
            raise CheckpointError(
                f"checkpoint {folder} is of policy {manifest.policy!r}, not of {self.policy!r}: name it in "
                f"the job (policy: {manifest.policy})"
            )
        names = sorted(manifest.files, key=lambda name: -manifest.files[name].size_bytes)
        share: Sequence[int] = range(ranks.rank, len(names), ranks.world)
        if ranks.many_hosts:
            needed = set(self.reads(names)) if self.reads is not None else set(names)
            share = [number for number, name in enumerate(names) if name in needed]

        def verify() -> int:
            """Return the position (from 1) of a damaged file in this rank's share, or 0 if none is
            damaged."""
            return max((n + 1 for n in share if not is_whole(names[n])), default=0)

        def is_whole(name: str) -> bool:
            return hashed_in(folder, name) == manifest.files[name]

        if damaged := ranks.largest(ranks.together(verify)):
            name = names[damaged - 1]
            raise CheckpointError(
                f"checkpoint {folder}: {name} is missing or damaged; use an older checkpoint of the run"
            )
        return Checkpoint(folder, manifest)


def _brought(store: CheckpointStore, step: int, folder: Path) -> str:
    """Download a checkpoint from the store. Returns an error text if it is damaged, so that all ranks skip
    it; otherwise an empty string."""
    try:
        store.bring(step, folder)
    except CheckpointError as error:
        return str(error)
    return ""


def _read(path: Path) -> bytes:
    """Return the content of a file; empty if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
