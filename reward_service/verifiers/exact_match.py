"""`exact_match`: the response is the ground truth, up to white space."""

from __future__ import annotations

from reward_service.sdk import Abstain, RewardInput, reward


@reward
def exact_match(given: RewardInput) -> float | Abstain:
    """1 when response and ground truth are the same text, else 0.

    Runs of white space count as one space, and none at either end. Case and punctuation count. A ground
    truth that is a number is compared as Python writes it. A task without ground truth is not judged."""
    if given.ground_truth is None:
        return Abstain("the task has no ground truth")
    return float(normalise(given.response) == normalise(str(given.ground_truth)))


def normalise(text: str) -> str:
    return " ".join(text.split())
