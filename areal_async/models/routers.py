"""The routers of a transformers mixture-of-experts model, which choose the experts of each token.

A router is called with hidden states. It returns `(logits [T, E], weights [T, K], experts i64 [T, K])`. The
place of the router in a block varies between models. The model declares the router's class among its
recordable outputs (`_can_record_outputs`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

PROBED = 64  # Number of tokens in a router's test


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of `model` in the order of its layers. Return none if it has no experts or does not
    declare them."""
    classes: set[type[nn.Module]] = set()
    for module in model.modules():
        said = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for each in said if isinstance(said, list) else [said]:
            if (kind := getattr(each, "target_class", None)) is not None:
                classes.add(kind)
    return [module for module in model.modules() if isinstance(module, tuple(classes))] if classes else []


def tried(router: nn.Module, config: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return (logits, weights, experts) that a router of this class, with random weights, returns for random
    tokens. Return None if its inputs or outputs have another form."""
    generator = torch.Generator().manual_seed(0)
    try:
        made = type(router)(config).float()
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
                )
            said = made(torch.randn(PROBED, config.hidden_size, generator=generator))
        logits, weights, experts = said
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return None
    if not all(isinstance(each, Tensor) and each.ndim == 2 and len(each) == PROBED for each in said):
        return None
    if experts.dtype != torch.int64 or weights.shape != experts.shape or logits.shape[1] < experts.shape[1]:
        return None
    return logits, weights, experts
