"""The server's memory of its clients. It decides the fate of a request: run it, join it to a running
duplicate, answer it by the remembered reply, or refuse it. The module is pure.

Promise: while a client waits for request `r`, at most one execution of `r` runs at a time. After its answer,
`r` does not run again while its reply is remembered. A reply is forgotten as soon as the client confirms it
(the `floor` of its later requests). Beyond the limits, the oldest replies are forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile

from typing_extensions import Buffer

from areal_async.rpc.frames import MAX_MESSAGE_BYTES


class Admission(Enum):
    RUN = "run"
    JOIN = "join"
    """The request is already running. Its one reply also answers this duplicate."""
    REPLAY = "replay"
    STALE = "stale"
    """The client no longer waits for this request."""
    BUSY = "busy"
    """The client has reached its limit of requests in flight."""


@dataclass
class _Memory:
    """Memory of one client: the reply of each request id, or None while the request runs."""

    replies: dict[int, Sequence[Buffer] | None] = field(default_factory=dict)
    running: int = 0
    floor: int = 0


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one server: requests in flight per client, remembered replies, and bytes of a frame.

    A longer frame closes its connection.
    """

    in_flight: int = 64
    cached_replies: int = 4096
    cached_bytes: int = 64 << 20
    part_bytes: int = MAX_MESSAGE_BYTES


class ReplyBook:
    def __init__(self, limits: ServerLimits, max_clients: int) -> None:
        self._limits = limits
        self._max_clients = max_clients
        self._clients: OrderedDict[int, _Memory] = OrderedDict()
        self._sizes: OrderedDict[tuple[int, int], int] = OrderedDict()
        self.size_bytes = 0  # bytes of the remembered replies

    def __len__(self) -> int:
        return len(self._sizes)

    def admit(self, client: int, request: int, floor: int) -> Admission:
        """Decide what to do with a request that arrived. If the result is RUN, the caller must call
        `finish`."""
        memory = self._clients.get(client) or self._remember(client)
        self._clients.move_to_end(client)
        if floor > memory.floor:
            memory.floor = floor
            self._forget_below(client, memory)
        if request < memory.floor:
            return Admission.STALE
        if request in memory.replies:
            return Admission.JOIN if memory.replies[request] is None else Admission.REPLAY
        if memory.running >= self._limits.in_flight:
            return Admission.BUSY
        memory.replies[request] = None
        memory.running += 1
        return Admission.RUN

    def reply(self, client: int, request: int) -> Sequence[Buffer]:
        """Return the remembered frames of a request admitted as REPLAY."""
        frames = self._clients[client].replies[request]
        assert frames is not None
        return frames

    def finish(self, client: int, request: int, frames: Sequence[Buffer] | None) -> bool:
        """Store the answer of a running request and return whether the client still waits for it.

        If `frames` is None, the request was only refused for now, and a retry runs it again.
        """
        memory = self._clients.get(client)
        if memory is None or request not in memory.replies:
            return False
        memory.running -= 1
        wanted = request >= memory.floor
        if frames is None or not wanted:
            del memory.replies[request]
            return wanted
        memory.replies[request] = frames
        size = sum(memoryview(frame).nbytes for frame in frames)
        self._sizes[(client, request)] = size
        self.size_bytes += size
        most, most_bytes = self._limits.cached_replies, self._limits.cached_bytes
        while self._sizes and (len(self._sizes) > most or self.size_bytes > most_bytes):
            (other, old), old_size = self._sizes.popitem(last=False)
            self.size_bytes -= old_size
            del self._clients[other].replies[old]
        return True

    def forget(self, client: int) -> None:
        """Forget a client that has left. Answers of its running requests are dropped."""
        memory = self._clients.pop(client, None)
        if memory is not None:
            for request, frames in memory.replies.items():
                if frames is not None:
                    self.size_bytes -= self._sizes.pop((client, request))

    def _remember(self, client: int) -> _Memory:
        if len(self._clients) >= self._max_clients:
            # The client that was silent for the longest time, if possible one without running requests. It
            # must say hello again.
            idle = next((c for c, m in self._clients.items() if not m.running), next(iter(self._clients)))
            self.forget(idle)
        memory = self._clients[client] = _Memory()
        return memory

    def _forget_below(self, client: int, memory: _Memory) -> None:
        # Ids are in order of arrival, so the loop sees only forgotten and running requests.
        below = takewhile(lambda item: item[0] < memory.floor, memory.replies.items())
        for request in [request for request, frames in below if frames is not None]:
            del memory.replies[request]
            self.size_bytes -= self._sizes.pop((client, request))
