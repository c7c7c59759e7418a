"""The monitor of one jail: it collects output, enforces limits and reports how the jail ended.

A jail may run its program several times, with one input after another. The limits apply to each run, except
for `within_s` and `clock_s`, which apply to all runs together.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from typing import Any

from . import cgroup, messages, process_tree

LOOK_EVERY_S = 0.02
LOOK_CLOSELY_S = 0.005  # seconds between polls once half of the memory is used, if polling is the only limit
SETUP_LIMIT_S = 20.0
END_LIMIT_S = 8.0
END_GRACE_S = 0.05
"""Seconds between the request to end a run and the kill. Within this time, the monitor notices if the program
has just ended by itself."""
READ_BYTES = 1 << 16
GO = b"g"  # byte that the first process of a jail waits for
ERRORS_FACTOR = (
    64  # standard error above its limit by this factor ends a run, because public judges discard it
)
OWN_FILES = 4  # files and folders in a jail's folder beside the program's


class ClientGone(Exception):
    """The client of the launcher has ended, so no process waits for the answer."""


class RunMonitor:
    """A monitor: call `watch()` until the jail has ended, then `answer()`."""

    def __init__(
        self,
        request: dict[str, Any],
        *,
        pid: int,
        control: socket.socket,
        streams: tuple[int, int],
        client: socket.socket,
        group: cgroup.MemoryGroup | None,
    ) -> None:
        """Create the monitor.

        `pid` is the launcher's child. All processes of the jail are descendants of this child, and the jail
        ends with it. `streams` are the read ends of standard output and errors. `group` counts the jail's
        memory, if there is one.
        """
        self._limits, self._within_s = request["limits"], request["within_s"]
        self._isolated = request["level"] == "isolated"
        self._folder = request["work"]
        self._work_fd: int | None = None
        self._group = group
        self._look_every_s = LOOK_EVERY_S
        self._pid = self._root = pid
        self._pidfd = os.pidfd_open(pid)
        self._control, self._client = control, client
        self._streams = streams
        self._failed = ""
        self._peak_bytes = 0
        self._beside: int = request["beside"]
        self._began_beside_ms = process_tree.usage(self._beside).cpu_ms if self._beside else 0.0
        self._most_beside_ms = self._began_beside_ms
        self._runs: list[dict[str, Any]] = []
        self._printed_before = b""
        self._spent_before_s = self._cpu_before_ms = 0.0
        self._made_s = time.monotonic()
        self._begin_run()
        self._killed_s: float | None = None
        self._end_asked_s: float | None = None

    def _begin_run(self) -> None:
        self._output = {fd: bytearray() for fd in self._streams}
        self._printed = dict.fromkeys(self._streams, 0)
        self._limit = ""
        self._report: dict[str, Any] = {"status": None}
        self._cpu_ms = 0.0
        self._waits = process_tree.WaitMeter()
        self._most_processes = 0
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self._setup_until_s = time.monotonic() + SETUP_LIMIT_S

    def watch(self) -> None:
        """Return when the jail's first process has ended. If the client ends first, kill that process and
        raise `ClientGone`."""
        poll = select.poll()
        for fd in (*self._streams, self._control.fileno(), self._client.fileno(), self._pidfd):
            poll.register(fd, select.POLLIN)
        look_s = 0.0
        try:
            while True:
                for fd, _ in poll.poll(self._look_every_s * 1000):
                    if fd == self._pidfd:
                        self._drain()
                        self._count_memory()
                        return
                    if fd == self._client.fileno():
                        if messages.receive(self._client) is None:
                            raise ClientGone
                        self._end_asked_s = self._end_asked_s or time.monotonic()
                    elif fd == self._control.fileno():
                        if not self._told():
                            poll.unregister(fd)
                    elif self._read(fd) == b"":
                        poll.unregister(fd)
                now_s = time.monotonic()
                if self._began_s is None and now_s > self._setup_until_s:
                    self._failed = self._failed or "the jail was not ready in time"
                    self._kill()
                if self._end_asked_s is not None and now_s - self._end_asked_s > END_GRACE_S:
                    self._end_as_asked()
                if self._began_s is not None and now_s >= look_s:
                    look_s = now_s + self._look_every_s
                    self._look(now_s - self._began_s)
                if self._killed_s is not None and now_s - self._killed_s > END_LIMIT_S:
                    self._failed = "the jail could not be ended"
                    return
        finally:
            self._kill()
            for held in (self._pidfd, self._work_fd):
                if held is not None:
                    os.close(held)

    def answer(self) -> tuple[dict[str, Any], bytes]:
        """Return how the runs ended, with their standard output and standard error."""
        if self._began_s is None and not self._failed and not self._limit and not self._runs:
            said = self._output[self._streams[1]].decode("utf-8", "replace").strip().splitlines()
            self._failed = said[-1] if said else "its first process ended at once"
        if self._began_s is not None or self._limit:
            self._end_run()
        head = {"failed": self._failed, "runs": self._runs}
        return head, self._printed_before

    def _end_run(self) -> None:
        """Record how the present run ended."""
        now_s = time.monotonic()
        out, err = (bytes(self._output[fd]) for fd in self._streams)
        wall_ms = ((self._ended_s or now_s) - (self._began_s or now_s)) * 1000
        cpu_ms = self._report.get("cpu_ms") or self._cpu_ms
        waited_ms = self._waits.waited_s * 1000
        if (
            self._most_processes <= 1 and not self._beside
        ):  # it has no other process that it could have waited for
            waited_ms = max(waited_ms, self._report.get("waited_ms", 0.0))
        ran_ms = self._report.get("ran_ms") or wall_ms
        spent_ms = max(ran_ms - waited_ms - self._cpu_beside_ms(), cpu_ms)
        times = {"wall_ms": wall_ms, "waited_ms": waited_ms, "spent_ms": spent_ms, "cpu_ms": cpu_ms}
        sizes = {"peak_mb": self._peak_bytes / (1 << 20), "stdout": len(out), "stderr": len(err)}
        self._runs.append({"kind": self._limit, "status": self._report["status"], **times, **sizes})
        self._printed_before += out + err
        self._spent_before_s += spent_ms / 1000

    def _look(self, wall_s: float) -> None:
        if self._ended_s is not None:
            return
        limits = self._limits
        used = process_tree.usage(self._root)
        self._most_processes = max(self._most_processes, used.processes)
        # A program and the tests of a pair wait for each other, so both count together.
        self._waits.look([self._root, *filter(None, [self._beside])], time.monotonic())
        own_ms = (wall_s - self._waits.waited_s) * 1000 - self._cpu_beside_ms()
        self._cpu_ms = max(self._cpu_ms, used.cpu_ms - self._cpu_before_ms)
        files, files_bytes = self._files()
        if self._too_much(used, files_bytes):
            self._end("memory")
        elif self._cpu_ms > limits["cpu_s"] * 1000:
            self._end("cpu")
        elif used.processes > limits["processes"] + 1:
            self._end("processes")
        elif own_ms > min(limits["wall_s"], self._within_s - self._spent_before_s) * 1000:
            self._end("timeout")
        elif time.monotonic() - self._made_s > limits["clock_s"]:
            self._end("clock")
        elif files > limits["files"] or files_bytes > limits["files_mb"] << 20:
            self._end("files")

    def _cpu_beside_ms(self) -> float:
        """Return the CPU time that the tests of a pair have used so far."""
        if not self._beside:
            return 0.0
        self._most_beside_ms = max(self._most_beside_ms, process_tree.usage(self._beside).cpu_ms)
        return self._most_beside_ms - self._began_beside_ms

    def _end_as_asked(self) -> None:
        if self._report["status"] is None and (
            self._began_s is None or any(map(process_tree.alive, process_tree.descendants(self._root)))
        ):
            self._end("ended")

    def _files(self) -> tuple[int, int]:
        """Return the number of files and folders of the run, and their bytes."""
        if not self._isolated:
            return process_tree.folder_usage(self._folder, self._limits["files"])
        if self._root == self._pid:
            return 0, 0  # process 1 has already ended
        try:
            if self._work_fd is None:
                inside = f"/proc/{self._root}/root{self._folder}"
                self._work_fd = os.open(inside, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError, PermissionError) as error:
            if isinstance(error, PermissionError) and process_tree.alive(self._root):
                raise
            return 0, 0
        about = os.fstatvfs(self._work_fd)
        files = about.f_files - about.f_ffree - OWN_FILES
        return files, (about.f_blocks - about.f_bfree) * about.f_frsize

    def _too_much(self, used: process_tree.TreeUsage, files_bytes: int) -> bool:
        """Return whether the run exceeds its memory limit."""
        most = self._limits["memory_mb"] << 20
        if self._group is not None:
            self._peak_bytes = max(self._peak_bytes, self._group.used_bytes())
            return self._group.over()
        # In a jail the filter forbids shared memory except files, sockets and pipes. Without a jail, mapped
        # memory counts.
        shared = used.mapped_shared_bytes
        if self._isolated:
            shared = files_bytes + process_tree.channel_bytes(self._root)
        held = used.private_bytes + shared
        if held > most:  # memory shared after a fork was counted once per process
            held -= used.private_bytes - process_tree.proportional_bytes(self._root, used.private_bytes)
        self._look_every_s = LOOK_CLOSELY_S if held > most / 2 else LOOK_EVERY_S
        self._peak_bytes = max(self._peak_bytes, held)
        return held > most

    def _count_memory(self) -> None:
        """Record the peak of memory at the end, and whether the kernel ended the run because of its
        memory."""
        if self._group is not None:
            self._peak_bytes = max(self._peak_bytes, self._group.peak_bytes())
            if self._group.over():
                self._limit = self._limit or "memory"

    def _told(self) -> bool:
        """Handle one message of the jail's first process. Return False if no more will come."""
        message = None
        with contextlib.suppress(ConnectionResetError):  # it was killed before it had read all messages
            message = messages.receive(self._control)
        if message is None:
            return False
        head, _ = message
        if "started" in head:
            self._began_s = time.monotonic()
            if self._isolated:  # it is a child of bubblewrap's own process
                self._root = (process_tree.children(self._pid) or [self._pid])[0]
        elif "failed" in head:
            self._failed = str(head["failed"])
        else:
            self._report = head
            self._ended_s = self._ended_s or time.monotonic()
            if head.get("more") and self._killed_s is None:
                self._next_run()
        return True

    def _next_run(self) -> None:
        """Start the program with the next input. The jail has no other process at this time and waits for the
        input."""
        self._drain_streams()
        self._count_memory()
        if self._limit:
            self._kill()
            return
        self._end_run()
        self._cpu_before_ms = process_tree.usage(self._root).cpu_ms
        self._begin_run()
        with contextlib.suppress(OSError):  # it has been killed in the meantime
            self._control.send(GO)

    def _read(self, fd: int) -> bytes | None:
        """Read one portion of the output. Return empty bytes at the end of the stream, and None if nothing is
        available."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(fd, READ_BYTES)
            if self._keep(fd, data):
                self._end("output")
            return data
        return None

    def _keep(self, fd: int, data: bytes) -> bool:
        """Keep the beginning of standard output and the end of standard error, within their limits.

        Return whether the program has printed more than allowed.
        """
        kept, most = self._output[fd], self._limits["output_kb"] << 10
        self._printed[fd] += len(data)
        if fd == self._streams[0]:
            kept += data[: most - len(kept)]
            return self._printed[fd] > most
        kept += data
        del kept[:-most]
        return self._printed[fd] > most * ERRORS_FACTOR

    def _drain(self) -> None:
        """Read the remaining output and messages."""
        self._drain_streams()
        while select.select([self._control], [], [], 0)[0] and self._told():
            pass

    def _drain_streams(self) -> None:
        """Read the data that is left in the pipes, at most their capacity."""
        for fd in self._streams:
            while self._read(fd):
                pass

    def _end(self, limit: str) -> None:
        self._limit = self._limit or limit
        self._ended_s = self._ended_s or time.monotonic()
        self._kill()

    def _kill(self) -> None:
        """Kill the first process. In a jail all other processes die with it."""
        if self._killed_s is None:
            self._killed_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
