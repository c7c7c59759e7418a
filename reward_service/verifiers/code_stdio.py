"""`code_stdio`: the program in the response turns each input of the task into its output."""

from __future__ import annotations

from typing import Any

from areal_async.wire.verdicts import Failure
from reward_service.sandbox import CompilerMissing, SandboxError
from reward_service.sandbox.errors import CannotIsolate
from reward_service.sdk import Abstain, RewardInput, RewardLoadError, Score, reward
from reward_service.verifiers.cases import read_cases
from reward_service.verifiers.fences import program_of
from reward_service.verifiers.run_cases import Result, Settings, run_cases, runner

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


@reward
def code_stdio(given: RewardInput, **arguments: Any) -> Score | Abstain | Failure:
    """1 when every case passes, else 0; with `partial` the share that passes. `CodeStdioArguments` has the
    arguments, `reward_service.verifiers.cases` the forms of the ground truth (one with `fn_name` is run as
    function tests).

    A response without a program, one that does not compile, crashes or passes a limit is a wrong answer: 0.
    Components: `extracted`, `compiled`, `passed` (share of the cases), `out_of_time`. A task without ground
    truth is not judged. What is not the model's fault is an error, never 0: a ground truth that cannot be
    read raises ValueError; without a sandbox or a compiler the verdict is an error of kind `sandbox` or
    `compile`."""
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
    cases = read_cases(given.ground_truth).first(settings.max_cases)
    block = program_of(given.response, extract=settings.extract)
    if block is None:
        return Score(0.0, {"extracted": 0.0, "compiled": 0.0, "passed": 0.0, "out_of_time": 0.0})
    language = settings.language
    if language == "auto":
        language = LANGUAGES_OF_FENCES.get(block.language, "python")
    try:
        return as_score(run_cases(block.text, language, cases, settings), settings)
    except (SandboxError, CompilerMissing) as error:
        return Failure(error.verdict_kind, str(error))


def as_score(result: Result, settings: Settings) -> Score:
    components = {
        "extracted": 1.0,
        "compiled": float(result.compiled),
        "passed": result.share,
        "out_of_time": float(result.out_of_time),
    }
    value = result.share if settings.partial else float(all(result.passed))
    return Score(value, components, sandbox=result.level)
