"""The promise `versions_are_true`, as far as snapshots go: what opens is, to the byte, one published
version."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.base.errors import SnapshotError
from areal_async.base.versions import VersionTag
from areal_async.weights.snapshot import SnapshotInfo, open_snapshot
from tests.snapshots import write_snapshot

FILES = ["manifest.json", "model.safetensors", "config.json"]


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "a": torch.randn(5, 3, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "c": torch.randint(0, 9, (2, 2), generator=generator, dtype=torch.int8),
    }


@dataclass
class World:
    """Two published versions, and their bytes to put back after each damage."""

    root: Path
    written: dict[int, SnapshotInfo]
    contents: dict[int, dict[str, bytes]]

    def restore(self) -> None:
        for version, files in self.contents.items():
            path = self.written[version].path
            if path.exists():
                shutil.rmtree(path)
            path.mkdir()
            for name, data in files.items():
                (path / name).write_bytes(data)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    root = Path(tempfile.mkdtemp(prefix="versions-"))
    written = {
        v: write_snapshot(
            root,
            VersionTag("policy", 1, v),
            tensors_of(v),
            files={"config.json": b'{"v": %d}' % v},
            tied={"d": "a"},
        )
        for v in (3, 4)
    }
    contents = {v: {name: (w.path / name).read_bytes() for name in FILES} for v, w in written.items()}
    yield World(root, written, contents)
    shutil.rmtree(root)


def expect_refused(written: SnapshotInfo) -> None:
    for manifest_hash in (written.manifest_hash, None):
        for tensors in (True, False):
            with pytest.raises(SnapshotError):
                open_snapshot(written.path, manifest_hash=manifest_hash, tensors=tensors)


def test_versions_are_true_an_intact_snapshot_opens_as_it_was_written(world):
    world.restore()
    for version, written in world.written.items():
        snapshot = open_snapshot(written.path, manifest_hash=written.manifest_hash)
        assert snapshot.tag == VersionTag("policy", 1, version)
        assert snapshot.tensors.keys() == {"a", "b", "c", "d"}
        for name, tensor in tensors_of(version).items():
            assert torch.equal(snapshot.tensors[name], tensor)
        assert snapshot.tensors["d"] is snapshot.tensors["a"]


def test_versions_are_true_every_single_byte_counts(world):
    world.restore()
    written = world.written[3]
    for name in FILES:
        content = bytearray(world.contents[3][name])
        with open(written.path / name, "r+b", buffering=0) as file:
            for at in range(len(content)):
                file.seek(at)
                file.write(bytes([content[at] ^ 1 << at % 8]))
                manifest_hash = written.manifest_hash if at % 2 else None
                for tensors in (True, False):
                    with pytest.raises(SnapshotError):
                        open_snapshot(written.path, manifest_hash=manifest_hash, tensors=tensors)
                file.seek(at)
                file.write(bytes([content[at]]))
    open_snapshot(written.path, manifest_hash=written.manifest_hash)


@given(st.data(), st.sampled_from(FILES))
@settings(max_examples=60)
def test_versions_are_true_a_truncated_or_extended_file_does_not_open(world, data, name):
    world.restore()
    content = world.contents[3][name]
    size = data.draw(st.integers(0, len(content) + 8).filter(lambda n: n != len(content)))
    (world.written[3].path / name).write_bytes((content + b"\0\n }    ")[:size])
    expect_refused(world.written[3])


@given(st.sets(st.sampled_from(FILES), min_size=1))
@settings(max_examples=30)
def test_versions_are_true_files_swapped_between_versions_do_not_open(world, names):
    world.restore()
    for name in names:
        (world.written[3].path / name).write_bytes(world.contents[4][name])
        (world.written[4].path / name).write_bytes(world.contents[3][name])
    expect_refused(world.written[3])
    expect_refused(world.written[4])


@given(st.sampled_from(FILES), st.sampled_from(["missing", "directory", "foreign"]))
@settings(max_examples=20)
def test_versions_are_true_missing_and_foreign_files_do_not_open(world, name, how):
    world.restore()
    path = world.written[3].path / name
    if how == "foreign":
        path.with_name("model-00002.safetensors").write_bytes(b"")
    else:
        path.unlink()
        if how == "directory":
            path.mkdir()
    expect_refused(world.written[3])


def test_versions_are_true_an_absent_or_half_written_directory_does_not_open(world):
    world.restore()
    shutil.rmtree(world.written[3].path)
    expect_refused(world.written[3])
    world.written[3].path.mkdir()
    expect_refused(world.written[3])


@given(st.integers(0, 10_000))
@settings(max_examples=50)
def test_versions_are_true_a_file_half_filled_with_the_next_version_does_not_open(world, cut):
    """What a reader sees who still reads while the allocation is filled again."""
    world.restore()
    old, new = world.contents[3]["model.safetensors"], world.contents[4]["model.safetensors"]
    cut %= len(old)
    torn = new[:cut] + old[cut:]
    if torn in (old, new):
        return
    (world.written[3].path / "model.safetensors").write_bytes(torn)
    expect_refused(world.written[3])


def test_versions_are_true_another_snapshot_of_the_same_tag_is_not_the_announced_one(world):
    world.restore()
    announced = world.written[3]
    shutil.rmtree(announced.path)
    write_snapshot(world.root, announced.tag, tensors_of(4))
    open_snapshot(announced.path)
    with pytest.raises(SnapshotError, match="not the announced one"):
        open_snapshot(announced.path, manifest_hash=announced.manifest_hash)


def test_versions_are_true_what_was_opened_does_not_change_with_its_files(world):
    world.restore()
    snapshot = open_snapshot(world.written[3].path)
    with open(world.written[3].path / "model.safetensors", "r+b") as file:
        file.write(bytes(len(world.contents[3]["model.safetensors"])))
    for name, tensor in tensors_of(3).items():
        assert torch.equal(snapshot.tensors[name], tensor)
