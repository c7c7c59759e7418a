"""Writing of a snapshot by the ranks of one trainer: each rank writes its own pieces into one memory-mapped
file.

    writer = PieceWriter(root, group)              # on every rank; rank 0 uses its `Publisher`
    writer.prepare(pieces)                         # once: plans the layout and makes the files
    publication = writer.begin(tag, pieces)        # returns when this rank's pieces are in the file
    info = publication.result()                    # returns when the snapshot is announced

Promises:
- A piece is copied once, from its tensor to its place in the mapped file, so no other memory is needed in
  proportion to the model. A rank on another host than rank 0 cannot map the file. It keeps a copy of its own
  pieces and sends them to a rank that can (`handover.py`).
- `begin` waits only for copies. Hashing, manifest and announcement continue in a thread.
- Every rank learns the result of a publication. If any rank fails, the publication fails on all ranks before
  anything is announced.

All ranks must call `prepare` and `begin` in the same order, and begin a publication only after the previous
one has ended. Ranks on rank 0's host share the folder `root`. Ranks on other hosts do not use it.
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
from areal_async.weights.layout import Box, Layout, box_of, plan_layout
from areal_async.weights.manifest import SPARE_PREFIX, Part
from areal_async.weights.pieces import TensorPiece
from areal_async.weights.snapshot import MODEL_FILE, SnapshotInfo
from areal_async.weights.tensor_file import MappedFile, fill, hash_ranges
from trainer_service.publishing.handover import StagedPieces, receive, receivers_of, written_by
from trainer_service.ranks import SideGroup

T = TypeVar("T")


class FilePool(msgspec.Struct, frozen=True):
    """The existing model files, by number. File n is called `.spare-<n>` while it belongs to no snapshot."""

    existing: list[int]
    ready: list[int]
    """Files that may be filled. The first file is filled next."""


class Lead(Protocol):
    """The decisions and actions for which rank 0 alone is responsible."""

    def offer_files(self) -> FilePool:
        """Return the files to prepare. Called at the start, and whenever a snapshot was announced."""

    def take_file(self, tag: VersionTag) -> FilePool:
        """Return the updated pool. The first ready file is filled with `tag`.

        Raises `SnapshotError` for a tag that cannot be published.
        """

    def announce(
        self, tag: VersionTag, layout: Layout, parts: list[Part], *, evaluate: bool, final: bool
    ) -> SnapshotInfo:
        """Make a snapshot of the taken file and announce it to receivers. Raises `SnapshotError`."""


class _Problem(msgspec.Struct, frozen=True):
    """An error in the form that other ranks receive. `errno` is 0 unless the error is an `OSError`."""

    text: str
    errno: int = 0


class _Given(msgspec.Struct, frozen=True):
    """One rank's message to rank 0: its data, or the reason why it has no data."""

    data: bytes
    problem: _Problem | None


class _Said(msgspec.Struct, frozen=True):
    """The message of rank 0 to all ranks."""

    problem: _Problem | None = None
    files: FilePool | None = None
    info: SnapshotInfo | None = None
    shared: list[bytes] = []  # data of all ranks


Publication = Future[SnapshotInfo]
"""Future of a publication. The pieces of this rank are copied, and the rest of the work continues in the
background.

On every rank, the result describes the announced snapshot. `result()` raises `SnapshotError` if any rank has
failed, and the group's own error if a rank did not answer.
"""


