"""Writing of a snapshot by the ranks of one trainer: each its own pieces, all into one mapped file.

    writer = PieceWriter(root, group)              # on every rank; rank 0 has the one of its `Publisher`
    writer.prepare(pieces)                         # once: who holds what, and files that can be filled
    publication = writer.begin(tag, pieces)        # returns when this rank's pieces are in the file
    info = publication.result()                    # once it is announced

Promises:
- A piece is copied once, from where it is to its place in the mapped file; nothing else grows with the model.
  A rank on another host than rank 0's has no such file: it keeps a copy of its own pieces, and hands them to
  a rank that has it (`handover.py`).
- `begin` waits for copies alone: hashing, manifest and announcement go on in a thread.
- Every rank hears how a publication ended. What fails on any of them fails it everywhere, before anything of
  it is announced.

All ranks call `prepare` and `begin` alike, and begin a publication only once the one before has ended. Those
on rank 0's host see the same `root`; the others do not use theirs.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import torch

from areal_async.base.errors import SnapshotError
from areal_async.base.versions import VersionTag
from areal_async.weights.collectives import ByteCollectives, OneRank
from areal_async.weights.handover import StagedPieces, receive, receivers_of, written_by
from areal_async.weights.layout import Box, Layout, box_of, plan_layout
from areal_async.weights.manifest import SPARE_PREFIX, Part
from areal_async.weights.pieces import TensorPiece
from areal_async.weights.snapshot import MODEL_FILE, SnapshotInfo
from areal_async.weights.tensor_file import MappedFile, fill, hash_ranges

T = TypeVar("T")


class FilePool(msgspec.Struct, frozen=True):
    """Numbers of the model files that there are. File n is called `.spare-<n>` while it is in no snapshot."""

    existing: list[int]
    ready: list[int]
    """Files that may be filled. The first is the next to be filled."""


class Lead(Protocol):
    """The decisions and acts of rank 0 alone."""

    def offer_files(self) -> FilePool:
        """Return the files to be made ready: at first, and whenever a snapshot is announced."""

    def take_file(self, tag: VersionTag) -> FilePool:
        """Return the files from now on; the first that is ready is filled with `tag`. Raises `SnapshotError`
        for a tag that cannot be published."""

    def announce(
        self, tag: VersionTag, layout: Layout, parts: list[Part], *, evaluate: bool, final: bool
    ) -> SnapshotInfo:
        """Make a snapshot of the file that was taken, and tell receivers. Raises `SnapshotError`."""


class _Problem(msgspec.Struct, frozen=True):
    """An error as other ranks hear of it; `errno` is 0 unless it is the system's."""

    text: str
    errno: int = 0


class _Given(msgspec.Struct, frozen=True):
    """One rank's message to rank 0: its data, or why it has none."""

    data: bytes
    problem: _Problem | None


class _Said(msgspec.Struct, frozen=True):
    """The message of rank 0 to all."""

    problem: _Problem | None = None
    files: FilePool | None = None
    info: SnapshotInfo | None = None
    shared: list[bytes] = []  # The data of all ranks


Publication = Future[SnapshotInfo]
"""A publication whose pieces are copied on this rank; the rest runs in the background. The result, on every
rank, is the written and announced snapshot. It raises `SnapshotError` if any rank failed, and the group's own
error if one did not join."""


