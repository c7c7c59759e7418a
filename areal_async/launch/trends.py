"""The sign of a reward that is exploited: training reward rises while held-out reward falls. The module is
pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

EDGE_STEPS = 10  # Most steps in the mean of the first and of the last rewards
LEVEL_Z = 1.96  # Half of a 95 % interval, in standard errors


class HeldOut(NamedTuple):
    """An evaluation: its mean reward, with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def edge_of(steps: int) -> int:
    """Return the number of steps in the mean of the first and of the last rewards of a run.

    With fewer than twice `EDGE_STEPS` steps, the number is half of the steps, so that no step counts in both
    means."""
    return max(1, min(EDGE_STEPS, steps // 2))


def reward_warning(
    rewards_first: Sequence[float], rewards_last: Sequence[float], first: HeldOut | None, last: HeldOut | None
) -> str:
    """Return a warning if the training reward rose and the held-out reward fell; else an empty text.

    Each change must exceed one standard error of the difference. `rewards_first` and `rewards_last` are mean
    rewards of the batches of the first and of the last steps (`edge_of`). With fewer than two rewards in
    either, or with an evaluation without an interval, there is no warning."""
    if first is None or last is None or min(len(rewards_first), len(rewards_last)) < 2:
        return ""
    rise = _mean(rewards_last) - _mean(rewards_first)
    fall = first.value - last.value
    error = sqrt(sum((one.high - one.low) ** 2 for one in (first, last))) / (2 * LEVEL_Z)
    if rise <= sqrt(_error2(rewards_first) + _error2(rewards_last)) or fall <= error:
        return ""
    return (
        f"training reward rose from {_mean(rewards_first):.3f} to {_mean(rewards_last):.3f} while held-out "
        f"reward fell from {first.value:.3f} to {last.value:.3f}: the model may exploit the reward, or "
        "overfit. Read held-out samples, and compare the components of the reward on both"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _error2(values: Sequence[float]) -> float:
    """Return the square of the standard error of the mean."""
    mean = _mean(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
