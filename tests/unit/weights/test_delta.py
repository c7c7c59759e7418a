"""Delta directories: from the right base the published snapshot, bit for bit; from anything else nothing."""

import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_async.base.errors import SnapshotError, WrongBase
from areal_async.weights import layout
from areal_async.weights.delta import DELTA_FILE, TARGET_FILE, apply_delta, write_delta
from areal_async.weights.manifest import MANIFEST_FILE, hash_of, seal, unseal
from areal_async.weights.snapshot import MODEL_FILE, SnapshotInfo, open_snapshot, read_manifest
from tests.snapshots import write_snapshot
from tests.unit.weights.world import files_of, tag

FILES = {"config.json": b"{}", "tokenizer.json": b"[1]"}


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(3000, generator=generator).bfloat16(),
        "b": torch.randn(30, 50, generator=generator),
        "frozen": torch.randn(700, generator=generator).half(),
        "ids": torch.arange(500),
        "empty": torch.empty(0, 3),
    }
    tensors["a"][::97] += version
    tensors["b"][:, version % 50] = -0.0
    tensors["ids"][7] = version
    return tensors


def snapshot(root: Path, version: int, files: dict[str, bytes] = FILES) -> SnapshotInfo:
    return write_snapshot(root, tag(version), weights(version), files=files, tied={"head": "a"})


def refused(base: Path, delta: Path, into: Path, match: str = "", kind: type = SnapshotError) -> None:
    before = sorted(os.listdir(into.parent))
    with pytest.raises(kind, match=match):
        apply_delta(base, delta, into)
    assert sorted(os.listdir(into.parent)) == before


@pytest.fixture
def made(tmp_path: Path) -> tuple[SnapshotInfo, SnapshotInfo, Path]:
    """Versions 1 and 2 under `trainer`, the delta between them, and the base alone on another `node`."""
    base, new = snapshot(tmp_path / "trainer", 1), snapshot(tmp_path / "trainer", 2)
    delta = write_delta(base.path, new.path)
    assert delta is not None
    shutil.copytree(base.path, tmp_path / "node" / base.path.name)
    return new, delta, tmp_path / "node" / base.path.name


def test_the_published_snapshot_comes_out_bit_for_bit(made):
    new, delta, base = made
    out = apply_delta(base, delta.path, base.parent / "policy-e1-v2")
    assert files_of(out.path) == files_of(new.path)
    assert (out.tag, out.manifest_hash, out.weights_hash) == (new.tag, new.manifest_hash, new.weights_hash)
    assert out.size_bytes == new.size_bytes
    opened = open_snapshot(out.path, manifest_hash=new.manifest_hash)
    assert opened.tensors["head"] is opened.tensors["a"]


def test_the_manifest_names_base_target_and_every_byte(made):
    new, delta, base = made
    manifest = unseal((delta.path / MANIFEST_FILE).read_bytes())
    assert (manifest.codec, manifest.base, manifest.tag) == ("delta", tag(1), tag(2))
    assert manifest.target_hash == new.manifest_hash
    assert manifest.base_hash == hash_of((base / MANIFEST_FILE).read_bytes())
    names = [part.tensor for part in read_manifest(new.path).parts]
    assert manifest.patches[names.index("frozen")] == 0
    assert sum(manifest.patches) == (delta.path / DELTA_FILE).stat().st_size
    assert delta.size_bytes == sum(f.stat().st_size for f in delta.path.iterdir())
    assert delta.size_bytes < new.size_bytes
    assert sorted(files_of(delta.path)) == sorted([DELTA_FILE, TARGET_FILE, MANIFEST_FILE])
    with pytest.raises(SnapshotError, match="it is a delta"):
        open_snapshot(delta.path)


def test_another_base_is_told_apart_from_damage(made, tmp_path):
    _, delta, base = made
    into = base.parent / "policy-e1-v2"
    refused(base.parent / "policy-e1-v0", delta.path, into, "needs policy-e1-v1 as its base", WrongBase)
    refused(snapshot(base.parent, 0).path, delta.path, into, "needs policy-e1-v1", WrongBase)
    other = write_snapshot(tmp_path / "other", tag(1), weights(3), files=FILES)
    refused(other.path, delta.path, into, "not the announced one", WrongBase)
    data = bytearray((base / MODEL_FILE).read_bytes())
    data[-1] ^= 1
    (base / MODEL_FILE).write_bytes(data)
    with pytest.raises(SnapshotError, match="does not match its hash") as caught:
        apply_delta(base, delta.path, into)
    assert not isinstance(caught.value, WrongBase)
    (base / MODEL_FILE).write_bytes(data[:-1])
    refused(base, delta.path, into, "has .* bytes instead of")
    (base / MODEL_FILE).unlink()
    refused(base, delta.path, into, "cannot be read")


def test_the_name_of_the_result_must_be_free_and_may_be_given_later(made):
    new, delta, base = made
    apply_delta(base, delta.path, base.parent / ".later").path.rename(base.parent / "policy-e1-v2")
    open_snapshot(base.parent / "policy-e1-v2", manifest_hash=new.manifest_hash)
    shutil.rmtree(base.parent / "policy-e1-v2")
    apply_delta(base, delta.path, base.parent / "policy-e1-v2")
    refused(base, delta.path, base.parent / "policy-e1-v2", "written once")


