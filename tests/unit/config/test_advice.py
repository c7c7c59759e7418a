"""Warnings: what a job file may say but will regret."""

import pytest

from areal_async.config.checks import advise, running_groups
from areal_async.config.load import load_job


def overrides(eta, batch, workers, concurrent, size=8):
    return [
        f"buffer.max_staleness={eta}",
        f"buffer.batch_groups={batch}",
        f"rollout.workers={workers}",
        f"rollout.max_concurrent={concurrent}",
        f"rollout.group_size={size}",
    ]


def test_the_defaults_are_without_a_warning(folder):
    assert advise(load_job(folder / "job.yaml")) == []


@pytest.mark.parametrize(
    ("eta", "running", "warned"),
    [(4, 16, False), (4, 17, True), (2, 8, False), (2, 9, True), (1, 4, False), (1, 5, True), (8, 33, True)],
)
def test_more_groups_at_once_than_the_bound_leaves_time_for_are_warned_of(folder, eta, running, warned):
    job = load_job(folder / "job.yaml", overrides(eta, 16, 1, 8 * running))
    assert running_groups(job) == running
    assert bool(advise(job)) == warned


@pytest.mark.parametrize("fields", [overrides(0, 16, 8, 64), [*overrides(1, 4, 2, 64), "kind=sft"]])
def test_synchronous_and_supervised_training_overtake_nothing(folder, fields):
    assert advise(load_job(folder / "job.yaml", fields)) == []


def test_the_warning_names_the_fields_and_fixes_that_help(folder):
    (warning,) = advise(load_job(folder / "job.yaml", overrides(2, 16, 2, 64)))
    text = str(warning)
    for field in ("max_staleness", "rollout.workers", "max_concurrent", "group_size", "buffer.batch_groups"):
        assert field in text
    assert "16 groups running at once" in text
    assert "rollout.max_concurrent to 32" in text
    assert "max_staleness to 4" in text
    for fixed in (overrides(2, 16, 2, 32), overrides(4, 16, 2, 64), overrides(2, 32, 2, 64)):
        assert advise(load_job(folder / "job.yaml", fixed)) == []


def test_a_limit_below_one_group_is_not_proposed(folder):
    (warning,) = advise(load_job(folder / "job.yaml", overrides(1, 4, 2, 16)))
    assert "max_concurrent to" not in str(warning)
    assert "Raise max_staleness to 4" in str(warning)
