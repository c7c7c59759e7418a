"""Rewards that the tests serve."""

import os
import time

from reward_service.sdk import Abstain, RewardInput, Score, reward


@reward
def concise(given: RewardInput, *, most: int = 200) -> float:
    """Right and short."""
    print("judging", given.response, "\x1b[31m")
    return 1.0 if given.ground_truth in given.response and len(given.response) < most else 0.0


@reward
def behave(given: RewardInput) -> float | Score | Abstain:
    match given.response:
        case "hang":
            time.sleep(3600)
        case "die":
            os._exit(3)
        case "nan":
            return float("nan")
        case "abstain":
            return Abstain("no opinion")
        case "raise":
            raise ValueError("on purpose\x1b[2J")
    return Score(0.5, {"length": len(given.response)})


@reward(scope="group")
def longest(given: list[RewardInput]) -> list[float]:
    most = max(len(one.response) for one in given)
    return [float(len(one.response) == most) for one in given]


@reward
def units(given: RewardInput) -> float:
    return float(given.episode.n_units)


@reward
def pictures(given: RewardInput) -> float:
    return float(sum(len(each.data) for each in given.media))


@reward
def needs(given: RewardInput, *, word: str) -> float:
    return float(word in given.response)