class PieceWriter:
    """One rank's part in the publications of its trainer. Used by one thread."""

    def __init__(
        self,
        root: Path,
        group: ByteCollectives | None = None,
        *,
        tied: Iterable[str] = (),
        lead: Lead | None = None,
    ) -> None:
        """Pieces called like one of the `tied` names are left out. `lead` is there on rank 0 alone."""
        self._root = root
        self._group: ByteCollectives = group if group is not None else OneRank()
        self._tied = frozenset(tied)
        self._lead = lead
        self._receivers = receivers_of(self._group.hosts)
        self._staged: StagedPieces | None = None
        """Pieces that this rank hands over, if it is not on rank 0's host."""
        self._held: list[list[Box]] = []
        self._layout: Layout | None = None
        self._mapped: dict[int, Future[MappedFile]] = {}
        self._last: Future[SnapshotInfo] | None = None
        self._writing = ThreadPoolExecutor(1, "weights-publish")
        self._touching = ThreadPoolExecutor(1, "weights-touch")

    def prepare(self, pieces: Iterable[TensorPiece]) -> None:
        """Plan the file for the pieces of all ranks, and create and touch the files in the background. Only
        the pieces' names, shapes and dtypes are used. Nothing happens if the plan is unchanged.

        Raises `SnapshotError`, on all ranks alike, for pieces that cannot be stored.
        """
        self._wait_for_last()
        held = describe(self._group, pieces, self._tied)
        if self._layout is not None and held == self._held:
            return
        self._layout, self._held = plan_layout(written_by(held, self._receivers), MODEL_FILE), held
        if self._group.rank in self._receivers:
            self._staged = StagedPieces(held[self._group.rank])
        self._drop(self._mapped)
        files = self._hear(lambda lead: _Said(files=lead.offer_files())).files
        self._map_all(files, self._layout)

    def begin(
        self,
        tag: VersionTag,
        pieces: Iterable[TensorPiece],
        *,
        evaluate: bool = False,
        final: bool = False,
    ) -> Publication:
        """Copy this rank's pieces, and begin to publish them with those of the others as `tag`. They may
        change as soon as this returns.

        `evaluate` pins the snapshot until an evaluator has acknowledged it; `final` says that none will
        follow; both are rank 0's to say. Raises `SnapshotError`, on all ranks alike, for a tag that is not
        newer than the last; other errors come with the result."""
        self._wait_for_last()
        layout = self._layout
        if layout is None:
            raise SnapshotError(f"{tag.label} cannot be published: nothing was prepared")
        files = self._hear(lambda lead: _Said(files=lead.take_file(tag))).files
        assert files is not None
        gone = set(self._mapped) - set(files.existing)
        staged, found = self._staged, None
        if staged is not None:
            problem = _each(pieces, self._tied, staged.copy) or _try(staged.check)[1]
        else:
            found = mapped = self._map(files.ready[0], layout)
            problem = _each(pieces, self._tied, lambda piece: fill(mapped.result(), layout, piece))
        if torch.cuda.is_initialized() and problem is None:
            _, problem = _try(torch.cuda.synchronize)
        self._last = self._writing.submit(
            self._finish, tag, layout, found, problem, gone, evaluate=evaluate, final=final
        )
        return self._last

    def close(self) -> None:
        """Wait for running work and close the files. The files stay."""
        self._touching.shutdown()
        self._writing.shutdown()
        self._drop(self._mapped)

    def _finish(
        self,
        tag: VersionTag,
        layout: Layout,
        found: Future[MappedFile] | None,
        problem: _Problem | None,
        gone: Set[int],
        *,
        evaluate: bool,
        final: bool,
    ) -> SnapshotInfo:
        """Do all that follows the copy, on a thread of its own; `gone` are files that are in use no more. On
        rank 0's host `found` is the file to be filled."""
        self._drop(gone)
        group = self._group
        if self._receivers and found is not None and problem is None:
            _, problem = _try(found.result)  # whoever is to receive has where to
        try:
            # A part may have rows of several ranks: none is hashed before all of them are copied.
            _agree(group, problem)
        except OSError as error:
            raise SnapshotError(f"{tag.label} cannot be written under {self._root}: {error}") from error

        if self._receivers:
            into = found.result() if found is not None else None
            hand_over = partial(_hand_over, group, self._receivers, self._staged, into, layout, self._held)
            _agree(group, _try(hand_over)[1])  # nor before all of them are received

        def work() -> list[Part]:
            if found is None:
                return []
            mapped = found.result()
            if group.rank == 0:
                mapped.write(0, layout.header)
            mapped.flush()
            return hash_ranges(mapped, [part for part in layout.ranges if part.rank == group.rank])

        parts, problem = _try(work)
        gathered = _gather(group, msgspec.msgpack.encode(parts), problem)

        def announce(lead: Lead) -> _Said:
            if said := _first_of(gathered):
                raise SnapshotError(said.text)
            of_rank = [iter(msgspec.msgpack.decode(each.data, type=list[Part])) for each in gathered]
            in_order = [next(of_rank[part.rank]) for part in layout.ranges]
            info = lead.announce(tag, layout, in_order, evaluate=evaluate, final=final)
            return _Said(info=info, files=None if final else lead.offer_files())

        said = self._hear(announce)
        self._map_all(said.files, layout)
        assert said.info is not None
        return said.info

    def _hear(self, of: Callable[[Lead], _Said]) -> _Said:
        """Return the message of rank 0's lead on all ranks. Raises `SnapshotError` on all where it fails."""
        said: _Said | None = None
        if (lead := self._lead) is not None:
            said, problem = _try(lambda: of(lead))
            said = said or _Said(problem)
        return _from_first(self._group, said)

    def _map_all(self, files: FilePool | None, layout: Layout) -> None:
        for number in files.ready if files is not None and self._staged is None else ():
            self._map(number, layout)

    def _map(self, number: int, layout: Layout) -> Future[MappedFile]:
        """File `number`, which is mapped and touched in the background."""
        if number not in self._mapped:
            path = spare_file(self._root, number)
            self._mapped[number] = self._touching.submit(_touched, path, layout.size_bytes)
        return self._mapped[number]

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in [*numbers]:
            found = self._mapped.pop(number)
            if found.exception() is None:
                found.result().close()

    def _wait_for_last(self) -> None:
        if self._last is not None:
            wait([self._last])


