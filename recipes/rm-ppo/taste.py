"""What is preferred in this example, which the policy is never told: numbers of even digits."""

from areal_async import RewardInput, reward


def even_share(answer: str) -> float:
    """Share of the digits that are even; 0 of what is no number."""
    return sum(digit in "02468" for digit in answer) / len(answer) if answer.isdecimal() else 0.0


@reward
def even(given: RewardInput) -> float:
    return even_share(given.response)
