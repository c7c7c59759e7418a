"""What of records is drawn."""

from __future__ import annotations

import math

from areal_async.show.figures import PANELS, ChartRow, row_of, rows_of, thinned
from tests.unit.page.runs import load, step


def test_a_step_has_its_own_figures_and_those_that_follow_from_them() -> None:
    fields = {"rewards": {"exact": 1}, "phases": {"train": 1.25}, "correction": {"ess": 0.75}, "entropy": 0.3}
    row = row_of(step(4, **fields))
    assert row is not None
    assert (row.policy, row.x, row.time_s) == ("policy", 4, 1004.0)
    assert row.figures["tokens_per_s"] == 50.0
    assert (row.figures["train_share"], row.figures["wait_share"]) == (0.75, 0.25)
    assert (row.figures["reward:exact"], row.figures["phase:train"]) == (1, 1.25)
    assert (row.figures["ess"], row.figures["entropy"]) == (0.75, 0.3)
    assert "kl" not in row.figures


def test_held_out_components_are_series_of_their_own_beside_those_of_training() -> None:
    row = row_of({"kind": "evaluation", "version": 4, "accuracy": 0.5, "rewards": {"exact": 0.25}})
    assert row is not None
    assert row.figures == {"accuracy": 0.5, "held_out:exact": 0.25}
    assert any({"reward:*", "held_out:*"} <= {*panel.keys} for panel in PANELS)


def test_what_is_no_finite_number_is_no_figure() -> None:
    row = row_of(step(0, loss=None, grad_norm=math.nan, lr="fast", step_s=0, correction=None))
    assert row is not None
    assert not {"loss", "grad_norm", "lr", "tokens_per_s", "train_share"} & row.figures.keys()
    assert row_of({"kind": "start", "time_s": 1.0}) is None
    assert row_of(step(0) | {"step": None}) is None


def test_busy_shares_and_speed_are_what_was_done_between_two_loads() -> None:
    records = [
        load(10.0, 1, worker={"busy_s": {"rollout": 4.0}, "tokens": 100}, buffer={"busy_s": {}}),
        step(1),
        load(20.0, 5, worker={"busy_s": {"rollout": 9.0}, "tokens": 600}, late={"busy_s": {"x": 1.0}}),
        {"kind": "resume", "time_s": 30.0},
        load(40.0, 7, worker={"busy_s": {"rollout": 1.0}, "tokens": 10}),
    ]
    rows, last = rows_of(records)
    assert [row.x for row in rows] == [1, 5]
    assert rows[1] == ChartRow("", 5, 20.0, {"busy:worker": 0.5, "generated_per_s": 50.0})
    assert last == records[-1]


def test_thinned_rows_are_few_and_have_the_last() -> None:
    rows = [ChartRow("p", n, n, {"loss": float(n)}) for n in range(1000)]
    kept = thinned(rows, 10)
    assert len(kept) == 10
    assert [row.x for row in kept][::9] == [99, 999]
    assert kept[0].figures == {"loss": 99.0}
    assert thinned(rows[:5], 10) == rows[:5]


def test_of_what_was_done_again_the_last_is_thinned() -> None:
    rows = [ChartRow("p", x, at, {"loss": float(at)}) for at, x in enumerate([0, 1, 2, 3, 1, 2])]
    assert [(row.x, row.figures["loss"]) for row in thinned(rows, 10)] == [(0, 0.0), (1, 4.0), (2, 5.0)]


def test_each_panel_draws_series_of_its_own() -> None:
    keys = [key for panel in PANELS for key in panel.keys]
    assert len(keys) == len(set(keys))
    assert len({panel.title for panel in PANELS}) == len(PANELS)
