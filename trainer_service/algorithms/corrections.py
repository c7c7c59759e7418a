"""Corrections: a detached weight per unit for the data's being off-policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_service.algorithms.losses import ratio_of
from trainer_service.algorithms.parts import correction

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_service.data.microbatch import UnitTable


def behaviour_weight(prox: Tensor, behaviour: Tensor) -> Tensor:
    """w = exp(prox - beh), detached, in fp32; not truncated. f32 [S] -> f32 [S]."""
    return ratio_of(prox.detach().float() - behaviour.float())


@correction(columns=("prox",), shares=("truncated",))
def decoupled(weight: Tensor, units: UnitTable, *, cap: float = 5.0) -> tuple[Tensor, dict[str, Tensor]]:
    """min(w, cap): the decoupled PPO objective weighs a loss whose ratio is taken against the proximal policy
    by how likely that policy was to sample the unit. Source: Hilton et al. 2022, "Batch size-invariance for
    policy optimization", eq. 5; Fu et al. 2025, "AReaL"."""
    return weight.clamp(max=cap), {"truncated": weight > cap}


@correction(corrects=False)
def none(weight: Tensor, units: UnitTable) -> Tensor:
    """1 everywhere: only right for units that the current weights sampled."""
    return weight.new_ones(weight.shape)
