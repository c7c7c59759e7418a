"""Recorded batches come back, and exported directories are ones that transformers loads."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_async.config.job import OptimizerSection
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.disk import companion_files, write_model
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
