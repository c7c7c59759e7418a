import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.base.errors import SnapshotError
from areal_async.weights.channels import chunks as tables
from areal_async.weights.channels.chunks import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, ChunkLayout, ChunkTable
from areal_async.weights.manifest import MANIFEST_FILE
from tests.unit.weights.world import LIMIT_S, written

HASH = "blake3:" + 64 * "0"


def table(*sizes: int, chunk_bytes: int = MIN_CHUNK_BYTES) -> ChunkTable:
    files = [(f"f{i}", size) for i, size in enumerate(sizes[:-1])] + [(MANIFEST_FILE, sizes[-1])]
    n = sum(tables.count_chunks(size, chunk_bytes) for size in sizes)
    return ChunkTable(1, HASH, chunk_bytes, files, bytes(32 * n))


@given(st.lists(st.integers(0, 3 * MIN_CHUNK_BYTES + 1), max_size=6), st.integers(1, MIN_CHUNK_BYTES + 1))
def test_chunks_cover_every_byte_of_every_file_once_and_in_order(sizes, manifest):
    layout = ChunkLayout(table(*sizes, manifest))
    at = {}
    for number in range(layout.n_chunks):
        file, offset, size = layout.chunk(number)
        assert offset == at.get(file, 0)
        assert 0 < size <= MIN_CHUNK_BYTES
        at[file] = offset + size
    assert at == {i: size for i, size in enumerate([*sizes, manifest]) if size}


def test_a_directory_of_another_manifest_has_no_table(tmp_path):
    snapshot = written(tmp_path)
    with pytest.raises(SnapshotError, match="another manifest"):
        tables.build_table(snapshot.path, HASH)
    with pytest.raises(SnapshotError, match="cannot be read"):
        tables.build_table(tmp_path / "policy-e9-v9", HASH)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"files": []},
        {"files": [("../f0", 1), (MANIFEST_FILE, 1)]},
        {"files": [("f0", 1), ("f0", 1), (MANIFEST_FILE, 1)]},
        {"files": [(MANIFEST_FILE, 1), ("f0", 1)]},
        {"files": [("f0", -1), (MANIFEST_FILE, 1)]},
        {"files": [("f0", 1 << 60), (MANIFEST_FILE, 1)]},
        {"chunk_bytes": 1},
        {"chunk_bytes": 2 * MAX_CHUNK_BYTES},
        {"digests": b"short"},
    ],
)
def test_a_table_that_cannot_be_is_refused(change):
    good = table(5, 5)
    assert tables.decode_table(tables.encode_table(good)) == good
    with pytest.raises(SnapshotError):
        tables.decode_table(tables.encode_table(msgspec.structs.replace(good, **change)))
    with pytest.raises(SnapshotError):
        tables.decode_table(b"\xc1")


def test_sizes_of_chunks_grow_with_the_snapshot_within_limits():
    assert tables.chunk_bytes_for(1) == MIN_CHUNK_BYTES
    assert tables.chunk_bytes_for(256 << 20) == 1 << 20
    assert tables.chunk_bytes_for(1 << 40) == MAX_CHUNK_BYTES


def test_a_snapshot_for_which_there_is_no_room_is_an_error_each_time_and_leaves_nothing(small_disk):
    code = """
import sys
from pathlib import Path
from areal_async.base.errors import SnapshotError
from areal_async.weights.channels.chunks import MANIFEST_FILE, MIN_CHUNK_BYTES, ChunkTable, PartialDownload
root = Path(sys.argv[1])
files = [("a", 3 << 20), ("b", 3 << 20), (MANIFEST_FILE, 1)]
n = sum(-(-size // MIN_CHUNK_BYTES) for _, size in files)
table = ChunkTable(1, "blake3:" + 64 * "0", MIN_CHUNK_BYTES, files, bytes(32 * n))
for _ in range(3):
    try:
        PartialDownload(root / "policy-e1-v1", table).resume()
    except SnapshotError as error:
        assert "No space left" in str(error), error
        assert list(root.iterdir()) == []
    else:
        raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", code, small_disk], timeout=LIMIT_S, check=False)
    assert done.returncode == 0


def test_what_an_older_version_left_with_holes_is_no_trap(small_disk):
    """The chunks of a sparse partial file are hashed again, on a disk that has no room for its holes."""
    files = [("a", 3 << 20), (MANIFEST_FILE, 1)]
    n = sum(tables.count_chunks(size, MIN_CHUNK_BYTES) for _, size in files)
    partial = tables.PartialDownload(
        small_disk / "policy-e1-v1", ChunkTable(1, HASH, MIN_CHUNK_BYTES, files, bytes(32 * n))
    )
    partial.directory.mkdir()
    with (partial.directory / "a").open("wb") as file:
        file.truncate(3 << 20)
    (small_disk / "ballast").write_bytes(bytes(2 << 20))
    with pytest.raises(SnapshotError, match="No space left"):
        partial.resume()
    (small_disk / "ballast").unlink()
    partial.resume()
    assert len(partial.missing) == n
    partial.abandon()
