"""What a row costs: the matrix products of a real forward pass, counted by torch."""

import json
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tests.unit.trainer import rank_process
from trainer_service.data.flops import TOKENS_ALONE, load_row_cost, n_experts, peak_flops, row_cost
from trainer_service.loop.report import figures_of

DIMENSIONS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS = [
    Qwen2Config(**DIMENSIONS),
    Qwen3Config(**DIMENSIONS, head_dim=16),
    Qwen3MoeConfig(**DIMENSIONS, **EXPERTS, head_dim=16, mlp_only_layers=[1]),
    Qwen3MoeConfig(**DIMENSIONS, **EXPERTS, head_dim=16, decoder_sparse_step=2),
    GPT2Config(vocab_size=96, n_embd=32, n_layer=3, n_head=4),
]


@pytest.mark.parametrize("config", CONFIGS, ids=["qwen2", "qwen3", "moe", "sparse_step", "gpt2"])
def test_a_row_costs_what_torch_counts(config):
    """Torch counts all pairs of tokens, the row's cost those of a token and one not after it: half of all."""
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens, units = 40, 7
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(tokens)[None], logits_to_keep=units)
    cost = row_cost(config)
    assert cost.of(tokens, units) + cost.attention * tokens**2 == counter.get_total_flops()


def test_a_row_that_is_not_trained_costs_nothing_and_long_rows_cost_more_than_their_tokens():
    cost = row_cost(CONFIGS[0])
    assert cost.of(0, 0) == 0
    assert cost.of(2000, 1) > 2 * cost.of(1000, 1)
    assert cost.of(1000, 900) > cost.of(1000, 1)


def test_a_model_without_these_dimensions_is_dealt_by_its_tokens(tmp_path):
    assert load_row_cost(tmp_path) == TOKENS_ALONE
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **DIMENSIONS}))
    assert load_row_cost(tmp_path) == row_cost(CONFIGS[0])
    assert [n_experts(config) for config in CONFIGS] == [0, 0, 6, 6, 0]


def test_the_share_of_the_peak_counts_forward_and_backward(tmp_path, model_dir, make_batch, monkeypatch):
    batch, _ = make_batch(1, max_staleness=2)
    _, learner = rank_process.learner_of(model_dir, tmp_path)
    result = SimpleNamespace(shared_tokens=10)
    assert learner.mfu(batch, result, 1.0) is None  # on a CPU
    monkeypatch.setattr("trainer_service.loop.learner.peak_flops", lambda device, dtype: 1e9)
    cost = load_row_cost(model_dir)
    rows = [row for group in batch.groups for episode in group.episodes for row in episode.rows]
    forward = sum(cost.of(*row) for row in rows) - 10 * cost.linear
    assert learner.mfu(batch, result, 0.5) == pytest.approx(3 * forward / 0.5e9)

    for name, peak in {"NVIDIA H100 PCIe": 756e12, "NVIDIA H100 80GB HBM3": 989e12, "Tesla T4": None}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda", 0), "bfloat16") == peak
        assert peak_flops(torch.device("cuda", 0), "float32") is None


def test_components_are_averaged_over_the_episodes_that_have_them(make_batch):
    batch, _ = make_batch(1, max_staleness=2)
    first, second = batch.groups[0].episodes[:2]
    first = replace(first, components={"right": 1.0, "short": 0.5})
    second = replace(second, components={"right": 0.0})
    groups = [replace(batch.groups[0], episodes=[first, second])]
    assert figures_of(replace(batch, groups=groups)).rewards == {"right": 0.5, "short": 0.5}
