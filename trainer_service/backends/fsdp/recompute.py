"""Activations that the backward pass computes again instead of keeping them.

Each block of the model is recomputed separately. `full` keeps only the inputs of a block. `selective` also
keeps the results of its matrix products and attention, which are expensive to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # registers `torch_attn::_varlen_attn`
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer_service.errors import ModelError

KEPT = (
    "mm",
    "addmm",
    "bmm",
    "_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
)
"""ATen operators whose results `selective` keeps, besides attention over ragged rows."""


def recompute_blocks(model: nn.Module, how: str) -> None:
    """Make every block of the sharded `model` recompute its activations in the backward pass.

    `how` is `none`, `selective` or `full`. The checkpoint is inside the block's forward, so that the gathered
    parameters are available when it runs again. Raises `ModelError` if the model has no blocks."""
    if how == "none":
        return
    blocks = blocks_of(model)
    if not blocks:
        raise ModelError(
            f"{type(model).__name__} does not say what its blocks are: set recompute: none in "
            "trainer.backend_args."
        )
    options = (
        {"context_fn": partial(create_selective_checkpoint_contexts, _keep)} if how == "selective" else {}
    )
    for block in blocks:
        block.forward = _recomputed(block.forward, options)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a sharded model."""
    return [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run


_KEPT_OPERATORS = {
    packet.default for name in KEPT if (packet := getattr(torch.ops.aten, name, None)) is not None
} | {torch.ops.torch_attn._varlen_attn.default}


def _keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
