"""The owner's side of a process that computes verdicts: start it, send frames, kill and reap it.

Promises: frames of the process arrive in order, including frames that it sent just before it died. `on_exit`
is called exactly once, after the last frame. By then the whole process group is killed and the process is
reaped. Its output is logged up to a limited rate, and the end of its output is kept to explain its death.
Printing never blocks the process for long.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar

from areal_async.base.log import get_logger
from areal_async.base.processes import ChildProcess
from reward_service.pool.protocol import MAX_REPORT_BYTES, FrameReader, framed

log = get_logger("pool")

READ_BYTES = 256 << 10
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
OUTPUT_TAIL_BYTES = 2000  # bytes at the end of the output that are kept to explain a death
OUTPUT_BYTES_PER_S = 4096
OUTPUT_BURST_BYTES = 32 << 10


THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment variables that limit numerical libraries to one thread, because the pool's processes already
run in parallel."""


on_print: ContextVar[Callable[[int, str], None]] = ContextVar(
    "on_print", default=lambda pid, text: log.info("reward printed", pid=pid, text=text)
)
"""Function that receives a process's output lines. The function is read in the context in which the process
is started."""


class WorkerProcess:
    """A running process of `reward_service.pool.worker`. It belongs to the event loop that created it. Raises
    `OSError`."""

    def __init__(self, on_frame: Callable[[bytes], None], on_exit: Callable[[str], None]) -> None:
        """Start the process. Both callbacks run in the loop.

        If `on_frame` raises `ValueError`, the process has broken the protocol and is killed.
        """
        self._loop = asyncio.get_running_loop()
        self._on_frame, self._on_exit = on_frame, on_exit
        self._fault = ""
        self._frames = FrameReader(MAX_REPORT_BYTES)
        self._unsent = bytearray()
        self.ended = asyncio.Event()
        self._link, theirs = socket.socketpair()
        read_fd, write_fd = os.pipe()
        with theirs, open(write_fd, "wb"):
            try:
                words = ["-m", "reward_service.pool.worker", "--link-fd", str(theirs.fileno())]
                self._child = ChildProcess(
                    [sys.executable, "-P", *words],
                    # Without buffering, output before a crash is seen.
                    environment={**THREADS, **os.environ, "PYTHONUNBUFFERED": "1"},
                    output=write_fd,
                    pass_fds=[theirs.fileno()],
                    on_orphaned="kill",
                )
            except BaseException:
                self._link.close()
                os.close(read_fd)
                raise
        self.pid = self._child.pid
        self._output = ProcessOutput(read_fd, self.pid)
        self._link.setblocking(False)
        self._loop.add_reader(self._link, self._read)
        self._loop.add_reader(read_fd, self._read_output)
        self._life = asyncio.create_task(self._live(), name=f"process {self.pid}")

    def send(self, payload: bytes) -> None:
        """Send a frame without waiting. Bytes that the socket does not accept yet are sent later."""
        waiting = bool(self._unsent)
        self._unsent += framed(payload)
        if not waiting:
            self._write()

    def kill(self) -> None:
        """Kill the whole process group. `on_exit` is called later. It is harmless to kill again."""
        self._child.kill()

    def memory_bytes(self) -> int:
        """Return the process's own memory in RAM, or 0 once it has ended."""
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as statm:
                return int(statm.read().split()[1]) * PAGE_BYTES
        except (OSError, IndexError):
            return 0

    def _write(self) -> None:
        try:
            del self._unsent[: self._link.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the process has ended; its exit is handled elsewhere
        if self._unsent:
            self._loop.add_writer(self._link, self._write)
        else:
            self._loop.remove_writer(self._link)

    def _read(self) -> bool:
        """Read the available bytes. Return False if there are none at present, or at the end of the
        stream."""
        try:
            data = self._link.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        try:
            for payload in self._frames.feed(data):
                self._on_frame(payload)
        except (ValueError, RecursionError) as error:
            self._fault, data = f"it broke the protocol: {error}", b""
            self.kill()
        if not data:
            self._loop.remove_reader(self._link)
        return bool(data)

    def _read_output(self) -> None:
        if not self._output.read():
            self._loop.remove_reader(self._output.fd)

    async def _live(self) -> None:
        status = await self._child.wait()
        while not self._fault and self._read():
            pass
        self._read_output()
        self._output.finish()
        for fd in (self._output.fd, self._link):
            self._loop.remove_reader(fd)
        self._loop.remove_writer(self._link)
        self._link.close()
        os.close(self._output.fd)
        self.ended.set()
        self._on_exit(self._fault or describe_exit(status, self._output.tail()))


class ProcessOutput:
    """The standard output and error of a process. They are logged up to a limited rate, and their end is
    kept."""

    def __init__(self, fd: int, pid: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._pid = pid
        self._show = on_print.get()
        self._end = b""
        self._line = b""
        self._allowance = float(OUTPUT_BURST_BYTES)
        self._dropped_bytes = 0
        self._at_s = time.monotonic()

    def read(self) -> bool:
        """Read one portion. Return False at the end of the output."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        self._end = (self._end + data[-OUTPUT_TAIL_BYTES:])[-OUTPUT_TAIL_BYTES:]
        now_s = time.monotonic()
        self._allowance = min(OUTPUT_BURST_BYTES, self._allowance + (now_s - self._at_s) * OUTPUT_BYTES_PER_S)
        self._at_s = now_s
        if len(data) > self._allowance:
            self._dropped_bytes += len(data)
            return True
        self._allowance -= len(data)
        if self._dropped_bytes:
            log.warning("reward printed too much", pid=self._pid, dropped_bytes=self._dropped_bytes)
            self._dropped_bytes = 0
        whole, newline, self._line = (self._line + data).rpartition(b"\n")
        if len(self._line) > OUTPUT_TAIL_BYTES:
            whole, self._line = whole + newline + self._line, b""
        self._pass_on(whole)
        return True

    def finish(self) -> None:
        """Log the last line if it has no newline."""
        self._pass_on(self._line)
        self._line = b""

    def _pass_on(self, data: bytes) -> None:
        if text := data.decode("utf-8", "replace").rstrip():
            self._show(self._pid, text)

    def tail(self) -> str:
        """Return the last lines as one line."""
        lines = self._end.decode("utf-8", "replace").strip().splitlines()
        return " | ".join(line.strip() for line in lines[-3:])


SIGNALS = {one.value: one.name for one in signal.Signals}


def describe_exit(status: int, output: str) -> str:
    """Return a text such as `signal SIGSEGV; last output: …` or `exit status 3`."""
    how = f"exit status {status}" if status >= 0 else f"signal {SIGNALS.get(-status, -status)}"
    return f"{how}; last output: {output[-500:]}" if output else how
