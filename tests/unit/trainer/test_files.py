"""Recorded batches come back, and exported directories are ones that transformers loads."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_async.config.job import OptimizerSection
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data.recording import read_step, write_step
from trainer_service.disk import companion_files, write_model
from trainer_service.errors import BatchError
from trainer_service.ranks import join_ranks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_export_loads_with_transformers(model_dir, untied_model_dir, tmp_path, tied, dtype):
    source = model_dir if tied else untied_model_dir
    backend = FsdpBackend(
        {"policy": source}, OptimizerSection(), join_ranks(0, 1), dtype=getattr(torch, dtype), total_updates=1
    )
    for _ in range(2):  # the second replaces the first
        write_model(tmp_path / "model", backend.export("policy"), companion_files(source, dtype))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", use_safetensors=True)
    assert model.dtype == getattr(torch, dtype)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    original = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    for (name, a), (_, b) in zip(model.named_parameters(), original.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")("12+34=")["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(source)("12+34=")["input_ids"]
    assert not list(tmp_path.glob(".model*"))


def test_companion_files_are_configuration_and_tokenizer_only(model_dir):
    files = companion_files(model_dir, "bfloat16")
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= files.keys()
    assert not any(name.endswith((".safetensors", ".bin", ".index.json")) for name in files)
    assert json.loads(files["config.json"])["dtype"] == "bfloat16"


def test_a_recorded_step_is_read_back_from_all_ranks(tmp_path, make_batch):
    batch, blobs = make_batch(2, max_staleness=2)
    ids = list(blobs)
    for rank, mine in enumerate((ids[::2], ids[1::2])):
        views = {name: memoryview(blobs[name]) for name in mine}
        write_step(tmp_path, batch, views, losses=[0.5, -0.25], grad_norms=[1.0, 2.0], rank=rank)
    step = read_step(tmp_path, 2)
    assert step.batch == batch
    assert step.blobs == blobs
    assert (step.losses, step.grad_norms) == ([0.5, -0.25], [1.0, 2.0])


def test_an_incomplete_record_is_refused(tmp_path, make_batch):
    with pytest.raises(BatchError, match="no step is recorded"):
        read_step(tmp_path, 0)
    batch, blobs = make_batch(0)
    first = dict(list(blobs.items())[:3])
    write_step(tmp_path, batch, first, losses=[0.0], grad_norms=[0.0])
    with pytest.raises(BatchError, match=f"lacks {len(blobs) - 3} of its episodes"):
        read_step(tmp_path, 0)
    (tmp_path / "step-000000" / "step-0.msgpack").write_bytes(b"\xc1")
    with pytest.raises(BatchError, match="cannot be read"):
        read_step(tmp_path, 0)
