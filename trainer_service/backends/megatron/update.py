"""Distributed optimizer of a model: Megatron-Core's AdamW, with a range of every parameter on each data rank.

A rank updates a range of each parameter's flattened elements, in fp32. If the parameter is fp32, the rank
updates the parameter's own memory; otherwise it updates a separate copy in fp32 (main copy). Checkpoints
contain these ranges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn

from areal_async.config.job import OptimizerSection
from trainer_service.backends.fsdp.optimizer import MOMENTS
from trainer_service.backends.megatron.stages import Stages


@dataclass(frozen=True, eq=False)
class OwnedRange:
    """Elements [start, end) of a flattened parameter that this rank updates."""

    start: int
    end: int
    main: nn.Parameter
    """f32 [end - start]"""
    state: dict[str, Any]
    """The optimizer's state of the range; without moments before the first update."""


class MegatronAdamW:
    """AdamW for the trained model with these stages."""

    def __init__(self, stages: Stages, section: OptimizerSection, dtype: torch.dtype) -> None:
        self._section = section
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        self.wrapped = [DistributedDataParallel(stages.config, ddp, chunk) for chunk in stages.chunks]
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=section.lr,
                weight_decay=section.weight_decay,
                adam_beta1=section.betas[0],
                adam_beta2=section.betas[1],
                adam_eps=section.eps,
                clip_grad=section.clip_grad_norm,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
            ),
            self.wrapped,
            config_overrides={},  # weight decay on every parameter, as with FSDP2
            use_gloo_process_groups=False,
        )
        self._reduced = False
        self.discard()

    @property
    def _parts(self) -> list[Any]:
        """The optimizers: one for experts and one for everything else, if the model has experts."""
        return list(getattr(self._optimizer, "chained_optimizers", [self._optimizer]))

    def owned(self, parameter: nn.Parameter) -> OwnedRange | None:
        """Return the range of a stage's parameter that this rank updates; None if it updates no part of the
        parameter."""
        for part in self._parts:
            if parameter in getattr(part, "model_param_gbuf_map", ()):
                where = part._get_model_param_range_map(parameter)["param"]
                group, order = part.model_param_group_index_map[parameter]
                main = part.optimizer.param_groups[group]["params"][order]
                return OwnedRange(where.start, where.end, main, part.optimizer.state[main])
        return None

    def norm(self) -> float:
        """Return the norm of the gradients of all ranks. The first call sums the gradients over ranks."""
        if not self._reduced:
            finalize_model_grads(self.wrapped)
            self._optimizer.prepare_grads()
            self._reduced = True
        return float(self._optimizer.get_grad_norm())

    def step(self, lr: float) -> None:
        """Clip and update at rate `lr`. `norm` must have been called for these gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.discard()

    def discard(self) -> None:
        """Clear gradients."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._reduced = False

    def restart(self, updates: int) -> None:
        """Set the state after `updates` updates, with moments of 0."""
        for part in self._parts:
            inner = part.optimizer
            inner.state.clear()
            for group in inner.param_groups:
                if "step" in group:  # Transformer Engine's optimizer counts here
                    group["step"] = updates
                for main in group["params"] if updates else ():
                    inner.state[main] = {"step": torch.tensor(float(updates))} | {
                        moment: torch.zeros_like(main, requires_grad=False) for moment in MOMENTS
                    }

    @torch.no_grad()
    def take_weights(self, tensors: Iterator[tuple[nn.Parameter, Tensor]]) -> None:
        """Set each parameter to its whole fp32 value, and this rank's main range to the part of this value
        that the range covers."""
        for parameter, whole in tensors:
            parameter.data.copy_(whole)
            if (owned := self.owned(parameter)) is not None:
                owned.main.data.copy_(whole.reshape(-1)[owned.start : owned.end])
