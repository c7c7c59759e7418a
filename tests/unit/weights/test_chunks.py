import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.errors import SnapshotError
from areal_async.weights.channels import chunks as tables
from areal_async.weights.channels.chunks import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, ChunkLayout, ChunkTable
from areal_async.weights.manifest import MANIFEST_FILE
from tests.unit.weights.world import written

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
