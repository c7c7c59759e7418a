"""Rewards for the tests of `areal-async reward test`."""

import time

from reward_service.sdk import Abstain, RewardInput, Score, reward


@reward
def right(given: RewardInput) -> Score:
    return Score(float(given.response == given.ground_truth), {"length": len(given.response)})


@reward
def talkative(given: RewardInput) -> float:
    print("judging", given.response, "\x1b[31m")
    return 1.0


@reward
def mixed(given: RewardInput) -> float | Abstain:
    match given.response:
        case "raise":
            raise ValueError("on purpose\x1b[2J")
        case "hang":
            time.sleep(600)
        case "nothing":
            return Abstain("cannot say")
    return 0.5


@reward
def lengths(given: RewardInput, *, scale: float = 1.0) -> float:
    return len(given.response) * scale


@reward(scope="group")
def longest(given: list[RewardInput]) -> list[float]:
    most = max(len(one.response) for one in given)
    return [float(len(one.response) == most) for one in given]
