"""Host memory for tensors that leave their device while another process uses it.

The storage of each tensor is emptied and later filled again, so every view and every owner of the tensor
stays valid. The host memory is allocated at the first move and then reused. With a GPU it is pinned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


class ParkingPlace:
    """Host copies of the tensors that are away from their device."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # Unused host memory by its bytes
        self._away: list[tuple[Tensor, Tensor]] = []
        """Bytes on the device, as a view of the emptied storage, and their host copy."""

    @property
    def away_bytes(self) -> int:
        """Bytes that are away from the device now."""
        return sum(host.numel() for _, host in self._away)

    @torch.no_grad()
    def leave(self, tensors: Iterable[Tensor]) -> int:
        """Copy the storages of the tensors into host memory and free them on the device. Return their bytes.
        Does nothing if tensors are away already."""
        if self._away:
            return self.away_bytes
        storages = {each._cdata: each for each in (tensor.untyped_storage() for tensor in tensors)}
        for storage in (each for each in storages.values() if each.nbytes()):
            here = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._away.append((here, self._host(here)))
        for here, host in self._away:
            host.copy_(here, non_blocking=True)
        self._settle()
        for here, _ in self._away:
            here.untyped_storage().resize_(0)
        if any(here.is_cuda for here, _ in self._away):
            torch.cuda.empty_cache()  # other processes need the memory, not this process's allocator
        return self.away_bytes

    @torch.no_grad()
    def come_back(self) -> None:
        """Restore all tensors on the device. Does nothing if none is away."""
        for here, host in self._away:
            here.untyped_storage().resize_(host.numel())
            here.copy_(host, non_blocking=True)
        self._settle()
        for _, host in self._away:
            self._free[host.numel()].append(host)
        self._away.clear()

    def _settle(self) -> None:
        if any(here.is_cuda for here, _ in self._away):
            torch.cuda.synchronize()

    def _host(self, here: Tensor) -> Tensor:
        free = self._free[here.numel()]
        return free.pop() if free else torch.empty(here.numel(), dtype=torch.uint8, pin_memory=here.is_cuda)
