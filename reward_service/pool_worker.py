"""A worker process of a reward pool: loads rewards, runs units one at a time, reports their verdicts.

Promises: every unit that returns or raises gives exactly one verdict for each of its inputs, validated and of
bounded size; what a reward prints never reaches the protocol; the process dies with its pool. Does not
promise to survive what a reward may do to its process, nor to end a unit in time: the pool kills the group.

Started by the pool as `python -m reward_service.pool_worker`. It must stay light: no torch, no numpy.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import functools
import inspect
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from areal_async.rpc.verdicts import Failure, Verdict
from reward_service.channel import (
    LENGTH,
    MAX_REPORT_BYTES,
    Assignment,
    Finished,
    Finishes,
    Forget,
    Load,
    Loaded,
    LoadFailed,
    Marker,
    Order,
    Report,
    Unit,
    framed,
)
from reward_service.checking import as_verdict, as_verdicts, clip, describe
from reward_service.imports import Import, imported_beside, keep
from reward_service.sdk import MARK, Mark, RewardInput, RewardLoadError, load_reward

FLUSH_AFTER_S = 0.005
"""Verdicts wait at most so long for company in one report, unless a unit takes longer."""
PR_SET_PDEATHSIG = 1


class Worker:
    """Runs the units of its programs and reports on a socket."""

    def __init__(self, link: socket.socket, marker: Marker) -> None:
        self._link = link
        self._incoming = link.makefile("rb")
        self._marker = marker
        self._programs: dict[int, Program] = {}
        self._orders = msgspec.msgpack.Decoder(Order)

    def serve(self) -> None:
        """Until the pool closes its end."""
        while (payload := self._read_frame()) is not None:
            match self._orders.decode(payload):
                case Assignment(units):
                    self._run(units)
                case Load() as order:
                    self._load(order)
                case Forget(program):
                    self._programs.pop(program, None)

    def _load(self, order: Load) -> None:
        try:
            program = self._programs[order.program] = load_program(order)
        except RewardLoadError as error:
            send(self._link, LoadFailed(order.program, clip(str(error))))
        except BaseException as error:
            text = f"the reward {order.name!r} failed while it was loaded: {describe(error)}"
            send(self._link, LoadFailed(order.program, text))
        else:
            send(self._link, Loaded(order.program, program.mark.batch, program.imports))

    def _run(self, units: list[Unit]) -> None:
        done: list[Finished] = []
        flushed_ns = time.monotonic_ns()
        for unit in units:
            if unit.number <= self._marker.recalled:
                continue
            began_ns = time.monotonic_ns()
            self._marker.begin(unit.number, began_ns)
            verdicts, raised = self._programs[unit.program](unit.inputs)
            ended_ns = time.monotonic_ns()
            done.append(Finished(unit.number, (ended_ns - began_ns) / 1e6, verdicts, raised))
            if ended_ns - flushed_ns > FLUSH_AFTER_S * 1e9:
                self._report(done)
                done, flushed_ns = [], ended_ns
        if done:
            self._report(done)

    def _report(self, done: list[Finished]) -> None:
        payload = msgspec.msgpack.encode(Finishes(done))
        if len(payload) > MAX_REPORT_BYTES:
            if len(done) > 1:
                for finished in done:
                    self._report([finished])
                return
            large = Failure("return_type", f"its verdicts take more than {MAX_REPORT_BYTES >> 20} MiB")
            done[0].verdicts = [large] * len(done[0].verdicts)
            payload = msgspec.msgpack.encode(Finishes(done))
        try:
            self._link.sendall(framed(payload))
        except OSError:
            # The pool has gone, or one of these units broke the link; the last one is not to be blamed.
            self._marker.begin(0, time.monotonic_ns())
            raise

    def _read_frame(self) -> bytes | None:
        head = self._incoming.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack(head)
        payload = self._incoming.read(size)
        return payload if len(payload) == size else None


class Program:
    """A loaded reward: encoded inputs in, one verdict for each out, whatever it returns or raises."""

    def __init__(self, function: Callable[..., Any], mark: Mark, imports: list[Import]) -> None:
        self.mark = mark
        self.imports = imports
        self._function = function
        self._inputs = msgspec.msgpack.Decoder(RewardInput)

    def __call__(self, encoded: list[msgspec.Raw]) -> tuple[list[Verdict], bool]:
        """The verdicts, and whether the invocation as a whole failed."""
        try:
            if self.mark.takes_list:
                inputs = [self._inputs.decode(one) for one in encoded]
                return as_verdicts(self._result(inputs), inputs), False
            given = self._inputs.decode(encoded[0])
            return [as_verdict(self._result(given), given)], False
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a reward are its errors too
            return [Failure("exception", describe(error))] * len(encoded), True

    def _result(self, given: RewardInput | list[RewardInput]) -> Any:
        result = self._function(given)
        return run_until_done(result) if isinstance(result, Awaitable) else result


def load_program(order: Load) -> Program:
    """The program of a `Load`, with its arguments filled in. Raises `RewardLoadError`."""
    if order.imports:
        keep(order.imports)
    function = load_reward(order.name, source=order.source)
    mark = getattr(function, MARK, Mark())
    if order.scope == "group" and mark.scope != "group":
        raise RewardLoadError(
            f"the reward {order.name!r} judges one episode at a time, and is asked for with the scope "
            '`group`. Mark it @reward(scope="group"), or set the scope to episode.'
        )
    if order.scope != "group" and mark.scope == "group":
        raise RewardLoadError(
            f"the reward {order.name!r} judges whole groups. Set the scope (beside its name) to group."
        )
    try:
        inspect.signature(function).bind(None, **order.args)
    except TypeError as error:
        raise RewardLoadError(f"the reward {order.name!r} and reward.args: {error}") from None
    preload = getattr(sys.modules.get(function.__module__), "preload", None)
    if order.source is None and preload is not None:
        preload(**order.args)
    imports = [] if order.source is None else imported_beside(Path(order.name.rpartition(":")[0]))
    return Program(functools.partial(function, **order.args) if order.args else function, mark, imports)


@functools.cache
def event_loop() -> Any:
    """The one loop of this process, made when the first asynchronous reward runs."""
    import asyncio  # heavy, and only asynchronous rewards need it

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def run_until_done(awaitable: Awaitable[Any]) -> Any:
    async def outcome() -> Any:
        return await awaitable

    return event_loop().run_until_complete(outcome())


def send(link: socket.socket, report: Report) -> None:
    link.sendall(framed(msgspec.msgpack.encode(report)))


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker of a reward pool (started by the pool).")
    parser.add_argument("--link-fd", type=int, required=True)
    parser.add_argument("--marker-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    _die_with(options.parent)
    # A reward's crash is a verdict, not a core file; its dump of the stack goes into the pool's log.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    for fd in (options.link_fd, options.marker_fd):
        os.set_inheritable(fd, False)
    link = socket.socket(fileno=options.link_fd)
    link.setblocking(True)
    Worker(link, Marker(options.marker_fd)).serve()
    # Threads and exit handlers that a reward left behind must not keep the process.
    os._exit(0)


def _die_with(parent: int) -> None:
    """End when the process of the pool ends, however it ends and whatever the reward is doing."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
