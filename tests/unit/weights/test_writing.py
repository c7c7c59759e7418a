"""Ranks of one trainer write one snapshot: the same, whoever holds what."""

import errno
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest
import safetensors.torch
import torch

from areal_async.base.errors import SnapshotError
from areal_async.weights import layout, tensor_file
from areal_async.weights.pieces import TensorPiece
from areal_async.weights.snapshot import MODEL_FILE, Companions, SnapshotInfo, open_snapshot
from areal_async.weights.tensor_file import MappedFile
from tests.snapshots import write_snapshot
from tests.unit.weights.ranks import box, groups, together
from tests.unit.weights.world import SECRET, tag
from tests.waiting import LIMIT_S
from trainer_service.publishing import handover, writing
from trainer_service.publishing.handover import receivers_of
from trainer_service.publishing.publisher import Publisher
from trainer_service.publishing.writing import PieceWriter, write_tensors
from trainer_service.ranks import SideGroup


def model(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "rows": torch.randn(10, 6, generator=generator).bfloat16(),
        "columns": torch.randn(8, 6, generator=generator),
        "experts": torch.randn(4, 3, 5, generator=generator).half(),
        "norm": torch.randn(7, generator=generator),
        "scale": torch.randn((), generator=generator),
        "none": torch.empty(0, 3),
    }


def shares(version: int) -> list[list[TensorPiece]]:
    """What each of two ranks holds: uneven rows, columns, whole tensors, and the rows of no tensor at all."""
    t = model(version)
    first = [
        box("rows", t["rows"], slice(0, 7)),
        box("columns", t["columns"], slice(0, 8), slice(0, 2)),
        box("experts", t["experts"], slice(2, 4)),
        box("scale", t["scale"]),
        box("head", t["rows"]),  # an alias
    ]
    second = [
        box("norm", t["norm"]),
        box("columns", t["columns"], slice(0, 8), slice(2, 6)),
        box("rows", t["rows"], slice(7, 10)),
        box("rows", t["rows"], slice(10, 10)),
        box("experts", t["experts"], slice(0, 2)),
        box("none", t["none"]),
    ]
    return [first, second]


class Two:
    """A trainer of two ranks under `place`; of different `hosts` each has a folder of its own."""

    def __init__(self, place: Path, hosts: tuple[str, ...] = ()) -> None:
        one, other = groups(2, hosts)
        root = place / "shm"
        self.other_root = place / "elsewhere" if len({*hosts}) > 1 else root
        self.publisher = Publisher(
            root,
            f"ipc://{place}/s",
            job="j",
            access=SECRET,
            group=one,
            companions=Companions(tied={"head": "rows"}),
        )
        self.publisher.start()
        self.other = PieceWriter(self.other_root, other, tied={"head"})

    @property
    def ranks(self) -> list[Publisher | PieceWriter]:
        return [self.publisher, self.other]

    def prepare(self, held: list[list[TensorPiece]]) -> list[object]:
        return together(*(lambda r=r, h=h: r.prepare(h) for r, h in zip(self.ranks, held, strict=True)))

    def publish(self, version: int, held: list[list[TensorPiece]]) -> list[object]:
        return together(
            *(
                lambda r=r, h=h: r.begin(tag(version), iter(h)).result()
                for r, h in zip(self.ranks, held, strict=True)
            )
        )

    def close(self) -> None:
        together(self.publisher.close, self.other.close)


@pytest.fixture(params=[(), ("near", "far")], ids=["one host", "two hosts"])
def two(place: Path, request: pytest.FixtureRequest) -> Iterator[Two]:
    with closing(Two(place, request.param)) as made:
        yield made
        assert made.other_root == place / "shm" or not made.other_root.exists()


def test_a_rank_without_pieces_that_gets_no_file_fails_with_the_others(place, monkeypatch):
    failed: Future[MappedFile] = Future()
    failed.set_exception(OSError(errno.ENOSPC, "full"))
    with closing(Two(place)) as two:
        first, second = shares(0)
        held = [first + second, []]
        two.prepare(held)
        with monkeypatch.context() as patch:
            patch.setattr(two.other, "_map", lambda *_: failed)
            said = two.publish(0, held)
        assert [type(error) for error in said] == [SnapshotError, SnapshotError]


