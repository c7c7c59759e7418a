"""A make-believe CUDA device: tensors that claim to be on `cuda:0` and keep their values in host memory.

    with make_believe_cuda() as device:
        ...                      # the real trainer on torch.device("cuda")
    device.syncs                 # Counter: where the host waited for the device, and by which operator
    device.attention             # list of attention calls with their shapes

`CudaTensor` is a wrapper whose inner tensor is an ordinary CPU tensor. A dispatch mode sees every operator.
It runs the operator on the inner tensors, and it raises the error that CUDA raises if an operator mixes
devices. It counts the operators at which CUDA makes the host wait. Operators of a process without the mode
are not affected.

The rules follow torch's own CUDA sources (2.13): `TensorIterator` (0-dim CPU tensors beside device tensors),
`TensorAdvancedIndexing` (indices on the CPU), `Copy.cu` (blocking copies), and the operators whose result has
a size that only the device knows.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from tests import flash_cpu

NAME = "believed"
CUDA, DEVICE = torch.device("cuda", 0), torch.device("privateuseone", 0)
"""The device that tensors claim, and the device of their C++ part. A CPU build of torch has no autograd for
`cuda`."""
HOST = torch.device("cpu")
ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / name}/" for name in ("trainer_service", "areal_async"))
"""Folders of the product. A sync is counted at the innermost line of these."""
aten = torch.ops.aten

UNKNOWN_SIZE = {
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "bincount",
    "argwhere",
}
"""Operators whose result has a size that only the device knows."""
READ = {"_local_scalar_dense", "equal"}
"""Operators that give a value to the host."""
COPIES = {"copy_", "_to_copy", "_copy_from", "_foreach_copy_"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
SCALAR_BESIDE = {"masked_fill", "masked_fill_", "fill", "fill_", "index_fill", "index_fill_", "where"}
"""Operators that are not tagged as pointwise and accept 0-dim CPU tensors beside device tensors."""


class CudaTensor(Tensor):
    """A tensor that claims to be on `cuda:0`. Its values are in `host`, a CPU tensor."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> CudaTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=DEVICE,
        )
        made.host = host
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CudaTensor({tuple(self.shape)}, {self.dtype})"

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)

    def untyped_storage(self) -> torch.UntypedStorage:
        """FSDP resizes storages in place."""
        return self.host.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if MakeBelieveCuda.current is None:
            raise RuntimeError(f"{func} got a tensor of a make-believe device that has ended")
        return MakeBelieveCuda.current.apply(func, args, kwargs or {})


@dataclass(frozen=True)
class Sync:
    """A place where the host waits for the device."""

    operator: str
    place: str
    """`file.py:line` of the innermost line of the product; otherwise of the innermost line at all."""

    def __str__(self) -> str:
        return f"{self.place} ({self.operator})"


