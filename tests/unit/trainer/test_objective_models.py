"""A reference and a critic beside the policy: what a step makes of them, and what comes back with a
checkpoint."""

import pytest
import torch

from areal_async.weights.pieces import whole_tensors
from tests.unit.trainer import rank_process
from tests.unit.trainer.conftest import plain_row
from tests.unit.trainer.rank_process import train_batch
from trainer_service.data.microbatch import build_micro_batch

KL = {"kl": {"coefficient": 0.5}}


@pytest.fixture
def step(make_batch):
    """Train step `number` of a learner."""

    def run(learner, number):
        batch, blobs = make_batch(number)
        return train_batch(learner, batch, blobs)

    return run


def learner(model_dir, out, **trainer):
    return rank_process.learner_of(model_dir, out, **trainer)


def weights(backend, model="policy"):
    return {name: tensor.clone() for name, tensor in whole_tensors(backend.export(model)).items()}


def same(a, b):
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def saved(learner, folder):
    folder.mkdir()
    learner.save(folder)()
    return folder


def test_the_policy_is_held_near_the_reference(model_dir, tmp_path, step):
    """The divergence is 0 before the first update, grows with training, and less so with a penalty."""
    found = {}
    for coefficient in (1e-9, 3.0):
        backend, mine = learner(model_dir, tmp_path, objective={"kl": {"coefficient": coefficient}})
        found[coefficient] = [step(mine, number).statistics["kl_ref"] for number in range(4)]
        assert same(weights(backend, "ref"), weights(learner(model_dir, tmp_path)[0]))
    assert found[3.0][0] == pytest.approx(0, abs=1e-6)
    assert 0 < found[3.0][-1] < found[1e-9][-1]


def test_a_penalty_in_the_reward_counts_once_the_policy_has_moved(model_dir, tmp_path, step):
    with_penalty, without = (
        learner(
            model_dir,
            tmp_path,
            objective={"kl": {"coefficient": coefficient, "place": "reward"}, "prox": "recompute"},
        )[1]
        for coefficient in (3.0, 0.0)
    )
    first, second = ([step(each, number).loss for number in range(2)] for each in (with_penalty, without))
    assert first[0] == second[0]
    assert first[1] != pytest.approx(second[1], rel=1e-3)


def test_a_reference_follows_the_policy(model_dir, tmp_path, step):
    """Every second step, half of the way."""
    backend, mine = learner(model_dir, tmp_path, objective=KL, reference={"every_steps": 2, "share": 0.5})
    start = weights(backend)
    step(mine, 0)
    assert same(weights(backend, "ref"), start)
    step(mine, 1)
    now, reference = weights(backend), weights(backend, "ref")
    for name, tensor in reference.items():
        torch.testing.assert_close(tensor, (start[name] + now[name]) / 2, atol=1e-6, rtol=0)


def test_the_adaptive_coefficient_and_a_reference_that_moved_come_back(model_dir, tmp_path, step):
    how = {
        "objective": {"kl": {"coefficient": 0.5, "target": 1e-4, "horizon_steps": 1}},
        "reference": {"every_steps": 1, "share": 0.25},
    }
    backend, mine = learner(model_dir, tmp_path, **how)
    coefficients = []
    for number in range(2):
        step(mine, number)
        coefficients.append(mine.objective.kl.coefficient)
    assert coefficients[0] == pytest.approx(0.4)  # nothing diverged before the first update
    folder, updates = saved(mine, tmp_path / "saved"), dict(backend.updates)
    expected = step(mine, 2), weights(backend), weights(backend, "ref")
    again, other = learner(model_dir, tmp_path, **how)
    other.load(folder, updates)
    assert other.objective.kl.coefficient == coefficients[-1]
    result = step(other, 2)
    assert (result.losses, result.statistics) == (expected[0].losses, expected[0].statistics)
    assert same(weights(again), expected[1])
    assert same(weights(again, "ref"), expected[2])


def test_the_norm_of_gradients_that_were_discarded_is_forgotten(model_dir, tmp_path):
    """It is known before the update if several models are checked before any of them changes."""
    backend, _ = learner(model_dir, tmp_path)
    batch = build_micro_batch([plain_row([3, 4, 5, 6], [2, 3])])
    norms = []
    for factor in (1.0, 3.0):
        backend.train("policy", [batch], lambda _, columns, factor=factor: factor * columns["logp"].sum())
        norms.append(backend.gradient_norm())
        backend.discard()
    assert norms[1] == pytest.approx(3 * norms[0], rel=1e-5)
