"""A worker process of a reward pool: it loads rewards, runs one unit of work at a time and reports the
verdicts.

Promises: for every unit of work (`WorkUnit`) in which the reward returns or raises, the process reports
exactly one verdict per input, validated and of bounded size. A reward's output never reaches the protocol.
The process dies with its pool. A reward may crash or block the process, and the pool then kills the group.

The pool starts the process as `python -m reward_service.pool.worker`. The process must stay light: no torch,
no numpy.
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
    FinishedUnit,
    FrameLink,
    LoadReward,
    RewardLoaded,
    RewardNotLoaded,
    WorkerOrder,
    WorkUnit,
)
from reward_service.sdk import MARK, Mark, RewardInput, RewardLoadError, deadline_in, load_reward


class UnitRunner:
    """Runs the units of its rewards and reports on a link."""

    def __init__(self, link: FrameLink) -> None:
        self._link = link
        self._rewards: dict[int, LoadedReward] = {}
        self._timeouts_s: dict[int, float] = {}
        self._orders = msgspec.msgpack.Decoder(WorkerOrder)

    def serve(self) -> None:
        """Run the pool's units until the pool closes its end."""
        while (payload := self._link.read()) is not None:
            match self._orders.decode(payload):
                case WorkUnit() as unit:
                    self._link.send(self._run(unit))
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

    def _run(self, unit: WorkUnit) -> bytes:
        """Run a unit and return its encoded report."""
        began_s = time.monotonic()
        verdicts, raised = self._rewards[unit.reward](unit.inputs, self._timeouts_s[unit.reward])
        elapsed_ms = (time.monotonic() - began_s) * 1000
        payload = msgspec.msgpack.encode(FinishedUnit(unit.number, elapsed_ms, verdicts, raised))
        if len(payload) <= MAX_REPORT_BYTES:
            return payload
        large = Failure("return_type", f"its verdicts take more than {MAX_REPORT_BYTES >> 20} MiB")
        return msgspec.msgpack.encode(FinishedUnit(unit.number, elapsed_ms, [large] * len(verdicts)))


class LoadedReward:
    """A loaded reward. A call takes encoded inputs and returns one verdict for each, whatever the reward
    returns or raises. Inputs of a reward that takes one at a time are judged one after the other."""

    def __init__(self, function: Callable[..., Any], mark: Mark) -> None:
        self.mark = mark
        self._function = function
        self._inputs = msgspec.msgpack.Decoder(RewardInput)

    def __call__(self, encoded: list[msgspec.Raw], timeout_s: float) -> tuple[list[Verdict], bool]:
        """Return the verdicts, and whether the invocation as a whole failed. Each call of the reward may take
        `timeout_s`."""
        if self.mark.takes_list or len(encoded) == 1:
            return self._judged(encoded, timeout_s)
        return [self._judged([one], timeout_s)[0][0] for one in encoded], False

    def _judged(self, encoded: list[msgspec.Raw], timeout_s: float) -> tuple[list[Verdict], bool]:
        try:
            with deadline_in(timeout_s):
                return self.verdicts(encoded), False
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a reward are also its errors
            return [Failure("exception", describe(error))] * len(encoded), True

    def verdicts(self, encoded: Sequence[bytes | msgspec.Raw]) -> list[Verdict]:
        """Return the verdicts. Raises the reward's errors."""
        if self.mark.takes_list:
            inputs = [self._inputs.decode(one) for one in encoded]
            return as_verdicts(self._result(inputs), inputs)
        given = self._inputs.decode(encoded[0])
        return [as_verdict(self._result(given), given)]

    def _result(self, given: RewardInput | list[RewardInput]) -> Any:
        result = self._function(given)
        return event_loop().run_until_complete(result) if isinstance(result, Awaitable) else result


def load(order: LoadReward) -> LoadedReward:
    """Return the reward that the pool has asked for, with its arguments. Raises `RewardLoadError`."""
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
    if order.args or len(inspect.signature(function).parameters) > 1:
        # Imported here, because pydantic takes half of the start of a process.
        from areal_async.config.registry import function_mistakes

        if mistake := next(function_mistakes(order.name, function, order.args, "reward.args"), None):
            raise RewardLoadError(str(mistake))
    if (preload := getattr(function, "preload", None)) is not None:
        preload(**order.args)
    return LoadedReward(functools.partial(function, **order.args) if order.args else function, mark)


@functools.cache
def event_loop() -> Any:
    """Return the event loop of this process. The first asynchronous reward creates it."""
    import asyncio  # slow to import, and only asynchronous rewards need it

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker of a reward pool (started by the pool).")
    parser.add_argument("--link-fd", type=int, required=True)
    options = parser.parse_args()
    # A reward's crash is a verdict, not a core file. The stack dump goes to the pool's log.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    UnitRunner(FrameLink(options.link_fd)).serve()
    # Threads and exit handlers of a reward must not keep the process alive.
    os._exit(0)


if __name__ == "__main__":
    main()