def write_tensors(
    path: Path,
    pieces: Callable[[], Iterable[TensorPiece]],
    group: ByteCollectives | None = None,
    *,
    tied: Iterable[str] = (),
) -> None:
    """Write the safetensors file `path` on rank 0's host, each rank its own pieces. Nothing is hashed, and it
    is durable once the caller has synced it. All ranks call this alike, in a folder that is there on that
    host; `pieces` is called twice.

    Raises `SnapshotError` for what cannot be stored, and `OSError`, on all ranks, where it cannot be written.
    """
    group, left_out = group if group is not None else OneRank(), frozenset(tied)
    held, receivers = describe(group, pieces(), left_out), receivers_of(group.hosts)
    layout = plan_layout(written_by(held, receivers), path.name)
    mapped, staged, problem = None, None, None
    if group.rank in receivers:
        staged = StagedPieces(held[group.rank])
        problem = _each(pieces(), left_out, staged.copy) or _try(staged.check)[1]
    else:
        mapped, problem = _try(lambda: MappedFile(path, layout.size_bytes, 0o666))
        failed = _each(pieces(), left_out, lambda piece: fill(mapped, layout, piece) if mapped else None)
        problem = problem or failed
    if receivers:
        _agree(group, problem)
        _hand_over(group, receivers, staged, mapped, layout, held)
    if mapped is not None and problem is None:
        if group.rank == 0:
            mapped.write(0, layout.header)
        mapped.close()
    _agree(group, problem)


def _hand_over(
    group: ByteCollectives,
    receivers: Mapping[int, int],
    staged: StagedPieces | None,
    mapped: MappedFile | None,
    layout: Layout,
    held: Sequence[list[Box]],
) -> None:
    """Bring the pieces of ranks on other hosts into the file, which is there on rank 0's host."""
    if staged is not None:
        staged.send(group, receivers[group.rank])
    elif mapped is not None and (from_ := [rank for rank, to in receivers.items() if to == group.rank]):
        receive(group, mapped, layout, {rank: held[rank] for rank in from_})


def spare_file(root: Path, number: int) -> Path:
    """Return the path of model file `number` while it is in no snapshot."""
    return root / f"{SPARE_PREFIX}{number}"


def describe(group: ByteCollectives, pieces: Iterable[TensorPiece], left_out: Set[str]) -> list[list[Box]]:
    """Return the pieces that each rank holds, on all ranks. Raises `SnapshotError` on all ranks if one rank
    cannot describe its pieces."""
    boxes: list[Box] = []
    problem = _each(pieces, left_out, lambda piece: boxes.append(box_of(piece)))
    shared = _share(group, msgspec.msgpack.encode(boxes), problem)
    return [msgspec.msgpack.decode(data, type=list[Box]) for data in shared]


def _agree(group: ByteCollectives, problem: _Problem | None) -> None:
    """Wait for all ranks. Raises the first one's error, if any has one, on all of them."""
    _share(group, b"", problem)


def _share(group: ByteCollectives, data: bytes, problem: _Problem | None) -> list[bytes]:
    """Return the data of all ranks, on every rank. Raises the first rank's error on all of them."""
    gathered = _gather(group, data, problem)
    said = _Said(_first_of(gathered), shared=[each.data for each in gathered]) if group.rank == 0 else None
    return _from_first(group, said).shared


def _gather(group: ByteCollectives, data: bytes, problem: _Problem | None) -> list[_Given]:
    """Return the messages of all ranks on rank 0, and nothing elsewhere."""
    gathered = group.gather(msgspec.msgpack.encode(_Given(data, problem)))
    return [msgspec.msgpack.decode(each, type=_Given) for each in gathered]


def _from_first(group: ByteCollectives, said: _Said | None) -> _Said:
    """Return rank 0's message on every rank. Raises `SnapshotError` or `OSError` where that is a problem."""
    data = msgspec.msgpack.encode(said, enc_hook=str) if said is not None else None
    heard = msgspec.msgpack.decode(group.broadcast(data), type=_Said, dec_hook=lambda _, text: Path(text))
    if (problem := heard.problem) is not None:
        raise OSError(problem.errno, problem.text) if problem.errno else SnapshotError(problem.text)
    return heard


def _first_of(given: Sequence[_Given]) -> _Problem | None:
    for rank, problem in enumerate(each.problem for each in given):
        if problem is not None:
            return _Problem(f"rank {rank}: {problem.text}", problem.errno) if len(given) > 1 else problem
    return None


def _try(action: Callable[[], T]) -> tuple[T | None, _Problem | None]:
    """Return the result of `action`, or its problem, which the other ranks have to hear: they would wait."""
    try:
        return action(), None
    except OSError as error:
        return None, _Problem(error.strerror or str(error), error.errno or errno.EIO)
    except Exception as error:
        return None, _Problem(str(error) or type(error).__name__)


def _each(
    pieces: Iterable[TensorPiece], left_out: Set[str], action: Callable[[TensorPiece], object]
) -> _Problem | None:
    """Do it with every piece, and return the first problem. To the end whatever happens: the other ranks go
    there too."""
    first: _Problem | None = None

    def go_through() -> None:
        nonlocal first
        for piece in pieces:
            if first is None and piece.name not in left_out:
                _, first = _try(partial(action, piece))

    _, ended = _try(go_through)
    return first or ended


def _touched(path: Path, size_bytes: int) -> MappedFile:
    path.parent.mkdir(parents=True, exist_ok=True)
    mapped = MappedFile(path, size_bytes)
    mapped.touch()
    return mapped
