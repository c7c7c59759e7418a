"""A step's result depends on its data, not on how the data is cut."""

import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from areal_async.config.job import OptimizerSection
from areal_async.config.objective import ObjectiveSection
from areal_async.weights.pieces import whole_tensors
from tests.golden import plain_objective as plain
from trainer_service.algorithms.objective import Objective
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data.episode_rows import EpisodeBytes, rows_of_episodes
from trainer_service.data.flops import TOKENS_ALONE
from trainer_service.errors import DivergenceError
from trainer_service.loop.step import StepInputs, check_manifest, plan_step, train_step
from trainer_service.ranks import join_ranks


def _train(backend, batch, blobs, *, budget=8192, minibatches=1, shuffle=None, **objective):
    composed = Objective(ObjectiveSection(**objective), minibatches=minibatches)
    ranks = join_ranks(0, 1)
    eta = batch.max_staleness
    check_manifest(batch, step=batch.step, max_staleness=eta)
    plan = plan_step(batch, minibatches=minibatches, ranks=1, cost=TOKENS_ALONE)
    rows = [
        rows_of_episodes(
            [
                EpisodeBytes(blobs[plan.episodes[index].episode_id], plan.episodes[index], index)
                for index in minibatch[0]
            ],
            policy="policy",
            with_places=composed.with_segments,
        )
        for minibatch in plan.shares
    ]
    if shuffle is not None:
        for part in rows:
            np.random.default_rng(shuffle).shuffle(part)
    inputs = StepInputs(
        rows,
        step=batch.step,
        max_staleness=eta,
        names=[episode.episode_id for episode in plan.episodes],
        episodes=plan.table,
        micro_batch_tokens=budget,
        cost=TOKENS_ALONE,
    )
    return train_step(backend, composed, ranks, inputs)


def _backend(folder, kind=FsdpBackend, lr=1e-6):
    """With an epsilon of 1e-3: at 1e-8 Adam moves a weight whose gradient is mere rounding by up to the whole
    learning rate, and steps would be compared by that."""
    section = OptimizerSection().model_copy(update={"lr": lr, "eps": 1e-3})
    models = {"policy": ModelUse(folder, section, 100)}
    return kind(models, join_ranks(0, 1), dtype=torch.float32)


def _step(folder, batch, blobs, *, lr=1e-2, **options):
    backend = _backend(folder, lr=lr)
    return _train(backend, batch, blobs, **options), whole_tensors(backend.export("policy"))


