"""Lets Megatron-Core compute on a CPU, for tests: it asks CUDA for devices, streams and random states.

What is shown on a CPU are the formulas, the places of weights and the schedules; not streams, kernels or
NCCL. `install` changes torch for the whole process: only processes of their own call it.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _names_cuda(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"


class _OnCpu(TorchFunctionMode):
    """Tensors that are asked for on CUDA are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Gradients are sorted by the names that types have on CUDA.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device)):
            args = (args[0], CPU if _names_cuda(args[1]) else args[1], *args[2:])
        return func(*args, **kwargs)


class _Nothing:
    """A stream or an event that has nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: Any) -> None: ...


_MODE = _OnCpu()


def install() -> None:
    """Do it once, before a process makes a model."""
    if torch.cuda.is_available() or getattr(torch.cuda, "areal_on_cpu", False):
        return
    torch.cuda.areal_on_cpu = True  # type: ignore[attr-defined]
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # nothing here is worth a compiler's time
    import megatron.core  # noqa: F401 - its decorators must see torch as it is
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Nothing()
    cuda.stream = lambda _: contextlib.nullcontext()
    for name in ("set_device", "synchronize", "empty_cache", "set_stream"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, lambda *_, **__: None)
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._get_cuda_rng_state = cuda.get_rng_state
    random._set_cuda_rng_state = cuda.set_rng_state
    if not hasattr(moe_utils, "te_general_gemm"):  # named where Transformer Engine is missing
        moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = _sizes
    distributed: Any = torch.distributed
    distributed.all_gather = _uneven_too(distributed.all_gather)
    distributed.reduce_scatter = _reduce_scatter
    _MODE.__enter__()


def _sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _uneven_too(all_gather: Any) -> Any:
    """`all_gather` also of tensors with different first sizes, which NCCL gathers and gloo does not."""

    def gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
        if len({each.shape for each in tensors}) == 1:
            all_gather(tensors, tensor, group=group)
            return
        longest = max(map(len, tensors))
        padded = torch.cat([tensor, tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])])
        found = [torch.empty_like(padded) for _ in tensors]
        all_gather(found, padded, group=group)
        for target, source in zip(tensors, found, strict=True):
            target.copy_(source[: len(target)])

    return gather


def _reduce_scatter(output: torch.Tensor, tensors: list[torch.Tensor], group: Any = None) -> None:
    """Also of tensors with different first sizes, as `_uneven_too`."""
    found = torch.cat(tensors)
    torch.distributed.all_reduce(found, group=group)
    output.copy_(found.split([*map(len, tensors)])[torch.distributed.get_rank(group)])