@pytest.mark.parametrize("part_bytes", [40, layout.PART_BYTES])
def test_what_two_ranks_write_is_what_one_would_have_written(two, place, monkeypatch, part_bytes):
    """Byte for byte, the manifest included: so a version keeps its identity on another number of ranks."""
    monkeypatch.setattr(layout, "PART_BYTES", part_bytes)
    two.prepare(shares(0))
    for version in range(4):
        info, said = two.publish(version, shares(version))
        assert isinstance(info, SnapshotInfo)
        assert said == info
        alone = write_snapshot(place / "alone", tag(version), model(version), tied={"head": "rows"})
        assert (info.manifest_hash, info.weights_hash) == (alone.manifest_hash, alone.weights_hash)
        opened = open_snapshot(info.path, manifest_hash=info.manifest_hash).tensors
        assert all(torch.equal(opened[name], tensor) for name, tensor in model(version).items())
        read = safetensors.torch.load_file(info.path / MODEL_FILE)
        assert read.keys() == model(version).keys()


def test_weights_hash_tells_weights_apart_and_nothing_else(tmp_path):
    first = write_snapshot(tmp_path, tag(1), model(0), files={"config.json": b"{}"})
    assert write_snapshot(tmp_path, tag(2), model(0)).weights_hash == first.weights_hash
    changed = model(0)
    changed["norm"][-1] += 1
    assert write_snapshot(tmp_path, tag(3), changed).weights_hash != first.weights_hash


@pytest.mark.parametrize(
    ("held", "problem"),
    [
        ([[box("w", torch.ones(4, 6), slice(0, 3))], []], "do not cover"),
        ([[box("w", torch.ones(4, 6), slice(0, 3))], [box("w", torch.ones(4, 6), slice(2, 4))]], "overlap"),
        ([[box("w", torch.ones(4, 6))], [box("w", torch.ones(4, 6))]], "overlap"),
        ([[box("w", torch.ones(4), slice(0, 2))], [box("w", torch.ones(5), slice(2, 5))]], "disagree"),
        ([[], [box("w", torch.ones(1, dtype=torch.complex64))]], "rank 1: w has dtype torch.complex64"),
    ],
)
def test_pieces_that_make_no_model_are_refused_on_every_rank(two, held, problem):
    for error in two.prepare(held):
        assert isinstance(error, SnapshotError)
        assert problem in str(error)


def test_what_fails_on_one_rank_fails_on_all_and_is_not_announced(two, place):
    two.prepare(shares(0))
    two.publish(0, shares(0))
    first, second = shares(1)
    wrong = [box("norm", torch.ones(8)), *second[1:]]
    for error in two.publish(1, [first, wrong]):
        assert isinstance(error, SnapshotError)
        assert "rank 1: norm is not what the layout was planned for" in str(error)

    def broken() -> Iterator[TensorPiece]:
        yield from first
        raise RuntimeError("the device is gone")

    for error in two.publish(1, [broken(), second]):  # type: ignore[list-item]
        assert "rank 0: the device is gone" in str(error)
    assert not (place / "shm" / tag(1).label).exists()
    for error in two.publish(0, shares(0)):
        assert "not newer" in str(error)
    info, _ = two.publish(1, shares(1))
    assert torch.equal(open_snapshot(info.path).tensors["norm"], model(1)["norm"])


def test_pieces_may_change_once_begun_and_what_follows_goes_on_beside_them(place, monkeypatch):
    """Here hashing is held up until the weights have changed."""
    begun, released = threading.Event(), threading.Event()
    real = tensor_file.hash_of

    def slow(data: memoryview) -> str:
        begun.set()
        assert released.wait(LIMIT_S)
        return real(data)

    monkeypatch.setattr(tensor_file, "hash_of", slow)
    publisher = Publisher(place / "shm", f"ipc://{place}/s", job="j", access=SECRET)
    publisher.start()
    with closing(publisher):
        weights = torch.arange(1000.0)
        pieces = [box("w", weights)]
        publisher.prepare(pieces)
        publication = publisher.begin(tag(0), pieces)
        assert begun.wait(LIMIT_S)
        assert not publication.done()
        assert not (place / "shm" / tag(0).label).exists()
        weights.fill_(-1)
        released.set()
        monkeypatch.undo()
        assert torch.equal(open_snapshot(publication.result().path).tensors["w"], torch.arange(1000.0))
        assert publication.done()


