"""Decode passes as CUDA graphs: what the model launches for one new unit of every row is recorded once for a
shape, and launched as one from then on.

A pass of a small model is hundreds of kernels of some microseconds each, and Python takes longer to launch
one than the GPU to run it. A graph runs the same kernels on the same memory. So rows and positions are
rounded up to few shapes (the rows beyond those in use compute garbage into rows of the cache that hold
nothing), what a pass reads lies where it lay when it was recorded, and graphs end with the tensors of the
cache that they were recorded with.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_async.base.log import get_logger
from rollout_service.engines.local.kv import LENGTH_STEP, Decode, SlotKV
from rollout_service.engines.local.model import LocalModel

log = get_logger("engine")

_RECORDING = threading.Lock()
"""CUDA records one graph at a time in a process, which may have several engines."""


class DecodeGraphs:
    """The decode passes of a model over a cache on a GPU. Parameters keep their places for as long as it
    lives. A model that cannot be recorded (its pass looks at numbers on the host) runs as it is."""

    def __init__(self, model: LocalModel, kv: SlotKV) -> None:
        self._model, self._kv = model, kv
        self._ids_and_position = torch.zeros(2, kv.rows, dtype=torch.long, device=kv.device)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor, list[Tensor]] | None] = {}
        """The recorded passes by rows and length; None for a shape that has run once. Its second pass is
        recorded: by then its kernels are loaded, and a shape that comes once is not worth recording."""
        self._kv_length = 0
        self._stream = torch.cuda.Stream(kv.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._able = True

    def hidden(self, ids: npt.NDArray[np.int64], position: npt.NDArray[np.int64], longest: int) -> Tensor:
        """Return the last hidden states `[n, 1, E]` of one new unit of each of rows 0 … n-1; see `Decode`.
        They hold until the next pass."""
        n = len(ids)
        rows = min(few(n), self._kv.rows)
        length = min(few(-(-longest // LENGTH_STEP)) * LENGTH_STEP, self._kv.length)
        padded = np.zeros((2, rows), np.int64)
        padded[0, :n], padded[1, :n] = ids, position
        self._ids_and_position[:, :rows].copy_(torch.from_numpy(padded))
        if self._kv_length != self._kv.length:
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()  # one whose last graph has gone takes no other
            self._kv_length = self._kv.length
        shape = rows, length
        if self._able and shape in self._graphs:
            recorded = self._graphs[shape] or self._record(rows, length)
            if recorded is not None:
                self._graphs[shape] = recorded
                graph, hidden, self._model.experts = recorded
                graph.replay()
                return hidden[:n]
        self._graphs.setdefault(shape)
        return self._pass(rows, length)[:n]

    def _pass(self, rows: int, length: int) -> Tensor:
        ids, position = self._ids_and_position[:, :rows]
        return self._model.hidden(ids[:, None], position[:, None], Decode(self._kv, position, length))

    def _record(self, rows: int, length: int) -> tuple[torch.cuda.CUDAGraph, Tensor, list[Tensor]] | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with _RECORDING, torch.cuda.stream(self._stream):
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    hidden = self._pass(rows, length)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            log.warning("decode passes are not recorded as CUDA graphs", error=str(error).splitlines()[0])
            self._able = False
            return None
        return graph, hidden, self._model.experts


def few(count: int) -> int:
    """Return the least of 1, 2, 3, 4, 6, 8, 12, 16, 24 … that is not below `count`: powers of two, and
    halfway."""
    power = 1 << (count - 1).bit_length()
    return 3 * power // 4 if power > 2 and count <= 3 * power // 4 else power
