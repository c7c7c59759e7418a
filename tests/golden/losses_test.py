"""Losses, corrections, proximal policies, KL, entropy and normalisers against the plain f64 reference of
`plain_objective.py`, over ragged cases; and their gradients."""

from functools import cache, partial
from itertools import product
from math import exp, fsum

import pytest
import torch

from areal_async.config.objective import ObjectiveSection
from tests.golden import plain_objective as plain
from tests.golden.tables import Alone, Threads, shuffled, totals_of, unrewarded
from trainer_service.algorithms.kl import KlPenalty
from trainer_service.algorithms.objective import Objective
from trainer_service.algorithms.parts import Correction, Loss, correction, loss
from trainer_service.algorithms.table import UnitTable
from trainer_service.errors import ObjectiveError

CASES, AT_ONCE = 520, 20
LENGTH = 7
LOSS_ARGS = {
    "ppo": [{}, {"clip_high": 0.28}, {"clip_low": 0.1, "dual_clip": 1.5}],
    "gspo": [{}, {"clip_low": 0.05, "clip_high": 0.3}],
    "gmpo": [{}, {"clip_low": 0.1, "clip_high": 0.2}],
    "cispo": [{}, {"clip_low": 0.4, "clip_high": 0.2}],
    "sapo": [{}, {"tau_positive": 2.0, "tau_negative": 3.0}],
    "dppo": [{}, {"divergence": "kl", "bound_low": 0.03, "bound_high": 0.05}],
    "raft_pp": [{}, {"clip_high": 0.5}],
    "kimi": [{}, {"tau": 2.0}],
    "kimi_token": [{}, {"tau": 2.0}],
    "topr": [{}, {"level": "token"}],
    "reinforce": [{}],
}
CORRECTION_ARGS = {
    "decoupled": [{}, {"cap": 1.1}, {"level": "sequence"}],
    "tis": [{}, {"level": "sequence", "cap": 1.5}],
    "icepop": [{}, {"low": 0.8, "high": 1.2}],
    "mis": [
        {},
        {"high": 0.3, "cap": 1.2},
        {"estimator": "k1", "low": -0.2, "high": 0.1},
        {"estimator": "k2"},
    ],
    "m2po": [{}, {"threshold": 0.5, "cap": 2.0}],
    "bypass": [{}],
    "none": [{}],
}
NORMALISERS = {"token": {}, "sequence": {}, "rollout": {}, "constant": {"length": LENGTH}}


@cache
def case(seed):
    return plain.case(seed)


@cache
def together(first, count):
    """Cases `first` to `first + count` as one: of most formulas an episode has nothing to do with others."""
    found, moved = [], 0
    for seed in range(first, first + count):
        names = ("episode", "group", "row")
        found += [u | {name: u[name] + moved for name in names} for u in case(seed)]
        moved = 1 + max(max(u[name] for name in names) for u in found)
    return found


def table(units, ranks=None, n_episodes=None):
    def column(name, dtype=torch.float32):
        return torch.tensor([u[name] for u in units], dtype=dtype)

    mask, row = column("mask", torch.bool), column("row", torch.int64)
    in_row = torch.zeros(1000, dtype=torch.int64).index_add(0, row, mask.long())
    count = n_episodes or 1 + max(u["episode"] for u in units)
    return UnitTable(
        {
            "behaviour": column("beh"),
            "prox": column("prox"),
            "ref": column("ref"),
            "advantage": column("A"),
            "mask": mask,
            "episode": column("episode", torch.int64),
            "group": column("group", torch.int64),
            "row": row,
            "row_units": in_row[row].clamp(min=1),
            "version": torch.zeros(len(units), dtype=torch.int64),
            "staleness": torch.arange(len(units)) % 4,
        },
        unrewarded(count),
        None,
        ranks or Alone(),
    )


def of(units, name):
    return torch.tensor([u[name] for u in units], dtype=torch.float32)


def section(loss, correction, *, loss_args=None, correction_args=None, normaliser="token", **more):
    return ObjectiveSection(
        loss=loss,
        loss_args=loss_args or {},
        correction=correction,
        correction_args=correction_args or {},
        normaliser=normaliser,
        normaliser_args=NORMALISERS[normaliser],
        **more,
    )


def filled(objective, units):
    """The table as `Objective.fill` leaves it, but for the advantages, which the case has."""
    given = units.advantage
    objective._advantages = lambda units, penalty: {"advantage": given}
    return objective.fill(units, 0).with_columns(staleness=units["staleness"])


