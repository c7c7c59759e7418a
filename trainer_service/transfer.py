"""Transfers from host memory to the device, during which the host does not wait.

A copy from ordinary memory makes the host wait until the device has finished its earlier work. All arrays of
a transfer are therefore written into one pinned buffer, which a single asynchronous copy moves. torch keeps
the buffer until the copy has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNED = 16
"""Bytes; the start of each array in the buffer is a multiple of this number. Dtypes need it, and a compiled
kernel that was made for aligned memory copies other inputs."""


def on_device(arrays: Mapping[str, NDArray[Any]], device: torch.device | str) -> dict[str, Tensor]:
    """Return the arrays as tensors on the device, under their names and with their dtypes and shapes.

    On a CPU, the tensors share the memory of contiguous arrays."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    place = torch.device(device)
    if place.type == "cpu":
        return tensors
    sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors.values()]
    starts = [*accumulate(sizes, initial=0)]
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for start, each in zip(starts, tensors.values(), strict=False):
        buffer[start : start + each.nbytes].copy_(each.reshape(-1).view(torch.uint8))
    there = buffer.to(place, non_blocking=True)
    return {
        name: there[start : start + each.nbytes].view(each.dtype).view(each.shape)
        for start, (name, each) in zip(starts, tensors.items(), strict=False)
    }


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on the device."""
    return on_device({"": tensor.numpy()}, device)[""]
