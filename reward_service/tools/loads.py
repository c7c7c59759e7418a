"""`python -m reward_service.tools.loads`: check whether rewards can be loaded in the way a scoring process
loads them.

The command reads a `RewardTrial` from standard input and prints one line: a JSON list with one text for each
reward, which is its problem, or empty. Output of a reward's file during import goes to standard error.
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
    """Return the reason why the reward cannot be loaded, or an empty text."""
    try:
        load(PooledReward(0, spec).load_order())
    except RewardLoadError as error:
        return "" if error.may_pass else str(error)
    except BaseException as error:  # a file may raise anything, including SystemExit
        return f"the reward {spec.name!r} cannot be loaded: {type(error).__name__}: {error}"
    return ""


def main() -> None:
    trial = msgspec.json.decode(sys.stdin.buffer.read(), type=RewardTrial)
    answer = os.dup(1)
    os.dup2(2, 1)
    os.write(answer, msgspec.json.encode([problem_of(spec) for spec in trial.rewards]) + b"\n")
    os._exit(0)  # threads of a file must not keep the process alive


if __name__ == "__main__":
    main()