def _same(a, b):
    (first, weights), (second, others) = a, b
    assert first.losses == pytest.approx(second.losses, abs=1e-6)
    assert first.grad_norms == pytest.approx(second.grad_norms, rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], atol=4e-6, rtol=0)
    for name in first.statistics.keys() - {"by_staleness"}:
        assert first.statistics[name] == pytest.approx(second.statistics[name], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("normaliser", ["token", "sequence"])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_step_is_invariant_to_micro_batching(model_dir, make_batch, normaliser, minibatches):
    batch, blobs = make_batch(3, max_staleness=2, lengths=(1, 9))
    options = {"minibatches": minibatches, "normaliser": normaliser}
    whole = _step(model_dir, batch, blobs, **options)
    tiny = _step(model_dir, batch, blobs, budget=12, shuffle=1, **options)
    assert whole[0].micro_batches == minibatches
    assert tiny[0].micro_batches > 3 * minibatches
    _same(whole, tiny)


OBJECTIVES = [
    {"loss": "gspo", "correction": "bypass", "loss_args": {"clip_high": 0.1}},
    {"loss": "gspo", "correction": "mis", "correction_args": {"high": 0.04}},
    {"loss": "gmpo", "correction": "bypass", "normaliser": "sequence"},
    {"loss": "gmpo", "correction": "decoupled", "correction_args": {"level": "sequence"}},
    {"loss": "cispo", "correction": "m2po", "correction_args": {"threshold": 0.05}},
    {"loss": "sapo", "correction": "icepop", "normaliser": "rollout"},
    {"loss": "dppo", "correction": "tis", "loss_args": {"bound_low": 1e-3, "bound_high": 1e-3}},
    {"loss": "raft_pp", "prox": "loglinear"},
    {"loss": "topr", "correction": "none"},
    {"loss": "topr", "correction": "none", "loss_args": {"level": "token"}},
    {"loss": "kimi", "correction": "mis", "correction_args": {"estimator": "k1", "high": 0.1}},
    {"loss": "reinforce", "entropy": 0.1},
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o['loss']}-{o.get('correction', '')}")
def test_a_step_of_any_loss_is_invariant_to_order_and_micro_batching(model_dir, make_batch, objective):
    """With episodes whose rows are in several micro-batches, and a second update whose ratios are not 1."""
    batch, blobs = make_batch(3, max_staleness=2, lengths=(1, 9), branches=3)
    whole = _step(model_dir, batch, blobs, minibatches=2, **objective)
    tiny = _step(model_dir, batch, blobs, minibatches=2, budget=12, shuffle=1, **objective)
    assert tiny[0].micro_batches > 3 * whole[0].micro_batches
    _same(whole, tiny)
    shares = [value for name, value in whole[0].statistics.items() if name.endswith("_share")]
    assert not shares or any(0 < share < 1 for share in shares), "nothing was decided by what is compared"


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("gspo", {"clip_low": 0.02, "clip_high": 0.03}),
        ("gmpo", {"clip_low": 0.02, "clip_high": 0.03}),
        ("topr", {}),
        ("topr", {"level": "token"}),
    ],
)
def test_the_ratio_of_an_episode_is_that_of_all_of_its_rows(monkeypatch, model_dir, make_batch, name, args):
    """Against plain f64 on the model's own log-probs, with rows of an episode in several micro-batches."""
    batch, blobs = make_batch(3, max_staleness=2, lengths=(1, 9), branches=3)
    seen, terms = [], Objective.terms

    def watch(self, columns, units):
        names = {"beh": units.behaviour, "A": units.advantage, "episode": units.episode}
        values = {"logp": columns["logp"].detach()} | names
        seen.append(
            [
                dict(zip(values, unit, strict=True))
                for unit in zip(*(v.tolist() for v in values.values()), strict=True)
            ]
        )
        return terms(self, columns, units)

    monkeypatch.setattr(Objective, "terms", watch)
    correction = "none" if name == "topr" else "bypass"
    options = {"loss": name, "loss_args": args, "correction": correction, "normaliser": "rollout"}
    result, _ = _step(model_dir, batch, blobs, budget=12, **options)
    episodes = [{unit["episode"] for unit in units} for units in seen]
    assert sum(map(len, episodes)) > len(set.union(*episodes)), "no episode was in two micro-batches"
    units = [unit | {"prox": unit["beh"]} for units in seen for unit in units]
    units = plain.with_means(units, name, args)
    wanted = [plain.LOSSES[name](u["logp"], u, **args) * plain.rollout(u, units) for u in units]
    assert result.loss == pytest.approx(math.fsum(wanted), abs=1e-6)


@pytest.mark.parametrize("normaliser", ["token", "sequence"])
def test_groups_are_whole_a_step_of_uneven_groups_depends_on_no_position(model_dir, make_batch, normaliser):
    """As partial groups leave it: 4, 1, 3 and 2 of 4 samples, not the first ones."""
    batch, blobs = make_batch(3, max_staleness=2, lengths=(1, 9))
    groups = [
        replace(group, episodes=group.episodes[4 - size :])
        for group, size in zip(batch.groups, (4, 1, 3, 2), strict=True)
    ]
    forth, back = (replace(batch, groups=order) for order in (groups, groups[::-1]))
    one = _step(model_dir, forth, blobs, normaliser=normaliser)
    _same(one, _step(model_dir, back, blobs, normaliser=normaliser, budget=12, shuffle=1))
    # The group of one has no advantage: without it, only what the normaliser divides by is another.
    without = replace(batch, groups=[groups[0], *groups[2:]])
    fewer, _ = _step(model_dir, without, blobs, normaliser=normaliser)
    divisor = {"sequence": (10, 9), "token": (one[0].statistics["units"], fewer.statistics["units"])}
    all_, some = divisor[normaliser]
    assert one[0].loss * all_ == pytest.approx(fewer.loss * some, abs=1e-5)


