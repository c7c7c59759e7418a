import os
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_async.base.errors import SnapshotError
from areal_async.base.versions import VersionTag
from areal_async.weights import layout, tensor_file
from areal_async.weights.manifest import MANIFEST_SCHEMA, Manifest, Part, seal, unseal
from areal_async.weights.snapshot import MODEL_FILE, open_snapshot
from tests.snapshots import write_snapshot

TAG = VersionTag("policy", 2, 5)
EMBEDDING = "model.embed_tokens.weight"


def test_every_dtype_and_shape_comes_back(tmp_path):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2, (3, 5), generator=generator)
    tensors = {str(dtype): values.to(dtype) for dtype in map(layout.torch_dtype, layout.TORCH_NAMES)}
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "slice": torch.arange(10, dtype=torch.int16)[1::3],
        "with_grad": torch.ones(2, requires_grad=True),
    }
    written = write_snapshot(tmp_path, TAG, tensors)
    assert sum(f.stat().st_size for f in written.path.iterdir()) == written.size_bytes
    opened = open_snapshot(written.path, manifest_hash=written.manifest_hash).tensors
    assert opened.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert opened[name].dtype == tensor.dtype
        assert opened[name].shape == tensor.shape
        assert torch.equal(opened[name].float(), tensor.detach().float())
        assert opened[name].is_contiguous()
        assert not opened[name].requires_grad
        assert opened[name].data_ptr() % opened[name].element_size() == 0
    read = safetensors.torch.load_file(written.path / MODEL_FILE)
    assert all(torch.equal(read[name].float(), opened[name].float()) for name in tensors)


def test_tied_weights_are_stored_once_and_restored_under_both_names(tmp_path):
    state = {EMBEDDING: torch.randn(50, 8), "norm": torch.ones(8)}
    tied = {"lm_head.weight": EMBEDDING}
    written = write_snapshot(tmp_path, TAG, state, tied=tied)
    snapshot = open_snapshot(written.path)
    assert snapshot.manifest.tied == tied
    assert snapshot.tensors["lm_head.weight"] is snapshot.tensors[EMBEDDING]
    assert set(safetensors.torch.load_file(written.path / MODEL_FILE)) == set(state)
    with pytest.raises(SnapshotError, match="tied to c, which is not among the tensors"):
        write_snapshot(tmp_path / "other", TAG, state, tied={"b": "c"})


def test_transformers_loads_the_directory(tmp_path):
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

    from tests.unit.families import FAMILIES

    config = FAMILIES["qwen2"]()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    config.save_pretrained(tmp_path / "config")
    files, tied = {"config.json": tmp_path / "config" / "config.json"}, {"lm_head.weight": EMBEDDING}
    written = write_snapshot(tmp_path, TAG, model.state_dict(), files=files, tied=tied)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        written.path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] | info["unexpected_keys"]
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, model(ids).logits)
    direct = Qwen2ForCausalLM(config)
    direct.load_state_dict(open_snapshot(written.path).tensors)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "manifest.json", MODEL_FILE, "x\0y"])