def test_without_having_prepared_nothing_can_be_begun(two):
    with pytest.raises(SnapshotError, match="nothing was prepared"):
        two.publisher.begin(tag(0), shares(0)[0])


def test_a_full_disk_is_an_error_on_every_rank(two, place, monkeypatch):
    def full(fd: int, at: int, n: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    two.prepare(shares(0))
    for error in two.publish(0, shares(0)):
        assert isinstance(error, SnapshotError)
        assert "No space left" in str(error)
    one, other = groups(2)
    path = place / "model.safetensors"
    for error in together(
        lambda: write_tensors(path, lambda: shares(0)[0], one, tied={"head"}),
        lambda: write_tensors(path, lambda: shares(0)[1], other, tied={"head"}),
    ):
        assert isinstance(error, OSError)
        assert error.errno == errno.ENOSPC


@pytest.mark.parametrize("hosts", [(), ("near", "far")], ids=["one host", "two hosts"])
def test_ranks_write_a_model_file_together(tmp_path, hosts, monkeypatch):
    monkeypatch.setattr(handover, "MESSAGE_BYTES", 20)
    one, other = groups(2, hosts)
    path = tmp_path / "model.safetensors"
    there = tmp_path / "elsewhere" / path.name if hosts else path
    assert together(
        lambda: write_tensors(path, lambda: iter(shares(3)[0]), one, tied={"head"}),
        lambda: write_tensors(there, lambda: iter(shares(3)[1]), other, tied={"head"}),
    ) == [None, None]
    assert there.exists() == (there == path)
    read = safetensors.torch.load_file(path)
    assert read.keys() == model(3).keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in model(3).items())


def test_ranks_elsewhere_are_dealt_to_those_of_the_first_ones_host():
    assert receivers_of(["a"] * 4) == receivers_of([]) == {}
    assert receivers_of(["a", "b"]) == {1: 0}
    assert receivers_of(["a", "b", "a", "b", "c", "b"]) == {1: 0, 3: 2, 4: 0, 5: 2}


def test_ranks_of_three_hosts_publish_what_one_rank_would_have(place, monkeypatch):
    """Two ranks of the first one's host receive; one of them holds nothing itself."""
    monkeypatch.setattr(handover, "MESSAGE_BYTES", 16)
    # One receives later than another could hash, which would be of what is not there yet.
    hashed, receive, hash_ranges = threading.Event(), writing.receive, writing.hash_ranges

    def receive_late(group, *rest):
        if group.rank == 2:
            hashed.wait(0.5)
        receive(group, *rest)

    def tell(*asked):
        hashed.set()
        return hash_ranges(*asked)

    monkeypatch.setattr(writing, "receive", receive_late)
    monkeypatch.setattr(writing, "hash_ranges", tell)
    weights, hosts = model(5), ("a", "b", "a", "c", "b")
    columns = [box("columns", weights["columns"], slice(0, 8), slice(at, at + 2)) for at in (0, 2, 4)]
    held: list[list[TensorPiece]] = [
        [columns[0], *(box(name, weights[name]) for name in ("norm", "scale", "none"))],
        [columns[1]],
        [],
        [columns[2], box("rows", weights["rows"])],
        [box("experts", weights["experts"])],
    ]
    first, *others = groups(5, hosts)
    publisher = Publisher(place / "shm", f"ipc://{place}/s", job="j", access=SECRET, group=first)
    publisher.start()
    roots = [place / "shm" if hosts[other.rank] == "a" else place / hosts[other.rank] for other in others]
    ranks = [publisher, *map(PieceWriter, roots, others)]
    try:
        together(*(lambda r=r, h=h: r.prepare(h) for r, h in zip(ranks, held, strict=True)))
        info, *said = together(
            *(lambda r=r, h=h: r.begin(tag(5), h).result() for r, h in zip(ranks, held, strict=True))
        )
    finally:
        together(*(rank.close for rank in ranks))
    assert said == [info] * 4
    alone = write_snapshot(place / "alone", tag(5), weights)
    assert info.manifest_hash == alone.manifest_hash


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_model_file_is_as_open_as_the_umask_lets_it_be_and_a_snapshot_is_ones_own(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "model.safetensors", lambda: [box("norm", model(3)["norm"])], SideGroup())
        MappedFile(tmp_path / "snapshot", 1).close()
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"model.safetensors": mode, "snapshot": 0o600}