def test_reused_prox_equals_recomputed_prox_in_the_first_update(model_dir, make_batch):
    batch, blobs = make_batch(3, max_staleness=2)
    _same(_step(model_dir, batch, blobs), _step(model_dir, batch, blobs, prox="reuse"))


def test_prox_is_that_of_the_start_of_the_step_in_every_minibatch(model_dir, make_batch):
    """w = exp(prox - beh) must not see the updates of earlier minibatches of the step."""
    batch, blobs = make_batch(0)
    one, _ = _step(model_dir, batch, blobs)
    four, _ = _step(model_dir, batch, blobs, minibatches=4, lr=0.3)
    for name in ("w_mean", "w_max", "w_min", "chi2"):
        assert four.statistics[name] == pytest.approx(one.statistics[name], rel=1e-4)
    assert four.statistics["clip_high_share"] + four.statistics["clip_low_share"] > 0
    assert one.statistics["clip_high_share"] == one.statistics["clip_low_share"] == 0


def test_statistics_are_split_by_staleness_and_every_sampled_unit_counts(model_dir, make_batch):
    batch, blobs = make_batch(5, max_staleness=2)
    statistics = _step(model_dir, batch, blobs)[0].statistics
    by = statistics["by_staleness"]
    assert set(by) <= {"0", "1", "2"}
    sampled = sum(e.n_sampled for g in batch.groups for e in g.episodes)
    assert sum(figures["units"] for figures in by.values()) == statistics["units"] == sampled


class Broken(FsdpBackend):
    """Whose log-probs of some episodes are `value`, with or without a gradient to take."""

    value, episodes, with_gradient = float("nan"), (3, 9), True

    def evaluate(self, model, batches, fn, *, columns=("logp",)):
        if self.with_gradient:
            return super().evaluate(model, batches, fn, columns=columns)

        def spoilt(index, found):
            return fn(index, {"logp": self._spoilt(batches[index], found["logp"])})

        return super().evaluate(model, batches, spoilt, columns=columns)

    def train(self, model, batches, loss_of, *, columns=("logp",)):
        def spoilt(index, found):
            logp = found["logp"]
            return loss_of(
                index, {"logp": self._spoilt(batches[index], logp) if self.with_gradient else logp}
            )

        super().train(model, batches, spoilt, columns=columns)

    def _spoilt(self, batch, logp):
        return torch.where(torch.isin(batch.episode, torch.tensor(self.episodes)), self.value, logp)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("with_gradient", [True, False], ids=["current", "proximal"])
def test_a_log_prob_that_is_not_finite_ends_training_before_the_update(
    model_dir, make_batch, value, with_gradient
):
    """Of the current weights or the proximal ones; the episodes are named, and those before them trained."""
    batch, blobs = make_batch(0)
    backend = _backend(model_dir, type("Kind", (Broken,), {"value": value, "with_gradient": with_gradient}))
    before = {name: tensor.clone() for name, tensor in whole_tensors(backend.export("policy")).items()}
    with pytest.raises(DivergenceError) as caught:
        _train(backend, batch, blobs, budget=64, prox="recompute")
    words = str(caught.value)
    assert "step 0, minibatch 0" in words
    episodes = [episode for group in batch.groups for episode in group.episodes]
    for index in (3, 9):
        assert f"{episodes[index].episode_id} ({episodes[index].n_sampled})" in words
    assert backend.updates == {"policy": 0}
    assert caught.value.restart_helps is False
    after = whole_tensors(backend.export("policy"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_the_minibatches_before_the_faulty_one_are_trained(model_dir, make_batch):
    batch, blobs = make_batch(0)
    backend = _backend(model_dir, type("Kind", (Broken,), {"episodes": (9,)}))
    with pytest.raises(DivergenceError, match="step 0, minibatch 2"):
        _train(backend, batch, blobs, minibatches=4)
    assert backend.updates == {"policy": 2}


def test_weights_that_are_not_finite_are_not_given_out(model_dir, make_batch):
    """An update that overflows, with a gradient that was finite."""
    backend = _backend(model_dir, lr=3e38)
    with pytest.raises(DivergenceError, match="the norm of the weights is"):
        _train(backend, *make_batch(0))
    assert backend.updates == {"policy": 0}
