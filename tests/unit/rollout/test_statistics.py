"""mean@n, best@n, maj@n and their intervals, against the slow and obvious way, and by their properties."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.statistics import ScoredSample, figure_of, per_task, statistics_of

SCORES = st.sampled_from([0.0, 0.25, 1.0])
SAMPLES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 6), SCORES, st.sampled_from("abc")),
    min_size=1,
    max_size=40,
    unique_by=lambda one: one[:2],
).map(lambda found: [ScoredSample(*one) for one in found])


def obvious(samples: list[ScoredSample]) -> list[tuple[float, float, float]]:
    out = []
    for task in sorted({one.task for one in samples}):
        mine = sorted((one for one in samples if one.task == task), key=lambda one: one.sample)
        scores = [one.score for one in mine]
        # Counter keeps the order of first appearance, and `most_common` is stable.
        answer = Counter(one.answer for one in mine).most_common(1)[0][0]
        of_answer = [one.score for one in mine if one.answer == answer]
        out.append((sum(scores) / len(scores), max(scores), sum(of_answer) / len(of_answer)))
    return out


@settings(max_examples=100, derandomize=True)
@given(SAMPLES)
def test_figures_of_tasks_are_the_obvious_ones(samples: list[ScoredSample]) -> None:
    np.testing.assert_allclose(per_task(samples), obvious(samples), atol=1e-12)


@settings(max_examples=30, derandomize=True)
@given(SAMPLES, st.randoms(use_true_random=False))
def test_neither_the_order_of_samples_nor_of_tasks_matters(samples, random):
    before = statistics_of(samples)
    shuffled = samples[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert statistics_of(shuffled) == before
    renamed = [ScoredSample(100 - one.task, one.sample, one.score, one.answer) for one in samples]
    again = statistics_of(renamed)
    for name in ("mean", "best", "maj"):
        mine, other = getattr(again, name), getattr(before, name)
        assert mine.value == pytest.approx(other.value)
        assert (mine.low is None) == (other.low is None)
        if mine.low is not None:
            assert (mine.low, mine.high) == pytest.approx((other.low, other.high))


@settings(max_examples=30, derandomize=True)
@given(SAMPLES)
def test_figures_are_ordered_and_intervals_hold_them(samples: list[ScoredSample]) -> None:
    found = statistics_of(samples)
    assert found.tasks == len({one.task for one in samples})
    assert found.mean.value <= found.best.value + 1e-12
    assert found.maj.value <= found.best.value + 1e-12
    for figure in (found.mean, found.best, found.maj):
        if found.tasks < 2:
            assert figure.low is None
            assert figure.high is None
        else:
            assert 0 <= figure.low <= figure.high <= 1
            assert figure.low - 1e-9 <= figure.value <= figure.high + 1e-9


def test_a_tie_goes_to_the_answer_that_came_first() -> None:
    first = [ScoredSample(0, n, float(answer == "a"), answer) for n, answer in enumerate("zaaz")]
    assert per_task(first)[0, 2] == 0.0
    assert per_task([*first, ScoredSample(0, 4, 1.0, "a")])[0, 2] == 1.0


def test_an_interval_moves_with_scale_and_shift() -> None:
    values = np.random.default_rng(0).random(50)
    one, moved = figure_of(values), figure_of(3 * values - 1)
    assert one.low is not None
    assert one.high is not None
    assert (moved.low, moved.high) == pytest.approx((3 * one.low - 1, 3 * one.high - 1))


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    found = [figure_of((rng.random(80) < 0.3).astype(float)) for _ in range(300)]
    hits = sum(one.low <= 0.3 <= one.high for one in found)  # type: ignore[operator]
    assert 0.90 <= hits / 300 <= 0.99


def test_nothing_scored_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        statistics_of([])