def test_other_tensors_other_files_and_too_many_changes_have_no_delta(tmp_path):
    base = write_snapshot(tmp_path, tag(1), {"a": torch.zeros(4)})
    for v, other in enumerate(
        ({"a": torch.zeros(5)}, {"a": torch.zeros(4).half()}, {"b": torch.zeros(4)}), 2
    ):
        new = write_snapshot(tmp_path, tag(v), other)
        assert write_delta(base.path, new.path) is None
    new = write_snapshot(tmp_path, tag(9), {"a": torch.zeros(4)}, files=FILES)
    assert write_delta(base.path, new.path) is None
    one, two = snapshot(tmp_path / "large", 1), snapshot(tmp_path / "large", 2)
    assert write_delta(one.path, two.path, below_bytes=10) is None
    assert not (tmp_path / "large" / "policy-e1-v2.delta").exists()


def comes_back(base: SnapshotInfo, new: SnapshotInfo) -> int:
    """Put the new snapshot together from the base and the delta; returns the size of the changes in bytes."""
    delta = write_delta(base.path, new.path, threads=2)
    assert delta is not None
    want = files_of(new.path)
    shutil.rmtree(new.path)
    assert files_of(apply_delta(base.path, delta.path, new.path).path) == want
    return (delta.path / DELTA_FILE).stat().st_size


def test_tensors_of_several_parts_have_deltas_too(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "PART_BYTES", 2 * 6 * 4)
    whole = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    base = write_snapshot(tmp_path, tag(1), {"w": whole})
    whole[2] += 1
    new = write_snapshot(tmp_path, tag(2), {"w": whole})
    assert [part.offset for part in read_manifest(new.path).parts] == [[0, 0], [2, 0], [4, 0], [6, 0]]
    assert comes_back(base, new) > 0


def test_tensors_of_many_blocks_have_deltas_and_without_a_change_empty_ones(tmp_path):
    values = torch.randn(5_000_001, generator=torch.Generator().manual_seed(0)).bfloat16()
    base = write_snapshot(tmp_path, tag(1), {"w": values})
    assert comes_back(base, write_snapshot(tmp_path, tag(2), {"w": values})) == 0
    values[::4001] = 7
    assert comes_back(base, write_snapshot(tmp_path, tag(3), {"w": values})) > 0


def reseal(path: Path, **changes: object) -> None:
    manifest = unseal((path / MANIFEST_FILE).read_bytes())
    (path / MANIFEST_FILE).write_bytes(seal(msgspec.structs.replace(manifest, **changes)))


def test_a_delta_that_lies_about_itself_is_refused(made):
    """Each manifest here is sealed anew, as whoever wrote it on purpose would."""
    _, delta, base = made
    good = unseal((delta.path / MANIFEST_FILE).read_bytes())
    patches = good.patches
    into = base.parent / "policy-e1-v2"
    for changes, match in (
        ({"target_hash": "blake3:0"}, "not the manifest that the delta names"),
        ({"patches": patches[1:]}, "patches"),
        ({"patches": list(reversed(patches))}, r"does not match its hash|frame"),
        ({"patches": [size + 1 for size in patches]}, "cover"),
        ({"patches": [-5, patches[0] + patches[1] + 5, *patches[2:]]}, "cover"),
        ({"codec": "full"}, "holds policy-e1-v2"),
        ({"base": None}, "is no delta"),
        ({"sidecars": good.sidecars[:1]}, "foreign files"),
    ):
        reseal(delta.path, **changes)
        refused(base, delta.path, into, match)
        (delta.path / MANIFEST_FILE).write_bytes(seal(good))
    apply_delta(base, delta.path, into)


@given(
    st.sampled_from([DELTA_FILE, TARGET_FILE, MANIFEST_FILE]),
    st.floats(0, 1),
    st.integers(0, 255),
    st.booleans(),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_versions_are_true_a_delta_changed_anywhere_makes_nothing(
    tmp_path_factory, file, where, flip, honest_hash
):
    """`honest_hash`: the manifest is sealed again over the damaged delta: only what it makes can tell."""
    root = tmp_path_factory.mktemp("d")
    base, new = snapshot(root, 1), snapshot(root, 2)
    delta = write_delta(base.path, new.path)
    assert delta is not None
    want = files_of(new.path)
    shutil.rmtree(new.path)
    data = bytearray((delta.path / file).read_bytes())
    at = int(where * (len(data) - 1))
    bad = data[:at] if not flip else data
    if flip:
        bad[at] ^= flip
    (delta.path / file).write_bytes(bad)
    if honest_hash and file == DELTA_FILE:
        manifest = unseal((delta.path / MANIFEST_FILE).read_bytes())
        entry = msgspec.structs.replace(manifest.sidecars[0], size_bytes=len(bad), hash=hash_of(bytes(bad)))
        reseal(delta.path, sidecars=[entry, *manifest.sidecars[1:]])
    try:
        made = apply_delta(base.path, delta.path, new.path)
    except SnapshotError:
        assert not new.path.exists()
    else:
        assert files_of(made.path) == want