def test_files_lie_in_the_directory_or_are_refused(tmp_path, name):
    with pytest.raises(SnapshotError):
        write_snapshot(tmp_path, TAG, {"a": torch.ones(1)}, files={name: b""})
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_is_written_once(tmp_path):
    write_snapshot(tmp_path, TAG, {"a": torch.ones(1)})
    with pytest.raises(SnapshotError, match="written once"):
        write_snapshot(tmp_path, TAG, {"a": torch.zeros(1)})


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    with pytest.raises(SnapshotError, match="complex64"):
        write_snapshot(tmp_path, TAG, {"a": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(SnapshotError, match="cannot be written"):
        write_snapshot(tmp_path, TAG, {"a": torch.ones(1)}, files={"config.json": tmp_path / "absent"})
    assert list(tmp_path.iterdir()) == []


def test_a_large_tensor_is_hashed_in_parts_of_whole_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "PART_BYTES", 2 * 6 * 4)
    tensors = {"w": torch.randn(5, 2, 3), "row": torch.randn(1, 100), "empty": torch.empty(0, 3)}
    written = write_snapshot(tmp_path, TAG, tensors | {"scalar": torch.tensor(1.0)}, tied={"alias": "w"})
    found = unseal((written.path / "manifest.json").read_bytes()).parts
    rows = [(part.offset[0], part.extent) for part in found if part.tensor == "w"]
    assert rows == [(0, [2, 2, 3]), (2, [2, 2, 3]), (4, [1, 2, 3])]
    assert [part.tensor for part in found].count("row") == 1
    opened = open_snapshot(written.path).tensors
    assert all(torch.equal(opened[name], tensor) for name, tensor in tensors.items())
    assert opened["alias"] is opened["w"]
    data = bytearray((written.path / MODEL_FILE).read_bytes())
    data[-1] ^= 1  # in the last part of the last tensor
    (written.path / MODEL_FILE).write_bytes(data)
    for wanted in (True, False):
        with pytest.raises(SnapshotError, match="does not match its hash"):
            open_snapshot(written.path, tensors=wanted)


def test_many_threads_write_and_read_as_one(tmp_path):
    state = {f"{i}": torch.full((i * 3000,), i, dtype=torch.int32) for i in range(40)}
    assert sum(tensor.nbytes for tensor in state.values()) > tensor_file.THREADS_FROM_BYTES
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # one thread, then
    try:
        alone = write_snapshot(tmp_path / "alone", TAG, state)
    finally:
        os.sched_setaffinity(0, cores)
    together = write_snapshot(tmp_path / "together", TAG, state)
    assert together.manifest_hash == alone.manifest_hash
    for tensors in (True, False):
        opened = open_snapshot(together.path, manifest_hash=alone.manifest_hash, tensors=tensors)
        assert opened.tensors.keys() == (state.keys() if tensors else set())
        assert all(torch.equal(tensor, state[name]) for name, tensor in opened.tensors.items())
    data = bytearray((together.path / MODEL_FILE).read_bytes())
    data[-1] ^= 1
    (together.path / MODEL_FILE).write_bytes(data)
    for tensors in (True, False):
        with pytest.raises(SnapshotError, match="does not match its hash"):
            open_snapshot(together.path, tensors=tensors)


def change(path: Path, **fields: object) -> None:
    """Seal another manifest over the same files: a writer's mistake, not damage."""
    manifest = unseal((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_bytes(seal(msgspec.structs.replace(manifest, **fields)))


def test_a_manifest_that_does_not_describe_its_files_is_refused(tmp_path):
    path = write_snapshot(tmp_path, TAG, {"a": torch.ones(2, 2), "b": torch.ones(1)}).path
    original = unseal((path / "manifest.json").read_bytes())
    (shard,) = original.shards
    a, b = original.parts
    replace = msgspec.structs.replace
    wrong: list[dict[str, object]] = [
        {"schema": 99},
        {"tag": VersionTag("policy", 2, 6)},
        {"parts": [a]},
        {"parts": [a, b, replace(b, file="absent")]},
        {"parts": [replace(a, dtype="F16"), b]},
        {"parts": [replace(a, shape=[4], offset=[0], extent=[4]), b]},
        {"parts": [replace(a, offset=[0]), b]},
        {"parts": [replace(a, offset=[1, 0]), b]},
        {"parts": [replace(a, extent=[1, 2]), b]},
        {"parts": [replace(a, extent=[2, 1]), replace(a, offset=[0, 1], extent=[2, 1]), b]},
        {"parts": [replace(a, extent=[3, 2]), replace(a, offset=[3, 0], extent=[-1, 2]), b]},
        {"parts": [a, replace(a, offset=[1, 0], extent=[1, 2]), b]},
        {"parts": [replace(a, hash=b.hash), b]},
        {"shards": [replace(shard, size_bytes=shard.size_bytes + 1)]},
        {"shards": [replace(shard, header_bytes=shard.header_bytes - 64)]},
        {"shards": [replace(shard, header_bytes=1 << 60)]},
        {"shards": [replace(shard, file="../x")]},
        {"shards": [shard, shard]},
        {"tied": {"c": "absent"}},
        {"tied": {"a": "b"}},
    ]
    for fields in wrong:
        change(path, **fields)
        for tensors in (True, False):
            with pytest.raises(SnapshotError):
                open_snapshot(path, tensors=tensors)
        (path / "manifest.json").write_bytes(seal(original))
    open_snapshot(path)


@given(st.binary(max_size=300))
def test_noise_is_no_manifest_and_no_header(noise):
    with pytest.raises(SnapshotError):
        unseal(noise)
    with pytest.raises(SnapshotError):
        tensor_file.parse_header(noise)


def test_a_manifest_has_one_form(tmp_path):
    parts = [Part("a", "F32", [], [], [], "f", "h")]
    sealed = seal(Manifest(MANIFEST_SCHEMA, TAG, None, "full", parts, [], [], {}))
    assert unseal(sealed).tag == TAG
    for other in (sealed + b" ", sealed.replace(b":", b": ", 1), sealed.replace(b'"F32"', b'"F3\\u0032"')):
        with pytest.raises(SnapshotError):
            unseal(other)
