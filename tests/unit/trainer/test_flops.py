"""What a row costs: the matrix products of a real forward pass, counted by torch."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from trainer_service.data.flops import TOKENS_ALONE, load_row_cost, n_experts, row_cost

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
