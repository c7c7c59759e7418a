"""AdamW on a rank's own shards, with its moments on the device or in host memory.

AdamW is elementwise, so it runs on plain local tensors. The results are the same as with DTensors, without a
DTensor dispatch for every operation.

Only the two moments are offloaded to host memory. They take 8 of the 12 bytes that each parameter needs
besides its gradient. The fp32 weights stay on the device, because every pass gathers from them. An update
moves the moments to the device and back, at most `STREAMED_BYTES` at a time. The arithmetic is the same in
both modes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from areal_async.config.job import OptimizerSection
from trainer_service.backends.fsdp.memory import STREAMED_BYTES

MOMENTS = ("exp_avg", "exp_avg_sq")
Stream = list[tuple[str, slice]]
"""Pieces of flattened shards, by name, whose moments are on the device at the same time."""


PIECE_ELEMENTS = 1024
"""Pieces of a tensor are a multiple of this many elements, so that kernels treat all of them alike."""


class ShardedAdamW:
    """AdamW on `shards`, which are f32 and contiguous, by name. `step` reads their `.grad`."""

    def __init__(
        self, shards: Mapping[str, nn.Parameter], section: OptimizerSection, *, offload: bool
    ) -> None:
        self._shards, self.offload, self._updates = shards, offload, 0
        self._streams = list(_streams(shards)) if offload else []
        whole = [list(shards.values())]
        settings: Any = {"lr": section.lr, "betas": section.betas, "eps": section.eps}
        settings |= {"weight_decay": section.weight_decay, "fused": True}
        parts = [self._views(stream) for stream in self._streams] if offload else whole
        self._parts = [torch.optim.AdamW(parameters, **settings) for parameters in parts]
        self._host = {name: self._zeros(shard) for name, shard in shards.items()} if offload else {}

    def step(self, lr: float) -> None:
        """Update the shards at rate `lr` and drop their gradients. Before the host reads the moments, it must
        have waited for the device, for example to read a norm of the updated shards."""
        for part in self._parts:
            part.param_groups[0]["lr"] = lr
        if not self.offload:
            self._parts[0].step()
        for part, stream in zip(self._parts, self._streams, strict=False):
            self._stream(part, stream)
        for shard in self._shards.values():
            shard.grad = None
        self._updates += 1

    def _stream(self, part: torch.optim.AdamW, stream: Stream) -> None:
        """Update pieces of parameters while their moments are on the device. The copies may still be running
        at the end: the device does them before what is asked of it next."""
        views = part.param_groups[0]["params"]
        for view, (name, where) in zip(views, stream, strict=True):
            gradient = self._shards[name].grad
            view.grad = None if gradient is None else gradient.view(-1)[where]
            held = {moment: values.view(-1)[where] for moment, values in self._host[name].items()}
            part.state[view] = self._state_of(view, held, self._updates)
        part.step()
        for view, (name, where) in zip(views, stream, strict=True):
            for moment, values in self._host[name].items():
                values.view(-1)[where].copy_(part.state[view][moment], non_blocking=True)
            view.grad = None
        part.state.clear()

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments of each shard, moment -> name -> f32; empty before the first update. They are
        the optimizer's own tensors."""
        if not self._updates:
            return {}
        if self.offload:
            return {m: {name: held[m] for name, held in self._host.items()} for m in MOMENTS}
        state = self._parts[0].state
        return {m: {name: state[shard][m] for name, shard in self._shards.items()} for m in MOMENTS}

    def restart(self, updates: int) -> dict[str, dict[str, Tensor]]:
        """Set the state as after `updates` updates, with moments of 0. Returns the moments, for the caller to
        fill in."""
        self._updates = updates
        for held in self._host.values():
            for values in held.values():
                values.zero_()
        if not self.offload:
            self._parts[0].state.clear()
            for shard in self._shards.values() if updates else ():
                self._parts[0].state[shard] = self._state_of(shard, self._zeros(shard), updates)
        return self.moments()

    def _views(self, stream: Stream) -> list[nn.Parameter]:
        return [nn.Parameter(self._shards[name].detach().view(-1)[where]) for name, where in stream]

    def _zeros(self, shard: nn.Parameter) -> dict[str, Tensor]:
        if not self.offload:
            return {moment: torch.zeros_like(shard, requires_grad=False) for moment in MOMENTS}
        pinned = shard.device.type == "cuda"  # Copies from pageable memory go through a small buffer
        return {moment: torch.zeros(shard.shape, pin_memory=pinned) for moment in MOMENTS}

    @staticmethod
    def _state_of(parameter: nn.Parameter, moments: Mapping[str, Tensor], updates: int) -> dict[str, Tensor]:
        state = {moment: moments[moment].to(parameter.device, non_blocking=True) for moment in MOMENTS}
        return {"step": torch.full((), float(updates), device=parameter.device), **state}


def _streams(shards: Mapping[str, nn.Parameter]) -> Iterator[Stream]:
    """Yield all elements of all shards in order, as streams whose moments take at most `STREAMED_BYTES`."""
    most = STREAMED_BYTES // (len(MOMENTS) * 4)
    stream: Stream = []
    left = most
    for name, shard in shards.items():
        start, end = 0, shard.numel()
        while start < end:
            take = min(end - start, left)
            if take < end - start:
                take -= take % PIECE_ELEMENTS
            if not take:
                yield stream
                stream, left = [], most
                continue
            stream.append((name, slice(start, start + take)))
            start, left = start + take, left - take
    if stream:
        yield stream
