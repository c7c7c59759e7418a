"""The FSDP back end computes what the plain model computes."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_async.config.job import OptimizerSection
from areal_async.weights.pieces import whole_tensors
from tests.unit.trainer.conftest import plain_row
from tests.unit.trainer.conftest import write_model as write_tiny_model
from tests.unit.trainer.sharded_process import train
from trainer_service.backends.base import ModelUse, learning_rate
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.backends.fsdp.optimizer import ShardedAdamW
from trainer_service.backends.fsdp.shards import read_shard, row_range, write_shard
from trainer_service.data.microbatch import build_micro_batch
from trainer_service.durable_files import companion_files, write_model
from trainer_service.errors import CheckpointError, ModelError
from trainer_service.ranks import join_ranks

OPTIMIZER = OptimizerSection(lr=1e-2, weight_decay=0.1, clip_grad_norm=0.5, warmup_steps=3)


def _backend(folder, *, dtype=torch.float32):
    models = {"policy": ModelUse(folder, OPTIMIZER, 100)}
    return FsdpBackend(models, join_ranks(0, 1), dtype=dtype)


def _weights(backend, model="policy"):
    return {name: tensor.clone() for name, tensor in whole_tensors(backend.export(model)).items()}


def _column(backend, batch, name="logp", model="policy"):
    (found,) = backend.evaluate(model, [batch], lambda index, columns: columns[name], columns=(name,))
    return found


def _rows(seed=0, temperature=1.0):
    rng = np.random.default_rng(seed)
    rows = []
    for episode in range(6):
        n = int(rng.integers(4, 9))
        begin = int(rng.integers(1, n))
        ids = rng.integers(0, 17, n)
        rows.append(plain_row(ids, slice(begin, None), episode=episode, temperature=temperature))
    return rows


def _batch(rows):
    return build_micro_batch(rows)


def _slope(batch):
    """f32 [S]: one number for each of six episodes."""
    return torch.linspace(-1, 1, 6)[batch.episode]


def _plain_logprobs(model, rows):
    out = []
    for row in rows:
        logits = model(
            input_ids=torch.from_numpy(row.token_ids[None].astype(np.int64)), use_cache=False
        ).logits
        logp = (logits[0] / row.temperature[0]).log_softmax(-1)
        out.append(logp[row.position - 1, row.token_ids[row.position]])
    return torch.cat(out)


@pytest.mark.parametrize("tied", [True, False])
def test_updates_equal_those_of_the_plain_model(model_dir, untied_model_dir, tied):
    folder = model_dir if tied else untied_model_dir
    backend = _backend(folder)
    assert backend.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(5):
        rows = _rows(step, temperature=0.7)
        halves = [_batch(rows[:3]), _batch(rows[3:])]
        weights = [_slope(half) for half in halves]
        backend.train(
            "policy", halves, lambda index, columns, by=weights: (columns["logp"] * by[index]).sum()
        )
        norm = backend.optimizer_step()

        logp = _plain_logprobs(model, rows)
        advantage = torch.cat([_slope(half) for half in halves])
        (logp * advantage).sum().backward()
        want_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.param_groups[0]["lr"] = 1e-2 * min(1, (step + 1) / 3)
        adamw.step()
        adamw.zero_grad()
        assert norm == pytest.approx(float(want_norm), rel=1e-4)
    tensors = _weights(backend)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(tensors[name], parameter.detach(), atol=2e-5, rtol=1e-4)
    assert set(tensors) == {name for name, _ in model.named_parameters()}


def test_the_norm_is_that_of_the_gradients_in_double_precision(model_dir, monkeypatch):
    """Its error in single precision grows with the number of gradients, and differs with their cut."""
    backend, squares = _backend(model_dir), []

    def note(self, lr):
        squares.extend(shard.grad.double().square().sum() for shard in self._shards.values())

    monkeypatch.setattr(ShardedAdamW, "step", note)
    # Small enough not to be clipped, so that the optimizer sees what the norm is of.
    backend.train("policy", [_batch(_rows())], lambda index, columns: 1e-3 * columns["logp"].sum())
    assert 0 < (norm := backend.optimizer_step()) < OPTIMIZER.clip_grad_norm
    assert norm == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-12)


def test_bfloat16_computes_in_bfloat16_and_keeps_fp32_weights(model_dir, tmp_path):
    half = _backend(model_dir, dtype=torch.bfloat16)
    full = _backend(model_dir)
    batch = _batch(_rows())
    low, exact = _column(half, batch), _column(full, batch)
    assert low.dtype == torch.float32
    assert 0 < (low - exact).abs().max() < 0.2
    assert {t.dtype for t in _weights(half).values()} == {torch.bfloat16}
    half.train("policy", [batch], lambda index, columns: columns["logp"].sum())
    half.optimizer_step()
    half.save(tmp_path)()
    (shard,) = tmp_path.glob("policy-*.safetensors")
    assert {tensor.dtype for tensor in load_file(shard).values()} == {torch.float32}


def test_training_goes_on_identically_after_a_checkpoint(model_dir, tmp_path):
    first = _backend(model_dir)
    train(first, range(3))
    first.save(tmp_path)()
    drawn = torch.rand(3)
    want = train(first, range(3, 6))
    second = _backend(model_dir)
    train(second, range(7, 8))
    second.load(tmp_path, {"policy": 3})
    assert torch.equal(torch.rand(3), drawn)
    assert train(second, range(3, 6)) == want
    for name, tensor in _weights(first).items():
        assert torch.equal(tensor, _weights(second)[name])


def test_a_checkpoint_of_another_model_is_refused(model_dir, tmp_path):
    _backend(model_dir).save(tmp_path)()
    wider = _backend(write_tiny_model(tmp_path / "wider", hidden=64))
    with pytest.raises(CheckpointError, match="cannot be read"):
        wider.load(tmp_path, {})


def test_an_unusable_model_directory_says_what_it_must_be(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json and safetensors"):
        _backend(tmp_path)
    broken = write_tiny_model(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"config\.json and safetensors"):
        _backend(broken)


@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (3, 1), (2, 3), (4, 2)])
def test_shards_are_readable_on_any_number_of_ranks(tmp_path, writers, readers):
    whole = {"a": torch.arange(14.0).reshape(7, 2), "b": torch.arange(3.0), "c": torch.arange(2.0)}
    rows = {name: t.shape[0] for name, t in whole.items()}

    def part(tensor, world, rank):
        start, end = row_range(tensor.shape[0], world, rank)
        return tensor[start:end]

    for rank in range(writers):
        write_shard(tmp_path, "x", {n: part(t, writers, rank) for n, t in whole.items()}, rows, rank, writers)
    for rank in range(readers):
        into = {n: torch.full_like(part(t, readers, rank), -1) for n, t in whole.items()}
        read_shard(tmp_path, "x", into, rows, rank, readers)
        assert all(torch.equal(into[n], part(t, readers, rank)) for n, t in whole.items())


def test_a_missing_shard_is_named(tmp_path):
    whole = torch.arange(6.0)
    write_shard(tmp_path, "x", {"a": whole[:3]}, {"a": 6}, 0, 2)
    with pytest.raises(CheckpointError, match="3 of the 6 rows of a"):
        read_shard(tmp_path, "x", {"a": torch.zeros(6)}, {"a": 6}, 0, 1)
    with safe_open(next(tmp_path.iterdir()), framework="pt") as file:
        assert file.metadata() == {"rows": '{"a": [0, 6]}'}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_steps": 4}, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 10: 1.0}),
        ({"schedule": "linear"}, {update: 1 - 0.1 * update for update in range(11)}),
        ({"schedule": "linear", "final_lr_share": 0.5}, {10: 0.5, 500: 0.5}),
        ({"schedule": "linear", "warmup_steps": 5}, {4: 1.0, 5: 1.0, 10: 0.0}),
        ({"schedule": "cosine"}, {5: 0.5, 10: 0.0}),
    ],
)
def test_the_learning_rate_rises_over_the_warm_up_and_falls_to_its_final_share(settings, expected):
    section = OptimizerSection(lr=1.0, **settings)
    found = {update: learning_rate(section, update, 11) for update in expected}
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_export_loads_with_transformers(model_dir, untied_model_dir, tmp_path, tied, dtype):
    source = model_dir if tied else untied_model_dir
    backend = _backend(source, dtype=getattr(torch, dtype))
    for _ in range(2):  # the second replaces the first
        write_model(
            tmp_path / "model",
            lambda: backend.export("policy"),
            companion_files(source, dtype),
            join_ranks(0, 1),
        )
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
