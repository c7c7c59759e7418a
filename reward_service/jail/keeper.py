"""Watches one jail from outside: gathers what it prints, ends it at its limits, says how it ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from reward_service.jail import frames, memory, tree

LOOK_EVERY_S = 0.02
LOOK_CLOSELY_S = 0.005
"""Once half of the memory is used, where looking is all that holds it."""
SETUP_LIMIT_S = 20.0
END_LIMIT_S = 8.0
READ_BYTES = 1 << 16


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass
class Seen:
    """What is known about a run so far."""

    kind: str = ""
    """Which limit ended it; empty while none has."""
    failed: str = ""
    """Why the jail could not be made."""
    status: int | None = None
    cpu_ms: float = 0.0
    peak_bytes: int = 0
    began_s: float | None = None
    ended_s: float | None = None
    output: dict[int, bytearray] = field(default_factory=dict)
    artifacts: list[tuple[str, int]] = field(default_factory=list)
    artifact_bytes: bytes = b""


class Keeper:
    """`Keeper(request, ...).watch()` until the jail is empty."""

    def __init__(
        self,
        request: dict[str, Any],
        *,
        pid: int,
        first: int,
        control: socket.socket,
        streams: tuple[int, int],
        client: socket.socket,
        group: memory.MemoryGroup | None,
    ) -> None:
        """`pid`: our child, whose end is the jail's. `first`: the process below which all of it is. `group`:
        where all of it is counted, if there is one."""
        self._limits = request["limits"]
        self._work: str | None = request.get("work")
        self._maker = request["maker"]
        self._group = group
        self._work_fd: int | None = None
        self._look_every_s = LOOK_EVERY_S
        self._root = first
        self._pid, self._first = pid, first
        self._control, self._client = control, client
        self._streams = streams
        self._seen = Seen(output={fd: bytearray() for fd in streams})
        self._pidfd = os.pidfd_open(pid)
        try:
            self._first_fd: int | None = os.pidfd_open(first)
        except ProcessLookupError:
            self._first_fd = None  # it has ended already
        self._killed_s: float | None = None

    def watch(self) -> Seen:
        poll = select.poll()
        for fd in (*self._streams, self._control.fileno(), self._client.fileno(), self._pidfd):
            poll.register(fd, select.POLLIN)
        setup_until_s = time.monotonic() + SETUP_LIMIT_S
        look_s = 0.0
        try:
            while True:
                for fd, _ in poll.poll(self._look_every_s * 1000):
                    if fd == self._pidfd:
                        self._drain()
                        self._count_memory()
                        return self._seen
                    if fd == self._client.fileno():
                        if frames.receive(self._client) is None:
                            raise ClientGone
                        if self._seen.status is None:  # it asks for the end
                            self._end("ended")
                    elif fd == self._control.fileno():
                        if not self._told():
                            poll.unregister(fd)
                    elif not self._read(fd):
                        poll.unregister(fd)
                now_s = time.monotonic()
                if self._seen.began_s is None:
                    if now_s > setup_until_s:
                        self._seen.failed = self._seen.failed or "the jail was not ready in time"
                        self._kill()
                elif now_s >= look_s:
                    look_s = now_s + self._look_every_s
                    self._look(now_s - self._seen.began_s)
                if self._killed_s is not None and now_s - self._killed_s > END_LIMIT_S:
                    self._seen.failed = "the jail could not be ended"
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self._pid, signal.SIGKILL)
                    return self._seen
        finally:
            self._kill()
            self._wait()
            os.close(self._pidfd)
            for held in (self._first_fd, self._work_fd):
                if held is not None:
                    os.close(held)

    def _look(self, wall_s: float) -> None:
        if self._seen.ended_s is not None:
            return
        limits = self._limits
        used = tree.usage(self._root)
        self._seen.cpu_ms = max(self._seen.cpu_ms, used.cpu_ms)
        if self._too_much(used):
            self._end("memory")
        elif used.cpu_ms > limits["cpu_s"] * 1000:
            self._end("cpu")
        elif used.processes > limits["processes"] + 1:
            self._end("processes")
        elif wall_s > limits["wall_s"]:
            self._end("timeout")
        elif self._work is not None:
            files, size_bytes = tree.folder_usage(self._work, limits["files"])
            if files > limits["files"] or size_bytes > limits["files_mb"] << 20:
                self._end("files")

    def _too_much(self, used: tree.Usage) -> bool:
        """Whether the jail holds more memory than it may."""
        most = self._limits["memory_mb"] << 20
        if self._group is not None:
            self._seen.peak_bytes = max(self._seen.peak_bytes, self._group.used_bytes())
            return self._group.over()
        held = used.private_bytes + self._shared_bytes(used)
        if held > most:  # what processes share after a fork was counted for each
            held -= used.private_bytes - tree.proportional_bytes(self._root, used.private_bytes)
        self._look_every_s = LOOK_CLOSELY_S if held > most / 2 else LOOK_EVERY_S
        self._seen.peak_bytes = max(self._seen.peak_bytes, held)
        return held > most

    def _shared_bytes(self, used: tree.Usage) -> int:
        """In a jail: what lies in its folder and may lie in sockets and pipes; the filter lets it have no
        other shared memory. Else what is mapped."""
        if not self._maker:
            return used.mapped_shared_bytes
        if self._work_fd is None:
            with contextlib.suppress(OSError):
                self._work_fd = os.open(f"/proc/{self._root}/root/work", os.O_PATH | os.O_CLOEXEC)
        held = tree.channel_bytes(self._root)
        if self._work_fd is not None:
            about = os.fstatvfs(self._work_fd)
            held += (about.f_blocks - about.f_bfree) * about.f_frsize
        return held

    def _count_memory(self) -> None:
        """At the end: the peak, and whether the kernel ended it for its memory."""
        if self._group is not None:
            self._seen.peak_bytes = max(self._seen.peak_bytes, self._group.peak_bytes())
            if self._group.over():
                self._seen.kind = self._seen.kind or "memory"

    def _told(self) -> bool:
        try:
            message = frames.receive(self._control)
        except ConnectionResetError:
            return False  # it was killed before it had read all that it was told
        if message is None:
            return False
        head, body = message
        if "started" in head:
            self._seen.began_s = time.monotonic()
            if self._maker == "bubblewrap":  # the warden is below it
                self._root = (tree.children(self._first) or [self._first])[0]
        elif "ended" in head:
            self._seen.ended_s = time.monotonic()
            self._count_memory()
            if self._group is not None:
                self._group.end()
                self._group = None
            frames.send(self._control, {"go": True})
        elif "failed" in head:
            self._seen.failed = str(head["failed"])
        elif "status" in head:
            self._seen.status = int(head["status"])
            self._seen.cpu_ms = float(head["cpu_ms"])
            self._seen.ended_s = self._seen.ended_s or time.monotonic()
            self._seen.artifacts = [(str(name), int(size)) for name, size in head["artifacts"]]
            self._seen.artifact_bytes = body
        return True

    def _read(self, fd: int) -> bool:
        """Take one portion; False at the end of the stream."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return True
        kept = self._seen.output[fd]
        most = self._limits["output_kb"] << 10
        kept += data[: most - len(kept)]
        if len(data) and len(kept) >= most:
            self._end("output")
        return bool(data)

    def _drain(self) -> None:
        """What was printed before the end. The pipes may hold no more than their size."""
        for fd in self._streams:
            with contextlib.suppress(BlockingIOError):
                while data := os.read(fd, READ_BYTES):
                    most = self._limits["output_kb"] << 10
                    kept = self._seen.output[fd]
                    if len(kept) + len(data) > most and not self._seen.kind:
                        self._seen.kind = "output"
                    kept += data[: most - len(kept)]
        while self._told_now():
            pass

    def _told_now(self) -> bool:
        return bool(select.select([self._control], [], [], 0)[0]) and self._told()

    def _end(self, kind: str) -> None:
        self._seen.kind = self._seen.kind or kind
        self._seen.ended_s = time.monotonic()
        self._kill()

    def _kill(self) -> None:
        """The first process of namespaces takes all others with it; a warden without them does it by hand."""
        if self._killed_s is None:
            self._killed_s = time.monotonic()
        if self._first_fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first_fd, signal.SIGKILL if self._maker else signal.SIGTERM)

    def _wait(self) -> None:
        if not select.select([self._pidfd], [], [], END_LIMIT_S)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        tree.reap(END_LIMIT_S)
