"""A check that rewards can be loaded in a scoring process: `python -m reward_service.tools.loads`.

Reads a `RewardTrial` from standard input and prints one line: a JSON list with the error of each reward, or
an empty text. Output of a reward's file during its import goes to standard error.
"""

from __future__ import annotations

import os
import sys

import msgspec

from areal_async.config.reward_routing import RewardSpec
from areal_async.launch.preflight import RewardTrial
from reward_service.pool.queue import PooledReward
from reward_service.pool.worker import load
from reward_service.sdk import RewardLoadError


def problem_of(spec: RewardSpec) -> str:
    """Return why the reward cannot be loaded; empty if it can."""
    try:
        load(PooledReward(0, spec).load_order())
    except RewardLoadError as error:
        return "" if error.may_pass else str(error)
    except BaseException as error:  # a file may raise anything, SystemExit too
        return f"the reward {spec.name!r} cannot be loaded: {type(error).__name__}: {error}"
    return ""


def main() -> None:
    trial = msgspec.json.decode(sys.stdin.buffer.read(), type=RewardTrial)
    answer = os.dup(1)
    os.dup2(2, 1)
    os.write(answer, msgspec.json.encode([problem_of(spec) for spec in trial.rewards]) + b"\n")
    os._exit(0)  # threads that a file has started must not keep the process


if __name__ == "__main__":
    main()
