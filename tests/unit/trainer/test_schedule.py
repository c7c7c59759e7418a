"""The learning rate over a run."""

import pytest

from areal_async.config.job import OptimizerSection
from trainer_service.backends.base import learning_rate


def rates(total: int = 11, **settings) -> list[float]:
    section = OptimizerSection(lr=1.0, **settings)
    return [learning_rate(section, update, total) for update in range(total)]


def test_a_constant_rate_rises_over_the_warm_up_and_stays():
    assert rates(warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 8)


def test_a_linear_rate_falls_evenly_to_its_final_share_at_the_last_update():
    assert rates(schedule="linear") == pytest.approx([1 - 0.1 * update for update in range(11)])
    assert rates(schedule="linear", final_lr_share=0.5)[-1] == pytest.approx(0.5)


def test_a_cosine_rate_is_halfway_down_in_the_middle():
    assert rates(schedule="cosine")[5] == pytest.approx(0.5)
    assert rates(schedule="cosine")[-1] == pytest.approx(0.0, abs=1e-12)


def test_the_decay_begins_after_the_warm_up_without_a_step():
    values = rates(schedule="linear", warmup_steps=5)
    assert values[4:6] == pytest.approx([1.0, 1.0])
    assert values[-1] == pytest.approx(0.0)


def test_updates_beyond_the_planned_ones_keep_the_final_rate():
    section = OptimizerSection(lr=1.0, schedule="linear", final_lr_share=0.1)
    assert learning_rate(section, 500, 10) == pytest.approx(0.1)