def run(objective, units, logp, entropy=None):
    """Loss and gradients of a whole table as one micro-batch."""
    units = filled(objective, units)
    logp = logp.clone().requires_grad_()
    entropy = torch.zeros_like(logp) if entropy is None else entropy.clone().requires_grad_()
    found = objective.statistic(logp, units)
    if found is not None:
        mean = units.mean_of_episode(found.detach()).float()
        size = units.by_episode(torch.ones_like(found))[units.episode].float()
        units = units.with_columns(episode_mean=mean + found - found.detach(), episode_units=size)
    terms = objective.terms({"logp": logp, "entropy": entropy}, units)
    (terms.loss * objective.coefficients(units, totals_of(units))).sum().backward()
    return terms, units, logp.grad, entropy.grad


def near(found, wanted, *, rel=1e-5, tiny=1e-6):
    """Rounding of f32 inputs to exp is 1e-6 of the result at the largest exponent."""
    scale = max([1.0, *map(abs, wanted)])
    for index, (a, b) in enumerate(zip(found.tolist(), wanted, strict=True)):
        assert abs(a - b) <= rel * abs(b) + tiny * min(scale, 1.0), f"{index}: {a} is not {b}"


@pytest.mark.parametrize("name", LOSS_ARGS)
def test_a_loss_and_its_gradient_are_those_of_the_formula(name):
    for seed in range(0, CASES, AT_ONCE):
        every, args = together(seed, AT_ONCE), LOSS_ARGS[name][seed // AT_ONCE % len(LOSS_ARGS[name])]
        objective = Objective(section(name, "none", loss_args=args), minibatches=2)
        terms, _, gradient, _ = run(objective, table(every), of(every, "logp"))
        mask = of(every, "mask").bool()
        units = plain.with_means([u for u in every if u["mask"]], name, args)
        formula = partial(plain.LOSSES[name], **args)
        near(terms.loss[mask], [formula(u["logp"], u) for u in units])
        slopes = [plain.slope(partial(formula, u=u), u["logp"]) / len(units) for u in units]
        near(gradient[mask], slopes, rel=1e-4)
        assert not terms.loss[~mask].any()
        assert not gradient[~mask].any()


@pytest.mark.parametrize("name", CORRECTION_ARGS)
def test_a_correction_is_that_of_the_formula(name):
    count = 1 if name == "m2po" else AT_ONCE
    for seed in range(0, CASES, count):
        every, args = together(seed, count), CORRECTION_ARGS[name][seed // count % len(CORRECTION_ARGS[name])]
        objective = Objective(section("kimi_token", name, correction_args=args), minibatches=2)
        mask = of(every, "mask").bool()
        units = [u for u in every if u["mask"]]
        terms, _, _, _ = run(objective, table(every), of(every, "logp"))
        prox = "beh" if name == "bypass" else "prox"
        losses = [plain.kimi_token(u["logp"], u | {"prox": u[prox]}) for u in units]
        weights = plain.CORRECTIONS[name](units, **args)
        near(terms.loss[mask], [a * b for a, b in zip(losses, weights, strict=True)])
        shown = "logp" if name == "bypass" else "prox"
        near(terms.weight[mask], [plain.ratio(u[shown] - u["beh"]) for u in units])
        if "dropped_share" in objective.figures:
            assert terms.figures["dropped_share"][mask].tolist() == [w == 0 for w in weights]


def test_a_whole_objective_is_that_of_the_formula_in_every_combination():
    """Loss, gradient through log-probs and entropies, KL penalty, correction and coefficient together."""
    pairs = [(a, b) for a, b in product(LOSS_ARGS, CORRECTION_ARGS) if a != "topr" or b == "none"]
    for seed in range(CASES):
        every, (name, corrected) = case(seed), pairs[seed % len(pairs)]
        normaliser = [*NORMALISERS][seed // len(pairs) % 4]
        kind = ("k1", "k2", "k3")[seed % 3]
        kl = {"coefficient": 0.3 * (seed % 2), "estimator": kind, "straight_through": seed % 5 == 0}
        chosen = section(name, corrected, normaliser=normaliser, kl=kl, entropy=0.1 * (seed % 4))
        objective = Objective(chosen, minibatches=2)
        terms, filled_, gradient, of_entropy = run(
            objective, table(every), of(every, "logp"), of(every, "entropy")
        )
        mask = of(every, "mask").bool()
        kept = [u | ({"prox": u["beh"]} if corrected == "bypass" else {}) for u in every if u["mask"]]
        units = plain.with_means(kept, name, {})
        weights = plain.CORRECTIONS[corrected](units)

        share = [plain.NORMALISERS[normaliser](u, units, **NORMALISERS[normaliser]) for u in units]
        values, slopes = [], []
        for u, w, c in zip(units, weights, share, strict=True):
            formula, beta = partial(plain.LOSSES[name], u=u), kl["coefficient"]
            penalty = plain.divergence(kind, u["logp"] - u["ref"])
            values.append(w * formula(u["logp"]) + beta * penalty - chosen.entropy * u["entropy"])
            shape = "k2" if kl["straight_through"] else kind
            of_kl = plain.slope_of_divergence(shape, u["logp"] - u["ref"])
            slopes.append(c * (w * plain.slope(formula, u["logp"]) + beta * of_kl))
        near(terms.loss[mask], values)
        near(objective.coefficients(filled_, totals_of(filled_))[mask], share, tiny=1e-8)
        near(gradient[mask], slopes, rel=1e-4)
        if chosen.entropy:
            near(of_entropy[mask], [-chosen.entropy * c for c in share], tiny=1e-8)
        assert not gradient[~mask].any()


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_the_gradient_of_an_episodes_loss_is_that_of_the_whole_episode(name):
    """By the mean that its formula takes over all of the episode's units, in f64."""
    for seed in range(40):
        units = [u | {"mask": True} for u in case(seed) if u["mask"]]
        first = units[0]["A"]
        units = [u | {"A": first} for u in units]
        objective = Objective(section(name, "none", normaliser="rollout"), minibatches=2)
        _, _, gradient, _ = run(objective, table(units), of(units, "logp"))

        def whole(x, index, units=units):
            moved = [u | ({"logp": x} if i == index else {}) for i, u in enumerate(units)]
            moved = plain.with_means(moved, name, {})
            return fsum(plain.LOSSES[name](u["logp"], u) * plain.rollout(u, moved) for u in moved)

        slopes = [plain.slope(lambda x, i=i: whole(x, i), u["logp"], 1e-7) for i, u in enumerate(units)]
        near(gradient, slopes, rel=1e-3, tiny=1e-5)


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_the_loglinear_proximal_policy_lies_between_behaviour_and_current(staleness):
    """α = (d - 1) / d with d = staleness + 1: at staleness 0 it is the behaviour policy itself."""
    for seed in range(50):
        every = case(seed)
        units = table(every)
        units = units.with_columns(staleness=torch.full_like(units["staleness"], staleness))
        logp = of(every, "logp")
        terms, _, gradient, _ = run(Objective(section("ppo", "decoupled", prox="loglinear")), units, logp)
        kept = [u for u in every if u["mask"]]
        alpha = staleness / (staleness + 1)
        kept = [u | {"prox": u["beh"] + alpha * (u["logp"] - u["beh"])} for u in kept]
        mask = of(every, "mask").bool()
        wanted = [plain.ppo(u["logp"], u) * min(plain.weight(u), 5.0) for u in kept]
        near(terms.loss[mask], wanted)
        slopes = [plain.slope(lambda x, u=u: plain.ppo(x, u), u["logp"]) for u in kept]
        weighed = [s * min(plain.weight(u), 5.0) / len(kept) for s, u in zip(slopes, kept, strict=True)]
        near(gradient[mask], weighed, rel=1e-4)


@pytest.mark.parametrize(
    ("objective", "minibatches", "mode"),
    [
        ({}, 1, "reuse"),
        ({}, 2, "recompute"),
        ({"prox": "recompute"}, 1, "recompute"),
        ({"prox": "loglinear"}, 2, "loglinear"),
        ({"correction": "bypass"}, 2, "behaviour"),
        ({"correction": "mis"}, 1, "recompute"),
        ({"correction": "m2po"}, 1, "recompute"),
        ({"correction_args": {"level": "sequence"}}, 1, "recompute"),
        ({"loss": "reinforce", "correction": "none"}, 4, "reuse"),
        ({"loss": "topr", "correction": "none"}, 4, "reuse"),
        ({"kl": {"coefficient": 0.1, "place": "reward"}}, 1, "recompute"),
        ({"kl": {"coefficient": 0.1}}, 1, "reuse"),
    ],
)
def test_auto_takes_a_pass_for_the_proximal_policy_only_where_it_differs(objective, minibatches, mode):
    composed = Objective(ObjectiveSection(**objective), minibatches=minibatches)
    assert composed.prox == mode
    assert ("prox" in composed.columns) == (mode == "recompute")


def test_a_penalty_in_the_reward_is_of_the_policy_at_the_start_of_the_step_or_else_of_the_behaviour():
    units = table(case(3)).cleared()
    for prox, start in (("auto", "prox"), ("reuse", "behaviour"), ("loglinear", "behaviour")):
        kl = {"coefficient": 0.5, "place": "reward", "estimator": "k1"}
        objective = Objective(ObjectiveSection(kl=kl, prox=prox))
        given = units if prox == "auto" else _without(units, "prox")
        seen = []
        objective._advantages = lambda units, penalty, seen=seen: (
            seen.append(penalty) or {"advantage": penalty}
        )
        objective.fill(given, 0)
        torch.testing.assert_close(seen[0], 0.5 * (units[start] - units["ref"]))


def _without(units, name):
    return UnitTable({n: c for n, c in units.columns.items() if n != name}, units.episodes, None, units.ranks)


def test_an_adaptive_coefficient_follows_what_is_measured():
    penalty = KlPenalty(ObjectiveSection(kl={"coefficient": 1.0, "target": 0.1, "horizon_steps": 4}).kl)
    for measured, factor in ((0.1, 1.0), (0.11, 1 + 0.1 / 4), (10.0, 1.05), (0.0, 0.95)):
        before = penalty.coefficient
        penalty.after_step(measured)
        assert penalty.coefficient == pytest.approx(before * factor)
    fixed = KlPenalty(ObjectiveSection(kl={"coefficient": 1.0}).kl)
    fixed.after_step(5.0)
    assert fixed.coefficient == 1.0


@pytest.mark.parametrize("name", ["decoupled", "mis", "m2po"])
def test_a_correction_of_the_whole_step_depends_neither_on_order_nor_on_who_holds_a_unit(name):
    args = {"level": "sequence"} if name == "decoupled" else {}
    objective = Objective(section("ppo", name, correction_args=args), minibatches=2)
    for seed in range(60):
        every = case(seed)
        whole = run(objective, table(every), of(every, "logp"))[0].loss
        order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))
        other = run(objective, shuffled(table(every), order), of(every, "logp")[order])[0].loss
        torch.testing.assert_close(other, whole[order], rtol=1e-6, atol=1e-6)
        episodes, threads = 1 + max(u["episode"] for u in every), Threads(2)

        def on(rank, every=every, threads=threads, episodes=episodes):
            mine = every[rank::2]
            own = Objective(section("ppo", name, correction_args=args), minibatches=2)
            if not mine:
                mine = [every[0] | {"mask": False}]
            units = filled(own, table(mine, threads, episodes))
            return own.terms({"logp": of(mine, "logp")}, units).loss[: len(every[rank::2])]

        for rank, found in enumerate(threads.on_ranks(on)):
            torch.testing.assert_close(found, whole[rank::2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("what", ["loss", "figure", "correction", "statistic", "normaliser"])
def test_a_part_that_returns_another_shape_is_told_so(what, monkeypatch):
    def short(logp, units):
        return logp[:-1]

    def with_figure(logp, units):
        return logp, {"share": logp[:1]}

    parts = {
        "loss": ("_loss", Loss(short)),
        "figure": ("_loss", loss(figures=("share",))(with_figure)),
        "correction": ("_correction", correction()(short)),
        "statistic": ("_loss", Loss(lambda logp, units: logp, statistic=short)),
        "normaliser": ("_normaliser", lambda units, totals: units.mask[:-1].float()),
    }
    objective = Objective(ObjectiveSection(correction="none"))
    monkeypatch.setattr(objective, *parts[what])
    assert what != "correction" or isinstance(objective._correction, Correction)
    every = case(5)
    shape = len(every) - 1 if what != "figure" else 1
    with pytest.raises(ObjectiveError, match=rf"was to return.* {len(every)} numbers.* shape \({shape},\)"):
        run(objective, table(every), of(every, "logp"))


def test_the_formulas_that_are_compared_with_are_those_by_hand():
    u = {"prox": 0.0, "logp": 0.5, "beh": 1.0, "A": -2.0, "mean": 0.1, "episode": 0}
    assert plain.ppo(0.5, u) == pytest.approx(2 * exp(0.5))
    assert plain.ppo(0.5, u, dual_clip=1.5) == pytest.approx(3.0)
    assert plain.gspo(0.5, u) == pytest.approx(2 * exp(0.1))
    assert plain.cispo(0.5, u, clip_high=0.2) == pytest.approx(1.2)
    assert plain.sapo(0.5, u) == pytest.approx(8 / 1.05 / (1 + exp(-1.05 * (exp(0.5) - 1))))
    assert plain.topr(0.5, u | {"sum": -0.3}) == pytest.approx(exp(-0.3))
    assert plain.topr(0.5, u, level="token") == pytest.approx(exp(-0.5))
    assert plain.kimi_token(0.5, u, tau=2) == pytest.approx(1.25)
    assert plain.kimi(0.5, u | {"sum": 3.0}, tau=2) == pytest.approx(1.0 + 3.0 * 0.5)
    assert plain.dppo(0.5, u) == pytest.approx(2 * exp(0.5)), "it rose, and A is negative"
    assert plain.dppo(0.5, u | {"A": 1.0}) == 0
    assert plain.mis([u], "k1") == [0.0], "its mean is 1"
    assert plain.m2po([u, u | {"beh": 0.1}]) == [0.0, pytest.approx(exp(-0.1))]
    assert plain.m2po([u | {"A": 1.0}]) == [pytest.approx(exp(-1.0))], "it is pulled back"
