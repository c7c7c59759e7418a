"""Cost of a training row in floating-point operations of its forward pass, from the model's dimensions.

The count is that of the matrix products alone, two operations for each multiply-add (Chowdhery et al. 2022,
"PaLM", appendix B). A backward pass and recomputation multiply it by the same number for every row, so rows
can be compared by it. A row of T tokens with S units to predict costs linear·T + attention·T² + head·S, where

    linear    = 2 · parameters of all layers that one token passes: projections of attention, and the MLP or
                router, shared and active experts
    attention = 2 · layers · heads · head size: QKᵀ and weights·V are 2·heads·head size each for every pair
                of a token and one not after it, T²/2 pairs. A sliding window is not subtracted
    head      = 2 · hidden · vocabulary: logits are made where a unit is predicted and nowhere else
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from areal_async.models.files import EXPERTS

TWO_MATRICES = frozenset({"gpt2", "gpt_neox", "opt", "phi", "falcon", "bloom", "starcoder2"})
"""Model types whose MLP has two matrices; others have a third, the gate."""


@dataclass(frozen=True)
class RowCost:
    """Coefficients of a row's FLOPs. Integers, so that every rank comes to the same sums."""

    linear: int
    """FLOPs per token."""
    attention: int
    """FLOPs per squared token."""
    head: int
    """FLOPs per predicted unit."""

    def of(self, tokens: int, units: int) -> int:
        """FLOPs of a row of `tokens` tokens fed that predicts `units` units; 0 for one of no tokens."""
        return tokens * (self.linear + self.attention * tokens) + self.head * units


PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}
"""bf16 FLOP/s of dense matrix products, from the vendor's data sheets, by a part of the device's name. The
first match counts."""


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the peak FLOP/s of a device; None if that is not known: on a CPU, in fp32, or for a device that
    is not in `PEAKS`."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


TOKENS_ALONE = RowCost(1, 0, 0)
"""The cost of rows where a model's dimensions are not known."""


def load_row_cost(model: Path) -> RowCost:
    """Return the cost of rows of the model in a Hugging Face directory. If its config.json cannot be read or
    lacks the dimensions, return `TOKENS_ALONE`; rows are then balanced by length only."""
    try:
        return row_cost(AutoConfig.from_pretrained(model, local_files_only=True))
    except (OSError, ValueError, AttributeError):
        return TOKENS_ALONE


def row_cost(config: Any) -> RowCost:
    """Return the cost of rows of a model with the configuration `config` (transformers' names of dimensions;
    for several modalities the text part). Raises `AttributeError` without hidden size, layers, heads or
    vocabulary."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    head_size = _number(config, "head_dim") or hidden // heads
    kv_heads = _number(config, "num_key_value_heads") or heads
    attention = 2 * hidden * (heads + kv_heads) * head_size
    matrices = 2 if getattr(config, "model_type", "") in TWO_MATRICES else 3
    dense = matrices * hidden * (_number(config, "intermediate_size") or 4 * hidden)
    sparse_layers = [is_sparse(config, layer) for layer in range(layers)].count(True)
    parameters = layers * attention + (layers - sparse_layers) * dense + sparse_layers * _experts(config)
    return RowCost(2 * parameters, 2 * layers * heads * head_size, 2 * hidden * config.vocab_size)


def _number(config: Any, *names: str) -> int:
    """Return the first of these fields that is set and not 0; 0 if none is."""
    return next((value for name in names if (value := getattr(config, name, None))), 0)


def n_experts(config: Any) -> int:
    """Experts of each sparse layer; 0 for a dense model."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return max((_number(config, name) for name in EXPERTS), default=0)


def is_sparse(config: Any, layer: int) -> bool:
    """Whether the MLP of a layer is a mixture of experts, by the usual ways to say so: the first layers dense
    (DeepSeek), some named ones dense, or one in every few sparse (Qwen)."""
    every, first = _number(config, "decoder_sparse_step") or 1, _number(config, "first_k_dense_replace")
    dense = layer < first or layer in (getattr(config, "mlp_only_layers", None) or ())
    return n_experts(config) > 0 and not dense and (layer + 1) % every == 0


def _experts(config: Any) -> int:
    """Parameters that a token passes in a sparse layer's router, active experts and shared ones."""
    width = _number(config, "moe_intermediate_size", "intermediate_size")
    active, hidden = _number(config, "num_experts_per_tok") or 1, int(config.hidden_size)
    shared = _number(config, "shared_expert_intermediate_size") or _number(config, "n_shared_experts") * width
    return hidden * n_experts(config) + 3 * hidden * (active * width + shared)
