"""Decode passes as CUDA graphs. The kernels for one new unit of every row are recorded once per shape, and
then launched together.

A pass of a small model consists of hundreds of kernels that run for microseconds. Python takes longer to
launch a kernel than the GPU to run it. A graph always runs the same kernels on the same memory. This has
three consequences. First, rows and positions are rounded up to a few shapes, and surplus rows write garbage
into unused rows of the cache. Second, inputs of a pass stay at the addresses of the recording. Third, graphs
are dropped when the cache gets new tensors.
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
"""CUDA records one graph at a time per process, and a process may have several engines."""


class DecodeGraphs:
    """Decode passes of a model over a cache on a GPU. The parameters must keep their addresses. A model that
    cannot be recorded, because its pass reads values on the host, runs without graphs."""

    def __init__(self, model: LocalModel, kv: SlotKV) -> None:
        self._model, self._kv = model, kv
        self._inputs = torch.zeros(3, kv.rows, dtype=torch.long, device=kv.device)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor, list[Tensor]] | None] = {}
        """Recorded passes by rows and length. None: the shape has run once. A shape is recorded when it
        occurs for the second time, because its kernels are loaded by then, and a shape that occurs only once
        is not worth recording."""
        self._kv_length = 0
        self._stream = torch.cuda.Stream(kv.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._able = True

    def hidden(self, inputs: npt.NDArray[np.int64], longest: int) -> Tensor:
        """Return the last hidden states `[n, 1, E]` of one new unit of each of rows 0 … n-1 (see `Decode`).
        They are valid until the next pass. `inputs` [3, n] are the ids, their places in the rows, and their
        rotary positions."""
        n = inputs.shape[1]
        rows = min(few(n), self._kv.rows)
        length = min(few(-(-longest // LENGTH_STEP)) * LENGTH_STEP, self._kv.length)
        padded = np.zeros((3, rows), np.int64)
        padded[:, :n] = inputs
        self._inputs[:, :rows].copy_(torch.from_numpy(padded))
        if self._kv_length != self._kv.length:
            self._graphs.clear()
            # a pool whose last graph was freed accepts no new graph
            self._pool = torch.cuda.graph_pool_handle()
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
        ids, place, position = self._inputs[:, :rows]
        return self._model.hidden(ids[:, None], position[:, None], Decode(self._kv, place, length))

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
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24 … that is at least `count`: powers of two and the
    values halfway between them."""
    power = 1 << (count - 1).bit_length()
    return 3 * power // 4 if power > 2 and count <= 3 * power // 4 else power
