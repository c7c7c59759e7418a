"""Every part of the objective against values computed by hand, and the parts against each other."""

from itertools import product
from math import exp, log, sqrt

import pytest
import torch
from torch import tensor

from areal_async.config.job import ObjectiveSection
from trainer_service.algorithms import built_in
from trainer_service.algorithms.objective import Objective, UnitTerms
from trainer_service.algorithms.off_policy import StepStatistics
from trainer_service.data.microbatch import UnitTable
from trainer_service.errors import ObjectiveError

NAN = float("nan")


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=atol, rtol=0)


def units(behaviour, *, episode, advantage, mask=None, version=None, prox=None):
    n = len(behaviour)
    return UnitTable(
        behaviour=tensor(behaviour),
        version=torch.zeros(n, dtype=torch.int64) if version is None else tensor(version),
        episode=tensor(episode),
        group=torch.zeros(n, dtype=torch.int64),
        advantage=tensor(advantage),
        mask=torch.ones(n, dtype=torch.bool) if mask is None else tensor(mask, dtype=torch.bool),
        computed={} if prox is None else {"prox": prox},
    )


def test_grpo_by_hand():
    # group 5: mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4; group 2: mean 2, sample variance 2
    rewards = tensor([1.0, 0.0, 0.0, 0.0, 3.0, 1.0])
    groups = tensor([5, 5, 5, 5, 2, 2])
    s = sqrt(2)
    close(
        built_in.grpo(rewards, groups, eps=0.1),
        [0.75 / 0.6, -0.25 / 0.6, -0.25 / 0.6, -0.25 / 0.6, 1 / (s + 0.1), -1 / (s + 0.1)],
    )


def test_grpo_of_a_single_episode_and_of_equal_rewards_is_zero():
    close(built_in.grpo(tensor([0.7, 0.1, 0.1, 0.1]), tensor([0, 1, 1, 1])), [0.0, 0.0, 0.0, 0.0], atol=0)


def test_groups_are_whole_positions_never_define_groups():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(24, generator=generator)
    groups = torch.arange(24) // 6
    expected = built_in.grpo(rewards, groups)
    shuffled = torch.randperm(24, generator=generator)
    close(built_in.grpo(rewards[shuffled], groups[shuffled]), expected[shuffled], atol=0)
    relabelled = tensor([90, 7, 13, -4])[groups]
    close(built_in.grpo(rewards, relabelled), expected, atol=0)


def test_ppo_by_hand():
    ratio = [1.5, 1.5, 0.5, 0.5, 1.1, 1.0]
    advantage = [2.0, -1.0, 1.0, -2.0, 3.0, -1.0]
    prox = tensor([-1.0, -2.0, -0.5, -3.0, -1.0, -1.0])
    logp = (prox + tensor(ratio).log()).requires_grad_()
    u = units([0.0] * 6, episode=[0] * 6, advantage=advantage, prox=prox)
    loss, shares = built_in.ppo(logp, u, clip_low=0.2, clip_high=0.3)
    close(loss, [-2.6, 1.5, -0.5, 1.6, -3.3, 1.0])
    assert shares["clip_high"].tolist() == [True, False, False, False, False, False]
    assert shares["clip_low"].tolist() == [False, False, False, True, False, False]
    loss.sum().backward()
    close(logp.grad, [0.0, 1.5, -0.5, 0.0, -3.3, 1.0])


def test_ppo_clamps_the_exponent():
    logp = tensor([0.0, -500.0], requires_grad=True)
    u = units([0.0, 0.0], episode=[0, 0], advantage=[-1.0, 1.0], prox=tensor([-500.0, 0.0]))
    loss, _ = built_in.ppo(logp, u)
    close(loss / tensor([exp(20), exp(-20)]), [1.0, -1.0], atol=1e-5)
    loss.sum().backward()
    assert torch.isfinite(logp.grad).all()


def test_sft_is_the_negative_log_prob():
    close(built_in.sft(tensor([-0.5, -2.0]), None), [0.5, 2.0])


def test_the_behaviour_weight_by_hand():
    prox = tensor([log(2.0), 0.0, -1.0], requires_grad=True)
    weight = built_in.behaviour_weight(prox, tensor([0.0, log(4.0), -1.0]))
    close(weight, [2.0, 0.25, 1.0])
    assert not weight.requires_grad
    close(built_in.decoupled(weight, None, cap=1.5)[0], [1.5, 0.25, 1.0])
    close(built_in.none(weight, None), [1.0, 1.0, 1.0])


def test_normalisers_by_hand():
    mask = tensor([True, True, True, False, True])
    episode = tensor([0, 0, 0, 2, 2])
    counts = tensor([3, 0, 1])
    close(built_in.token(mask, episode, counts), [0.25, 0.25, 0.25, 0.0, 0.25])
    close(built_in.sequence(mask, episode, counts), [1 / 6, 1 / 6, 1 / 6, 0.0, 1 / 2])


def test_decoupled_ppo_by_hand():
    # ρ = 1.5 and 0.9; w = 2 (cut to 1.2) and 0.5
    logp = tensor([log(1.5), log(0.9)], requires_grad=True)
    prox = tensor([0.0, 0.0])
    u = units([-log(2.0), log(2.0)], episode=[0, 1], advantage=[1.0, -1.0])
    objective = Objective(ObjectiveSection(correction_args={"cap": 1.2}))
    terms = objective.terms(logp, prox, u)
    close(terms.loss, [-1.2 * 1.2, 0.9 * 0.5])
    assert terms.shares["truncated"].tolist() == [True, False]
    (terms.loss * objective.coefficients(u, tensor([1, 1]))).sum().backward()
    close(logp.grad, [0.0, 0.9 * 0.5 / 2])


