"""The packed tensors that every objective works on: one entry per sampled unit, any order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class UnitTable:
    """S units of one micro-batch. `episode` and `group` are indices into the step's batch: what belongs
    together is said by them, never by a unit's position."""

    behaviour: Tensor
    """f32 [S]: log-prob recorded by the engine that sampled the unit."""
    version: Tensor
    """i64 [S]: version of the weights that sampled it."""
    episode: Tensor
    """i64 [S]"""
    group: Tensor
    """i64 [S]"""
    advantage: Tensor
    """f32 [S]"""
    mask: Tensor
    """bool [S]: False leaves the unit out of the loss, of its gradient and of every count."""

    def __len__(self) -> int:
        return self.mask.shape[0]


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 where the mask is off. Done before any arithmetic, so that a NaN or an infinity of a
    masked unit reaches neither a sum nor a gradient."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
