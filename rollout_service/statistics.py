"""Figures of an evaluation with several samples of each task, with confidence intervals. Pure.

Each task has three figures over its scored samples:

    mean   mean of the scores: mean@n, an unbiased estimate of the expected score of one sample
    best   the largest score: best@n, the score of a perfect choice among the n
    maj    the score of the most frequent answer: maj@n. Among equally frequent answers, the one with the
           lowest sample number counts. If equal answers have different scores, their mean score counts.

A figure is the mean over tasks, so all tasks have the same weight, however many of their samples were scored.
Samples without a score are counted separately and never treated as a score of 0. A task without any score is
in no figure.

The interval is the normal confidence interval of the mean over tasks, limited to the range of the tasks'
figures. It treats the tasks, not their samples, as independent draws from a larger population, because
samples of one task are not independent. With few tasks, or tasks with equal figures, the interval is too
narrow. With fewer than two tasks there is no interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Z = 1.96  # Standard errors on each side of the mean, for an interval of level 0.95

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """One scored sample of a task."""

    task: int
    """Any number that identifies the task of the sample."""
    sample: int
    """Number of the sample within its task."""
    score: float
    answer: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over tasks and its interval of level 0.95. Low and high are None if fewer than two tasks were
    scored."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    tasks: int
    """Number of tasks with at least one score."""
    mean: Figure
    best: Figure
    maj: Figure
    partial_credit: bool = False
    """Whether any score is neither 0 nor 1, so that a mean of scores is not a share of correct answers."""


def statistics_of(samples: Sequence[ScoredSample]) -> Statistics:
    """Return figures over the tasks of `samples` (at least one). The order of samples and tasks does not
    matter."""
    columns = per_task(samples)
    partial_credit = any(sample.score not in (0.0, 1.0) for sample in samples)
    mean, best, maj = map(figure_of, columns.T)
    return Statistics(len(columns), mean, best, maj, partial_credit)


def figure_of(values: Floats) -> Figure:
    """Return the mean of the tasks' values f64 [T], with its interval."""
    mean = float(values.mean())
    if len(values) < 2:
        return Figure(mean)
    half = Z * float(values.std(ddof=1)) / len(values) ** 0.5
    return Figure(mean, max(mean - half, float(values.min())), min(mean + half, float(values.max())))


def component_means(samples: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return the mean of each reward component by name. A component is first averaged over the samples of a
    task that have it, and then over tasks. `samples` has a task number and components for each sample."""
    found: dict[str, dict[int, list[float]]] = {}
    for task, components in samples:
        for name, value in components.items():
            found.setdefault(name, {}).setdefault(task, []).append(value)
    return {
        name: float(np.mean([np.mean(values) for values in tasks.values()]))
        for name, tasks in sorted(found.items())
    }


def per_task(samples: Sequence[ScoredSample]) -> Floats:
    """Return f64 [T, 3]: mean, best and maj of each task, in the order of the tasks' numbers."""
    if not samples:
        raise ValueError("statistics need at least one scored sample")
    tasks: dict[int, list[ScoredSample]] = {}
    for one in sorted(samples, key=lambda one: (one.task, one.sample)):
        tasks.setdefault(one.task, []).append(one)
    rows = []
    for own in tasks.values():
        answers: dict[str, list[float]] = {}
        for one in own:
            answers.setdefault(one.answer, []).append(one.score)
        most = max(answers.values(), key=len)  # Among equally frequent answers the one that came first
        scores = [one.score for one in own]
        rows.append((np.mean(scores), max(scores), np.mean(most)))
    return np.array(rows, np.float64)
