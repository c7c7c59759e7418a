"""Adapters: what is trained, given out, saved, and what it adds up to."""

import msgspec
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_async.config.job import LoraSection, OptimizerSection
from areal_async.weights.adapter import BaseWeights, adapter_config
from areal_async.weights.pieces import whole_tensors
from tests.unit.trainer.conftest import plain_row
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data.microbatch import build_micro_batch
from trainer_service.errors import ModelError
from trainer_service.ranks import join_ranks

OPTIMIZER = OptimizerSection(lr=1e-2)
LORA = LoraSection(rank=4, alpha=8.0)


def _backend(folder, *, lora=LORA, dtype=torch.float32, **options):
    return FsdpBackend(
        {"policy": ModelUse(folder, OPTIMIZER, 10)}, join_ranks(0, 1), dtype=dtype, lora=lora, **options
    )


def _batch(seed=0):
    rng = np.random.default_rng(seed)
    rows = [plain_row(rng.integers(0, 17, 8), slice(2, 8), episode=episode) for episode in range(4)]
    return build_micro_batch(rows)


def _weight(batch):
    """f32 [S]: one number for each episode."""
    return torch.tensor([1.0, -1.0, 2.0, -2.0])[batch.episode]


def _logp(backend, batch):
    return backend.evaluate("policy", [batch], lambda index, columns: columns["logp"])[0]


def _train(backend, steps=3):
    for step in range(steps):
        batch = _batch(step)
        backend.train(
            "policy", [batch], lambda index, columns, by=batch: (columns["logp"] * _weight(by)).sum()
        )
        backend.optimizer_step()
    return backend


def _adapter(backend):
    return {name: tensor.clone() for name, tensor in whole_tensors(backend.export("policy")).items()}


def test_the_first_version_is_the_base_model(model_dir):
    torch.testing.assert_close(
        _logp(_backend(model_dir), _batch()), _logp(_backend(model_dir, lora=None), _batch())
    )


def test_adapters_alone_are_trained_and_given_out_under_the_names_of_peft(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    theirs = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).state_dict()
    names = {name.replace(".default", "") for name in theirs if ".lora_" in name}
    backend = _backend(model_dir)
    before = _adapter(backend)
    assert before.keys() == names
    after = _adapter(_train(backend))
    assert all(not torch.equal(before[name], after[name]) for name in names)


def test_adapters_and_the_base_merged_compute_what_is_trained(model_dir, tmp_path):
    """What engines get is what the trainer computes with."""
    backend = _train(_backend(model_dir))
    merged = dict(BaseWeights(model_dir, torch.float32).merged(_adapter(backend), LORA.alpha / LORA.rank))
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.load_state_dict(merged, strict=False)
    model.save_pretrained(tmp_path)
    want = _logp(_backend(tmp_path, lora=None), _batch(7))
    torch.testing.assert_close(_logp(backend, _batch(7)), want, atol=1e-5, rtol=0)
    assert float((want - _logp(_backend(model_dir), _batch(7))).abs().max()) > 0.1


def test_training_equals_that_of_peft(model_dir):
    """Gradients of adapters, not their first values: those are given to peft's model."""
    backend = _backend(model_dir)
    start = _adapter(backend)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir), config)
    own = {name.replace(".weight", ".default.weight"): tensor for name, tensor in start.items()}
    assert not model.load_state_dict(own, strict=False).unexpected_keys
    batch = _batch()
    backend.train("policy", [batch], lambda index, columns: (columns["logp"] * _weight(batch)).sum())
    norm = backend.optimizer_step()
    ids = batch.input_ids.view(4, 7)
    logits = model(input_ids=ids).logits.flatten(0, 1)[batch.predict]
    logp = logits.log_softmax(-1).gather(1, batch.target[:, None])[:, 0]
    (logp * _weight(batch)).sum().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert norm == pytest.approx(float(torch.nn.utils.get_total_norm([p.grad for p in trained])), rel=1e-4)


def test_training_goes_on_from_a_checkpoint_that_holds_adapters_alone(model_dir, tmp_path):
    first = _train(_backend(model_dir), 2)
    first.save(tmp_path)()
    (held,) = tmp_path.glob("policy-*.safetensors")
    assert all(".lora_" in name for name in load_file(held))
    second = _backend(model_dir)
    second.load(tmp_path, {"policy": 2})
    want, got = _adapter(_train(first)), _adapter(_train(second))
    assert all(torch.equal(tensor, got[name]) for name, tensor in want.items())


def test_a_frozen_base_takes_the_dtype_that_is_computed_in(model_dir):
    backend = _train(_backend(model_dir, dtype=torch.bfloat16), 1)
    held = {name: p.dtype for name, p in backend._models["policy"].module.named_parameters()}
    assert {dtype for name, dtype in held.items() if ".lora_" not in name} == {torch.bfloat16}
    assert {dtype for name, dtype in held.items() if ".lora_" in name} == {torch.float32}


def test_first_values_depend_on_the_seed_alone(model_dir):
    one, same, other = (_adapter(_backend(model_dir, seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_targets_are_chosen_by_the_last_part_of_their_name(model_dir):
    backend = _backend(model_dir, lora=LoraSection(rank=2, targets=("q_proj", "o_proj")))
    assert {name.rpartition(".")[2] for name in backend.adapted} == {"q_proj", "o_proj"}
    assert len(backend.adapted) == 4


def test_a_target_that_the_model_has_not_is_named(model_dir):
    with pytest.raises(
        ModelError, match=r"trainer\.lora\.targets: .* called x_proj for adapters\. It has down_proj"
    ):
        _backend(model_dir, lora=LoraSection(targets=("q_proj", "x_proj")))


def test_the_config_is_one_that_peft_reads_without_a_warning(tmp_path, model_dir, recwarn):
    text = adapter_config(rank=4, alpha=8.0, targets=["a.q_proj"], base=model_dir, identified=False)
    (tmp_path / "adapter_config.json").write_bytes(text)
    config = LoraConfig.from_pretrained(str(tmp_path))
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 8.0, {"a.q_proj"})
    assert not recwarn.list
    assert msgspec.json.decode(text)["inference_mode"] is True
