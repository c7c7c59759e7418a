"""An adapter and the base model make the weights that peft makes of them."""

import msgspec
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from areal_async.base.errors import SnapshotError
from areal_async.base.versions import VersionTag
from areal_async.weights.adapter import (
    BaseWeights,
    adapter_config,
    scale_of,
    write_merged,
)
from areal_async.weights.manifest import ADAPTER_CONFIG, MANIFEST_FILE
from tests.snapshots import write_snapshot
from tests.unit.trainer.conftest import write_model

ADAPTER_FILE = "adapter_model.safetensors"
TARGETS = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
SHAPES = {TARGETS[0]: (32, 32), TARGETS[1]: (32, 64)}  # [out, in]


@pytest.fixture
def base(tmp_path):
    return write_model(tmp_path / "base")


@pytest.fixture
def adapter(tmp_path, base):
    """A directory in peft's form."""
    folder = tmp_path / "policy-e1-v3"
    folder.mkdir()
    torch.manual_seed(5)
    tensors = {}
    for name, (rows, columns) in SHAPES.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(4, columns)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, 4)
    save_file(tensors, folder / ADAPTER_FILE)
    (folder / ADAPTER_CONFIG).write_bytes(adapter_config(rank=4, alpha=6.0, targets=TARGETS, base=base))
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    (folder / MANIFEST_FILE).write_bytes(b"what it was made of")
    return folder


def _merge(base, tensors, adapter, into):
    files = {name: adapter / name for name in ("config.json", MANIFEST_FILE)}
    write_merged(BaseWeights(base, torch.float32), tensors, scale_of(adapter), files, into)


def test_merged_weights_are_those_of_peft(tmp_path, base, adapter):
    into = tmp_path / "merged" / "policy-e1-v3"
    into.parent.mkdir()
    _merge(base, load_file(adapter / ADAPTER_FILE), adapter, into)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    want = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    got = load_file(into / "model.safetensors")
    assert got.keys() == load_file(base / "model.safetensors").keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], atol=1e-6, rtol=0)
    changed = {n for n, t in load_file(base / "model.safetensors").items() if not torch.equal(t, got[n])}
    assert changed == {f"{name}.weight" for name in TARGETS}
    assert (into / MANIFEST_FILE).read_bytes() == b"what it was made of"
    AutoModelForCausalLM.from_pretrained(into)


def test_merged_weights_have_the_dtype_asked_for(base, adapter):
    model = BaseWeights(base, torch.bfloat16)
    merged = dict(model.merged(load_file(adapter / ADAPTER_FILE), scale_of(adapter)))
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    exact = dict(
        BaseWeights(base, torch.float32).merged(load_file(adapter / ADAPTER_FILE), scale_of(adapter))
    )
    assert all(torch.equal(exact[name].to(torch.bfloat16), tensor) for name, tensor in merged.items())


@pytest.mark.parametrize("damage", ["another target", "another size", "half of a pair", "something else"])
def test_an_adapter_that_does_not_fit_the_base_is_refused_whole(tmp_path, base, adapter, damage):
    tensors = load_file(adapter / ADAPTER_FILE)
    a, b = (f"base_model.model.{TARGETS[0]}.lora_{part}.weight" for part in "AB")
    if damage == "another target":
        for key in (a, b):
            tensors[key.replace("q_proj", "x_proj")] = tensors.pop(key)
    elif damage == "another size":
        tensors[a] = torch.zeros(4, 16)
    elif damage == "half of a pair":
        del tensors[b]
    else:
        tensors["base_model.model.extra"] = torch.zeros(1)
    with pytest.raises(SnapshotError, match="adapter"):
        _merge(base, tensors, adapter, tmp_path / "merged")
    assert list(tmp_path.glob("*merged*")) == []


def test_versions_are_true_equal_tensors_of_another_scale_are_other_weights(tmp_path, base, adapter):
    tensors = load_file(adapter / ADAPTER_FILE)

    def weights_hash(epoch, alpha):
        config = adapter_config(rank=4, alpha=alpha, targets=TARGETS, base=base)
        tag = VersionTag("policy", epoch, 3)
        return write_snapshot(tmp_path / "out", tag, tensors, files={ADAPTER_CONFIG: config}).weights_hash

    assert weights_hash(1, 6.0) == weights_hash(2, 6.0) != weights_hash(3, 12.0)


def test_a_base_without_weights_is_refused(tmp_path):
    with pytest.raises(SnapshotError, match="no safetensors files"):
        BaseWeights(tmp_path, torch.float32)


def test_a_config_that_is_none_is_refused(adapter):
    (adapter / ADAPTER_CONFIG).write_bytes(msgspec.json.encode({"r": 4}))
    with pytest.raises(SnapshotError, match="adapter_config"):
        scale_of(adapter)
