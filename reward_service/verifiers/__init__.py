"""Built-in rewards that judge an answer by its text: docs/rewards.md#use-built-in-rewards and docs/sandbox.md
describe each.

    text, arithmetic, math   of answers
    composed                 of other rewards
    code_rewards             of programs

`answers` says where in a response an answer stands, `equality`, `formulas` and `latex` what maths is the
same. Importing a module loads no library that only judging needs (sympy), since a job file
is checked by it.

A model must not be able to choose that its answer is not judged: a timeout may be masked, a wrong answer is
not. So a verifier whose cost depends on the answer ends by itself (`within`), well before the deadline of
its call, and counts the answer as wrong; and an exception that a neutral answer does not cause is the
answer's fault, unless it is `TaskAtFault`. CPU time is counted and not the clock's, so that a busy machine
makes no answer wrong. Only Python code is ended: what one call of a C function takes has to be bounded
before it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from areal_async.base.verdicts import Failure, FaultOf
from areal_async.config.base import Section
from reward_service.checking import describe
from reward_service.sdk import Abstain, RewardLoadError, Scope, reward

A = TypeVar("A", bound=Section)
Judge = Callable[[Any, A], Any]
NEUTRAL = "I do not know."
"""The answer to a task that any verifier can judge."""
MOST_PARSED = 64  # Different arguments of one reward that are remembered in a process


def verifier(
    arguments: type[A],
    *,
    prepare: Callable[[A], None] | None = None,
    scope: Scope = "episode",
    needs_truth: bool = False,
) -> Callable[[Judge[A]], Callable[..., Any]]:
    """Make `judge(given, arguments)` a built-in reward that is called as `judge(given, **arguments)`.

    `arguments` declares its arguments, and `prepare(arguments)` does the work that should precede the first
    call. The reward has these as `Arguments` and `preload(**arguments)`, which raises RewardLoadError. A call
    with arguments of another type raises ValueError. With `needs_truth`, a task without ground truth is not
    judged.
    """

    def made(judge: Judge[A]) -> Callable[..., Any]:
        parsed_of: dict[str, A] = {}

        def checked(given: Any, **values: Any) -> Any:
            # Checking them takes ten times as long as comparing two texts, and calls repeat them.
            if (key := repr(values)) not in parsed_of:
                if len(parsed_of) >= MOST_PARSED:
                    parsed_of.clear()
                parsed_of[key] = arguments.model_validate(values)
            if needs_truth and given.ground_truth is None:
                return Abstain("the task has no ground truth")
            return judge(given, parsed_of[key])

        def judged(given: Any, **values: Any) -> Any:
            try:
                return checked(given, **values)
            except TaskAtFault:
                raise
            except Exception as error:
                # A neutral answer shows whose fault it is: if that fails too, it is the task's or ours.
                neutral = msgspec.structs.replace(given, response=NEUTRAL, metadata={}, blob=b"")
                try:
                    checked(neutral, **values)
                except Exception:
                    raise error from None
                return Failure("exception", describe(error), fault=FaultOf.ANSWER)

        def preload(**values: Any) -> None:
            try:
                parsed = arguments.model_validate(values)
            except ValidationError as error:
                wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
                raise RewardLoadError(f"the arguments of {judge.__name__!r}: {wrong}") from None
            if prepare is not None:
                prepare(parsed)

        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(judged, name, getattr(judge, name))
        judged.preload = preload  # type: ignore[attr-defined]
        judged.needs_truth = needs_truth  # type: ignore[attr-defined]
        return reward(scope=scope, arguments=arguments)(judged)

    return made


class TaskAtFault(ValueError):
    """The task judges no answer, which this one alone has shown."""


class NoArguments(Section):
    """The reward takes none."""


# --- what judging one answer may cost ----------------------------------------------------------------


T = TypeVar("T")

AGAIN_S = 1.0  # A library may swallow the first interruption: another one follows so much later
MOST_INTERRUPTIONS = 10


class TooCostly(Exception):
    """Comparing the answer would cost more than its budget: it is wrong."""


class BudgetSpent(BaseException):
    """The budget of this code is spent. It is no `Exception`, since sympy swallows these."""


def within(cpu_s: float, work: Callable[[], T]) -> T:
    """Return the result of `work`. Raises `TooCostly` once this thread has spent `cpu_s` of CPU time."""
    finished, lock, thread = threading.Event(), threading.Lock(), threading.get_ident()
    clock = time.pthread_getcpuclockid(thread)
    end_s = time.clock_gettime(clock) + cpu_s

    def watch() -> None:
        with suppress(OSError):  # the thread has ended, and its clock with it
            while (left_s := end_s - time.clock_gettime(clock)) > 0:
                if finished.wait(left_s):
                    return
            for _ in range(MOST_INTERRUPTIONS):
                with lock:
                    if finished.is_set():
                        return
                    _raise_in(thread, BudgetSpent)
                finished.wait(AGAIN_S)

    def end() -> None:
        while not finished.is_set():
            with suppress(BudgetSpent):
                with lock:
                    finished.set()
                _raise_in(thread, None)

    threading.Thread(target=watch, name="budget", daemon=True).start()
    try:
        try:
            return work()
        finally:
            end()
    except BudgetSpent:
        end()
        raise TooCostly(f"it takes more than {cpu_s:g} s of CPU time") from None


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise `error` in a thread at its next step in Python code; None cancels a pending one."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(error) if error is not None else None
    )
