"""The trainer's side of a process group with several engines: forming it, sending to it, and ending it.

Promises:
- Members keep step: no member starts a bucket before all are ready for it. So a member that failed or was
  lost between two buckets does not block the others in a broadcast.
- A failure breaks the group permanently: waiting members are told, and members at the meeting point are
  disconnected. The trainer waits for no member longer than `limit_s`.

A member that stops in the middle of a broadcast may block the members that it would forward bytes to, until
its connections close.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from itertools import accumulate
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from areal_async.base.versions import VersionTag
from areal_async.rpc.weights_messages import JOIN

POLL_S = 0.0005

T = TypeVar("T")


class TensorGroup:
    """Rank 0 of a group with `members`: ranks by engine, in the order of their places. One thread at a time
    sends through it; any thread may say that a member is ready, or break it. Raises `OSError` where nothing
    can be listened on."""

    def __init__(
        self, name: str, members: Mapping[str, int], *, device: torch.device, limit_s: float, host: str
    ) -> None:
        self.name, self.host = name, host
        self.members = dict(members)
        *firsts, self.size = accumulate(members.values(), initial=1)  # The trainer is rank 0
        self.first_rank = dict(zip(members, firsts, strict=True))
        self.kind: Literal["nccl", "gloo"] = "nccl" if device.type == "cuda" else "gloo"
        self.busy = False
        self.broken = ""
        """Why it is of no use any more."""
        self._device = device
        self._limit_s = limit_s
        self._backend: Any = None
        """torch's `ProcessGroupGloo` or `ProcessGroupNCCL`: its types name no common base with
        collectives."""
        self._changed = threading.Condition()
        self._tag: VersionTag | None = None
        self._ready: dict[str, int] = {}  # The bucket that each member is ready for
        self._last = self._released = 0
        self._waiting: list[tuple[int, asyncio.Future[str]]] = []
        # A store left to itself listens on every interface, and asks nobody who they are. Each group has one
        # of its own: with it goes whoever still waits there.
        with socket.create_server((host, 0), backlog=128) as listening:
            self.port: int = listening.getsockname()[1]
            self._meeting: dist.TCPStore | None = self._store(True, master_listen_fd=listening.detach())

    def _store(self, is_master: bool, **how: Any) -> dist.TCPStore:
        limit = timedelta(seconds=self._limit_s)
        return dist.TCPStore(
            self.host, self.port, None, is_master, timeout=limit, wait_for_workers=False, **how
        )

    def begin(self, tag: VersionTag, n_buckets: int) -> None:
        """Note that `tag` is sent next: nobody has taken anything of it."""
        with self._changed:
            self.busy, self._tag, self._last, self._released = True, tag, n_buckets, JOIN - 1
            self._ready = dict.fromkeys(self.members, JOIN - 1)

    # --- the members' side: from an event loop -------------------------------------------------------

    async def ready(self, engine: str, tag: VersionTag, number: int, wait_s: float) -> bool | str:
        """Return whether `engine` may take bucket `number` now: False if not all were ready within `wait_s`;
        a text is the reason why nothing comes any more."""
        future = asyncio.get_running_loop().create_future()
        with self._changed:
            if self.broken or tag != self._tag or engine not in self._ready:
                return self.broken or "the group sends something else by now"
            self._ready[engine] = max(number, self._ready[engine])
            self._changed.notify_all()
            if number <= self._released or number >= self._last:
                return True
            self._waiting.append((number, future))
        try:
            async with asyncio.timeout(wait_s):
                return (await future) or True
        except TimeoutError:
            return False
        finally:
            with self._changed:
                self._waiting = [entry for entry in self._waiting if entry[1] is not future]

    def break_up(self, reason: str) -> None:
        """End the use of the group. Members that wait for the others hear the reason."""
        with self._changed:
            if self.broken:
                return
            self.broken = reason
            waiting, self._waiting = self._waiting, []
            self._changed.notify_all()
            if not self.busy:
                self._backend = self._meeting = None
        settle((future for _, future in waiting), reason)

    def part(self) -> None:
        """Close the meeting point of a broken group: whoever waits there for a member that does not come
        loses the connection. One that comes now tries for minutes to connect, so those told to join get a
        moment."""
        self._meeting = None

    # --- the trainer's side: on a thread that may wait -----------------------------------------------

    def meet(self) -> None:
        """Form it, as SGLang's `init_custom_process_group` does; return once all are there. Raises
        `RuntimeError`."""
        if self._backend is not None:
            return
        self.wait_for(JOIN)
        # A connection of its own: the listening one would be waited for by whoever breaks the group.
        store: dist.Store = self._store(False)
        place = "cuda" if self.kind == "nccl" else "cpu"
        for prefix in (self.name, f"{self.name}/", f"{place}/"):
            store = dist.PrefixStore(prefix, store)
        if self.kind == "gloo":
            self._backend = dist.ProcessGroupGloo(store, 0, self.size, timedelta(seconds=self._limit_s))
            return
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)
        self._backend = dist.ProcessGroupNCCL(store, 0, self.size, options)

    def wait_for(self, number: int) -> None:
        """Return when all are ready for bucket `number`, and have been told to take it. Raises
        `RuntimeError`."""
        with self._changed:
            self._changed.wait_for(lambda: self.broken or self._all_ready(number), self._limit_s)
            if not self.broken and not self._all_ready(number):
                late = ", ".join(engine for engine, at in self._ready.items() if at < number)
                raise RuntimeError(f"{late} did not come for bucket {number} within {self._limit_s:g} s")
            if self.broken:
                raise RuntimeError(self.broken)
            self._released = number
            waiting = [future for at, future in self._waiting if at <= number]
        settle(waiting, "")

    def broadcast(self, data: torch.Tensor) -> None:
        """Send `data`, u8 [bytes]. Raises `RuntimeError` when the others have not taken it within the
        limit."""
        how = dist.BroadcastOptions()
        how.rootRank = 0
        if self.kind == "gloo":
            self._backend.broadcast([data], how).wait()
            return
        with torch.cuda.device(self._device):
            work = self._backend.broadcast([data], how)
        until_s = time.monotonic() + self._limit_s
        # NCCL's own wait orders streams and returns at once: whether the bytes left is asked.
        while not work.is_completed():
            if self.broken or time.monotonic() > until_s:
                self._backend.abort()
                raise RuntimeError(self.broken or f"a bucket was not taken within {self._limit_s:g} s")
            time.sleep(POLL_S)

    def end(self) -> None:
        """Note that the thread is through with it. The connections of a broken one close, so that the other
        sides need not wait for their own time limits."""
        with self._changed:
            self.busy = False
            if self.broken:
                self._backend = self._meeting = None

    def _all_ready(self, number: int) -> bool:
        return min(self._ready.values()) >= number


def settle(futures: Iterable[asyncio.Future[T]], value: T) -> None:
    """Set the results of futures, from any thread. Futures that nobody awaits any more are skipped."""

    def give(future: asyncio.Future[T]) -> None:
        if not future.done():
            future.set_result(value)

    for future in futures:
        try:
            future.get_loop().call_soon_threadsafe(give, future)
        except RuntimeError:  # its loop has ended, and with it who asked
            continue