class PieceWriter:
    """One rank's part in the publications of its trainer. Only one thread may use it."""

    def __init__(
        self,
        root: Path,
        group: SideGroup | None = None,
        *,
        tied: Iterable[str] = (),
        lead: Lead | None = None,
    ) -> None:
        """Create the writer. Pieces with a name in `tied` are not written. Only rank 0 has a `lead`."""
        self._root = root
        self._group = group if group is not None else SideGroup()
        self._tied = frozenset(tied)
        self._lead = lead
        self._receivers = receivers_of(self._group.hosts)
        self._staged: StagedPieces | None = None
        """Pieces that this rank sends, if it is not on rank 0's host."""
        self._held: list[list[Box]] = []
        self._layout: Layout | None = None
        self._mapped: dict[int, Future[MappedFile]] = {}
        self._last: Future[SnapshotInfo] | None = None
        self._writing = ThreadPoolExecutor(1, "weights-publish")
        self._touching = ThreadPoolExecutor(1, "weights-touch")

    def prepare(self, pieces: Iterable[TensorPiece]) -> None:
        """Plan the file for the pieces of all ranks, and make and touch files in the background.

        Only the names, shapes and dtypes of the pieces are read. Does nothing if the pieces match the plan.
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
        """Copy this rank's pieces and start to publish them, with the pieces of other ranks, as `tag`.

        The pieces may change as soon as this method returns. `evaluate` pins the snapshot until an evaluator
        has acknowledged it. `final` marks the last snapshot. Only rank 0's values of `evaluate` and `final`
        count. Raises `SnapshotError`, on all ranks alike, if `tag` is not newer than the last tag. The result
        raises all other errors.
        """
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
        """Wait for work in progress and close the files, without removing them."""
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
        """Do all work that follows the copy. This runs in a thread of its own.

        `gone` are files that are no longer in use. On rank 0's host, `found` is the file to fill.
        """
        self._drop(gone)
        group = self._group
        if found is not None and problem is None:
            _, problem = _try(found.result)  # now each receiver has a file to write into

        def work() -> list[Part]:
            if found is None:
                return []
            mapped = found.result()
            if group.rank == 0:
                mapped.write(0, layout.header)
            mapped.flush()
            return hash_ranges(mapped, [part for part in layout.ranges if part.rank == group.rank])

        try:
            # A part may have rows of several ranks. No part is hashed before all ranks have copied.
            _agree(group, problem)
            into = found.result() if found is not None else None
            _hand_over(group, self._receivers, self._staged, into, layout, self._held)
            parts, problem = _try(work)
            shared = _share(group, msgspec.msgpack.encode(parts), problem)
        except OSError as error:
            raise SnapshotError(f"{tag.label} cannot be written under {self._root}: {error}") from error

        def announce(lead: Lead) -> _Said:
            of_rank = [iter(msgspec.msgpack.decode(data, type=list[Part])) for data in shared]
            in_order = [next(of_rank[part.rank]) for part in layout.ranges]
            info = lead.announce(tag, layout, in_order, evaluate=evaluate, final=final)
            return _Said(info=info, files=None if final else lead.offer_files())

        said = self._hear(announce)
        self._map_all(said.files, layout)
        assert said.info is not None
        return said.info

    def _hear(self, of: Callable[[Lead], _Said]) -> _Said:
        """Return on all ranks the result of a call of rank 0's lead. If the call fails, raises
        `SnapshotError` on all ranks."""
        said: _Said | None = None
        if (lead := self._lead) is not None:
            said, problem = _try(lambda: of(lead))
            said = said or _Said(problem)
        return _from_first(self._group, said)

    def _map_all(self, files: FilePool | None, layout: Layout) -> None:
        for number in files.ready if files is not None and self._staged is None else ():
            self._map(number, layout)

    def _map(self, number: int, layout: Layout) -> Future[MappedFile]:
        """Map and touch file `number` in the background."""
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
    group: SideGroup,
    *,
    tied: Iterable[str] = (),
) -> None:
    """Write the safetensors file `path` on rank 0's host. Each rank writes its own pieces.

    Nothing is hashed. The caller must sync the file to make it durable. All ranks make the same call. The
    folder must exist on rank 0's host. `pieces` is called twice. Raises `SnapshotError` for pieces that
    cannot be stored. Raises `OSError`, on all ranks, if the file cannot be written.
    """
    left_out = frozenset(tied)
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
    _agree(group, problem)
    _hand_over(group, receivers, staged, mapped, layout, held)
    if mapped is not None:
        if group.rank == 0:
            mapped.write(0, layout.header)
        mapped.close()


def _hand_over(
    group: SideGroup,
    receivers: Mapping[int, int],
    staged: StagedPieces | None,
    mapped: MappedFile | None,
    layout: Layout,
    held: Sequence[list[Box]],
) -> None:
    """Write the pieces of ranks on other hosts into the file on rank 0's host. Raises the same errors as
    `_agree`."""
    if not receivers:
        return

    def work() -> None:
        if staged is not None:
            staged.send(group, receivers[group.rank])
        elif mapped is not None:
            senders = [rank for rank, to in receivers.items() if to == group.rank]
            receive(group, mapped, layout, {rank: held[rank] for rank in senders})

    _agree(group, _try(work)[1])


def spare_file(root: Path, number: int) -> Path:
    """Return the path of model file `number` while no snapshot contains it."""
    return root / f"{SPARE_PREFIX}{number}"


def describe(group: SideGroup, pieces: Iterable[TensorPiece], left_out: Set[str]) -> list[list[Box]]:
    """Return the boxes that each rank holds, on all ranks.

    If one rank cannot describe its pieces, raises `SnapshotError` on all ranks.
    """
    boxes: list[Box] = []
    problem = _each(pieces, left_out, lambda piece: boxes.append(box_of(piece)))
    shared = _share(group, msgspec.msgpack.encode(boxes), problem)
    return [msgspec.msgpack.decode(data, type=list[Box]) for data in shared]


def _agree(group: SideGroup, problem: _Problem | None) -> None:
    """Wait for all ranks. If any rank has a problem, raises the first rank's error on all ranks."""
    _share(group, b"", problem)


def _share(group: SideGroup, data: bytes, problem: _Problem | None) -> list[bytes]:
    """Return the data of all ranks, on every rank. Raises the first rank's error on all ranks."""
    gathered = group.gather(msgspec.msgpack.encode(_Given(data, problem)))
    given = [msgspec.msgpack.decode(each, type=_Given) for each in gathered]
    said = _Said(_first_of(given), shared=[each.data for each in given]) if group.rank == 0 else None
    return _from_first(group, said).shared


def _from_first(group: SideGroup, said: _Said | None) -> _Said:
    """Return rank 0's message on every rank. If the message is a problem, raises `SnapshotError` or
    `OSError`."""
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
    """Return the result of `action`, or its error as a problem. It must not raise, because the other ranks
    wait for the outcome."""
    try:
        return action(), None
    except OSError as error:
        return None, _Problem(error.strerror or str(error), error.errno or errno.EIO)
    except Exception as error:
        return None, _Problem(str(error) or type(error).__name__)


def _each(
    pieces: Iterable[TensorPiece], left_out: Set[str], action: Callable[[TensorPiece], object]
) -> _Problem | None:
    """Call `action` for every piece and return the first problem.

    The loop continues after a problem, because yielding the pieces is a joint operation, and the other ranks
    also process all of theirs.
    """
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
