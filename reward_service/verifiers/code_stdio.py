"""`code_stdio`: the program in the response turns each input of the task into its output."""

from __future__ import annotations

import functools
from typing import Any

from areal_async.rpc.verdicts import Failure
from areal_async.runtime.log import get_logger
from reward_service.sandbox import CompilerMissing, SandboxError
from reward_service.sandbox.program import CannotIsolate
from reward_service.sdk import Abstain, RewardInput, RewardLoadError, Score, reward
from reward_service.verifiers.cases import Cases, read_cases
from reward_service.verifiers.fences import program_of
from reward_service.verifiers.run_cases import Result, Settings, run_cases, runner

log = get_logger("sandbox")

LANGUAGES_OF_FENCES = {
    "python": "python",
    "py": "python",
    "python3": "python",
    "c": "c",
    "cpp": "cpp",
    "c++": "cpp",
    "cc": "cpp",
    "rust": "rust",
    "rs": "rust",
    "javascript": "javascript",
    "js": "javascript",
    "node": "javascript",
    "java": "java",
}
COMPONENTS = ("extracted", "compiled", "passed", "out_of_time", "live_objects")


@reward
def code_stdio(given: RewardInput, **arguments: Any) -> Score | Abstain | Failure:
    """1 when every case passes, else 0; with `partial` the share that passes. `CodeStdioArguments` has the
    arguments, `reward_service.verifiers.cases` the forms of the ground truth (one with `fn_name` is run as
    function tests).

    A response without a program, one that does not compile, crashes or passes a limit is a wrong answer: 0.
    Components: `extracted`, `compiled`, `passed` (share of the cases), `out_of_time`, `live_objects` (1 where
    tests were answered by objects of the program). A task without ground truth is not judged. What is not the
    model's fault is an error, never 0: a ground truth that cannot be read raises ValueError; without a
    sandbox or a compiler the verdict is an error of kind `sandbox` or `compile`. A language that the model
    chose (`auto`) and that is not installed is its fault."""
    return judged(given, Settings(**arguments))


def preload(**arguments: Any) -> None:
    """Have the sandbox ready before the first call. Raises RewardLoadError where there is none; a server that
    does not answer may come back."""
    settings = Settings(**arguments)
    try:
        runner(settings)
    except SandboxError as error:
        away = bool(settings.remote) and not isinstance(error, CannotIsolate)
        raise RewardLoadError(f"programs cannot be run: {error}", may_pass=away) from None


def judged(given: RewardInput, settings: Settings) -> Score | Abstain | Failure:
    if given.ground_truth is None:
        return Abstain("the task has no ground truth")
    cases = readable(read_cases(given.ground_truth), settings).first(settings.max_cases)
    block = program_of(given.response, extract=settings.extract)
    if block is None:
        return no_score()
    chosen = settings.language == "auto"
    language = LANGUAGES_OF_FENCES.get(block.language, "python") if chosen else settings.language
    if chosen and language != "python" and (cases.calls or cases.codes):
        return no_score(extracted=1.0)  # tests of functions are in Python, whatever the model prefers
    try:
        return as_score(run_cases(block.text, language, cases, settings), settings)
    except CompilerMissing as error:
        if chosen:
            _warn_of_missing(str(error))
            return no_score(extracted=1.0)
        return Failure(error.verdict_kind, str(error))
    except SandboxError as error:
        return Failure(error.verdict_kind, str(error))


@functools.cache
def _warn_of_missing(why: str) -> None:
    log.warning("a program in a language that is not installed counts as wrong", why=why)


def no_score(**components: float) -> Score:
    """0, for a program that was not run."""
    return Score(0.0, dict.fromkeys(COMPONENTS, 0.0) | components)


def readable(cases: Cases, settings: Settings) -> Cases:
    """Raises ValueError for tests that need objects of the program where the job refuses them."""
    if cases.live and settings.live_objects == "refuse":
        raise ValueError(
            "the tests use objects of the program (attributes, calls or items of what it returns), which "
            "could answer for themselves. Set `live_objects: allow` among the reward's arguments, or write "
            "tests that compare plain data"
        )
    return cases


def as_score(result: Result, settings: Settings) -> Score:
    components = {
        "extracted": 1.0,
        "compiled": float(result.compiled),
        "passed": result.share,
        "out_of_time": float(result.out_of_time),
        "live_objects": float(result.live),
    }
    value = result.share if settings.partial else float(all(result.passed))
    return Score(value, components, sandbox=result.level)