def test_reused_prox_is_the_current_log_prob_detached():
    logp = tensor([-1.0, -2.0], requires_grad=True)
    u = units([-1.0, -1.0], episode=[0, 0], advantage=[2.0, 1.0])
    terms = Objective(ObjectiveSection(prox="reuse")).terms(logp, None, u)
    close(terms.loss, [-2.0, -exp(-1.0)])
    terms.loss.sum().backward()
    close(logp.grad, [-2.0, -exp(-1.0)])


MATRIX = list(
    product(
        ("token", "sequence"),
        (("ppo", "decoupled"), ("ppo", "none"), ("sft", "none")),
        ([1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1], [0, 0, 0, 1, 1, 1], [0, 1, 0, 0, 0, 0]),
    )
)


@pytest.mark.parametrize(("normaliser", "parts", "mask"), MATRIX)
def test_a_masked_unit_counts_nowhere(normaliser, parts, mask):
    """Masked units full of NaN give the loss and gradient of a batch that never had them."""
    loss_name, correction = parts
    objective = Objective(ObjectiveSection(loss=loss_name, correction=correction, normaliser=normaliser))
    keep = torch.tensor(mask, dtype=torch.bool)
    episode = tensor([0, 0, 0, 1, 1, 2])
    values = {
        "logp": tensor([-0.3, -1.0, -2.0, -0.7, -0.1, -1.5]),
        "prox": tensor([-0.5, -1.1, -1.0, -0.9, -0.2, -1.0]),
        "beh": tensor([-0.4, -3.0, -1.3, -0.2, -0.3, -1.2]),
        "adv": tensor([1.0, 1.0, 1.0, -0.5, -0.5, 2.0]),
    }

    def run(logp, prox, beh, adv, eps, mask_):
        logp = logp.clone().requires_grad_()
        u = units(beh.tolist(), episode=eps.tolist(), advantage=adv.tolist(), mask=mask_.tolist())
        counts = torch.zeros(3, dtype=torch.int64).index_add(0, u.episode, u.mask.long())
        terms = objective.terms(logp, prox, u)
        loss = (terms.loss * objective.coefficients(u, counts)).sum()
        loss.backward()
        statistics = StepStatistics(0, 0, objective.shares)
        statistics.add(terms, u)
        return loss.detach(), logp.grad, statistics.report()

    spoilt = {name: torch.where(keep, v, tensor(NAN)) for name, v in values.items()}
    loss, gradient, report = run(*spoilt.values(), episode, keep)
    alone = {name: v[keep] for name, v in values.items()}
    want_loss, want_gradient, want_report = run(*alone.values(), episode[keep], torch.ones(int(keep.sum())))
    close(loss, want_loss, atol=1e-7)
    close(gradient[keep], want_gradient, atol=1e-7)
    assert torch.equal(gradient[~keep], torch.zeros(int((~keep).sum())))
    assert report == want_report


def test_the_combination_of_sft_and_a_correction_says_why_it_is_wrong():
    with pytest.raises(ObjectiveError, match="no behaviour policy"):
        Objective(ObjectiveSection(loss="sft", correction="decoupled"))


def test_statistics_by_hand_split_by_staleness():
    objective = Objective(ObjectiveSection(correction_args={"cap": 1.5}))
    # step 5: staleness 0, 0, 2; w = 1, 2, 1/2
    u = units([0.0, -log(2.0), log(2.0)], episode=[0, 0, 1], advantage=[1.0, 1.0, -1.0], version=[5, 5, 3])
    terms = objective.terms(tensor([log(1.5), 0.0, log(0.5)]), torch.zeros(3), u)
    statistics = StepStatistics(5, 4, objective.shares)
    columns = ("behaviour", "version", "episode", "group", "advantage", "mask")
    for part in (slice(0, 1), slice(1, 3)):
        cut = UnitTable(**{name: getattr(u, name)[part] for name in columns})
        shares = {name: share[part] for name, share in terms.shares.items()}
        statistics.add(UnitTerms(terms.loss[part], terms.weight[part], shares), cut)
    report = statistics.report()
    assert report["units"] == 3
    assert report["w_mean"] == pytest.approx(3.5 / 3)
    assert (report["w_max"], report["w_min"]) == (pytest.approx(2.0), pytest.approx(0.5))
    assert report["ess"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert report["chi2"] == pytest.approx((0 + 1 + 0.25) / 3)
    assert report["kl_prox_beh"] == pytest.approx((0 + 2 * log(2) - 1 + 0.5 * log(0.5) + 0.5) / 3)
    assert report["truncated_share"] == pytest.approx(1 / 3)
    assert report["clip_high_share"] == pytest.approx(1 / 3)
    assert report["clip_low_share"] == pytest.approx(1 / 3)
    by = report["by_staleness"]
    assert set(by) == {"0", "2"}
    assert by["0"]["units"] == 2
    assert by["0"]["clip_high_share"] == 0.5
    assert by["2"]["clip_low_share"] == 1.0
    assert by["2"]["w_max"] == pytest.approx(0.5)
