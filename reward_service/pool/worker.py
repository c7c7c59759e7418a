"""A worker process of a reward pool: loads rewards, runs units one at a time, reports their verdicts.

Promises: every unit that returns or raises gives exactly one verdict for each of its inputs, validated and of
bounded size; what a reward prints never reaches the protocol; the process dies with its pool. Does not
promise to survive what a reward may do to its process, nor to end a unit in time: the pool kills the group.

Started by the pool as `python -m reward_service.pool.worker`. It must stay light: no torch, no numpy.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import importlib
import inspect
import os
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from areal_async.base.verdicts import Failure, Verdict
from reward_service.checking import as_verdict, as_verdicts, clip, describe
from reward_service.pool.protocol import (
    MAX_REPORT_BYTES,
    Assignment,
    FinishedUnit,
    FrameLink,
    LoadReward,
    Marker,
    RewardLoaded,
    RewardNotLoaded,
    UnitsFinished,
    WorkerOrder,
    WorkUnit,
)
from reward_service.sdk import MARK, Mark, RewardInput, RewardLoadError, deadline_in, load_reward

FLUSH_AFTER_S = 0.005  # Verdicts wait at most so long for company in one report, unless a unit takes longer


class UnitRunner:
    """Runs the units of its rewards and reports on a link."""

    def __init__(self, link: FrameLink, marker: Marker) -> None:
        self._link = link
        self._marker = marker
        self._rewards: dict[int, LoadedReward] = {}
        self._timeouts_s: dict[int, float] = {}
        self._orders = msgspec.msgpack.Decoder(WorkerOrder)

    def serve(self) -> None:
        """Run the pool's calls until it closes its end."""
        while (payload := self._link.read()) is not None:
            match self._orders.decode(payload):
                case Assignment(units):
                    self._run(units)
                case LoadReward() as order:
                    self._link.send(msgspec.msgpack.encode(self._load(order)))

    def _load(self, order: LoadReward) -> RewardLoaded | RewardNotLoaded:
        try:
            reward = self._rewards[order.reward] = load(order)
            self._timeouts_s[order.reward] = order.timeout_s
        except RewardLoadError as error:
            return RewardNotLoaded(order.reward, clip(str(error)))
        except BaseException as error:
            text = f"the reward {order.name!r} failed while it was loaded: {describe(error)}"
            return RewardNotLoaded(order.reward, text)
        return RewardLoaded(order.reward, reward.mark.batch)

    def _run(self, units: list[WorkUnit]) -> None:
        done: list[FinishedUnit] = []
        flushed_ns = time.monotonic_ns()
        for unit in units:
            if unit.number <= self._marker.recalled:
                continue
            began_ns = time.monotonic_ns()
            self._marker.begin(unit.number, began_ns)
            with deadline_in(self._timeouts_s[unit.reward]):
                verdicts, raised = self._rewards[unit.reward](unit.inputs)
            ended_ns = time.monotonic_ns()
            done.append(FinishedUnit(unit.number, (ended_ns - began_ns) / 1e6, verdicts, raised))
            if ended_ns - flushed_ns > FLUSH_AFTER_S * 1e9:
                self._report(done)
                done, flushed_ns = [], ended_ns
        if done:
            self._report(done)

    def _report(self, done: list[FinishedUnit]) -> None:
        payload = msgspec.msgpack.encode(UnitsFinished(done))
        if len(payload) > MAX_REPORT_BYTES and len(done) > 1:
            for finished in done:
                self._report([finished])
            return
        if len(payload) > MAX_REPORT_BYTES:
            large = Failure("return_type", f"its verdicts take more than {MAX_REPORT_BYTES >> 20} MiB")
            done[0].verdicts = [large] * len(done[0].verdicts)
            payload = msgspec.msgpack.encode(UnitsFinished(done))
        try:
            self._link.send(payload)
        except OSError:
            # The pool has gone, or one of these units broke the link; the last one is not to be blamed.
            self._marker.begin(0, time.monotonic_ns())
            raise


class LoadedReward:
    """A loaded reward: encoded inputs in, one verdict for each out, whatever it returns or raises."""

    def __init__(self, function: Callable[..., Any], mark: Mark) -> None:
        self.mark = mark
        self._function = function
        self._inputs = msgspec.msgpack.Decoder(RewardInput)

    def __call__(self, encoded: list[msgspec.Raw]) -> tuple[list[Verdict], bool]:
        """Return the verdicts, and whether the whole invocation failed."""
        try:
            return self.verdicts(encoded), False
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a reward are its errors too
            return [Failure("exception", describe(error))] * len(encoded), True

    def verdicts(self, encoded: Sequence[bytes | msgspec.Raw]) -> list[Verdict]:
        """Return the verdicts. Raises the errors of the reward."""
        if self.mark.takes_list:
            inputs = [self._inputs.decode(one) for one in encoded]
            return as_verdicts(self._result(inputs), inputs)
        given = self._inputs.decode(encoded[0])
        return [as_verdict(self._result(given), given)]

    def _result(self, given: RewardInput | list[RewardInput]) -> Any:
        result = self._function(given)
        return event_loop().run_until_complete(result) if isinstance(result, Awaitable) else result


def load(order: LoadReward) -> LoadedReward:
    """Return the ordered reward, with its arguments filled in. Raises `RewardLoadError`."""
    if order.worker_class:
        module, _, name = order.worker_class.partition(":")
        made = getattr(importlib.import_module(module), name)(**order.args)
        return LoadedReward(made, Mark(made.batch))
    function = load_reward(order.name, source=order.source)
    mark = getattr(function, MARK, Mark())
    if order.scope in getattr(function, "scopes", ()):
        mark = msgspec.structs.replace(mark, scope=order.scope)
    if order.scope == "group" and mark.scope != "group":
        told = f"the reward {order.name!r} judges one episode at a time, and the scope is `group`"
        raise RewardLoadError(f'{told}. Mark it @reward(scope="group"), or set the scope to episode.')
    if order.scope != "group" and mark.scope == "group":
        told = f"the reward {order.name!r} judges whole groups"
        raise RewardLoadError(f"{told}. Set the scope (beside its name) to group.")
    try:
        inspect.signature(function).bind(None, **order.args)
    except TypeError as error:
        raise RewardLoadError(f"the reward {order.name!r} and reward.args: {error}") from None
    if (preload := getattr(function, "preload", None)) is not None:
        preload(**order.args)
    return LoadedReward(functools.partial(function, **order.args) if order.args else function, mark)


@functools.cache
def event_loop() -> Any:
    """Return the single event loop of this process, created when the first asynchronous reward runs."""
    import asyncio  # heavy, and only asynchronous rewards need it

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker of a reward pool (started by the pool).")
    parser.add_argument("--link-fd", type=int, required=True)
    parser.add_argument("--marker-fd", type=int, required=True)
    options = parser.parse_args()
    # A reward's crash is a verdict, not a core file; its dump of the stack goes into the pool's log.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    os.set_inheritable(options.marker_fd, False)
    UnitRunner(FrameLink(options.link_fd), Marker(options.marker_fd)).serve()
    # Threads and exit handlers that a reward left behind must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
