"""Floating-point operations in the forward pass of a training row, from the model's dimensions.

The count covers only matrix products, with two operations for each multiply-add (Chowdhery et al. 2022,
"PaLM", appendix B). A backward pass or recomputation multiplies the count of every row by the same factor, so
the count serves to compare rows. A row of T tokens with S predicted units and I tokens of images costs
linear·T + attention·T² + head·S + vision·I, where

    linear    = 2 · parameters of all layers that a token uses: projections of attention, and the MLP or the
                router, shared and active experts
    attention = 2 · layers · heads · head size: QKᵀ and weights·V each take 2 · heads · head size operations
                for each of the T²/2 pairs of a token and an earlier or equal one. Sliding windows are ignored
    head      = 2 · hidden · vocabulary: logits are computed only for predicted units
    vision    = 2 · parameters of the vision tower's blocks · patches per token. A frozen tower has no
                backward pass, so it counts as a third of this. Its attention is ignored
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from areal_async.models.files import EXPERTS

TWO_MATRICES = frozenset({"gpt2", "gpt_neox", "opt", "phi", "falcon", "bloom", "starcoder2"})
"""Model types whose MLP has two matrices. Other models have a third one, the gate."""


GATED_TOWERS = ("qwen2_5_vl", "pixtral")
"""Beginnings of the model types of vision towers whose MLP has three matrices."""
PASSES = 3
"""FLOPs of a forward and a backward pass, as a multiple of the forward pass."""


@dataclass(frozen=True)
class RowCost:
    """Coefficients of a row's FLOPs. They are integers, so that every rank computes the same sums."""

    linear: int
    """FLOPs per token."""
    attention: int
    """FLOPs per squared token."""
    head: int
    """FLOPs per predicted unit."""
    vision: int = 0
    """FLOPs per token that stands for a part of an image."""

    def of(self, tokens: int, units: int, images: int = 0) -> int:
        """Return the FLOPs of a row with `tokens` input tokens, of which `images` stand for images, and
        `units` predicted units; 0 for a row without tokens."""
        return tokens * (self.linear + self.attention * tokens) + self.head * units + self.vision * images


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
"""Peak bf16 FLOP/s of dense matrix products by a part of the device's name, from the vendor's data sheets.
The first matching entry applies."""


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the peak FLOP/s of a device. None on a CPU, in fp32, or if the device is not in `PEAKS`."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


TOKENS_ALONE = RowCost(1, 0, 0)
"""Cost of rows if a model's dimensions are unknown."""


def load_row_cost(model: Path, *, trains_vision: bool = False) -> RowCost:
    """Return the row cost of the model in a Hugging Face directory, whose vision tower is trained or not.

    It is `TOKENS_ALONE` if config.json cannot be read or lacks a dimension. Rows are then distributed by
    their lengths, and the FLOP utilization is not reported."""
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        return row_cost(config, trains_vision=trains_vision)
    except (OSError, ValueError, AttributeError):
        return TOKENS_ALONE


def row_cost(config: Any, *, trains_vision: bool = False) -> RowCost:
    """Return the row cost of a model with this transformers `config`. In a multimodal model, the language
    model and the vision tower count. Raises `AttributeError` if hidden size, layers, heads or vocabulary are
    missing."""
    vision = _vision(getattr(config, "vision_config", None)) // (1 if trains_vision else PASSES)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    head_size = _number(config, "head_dim") or hidden // heads
    kv_heads = _number(config, "num_key_value_heads") or heads
    attention = 2 * hidden * (heads + kv_heads) * head_size
    matrices = 2 if getattr(config, "model_type", "") in TWO_MATRICES else 3
    dense = matrices * hidden * (_number(config, "intermediate_size") or 4 * hidden)
    sparse_layers = [is_sparse(config, layer) for layer in range(layers)].count(True)
    parameters = layers * attention + (layers - sparse_layers) * dense + sparse_layers * _experts(config)
    return RowCost(2 * parameters, 2 * layers * heads * head_size, 2 * hidden * config.vocab_size, vision)


def _vision(config: Any) -> int:
    """Return the FLOPs of a vision tower with this config for one token; 0 if its dimensions are unknown."""
    hidden, layers = (
        _number(config, "hidden_size", "embed_dim"),
        _number(config, "depth", "num_hidden_layers"),
    )
    inner = _number(config, "intermediate_size") or round(hidden * _number(config, "mlp_ratio"))
    matrices = 3 if str(getattr(config, "model_type", "")).startswith(GATED_TOWERS) else 2
    patches = (_number(config, "spatial_merge_size") or 1) ** 2
    return 2 * patches * layers * hidden * (4 * hidden + matrices * inner)


def _number(config: Any, *names: str) -> int:
    """Return the first of these fields that is set and not 0, or 0."""
    return next((value for name in names if (value := getattr(config, name, None))), 0)


def n_experts(config: Any) -> int:
    """Return the number of experts in each sparse layer; 0 for a dense model."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return max((_number(config, name) for name in EXPERTS), default=0)


def is_sparse(config: Any, layer: int) -> bool:
    """Return whether the MLP of a layer is a mixture of experts.

    It knows the usual fields: the first layers are dense (DeepSeek), some listed layers are dense, or every
    n-th layer is sparse (Qwen)."""
    every, first = _number(config, "decoder_sparse_step") or 1, _number(config, "first_k_dense_replace")
    dense = layer < first or layer in (getattr(config, "mlp_only_layers", None) or ())
    return n_experts(config) > 0 and not dense and (layer + 1) % every == 0


def _experts(config: Any) -> int:
    """Return the parameters that a token uses in a sparse layer: router, active experts and shared
    experts."""
    width = _number(config, "moe_intermediate_size", "intermediate_size")
    active, hidden = _number(config, "num_experts_per_tok") or 1, int(config.hidden_size)
    shared = _number(config, "shared_expert_intermediate_size") or _number(config, "n_shared_experts") * width
    return hidden * n_experts(config) + 3 * hidden * (active * width + shared)
