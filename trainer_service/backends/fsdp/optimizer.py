"""AdamW on a rank's own shards, with its moments on the device or in the host's memory.

AdamW is elementwise, so it runs on plain local tensors instead of on DTensors: the same numbers without a
dispatch through DTensor for every one of its operations.

In the host's memory are the two moments alone, 8 of the 12 bytes that a parameter has beside its gradient:
the fp32 weights stay on the device, where every pass gathers from them. An update takes the moments of a few
parameters at a time to the device and back, so the arithmetic is the same on either side, bit by bit, and
no more than `STREAMED_BYTES` of them (or one parameter's) are on the device at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from areal_async.config.job import OptimizerSection

MOMENTS = ("exp_avg", "exp_avg_sq")
STREAMED_BYTES = 1 << 28


class ShardedAdamW:
    """`shards` are f32, by name; their `.grad` is what `step` takes."""

    def __init__(
        self, shards: Mapping[str, nn.Parameter], section: OptimizerSection, *, offload: bool
    ) -> None:
        self._shards = shards
        self._offload = offload
        self._parts = [
            torch.optim.AdamW(
                [shards[name] for name in names],
                lr=section.lr,
                betas=section.betas,
                eps=section.eps,
                weight_decay=section.weight_decay,
                fused=True,
            )
            for names in (_streams(shards) if offload else [list(shards)])
        ]
        self._updates = 0
        self._host: dict[nn.Parameter, dict[str, Tensor]] = {}
        if offload:
            self._host = {shard: self._zeros(shard) for shard in shards.values()}

    def step(self, lr: float) -> None:
        """Update the shards at rate `lr` and drop their gradients."""
        for part in self._parts:
            part.param_groups[0]["lr"] = lr
            if self._offload:
                for shard in part.param_groups[0]["params"]:
                    part.state[shard] = self._state_of(shard, self._host[shard], self._updates)
            part.step()
            if self._offload:
                for shard in part.param_groups[0]["params"]:
                    for moment in MOMENTS:
                        self._host[shard][moment].copy_(part.state[shard][moment])
                part.state.clear()
            part.zero_grad(set_to_none=True)
        self._updates += 1

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Moment -> name -> f32, of each shard; nothing before the first update. They are the optimizer's own
        tensors."""
        if not self._updates:
            return {}
        kept: Mapping[Any, Mapping[str, Tensor]] = self._host or self._parts[0].state
        return {
            moment: {name: kept[shard][moment] for name, shard in self._shards.items()} for moment in MOMENTS
        }

    def restart(self, updates: int) -> dict[str, dict[str, Tensor]]:
        """Be as after `updates` updates, with moments of 0: returns those, to be filled."""
        self._updates = updates
        for part in self._parts:
            part.state.clear()
        for shard in self._host:
            self._host[shard] = self._zeros(shard)
        for part in self._parts if updates and not self._offload else ():
            for shard in part.param_groups[0]["params"]:
                part.state[shard] = self._state_of(shard, self._zeros(shard), updates)
        return self.moments()

    def _zeros(self, shard: nn.Parameter) -> dict[str, Tensor]:
        if not self._offload:
            return {moment: torch.zeros_like(shard, requires_grad=False) for moment in MOMENTS}
        pinned = shard.device.type == "cuda"  # Copies from pageable memory go through a small buffer
        return {moment: torch.zeros(shard.shape, pin_memory=pinned) for moment in MOMENTS}

    @staticmethod
    def _state_of(shard: nn.Parameter, moments: Mapping[str, Tensor], updates: int) -> dict[str, Tensor]:
        state = {moment: moments[moment].to(shard.device) for moment in MOMENTS}
        return {"step": torch.tensor(float(updates), device=shard.device), **state}


def _streams(shards: Mapping[str, nn.Parameter]) -> Iterator[list[str]]:
    """Names in order, in lists whose moments take `STREAMED_BYTES` at most, or of one name."""
    names: list[str] = []
    held = 0
    for name, shard in shards.items():
        size = len(MOMENTS) * shard.numel() * shard.element_size()
        if names and held + size > STREAMED_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    if names:
        yield names