@dataclass
class MakeBelieveCuda:
    """The device, and what was counted on it."""

    syncs: Counter[Sync] = field(default_factory=Counter)
    attention: list[tuple[Any, ...]] = field(default_factory=list)
    """Attention calls in order: the operator, and shapes and flags that select a kernel or a plan."""
    launches: int = 0
    """Number of operators that ran on the device, without views."""
    _pinned: dict[int, Any] = field(default_factory=dict)
    """Storages in pinned memory by their address. They are kept, so that no address is used twice."""
    current = None

    def clear(self) -> None:
        self.syncs.clear()
        self.attention.clear()
        self.launches = 0

    @property
    def n_syncs(self) -> int:
        return self.syncs.total()

    def report(self) -> str:
        """Return the syncs by place, one a line."""
        return "\n".join(f"{n:5d} {sync}" for sync, n in sorted(self.syncs.items(), key=str))

    def on_device(self, host: Tensor) -> Tensor:
        """Return a device tensor with a copy of the values of `host`, without counting."""
        return CudaTensor(host.detach().clone())

    def apply(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator as CUDA would. Raises the error of CUDA if it mixes devices."""
        name = func._schema.name.rpartition("::")[2]
        if special := _SPECIAL.get(name):
            return special(self, func, *args, **kwargs)
        asked = kwargs.get("device")
        asked = None if asked is None else torch.device(asked).type
        asked = "cuda" if asked == DEVICE.type else asked
        tensors: list[Tensor] = []
        inner = [_inner(each, tensors) for each in args]
        named = {key: _inner(each, tensors) for key, each in kwargs.items()}
        ours = [each for each in tensors if isinstance(each, CudaTensor)]
        if not ours and asked != "cuda":
            return self._on_host(func, args, kwargs)
        if len(ours) < len(tensors):
            self._check(func, name, args, kwargs, tensors)
        self._count(func, name, args, kwargs, asked)
        if named.get("pin_memory") is False:
            named["pin_memory"] = None
        found = func(*inner, **named)
        return found if asked not in (None, "cuda") else _outer(found, {id(each.host): each for each in ours})

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on host tensors alone. Pinned memory is ordinary memory with a mark."""
        pinned = kwargs.get("pin_memory")
        found = func(*args, **({**kwargs, "pin_memory": None} if pinned is not None else kwargs))
        return self.pin(found) if pinned else found

    def attend(self, name: str, args: Any, kwargs: Any) -> None:
        """Note an attention call by everything for which a kernel or a plan is chosen."""
        given = [*args, *(kwargs[key] for key in sorted(kwargs))]
        self.attention.append((name, *(shape_of(each) for each in given)))

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, CudaTensor) and tensor.untyped_storage()._cdata in self._pinned

    def _check(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        """Raise what CUDA raises if the operator has tensors on two devices and cannot have them."""
        hosts = [each for each in tensors if not isinstance(each, CudaTensor) and each.device.type == "cpu"]
        if not hosts or name in COPIES:
            return
        if name in INDEXED:
            self._check_index(name, args, hosts)
            return
        written = _written(func, args, kwargs)
        beside = torch.Tag.pointwise in func.tags or name in SCALAR_BESIDE or name.startswith("_foreach_")
        for each in hosts:
            if each.dim() == 0 and beside and not any(each is other for other in written):
                continue
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                f"cpu! ({func}, CPU tensor of shape {tuple(each.shape)}, at {_place()})"
            )

    def _check_index(self, name: str, args: Any, hosts: list[Tensor]) -> None:
        if not isinstance(args[0], CudaTensor):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu) "
                f"(at {_place()})"
            )
        if len(args) > 2 and any(args[2] is each for each in hosts) and args[2].dim():
            raise RuntimeError(f"Expected all tensors to be on the same device: {name} at {_place()}")

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, asked: Any) -> None:
        if not func.is_view:
            self.launches += 1
        if name == "_varlen_attn":
            self.attend(name, args, kwargs)
        waits = name in UNKNOWN_SIZE | READ
        if name == "repeat_interleave":
            waits = any(isinstance(each, Tensor) for each in args[1:2] or args[:1])
            waits = waits and kwargs.get("output_size") is None
        if name in INDEXED:
            waits = self._index_waits(args)
        if name in COPIES:
            waits = self._copy_waits(name, args, kwargs, asked)
        if waits:
            self.syncs[Sync(name, _place())] += 1

    def _index_waits(self, args: Any) -> bool:
        indices = [each for each in args[1] if each is not None]
        if not all(isinstance(each, CudaTensor) for each in indices):
            return True  # the indices are copied to the device
        masks = [each for each in indices if each.dtype in (torch.bool, torch.uint8)]
        # A mask with one value is filled without knowing how many elements there are.
        return bool(masks) and not (len(args) > 2 and args[2].numel() == 1 and len(indices) == 1)

    def _copy_waits(self, name: str, args: Any, kwargs: Any, asked: Any) -> bool:
        if name == "_to_copy":
            source = args[0]
            goes = asked or ("cuda" if isinstance(source, CudaTensor) else "cpu")
            comes = "cuda" if isinstance(source, CudaTensor) else "cpu"
            if comes == goes or source.device.type == "meta":
                return False
            free = bool(kwargs.get("non_blocking"))
            return not (free and (comes == "cuda" or self.is_pinned(source)))
        free = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        pairs = zip(*args[:2], strict=True) if name == "_foreach_copy_" else [args[:2]]
        for pair in pairs:
            host = [each for each in pair if not isinstance(each, CudaTensor)]
            if len(host) == 1 and not (free and self.is_pinned(host[0])):
                return True
        return False


def shape_of(each: Any) -> Any:
    return (tuple(each.shape), str(each.dtype)) if isinstance(each, Tensor) else str(each)


