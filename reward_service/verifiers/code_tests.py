"""`code_tests`: the functions that the response defines pass the task's tests. Python."""

from __future__ import annotations

from typing import Any

from areal_async.rpc.verdicts import Failure
from reward_service.sdk import Abstain, RewardInput, Score, reward
from reward_service.verifiers.code_stdio import judged, preload
from reward_service.verifiers.run_cases import Settings

__all__ = ["code_tests", "preload"]


@reward
def code_tests(given: RewardInput, **arguments: Any) -> Score | Abstain | Failure:
    """As `code_stdio`, of a ground truth that holds assertions, a function that checks, or arguments and
    results (`reward_service.verifiers.cases`). All tests of a response share one run: `cpu_s` and `wall_s`
    are those of all of them.

    The program does not see the tests, nor can it say that it passed: see `reward_service.sandbox.harness`.
    `CodeTestsArguments` has the arguments."""
    return judged(given, Settings(**arguments))
