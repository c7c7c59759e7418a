"""What `benchmarks/against_trl.py` makes of the runs that it measured."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from against_trl import MODELS, variants
from against_trl_report import crossed_at, draw, first_at, learned_better, tables
from against_trl_runs import CpuMeter, Run, followed

CURVE = [(0, 0.0, 0.45), (25, 10.0, 0.65), (50, 20.0, 0.75), (75, 30.0, 0.72), (100, 40.0, 0.81)]

THRESHOLDS = MODELS["quickstart"].thresholds


def run_of(system: str, seed: int, pace: float, reaches: float = 0.81) -> Run:
    points = [(step, seconds * pace, min(accuracy, reaches)) for step, seconds, accuracy in CURVE]
    return Run(
        system, seed, 1e-4, start_s=5.0, s_per_step=0.4 * pace, cpu_per_step={system: 0.5}, points=points
    )


def row_of(text: str, *begins: str) -> list[str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return next(row for row in rows if row[: len(begins)] == list(begins))


def test_a_threshold_counts_from_the_first_checkpoint_above_it_or_from_an_even_rise_between_two() -> None:
    assert [first_at(CURVE, share) for share in (0.70, 0.75, 0.82)] == [(50, 20.0), (50, 20.0), None]
    assert crossed_at(CURVE, 0.70) == pytest.approx((37.5, 15.0))
    assert [crossed_at(CURVE, share) for share in (0.45, 0.82)] == [(0, 0.0), None]


def test_the_better_learning_rate_comes_farther_and_then_sooner() -> None:
    soon_but_low = [(0, 0.0, 0.45), (25, 10.0, 0.79)]
    late = [(0, 0.0, 0.45), (100, 40.0, 0.69), (125, 50.0, 0.81)]
    assert max([soon_but_low, late, CURVE], key=lambda points: learned_better(points, THRESHOLDS)) is CURVE


def test_ratios_are_of_the_means_and_of_each_seed() -> None:
    text = tables(
        [run_of("eta=4", 0, 1.0), run_of("trl", 0, 2.0), run_of("trl", 1, 4.0), run_of("eta=4", 1, 2.0)],
        THRESHOLDS,
    )
    assert row_of(text, "0.70", "interpolated")[2:] == ["22.5", "45.0", "0.50 (0.50, 0.50)"]
    assert row_of(text, "0.70", "at the first checkpoint")[2:] == ["30.0", "60.0", "0.50 (0.50, 0.50)"]
    assert row_of(text, "0.70", "interpolated, from the start of the process")[2:4] == ["27.5", "50.0"]


def test_a_system_of_which_a_run_fell_short_has_no_mean() -> None:
    text = tables(
        [run_of("eta=4", 0, 1.0), run_of("eta=4", 1, 1.0, reaches=0.78), run_of("trl", 0, 1.0)], THRESHOLDS
    )
    assert row_of(text, "0.80", "interpolated")[2:] == ["1 of 2 came there", "38.9", "–"]


def test_steps_are_compared_with_synchronous_training_where_it_ran() -> None:
    text = tables([run_of("eta=4", 0, 1.0), run_of("eta=0", 0, 1.0)], THRESHOLDS)
    assert "| held-out accuracy | steps | eta=4 | eta=0 | eta=4 over eta=0 |" in text


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "images" / "against.png"
    draw([run_of("eta=4", 0, 1.0), run_of("eta=0", 0, 1.5), run_of("trl", 0, 2.0)], THRESHOLDS, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_variants_name_their_bound_and_their_pacing() -> None:
    first, second = variants("eta=0,eta=4:full", "fresh", ["rollout.torch_threads=2"])
    assert first.overrides == ("rollout.torch_threads=2", "buffer.max_staleness=0", "buffer.pacing=fresh")
    assert (second.name, second.overrides[-1]) == ("eta=4, full", "buffer.pacing=full")


def test_cpu_is_counted_by_process_with_that_of_children_that_ended() -> None:
    meter = CpuMeter(os.getpid(), "test")
    meter.samples = [
        (100.0, {"machine": 10.0, "trainer": 1.0}),
        (102.0, {"machine": 14.0, "trainer": 3.0, "late": 1.0}),
    ]
    assert meter.between(101.0, 102.0) == {"machine": 2.0, "trainer": 1.0, "late": 0.5}


def test_a_run_that_fails_ends_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="failed with status 3"):
        followed([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log", "trl")
