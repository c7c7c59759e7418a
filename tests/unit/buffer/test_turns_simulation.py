"""Turns on a shared device, simulated on the real ledger: never above η, and as fast as they should be."""

from __future__ import annotations

import pytest

from benchmarks import turns
from benchmarks.turns import row


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(turns, "GROUPS", 8)
    monkeypatch.setattr(turns, "SLOTS", 64)
    monkeypatch.setattr(turns, "WARM_UP", 8)


@pytest.mark.parametrize("ratio", [1 / 5, 1.0, 5.0])
@pytest.mark.parametrize("eta", [0, 1, 4])
@pytest.mark.parametrize("pacing", ["fresh", "full"])
def test_staleness_is_bounded_in_turns_whatever_the_ratio(ratio, eta, pacing):
    found = row(ratio, eta, pacing, None, steps=12)
    assert 0 <= found.staleness_max <= eta
    assert 1 <= found.turn <= eta + 1
    assert 0.3 < found.of_ideal < 1
    if eta == 0:
        assert (found.staleness_mean, found.turn) == (0, 1)


def test_turns_are_longer_where_switches_would_cost_more(monkeypatch):
    monkeypatch.setattr(turns, "SWITCH_S", 0.1)
    short = row(1.0, 4, "fresh", None, steps=12)
    monkeypatch.setattr(turns, "SWITCH_S", 12.0)
    long = row(1.0, 4, "fresh", None, steps=12)
    assert short.turn < 2 < long.turn
    assert short.switching < 0.01


def test_turns_pay_where_the_trainers_state_leaves_little_room():
    alone, beside = row(1.0, 4, "fresh", None, steps=12), row(1.0, 4, "fresh", 0.08, steps=12)
    assert alone.steps_per_hour > 1.2 * beside.steps_per_hour
    assert beside.staleness_max <= 4
