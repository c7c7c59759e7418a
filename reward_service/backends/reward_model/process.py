"""The process of a reward model, seen from its owner: started, spoken to, killed, reaped.

Promises: reports arrive in order, also those sent just before the process died; `on_exit` is called exactly
once, after the last of them, with the whole process group killed and the process reaped. What it prints is
logged up to a rate, and the end of it is the cause of a death.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from reward_service.backends.reward_model import RewardModelArguments
from reward_service.backends.reward_model.protocol import MAX_FRAME_BYTES, Load, Order, Report
from reward_service.channel import LENGTH, framed
from reward_service.process import Output, describe_exit


class ModelProcess:
    """A running `python -m reward_service.backends.reward_model.worker`."""

    def __init__(
        self,
        arguments: RewardModelArguments,
        *,
        on_report: Callable[[Report], None],
        on_exit: Callable[[str], None],
    ) -> None:
        """Starts it and tells it what to load. Raises OSError. Needs a running event loop."""
        self._on_report = on_report
        self._on_exit = on_exit
        self._decode = msgspec.msgpack.Decoder(Report).decode
        self._link, theirs = socket.socketpair()
        read_fd, write_fd = os.pipe()
        try:
            self._popen = subprocess.Popen(
                _command(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError:
            self._link.close()
            os.close(read_fd)
            raise
        finally:
            theirs.close()
            os.close(write_fd)
        self.pid = self._popen.pid
        self.ended = asyncio.Event()
        self._output = Output(read_fd, self.pid)
        self._link.setblocking(False)
        asyncio.get_running_loop().add_reader(read_fd, self._read_output)
        self._orders: asyncio.Queue[Order] = asyncio.Queue()
        self.send(Load(arguments.model_dump_json().encode()))
        self._life = asyncio.create_task(self._live(), name="reward-model-process")

    def send(self, order: Order) -> None:
        """Without waiting: the owner bounds how many are under way."""
        self._orders.put_nowait(order)

    def kill(self) -> None:
        """Kill the whole process group; `on_exit` follows. Safe to repeat."""
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _live(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self._link)
        writing = asyncio.create_task(self._write(writer))
        fault = ""
        try:
            while (frame := await _frame(reader)) is not None:
                self._on_report(self._decode(frame))
        except (msgspec.DecodeError, ValueError) as error:
            fault = f"it broke the protocol: {error}"
        finally:
            # Its end of the link is closed: it has ended, or is of no more use.
            self.kill()
            writing.cancel()
            writer.close()
            status = await asyncio.to_thread(self._popen.wait)
            self._read_output()
            asyncio.get_running_loop().remove_reader(self._output.fd)
            os.close(self._output.fd)
            self.ended.set()
        self._on_exit(fault or describe_exit(status, self._output.tail()))

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # it has gone; the reading side tells the rest
            while True:
                writer.write(framed(msgspec.msgpack.encode(await self._orders.get())))
                await writer.drain()

    def _read_output(self) -> None:
        if not self._output.read():
            asyncio.get_running_loop().remove_reader(self._output.fd)


async def _frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame; None at the end. Raises ValueError for one that is too large."""
    try:
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {size} bytes")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, OSError):
        return None


def _command(link_fd: int) -> list[str]:
    module = [sys.executable, "-P", "-m", "reward_service.backends.reward_model.worker"]
    return [*module, "--link-fd", str(link_fd), "--parent", str(os.getpid())]