class _Mode(TorchDispatchMode):
    def __init__(self, device: MakeBelieveCuda) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (CudaTensor, Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor calls operators on its local tensors
        return self.device.apply(func, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """Functions that torch does not show to a dispatch mode."""

    def __init__(self, device: MakeBelieveCuda) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.to:
            args = tuple(_of_torch(each) for each in args)
        if func is scaled_dot_product_attention and isinstance(args[0], CudaTensor):
            self.device.attend("sdpa", args, kwargs)
        if "device" in kwargs:
            kwargs["device"] = _of_torch(kwargs["device"])
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            device = kwargs.pop("device", args[0].device if func is Tensor.new_tensor else None)
            if func is Tensor.new_tensor:
                args, kwargs = args[1:], {"dtype": args[0].dtype} | kwargs
            grad = kwargs.pop("requires_grad", False)
            made = torch.tensor(*args, **kwargs) if func is not torch.as_tensor else func(*args, **kwargs)
            return (made if device is None else made.to(device)).requires_grad_(grad)
        return func(*args, **kwargs)


def _of_torch(each: Any) -> Any:
    """Return the C++ device for `cuda`. Other values are returned as they are."""
    if isinstance(each, str):
        return DEVICE if each in ("cuda", "cuda:0") else each
    return DEVICE if isinstance(each, torch.device) and each.type == "cuda" else each


def _inner(each: Any, tensors: list[Tensor]) -> Any:
    """Return an argument with host tensors in place of device tensors. Its tensors are added to `tensors`."""
    if isinstance(each, Tensor):
        tensors.append(each)
        return each.host if isinstance(each, CudaTensor) else each
    if isinstance(each, list | tuple):
        return type(each)(_inner(one, tensors) for one in each)
    return HOST if isinstance(each, torch.device) and each.type in (CUDA.type, DEVICE.type) else each


def _outer(found: Any, known: Mapping[int, CudaTensor]) -> Any:
    """Return a result with device tensors in place of host tensors. `known` are arguments by their host
    tensors, which an operator that works in place returns."""
    if isinstance(found, Tensor):
        return known[id(found)] if id(found) in known else CudaTensor(found)
    return type(found)(_outer(one, known) for one in found) if isinstance(found, list | tuple) else found


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operator writes."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, list | tuple) else [value]
    return found


def _place() -> str:
    """Return the innermost line of the product on this thread's stack; otherwise the innermost line."""
    frame, first = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OURS):
            return f"{Path(name).relative_to(ROOT)}:{frame.f_lineno}"
        if not first and name != __file__ and "/torch/" not in name:
            first = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return first


# --- operators that need more than their inner tensors ---


def _pin(device: MakeBelieveCuda, func: Any, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return device.pin(tensor.clone())


def _is_pinned(device: MakeBelieveCuda, func: Any, tensor: Tensor, *_: Any, **__: Any) -> bool:
    return device.is_pinned(tensor)


_SPECIAL: dict[str, Callable[..., Any]] = {"_pin_memory": _pin, "is_pinned": _is_pinned}


# --- torch.cuda ---


class Event:
    """Stand-in for `torch.cuda.Event`. Everything has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> Event:
        return self

    def wait(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _waited("Event.synchronize")


class Stream:
    """Stand-in for `torch.cuda.Stream`. Work on it is done at once."""

    device = CUDA

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def record_event(self, *_: Any) -> Event:
        return Event()

    def synchronize(self) -> None:
        _waited("Stream.synchronize")


def _waited(what: str) -> None:
    if MakeBelieveCuda.current is not None:
        MakeBelieveCuda.current.syncs[Sync(what, _place())] += 1


STREAM = Stream()
TORCH_CUDA: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "current_stream": lambda *_: STREAM,
    "default_stream": lambda *_: STREAM,
    "stream": lambda *_: nullcontext(),
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "set_device": lambda *_: None,
    "synchronize": lambda *_: _waited("torch.cuda.synchronize"),
    "is_available": lambda: True,
    "get_device_capability": lambda *_: (9, 0),
    "is_initialized": lambda: True,
    "is_current_stream_capturing": lambda: False,
    "_lazy_init": lambda: None,
}
"""Names of `torch.cuda` that torch's FSDP, its optimizers and the trainer use."""


@cache
def _register() -> None:
    """Register the device that torch reserves for others (`privateuseone`), which autograd needs to know.
    This holds for the rest of the process, in which there are no such devices outside the context."""
    functions = {
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda *_: None,
        "device_count": lambda: int(MakeBelieveCuda.current is not None),
        "is_available": lambda: MakeBelieveCuda.current is not None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda *_: None,
        "current_device": lambda: 0,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    module = type("Module", (), {name: staticmethod(each) for name, each in functions.items()})
    backend_registration._setup_privateuseone_for_python_backend(NAME, module())


@contextmanager
def make_believe_cuda() -> Iterator[MakeBelieveCuda]:
    """Context manager in which `torch.device("cuda")` works. Tensors on it must not be used afterwards."""
    _register()
    device = MakeBelieveCuda()
    with ExitStack() as stack:
        for name, value in TORCH_CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(MakeBelieveCuda, "current", device))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(flash_cpu.installed())
        stack.enter_context(_Factories(device))
        stack.enter_context(_Mode(device))
        yield device
