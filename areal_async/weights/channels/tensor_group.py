"""The trainer's rank in a process group with several engines. It forms the group, sends tensors, and gives up
on failures.

Promises:
- No member starts a bucket before all members are ready for it. If a member fails between two buckets, the
  other members are therefore not blocked in a broadcast.
- A failure breaks the group permanently. Members that wait for a bucket get the reason, and members that wait
  at the meeting point lose their connection. The trainer waits at most `limit_s` for a member.

One case remains: if a member stops during a broadcast, the members that expect bytes from it may be blocked
until its connections close.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
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
    """Rank 0 of a group with `members`: ranks by engine, in rank order.

    One thread at a time sends. Any thread may report a member as ready, or break the group. Raises `OSError`
    if no port can be opened.
    """

    def __init__(
        self, name: str, members: Mapping[str, int], *, device: torch.device, limit_s: float, host: str
    ) -> None:
        self.name, self.host = name, host
        self.members = dict(members)
        *firsts, self.size = accumulate(members.values(), initial=1)  # the trainer is rank 0
        self.first_rank = dict(zip(members, firsts, strict=True))
        self.kind: Literal["nccl", "gloo"] = "nccl" if device.type == "cuda" else "gloo"
        self.busy = False
        self.broken = ""
        """The reason why the group is broken, or an empty text."""
        self._device = device
        self._limit_s = limit_s
        self._backend: Any = None
        """torch's `ProcessGroupGloo` or `ProcessGroupNCCL`. torch's types have no common base with
        collectives."""
        self._changed = threading.Condition()
        self._tag: VersionTag | None = None
        self._ready: dict[str, int] = {}  # the bucket for which each member is ready
        self._last = self._released = 0
        self._waiters: set[asyncio.Future[None]] = set()
        # By default a store listens on every interface and authenticates no client. Each group has its own
        # store. Closing the store disconnects all members that still wait there.
        with socket.create_server((host, 0), backlog=128) as listening:
            self.port: int = listening.getsockname()[1]
            self._meeting: dist.TCPStore | None = self._store(True, master_listen_fd=listening.detach())

    def _store(self, is_master: bool, **how: Any) -> dist.TCPStore:
        limit = timedelta(seconds=self._limit_s)
        return dist.TCPStore(
            self.host, self.port, None, is_master, timeout=limit, wait_for_workers=False, **how
        )

    def begin(self, tag: VersionTag, n_buckets: int) -> None:
        """Prepare to send `tag`, of which no member has taken a bucket yet."""
        with self._changed:
            self.busy, self._tag, self._last, self._released = True, tag, n_buckets, JOIN - 1
            self._ready = dict.fromkeys(self.members, JOIN - 1)
            self._wake()

    # --- the members' side: from an event loop -------------------------------------------------------

    async def ready(self, engine: str, tag: VersionTag, number: int, wait_s: float) -> bool | str:
        """Return whether `engine` may take bucket `number` now.

        The result False means that not all members were ready within `wait_s`. A text is the reason why
        nothing more will be sent.
        """
        with self._changed:
            if self.broken or tag != self._tag or engine not in self._ready:
                return self.broken or "the group sends something else by now"
            self._ready[engine] = max(number, self._ready[engine])
            self._changed.notify_all()
        until_s = time.monotonic() + wait_s
        while True:
            woken = asyncio.get_running_loop().create_future()
            with self._changed:
                if self.broken or number <= self._released or number >= self._last:
                    return self.broken or True
                self._waiters.add(woken)
            try:
                await asyncio.wait_for(woken, until_s - time.monotonic())
            except TimeoutError:
                return False
            finally:
                with self._changed:
                    self._waiters.discard(woken)

    def break_up(self, reason: str) -> None:
        """Stop using the group. Members that wait for a bucket get the reason."""
        with self._changed:
            if self.broken:
                return
            self.broken = reason
            self._changed.notify_all()
            self._wake()
            if not self.busy:
                self._backend = self._meeting = None

    def part(self) -> None:
        """Close the meeting point of a broken group, so that members that wait there lose the connection.

        A member that arrives later would try to connect for minutes. Therefore, first give the members that
        were told to join a moment to arrive.
        """
        self._meeting = None

    # --- the trainer's side: on a thread that may wait -----------------------------------------------

    def meet(self) -> None:
        """Form the group as SGLang's `init_custom_process_group` does, and return when all members have
        joined.

        Raises `RuntimeError`.
        """
        if self._backend is not None:
            return
        self.wait_for(JOIN)
        # This store needs a connection of its own, because breaking the group would wait for the listening
        # one.
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
        """Wait until all members are ready for bucket `number` and were told to take it. Raises
        `RuntimeError`."""
        with self._changed:
            self._changed.wait_for(lambda: self.broken or self._all_ready(number), self._limit_s)
            if not self.broken and not self._all_ready(number):
                late = ", ".join(engine for engine, at in self._ready.items() if at < number)
                raise RuntimeError(f"{late} did not come for bucket {number} within {self._limit_s:g} s")
            if self.broken:
                raise RuntimeError(self.broken)
            self._released = number
            self._wake()

    def broadcast(self, data: torch.Tensor) -> None:
        """Send `data`, u8 [bytes]. Raises `RuntimeError` if the members have not taken it within the
        limit."""
        how = dist.BroadcastOptions()
        how.rootRank = 0
        if self.kind == "gloo":
            self._backend.broadcast([data], how).wait()
            return
        with torch.cuda.device(self._device):
            work = self._backend.broadcast([data], how)
        until_s = time.monotonic() + self._limit_s
        # NCCL's own wait only orders streams and returns at once, so this loop polls for completion.
        while not work.is_completed():
            if self.broken or time.monotonic() > until_s:
                self._backend.abort()
                raise RuntimeError(self.broken or f"a bucket was not taken within {self._limit_s:g} s")
            time.sleep(POLL_S)

    def end(self) -> None:
        """Record that the sending thread no longer uses the group.

        This closes the connections of a broken group, so that the other members need not wait for their own
        timeouts.
        """
        with self._changed:
            self.busy = False
            if self.broken:
                self._backend = self._meeting = None

    def _wake(self) -> None:
        """Wake all waiting members, so that they check the state again. The caller holds the lock."""
        for woken in self._waiters:
            settle(woken, None)

    def _all_ready(self, number: int) -> bool:
        return min(self._ready.values()) >= number


def settle(future: asyncio.Future[T], value: T) -> None:
    """Set the result of a future, from any thread. A future without a waiter is ignored."""

    def give() -> None:
        if not future.done():
            future.set_result(value)

    with suppress(RuntimeError):  # the loop of the waiter has ended
        future.get_loop().call_soon_threadsafe(give)
