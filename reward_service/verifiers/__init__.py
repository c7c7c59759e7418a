"""Built-in rewards that judge an answer by its text. docs/rewards.md#use-built-in-rewards and docs/sandbox.md
describe each.

    text, arithmetic, math   of answers
    composed                 of other rewards
    code_rewards             of programs

`answers` finds the answer in a response. `equality`, `formulas` and `latex` compare maths. Importing a module
does not import libraries that only judging needs (such as sympy), because the check of job files imports the
modules too.

A model must not be able to escape a bad score with an answer that is costly to judge, because an episode with
a timeout may be masked. So a verifier whose cost depends on the answer stops by itself (`within`), well
before the deadline of its call, and the answer counts as wrong. The limit is CPU time, so that a busy machine
makes no answer wrong. Only Python code can be stopped, so the cost of a C function must be bounded before its
call. If judging an answer raises an exception, a neutral answer is judged too. The exception is the answer's
fault if the neutral answer does not cause it as well, unless it is `TaskAtFault`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pydantic import ValidationError

from areal_async.base.verdicts import Failure, FaultOf
from areal_async.config.base import Section
from reward_service.checking import describe
from reward_service.inputs import RewardInput
from reward_service.sdk import Abstain, RewardLoadError, reward

if TYPE_CHECKING:
    from areal_async.base.records import Task

A = TypeVar("A", bound=Section)
Judge = Callable[[Any, A], Any]
NEUTRAL = "I do not know."
"""An answer that any verifier can judge."""
MOST_PARSED = 64  # different arguments of one reward that a process remembers


def verifier(
    arguments: type[A],
    *,
    prepare: Callable[[A], None] | None = None,
    needs_truth: bool = False,
    reads_truth: bool = False,
) -> Callable[[Judge[A]], Callable[..., Any]]:
    """Make `judge(given, arguments)` a built-in reward that is called as `judge(given, **arguments)`.

    `arguments` is the class that declares the arguments, and `prepare(arguments)` does the work before the
    first call. The reward offers them as the attributes `Arguments` and `preload(**arguments)`. `preload`
    raises `RewardLoadError`. A call with invalid arguments raises `ValueError`. If `needs_truth` is true, a
    task without ground truth is not judged. With `needs_truth` or `reads_truth`, the reward has
    `check_task(task, **arguments)`, which raises an exception if no answer to the task can be judged.
    """

    def made(judge: Judge[A]) -> Callable[..., Any]:
        parsed_of: dict[str, A] = {}

        def checked(given: Any, **values: Any) -> Any:
            # Checking the arguments takes ten times as long as comparing two texts, and calls repeat them.
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
                # A neutral answer shows the side at fault. If it fails too, the task or our code is at fault.
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
        if needs_truth or reads_truth:
            judged.check_task = partial(_check_task, checked)  # type: ignore[attr-defined]
        return reward(arguments=arguments)(judged)

    return made


def _check_task(checked: Callable[..., Any], task: Task, **arguments: Any) -> None:
    with suppress(ValidationError):  # of the arguments, which other checks name
        found = checked(RewardInput.to(task, response=NEUTRAL), **arguments)
        if task.ground_truth is None and isinstance(found, Abstain):
            raise ValueError(found.reason)


class TaskAtFault(ValueError):
    """The task is wrong, so no answer to it can be judged. The task is at fault even if a neutral answer
    causes no error."""


class NoArguments(Section):
    """Arguments of a reward that takes none."""


# --- what judging one answer may cost ----------------------------------------------------------------


T = TypeVar("T")

AGAIN_S = 1.0  # a library may swallow the first interruption, so another one follows after this time
MOST_INTERRUPTIONS = 10


class TooCostly(Exception):
    """Judging the answer would exceed its budget, so the answer counts as wrong."""


class BudgetSpent(BaseException):
    """The CPU budget is spent. This is not an `Exception`, because sympy swallows exceptions."""


def within(cpu_s: float, work: Callable[[], T]) -> T:
    """Return the result of `work`.

    Raises `TooCostly` once this thread has spent `cpu_s` of CPU time. Work that ended later than this without
    an interruption is too costly, too.
    """
    finished, lock, thread = threading.Event(), threading.Lock(), threading.get_ident()
    clock = time.pthread_getcpuclockid(thread)
    end_s = time.clock_gettime(clock) + cpu_s

    def watch() -> None:
        with suppress(OSError):  # the thread and its clock have ended
            while (left_s := end_s - time.clock_gettime(clock)) > 0:
                if finished.wait(left_s):
                    return
            for _ in range(MOST_INTERRUPTIONS):
                with lock:
                    if not finished.is_set():
                        _raise_in(thread, BudgetSpent)
                finished.wait(AGAIN_S)

    def end() -> None:
        while not finished.is_set():
            with suppress(BudgetSpent):
                with lock:
                    finished.set()
                _raise_in(thread, None)

    try:
        try:
            # The interruption may come at once, so the thread starts in here.
            threading.Thread(target=watch, name="budget", daemon=True).start()
            result = work()
        finally:
            end()
        if time.clock_gettime(clock) > end_s:
            raise BudgetSpent
        return result
    except BudgetSpent:
        end()
        raise TooCostly(f"it takes more than {cpu_s:g} s of CPU time") from None


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise `error` in a thread at its next step of Python code. If `error` is None, cancel an error that was
    not raised yet."""
    raised = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
