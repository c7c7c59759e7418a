"""One worker process of a reward pool, seen from the pool: started, spoken to, killed, reaped.

Promises: frames of the worker arrive in order, also those it sent just before it died; `on_exit` is called
exactly once, after the last frame, with the whole process group killed and the process reaped. What the
reward prints is logged up to a rate and its end kept for the cause of a death; it never blocks for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from areal_async.runtime.log import get_logger
from reward_service.channel import MAX_REPORT_BYTES, FrameError, FrameReader, Marker, Order, framed

log = get_logger("pool")

READ_BYTES = 256 << 10
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
OUTPUT_TAIL_BYTES = 2000
"""The end of the output that is kept for the cause of a death."""
OUTPUT_BYTES_PER_S = 4096
"""Output beyond this rate is dropped, with a count."""
PRINTED = "reward printed"
"""The event by which a tool knows what a reward prints."""
OUTPUT_BURST_BYTES = 32 << 10


class WorkerProcess:
    """A running `python -m reward_service.pool_worker`. Needs the event loop it was made in."""

    def __init__(self, *, on_frame: Callable[[bytes], None], on_exit: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_frame = on_frame
        self._on_exit = on_exit
        self._fault = ""
        self._frames = FrameReader(MAX_REPORT_BYTES)
        self._encoder = msgspec.msgpack.Encoder()
        self._unsent = bytearray()
        self.ended = asyncio.Event()
        self.marker = Marker.create()
        self._link, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                _command(theirs.fileno(), self.marker.fd),
                pass_fds=(theirs.fileno(), self.marker.fd),
                # Its own group, so that what a reward starts dies with it; its own session, so that a
                # Ctrl-C in the terminal reaches only the service, which then decides.
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(),
            )
        self.pid = self._popen.pid
        assert self._popen.stdout is not None
        self._output = Output(self._popen.stdout.fileno(), self.pid)
        self._exit_fd = os.pidfd_open(self.pid)
        self._link.setblocking(False)
        self._loop.add_reader(self._link, self._read)
        self._loop.add_reader(self._output.fd, self._read_output)
        self._loop.add_reader(self._exit_fd, self._exited)

    def order(self, order: Order) -> None:
        """Send an order without waiting; what the socket does not take yet is kept and sent later."""
        waiting = bool(self._unsent)
        self._unsent += framed(self._encoder.encode(order))
        if not waiting:
            self._write()

    def kill(self) -> None:
        """Kill the whole process group; `on_exit` follows. Safe to repeat.

        The process is not reaped before `_exited`, so its group id cannot be another's."""
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def memory_bytes(self) -> int:
        """Memory of the process itself that is in RAM; 0 once it has ended."""
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as statm:
                return int(statm.read().split()[1]) * PAGE_BYTES
        except (OSError, IndexError):
            return 0

    def close(self) -> None:
        """Free what outlives the exit: the marker. To be called after `on_exit`."""
        self.marker.close()

    def _write(self) -> None:
        try:
            sent = self._link.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            # The worker has gone; its exit tells the rest.
            self._unsent.clear()
            sent = 0
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._link, self._write)
        else:
            self._loop.remove_writer(self._link)

    def _read(self) -> bool:
        """Take what has arrived. False when there is no more, now or ever."""
        try:
            data = self._link.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._link)
            return False
        try:
            for payload in self._frames.feed(data):
                self._on_frame(payload)
        except (FrameError, msgspec.DecodeError) as error:
            self._fault = f"it broke the pool's protocol: {error}"
            self._loop.remove_reader(self._link)
            self.kill()
            return False
        return True

    def _read_output(self) -> None:
        if not self._output.read():
            self._loop.remove_reader(self._output.fd)

    def _exited(self) -> None:
        self.kill()
        while not self._fault and self._read():
            pass
        self._read_output()
        self._output.finish()
        for fd in (self._exit_fd, self._output.fd, self._link):
            self._loop.remove_reader(fd)
        self._loop.remove_writer(self._link)
        status = self._popen.wait()
        assert self._popen.stdout is not None
        self._popen.stdout.close()
        self._link.close()
        os.close(self._exit_fd)
        self.ended.set()
        self._on_exit(self._fault or describe_exit(status, self._output.tail()))


class Output:
    """What a worker's standard output and error carry: logged up to a rate, the end kept."""

    def __init__(self, fd: int, pid: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._pid = pid
        self._end = b""
        self._line = b""
        self._allowance = float(OUTPUT_BURST_BYTES)
        self._dropped_bytes = 0
        self._at_s = time.monotonic()

    def read(self) -> bool:
        """Take one portion; False at the end of the output."""
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
        self._log(whole)
        return True

    def finish(self) -> None:
        """What stands in a line that was not ended."""
        self._log(self._line)
        self._line = b""

    def _log(self, data: bytes) -> None:
        if text := data.decode("utf-8", "replace").rstrip():
            log.info(PRINTED, pid=self._pid, text=text)

    def tail(self) -> str:
        """The last lines, as one."""
        lines = self._end.decode("utf-8", "replace").strip().splitlines()
        return " | ".join(line.strip() for line in lines[-3:])


def describe_exit(status: int, output: str) -> str:
    """`signal SIGSEGV; last output: …` or `exit status 3`."""
    if status < 0:
        try:
            how = f"signal {signal.Signals(-status).name}"
        except ValueError:
            how = f"signal {-status}"
    else:
        how = f"exit status {status}"
    return f"{how}; last output: {output[-500:]}" if output else how


def _command(link_fd: int, marker_fd: int) -> list[str]:
    fds = ["--link-fd", str(link_fd), "--marker-fd", str(marker_fd)]
    return [sys.executable, "-m", "reward_service.pool_worker", *fds, "--parent", str(os.getpid())]


def _environment() -> dict[str, str]:
    """Ours; with unbuffered output, so that prints before a crash are seen, and one thread per worker for
    numerical libraries, since the pool is the parallelism."""
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
