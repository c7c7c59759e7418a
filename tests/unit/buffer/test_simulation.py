"""A slice of `benchmarks/staleness_sweep.py`: the real ledger and admission on a simulated clock.

Simulated time knows no flukes: each of these runs always gives the same figures."""

from __future__ import annotations

from dataclasses import replace as changed
from itertools import cycle

import pytest
from staleness_simulation import CONDITIONS, DISTRIBUTIONS, REGIMES, Scenario, Simulation
from staleness_sweep import Cell, Sweep, broken_promises

from replay_buffer.ledger import admission

STEPS, WARM_UP = 20, 5


def simulated(eta, distribution="lognormal 0.5", regime="balanced", condition="plain", running=0.5, **rules):
    return Simulation(Scenario(eta, distribution, regime, condition, running), **rules).run(STEPS, WARM_UP)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("eta", [0, 1, 4])
def test_staleness_is_bounded_whatever_the_durations(eta, regime):
    kinds = zip(cycle(DISTRIBUTIONS), CONDITIONS, strict=False)
    for (distribution, condition), running in zip(kinds, cycle((0.5, 2.0))):
        figures = simulated(eta, distribution, regime, condition, running)
        assert figures.steps == STEPS
        assert figures.max_staleness <= eta
        if eta == 0:
            assert figures.overlapped == figures.dropped == 0, "workers and trainer take turns"


@pytest.mark.parametrize("condition", CONDITIONS)
def test_half_a_batch_running_at_eta_4_wastes_little_and_costs_little(condition):
    """The lines of the sweep, where they are nearest: heavy tails, and a trainer as fast as the workers."""
    cell = Sweep(seeds=1, steps=50).cell(Scenario(4, "lognormal 1", "balanced", condition))
    assert broken_promises([cell]) == []


@pytest.mark.parametrize("sampling", ["freshest", "priority"])
def test_staleness_is_bounded_and_nothing_wasted_in_any_order(sampling):
    for regime in REGIMES:
        figures = simulated(4, regime=regime, sampling=sampling)
        assert figures.steps == STEPS
        assert figures.max_staleness <= 4
        assert figures.dropped == 0


@pytest.mark.parametrize("regime", REGIMES)
def test_replay_fills_steps_and_wastes_next_to_nothing(regime):
    once, twice = (simulated(4, regime=regime, max_reuse=reuse) for reuse in (1, 2))
    assert twice.steps == STEPS
    assert twice.max_staleness <= 4
    assert twice.waste <= 0.01
    if regime == "generation-bound":
        assert twice.elapsed_ms < 0.7 * once.elapsed_ms, "a step takes half of its groups again"


def test_a_broken_line_is_named():
    good = Cell(Scenario(4), 1.0, 0.0, 4, 2.0, 7, 1)
    assert broken_promises([good]) == []
    for bad, words in (
        (changed(good, max_staleness=5), "above η"),
        (changed(good, waste=0.011), "waste"),
        (changed(good, throughput=0.94), "throughput"),
        (changed(good, scenario=Scenario(0), max_staleness=0), "not synchronous"),
    ):
        (broken,) = broken_promises([bad])
        assert words in broken
    assert broken_promises([changed(good, scenario=Scenario(4, running=1.0), waste=0.5)]) == []


def test_the_hard_check_bounds_staleness_whatever_admission_does(monkeypatch):
    monkeypatch.setattr(admission, "steps_allowed", lambda demand, v_serving: 1000)
    for regime in REGIMES:
        assert simulated(1, regime=regime).max_staleness <= 1
