"""Advantages that further models give, against references written plainly over lists, in float64."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch

from areal_async.config.objective import ObjectiveSection
from tests.golden.advantages_test import random_case, sequences
from tests.golden.tables import table_of
from trainer_service.algorithms.by_models import process_slopes
from trainer_service.algorithms.objective import Objective

N_CASES = 250


@cache
def made(seed):
    """A case with greedy answers here and there, and the columns of further models."""
    case = random_case(7000 + seed, greedy=seed % 2 == 1, masked=seed % 2 == 0)
    rng = np.random.default_rng(seed)
    count = len(case.columns["prox"])
    for name in ("teacher", "process"):
        case.columns[name] = torch.from_numpy(rng.normal(size=count).astype(np.float32))
    return case


def filled(case, advantage, **arguments):
    section = ObjectiveSection(advantage=advantage, advantage_args=arguments)
    table = table_of(case.rows, case.episodes).with_columns(**case.columns)
    for name in ("prox", "ref", "teacher", "process"):
        table[name][~table["mask"]] = math.nan
    return Objective(section).fill(table, 0)


def columns_of(case):
    """(unit, its columns, its segment) in the order of the table, as numbers."""
    order = [(segment, unit) for segment in case.segments for unit in segment.units]
    names = ("prox", "ref", "teacher", "process")
    values = {name: case.columns[name].double().tolist() for name in names}
    return [
        (unit, {name: values[name][place] for name in names}, segment)
        for place, (segment, unit) in enumerate(order)
    ]


def to_go(case, value, gamma):
    """By unit: Σ γ^(k - t) value_k over the later unmasked units of its sequence."""
    found = {}
    for sequence in sequences(case.segments):
        total = 0.0
        for unit in reversed([unit for segment in sequence for unit in segment.units if unit.mask]):
            total = value[id(unit)] + gamma * total
            found[id(unit)] = total
    return found


def by_episode(case, value):
    sums, counts = {}, {}
    for unit, _, segment in columns_of(case):
        if unit.mask:
            sums[segment.episode] = sums.get(segment.episode, 0.0) + value[id(unit)]
            counts[segment.episode] = counts.get(segment.episode, 0) + 1
    return sums, counts


def close(case, found, wanted):
    plain = [wanted.get(id(unit), 0.0) if unit.mask else 0.0 for unit, _, _ in columns_of(case)]
    assert found.tolist() == pytest.approx(plain, rel=2e-5, abs=2e-5)


def test_distillation_is_the_reverse_kl_with_its_sign_turned():
    for seed in range(N_CASES):
        case = made(seed)
        gamma = (0.0, 0.9, 1.0)[seed % 3]
        gap = {id(unit): c["teacher"] - c["prox"] for unit, c, _ in columns_of(case) if unit.mask}
        close(case, filled(case, "distill", gamma=gamma).advantage, to_go(case, gap, gamma))


def log_sigmoid(x):
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


def pair_loss(case, s, ref, count, beta, smoothing):
    """The mean of dpo over the best and the worst of each group."""
    losses = []
    for group in set(case.groups):
        members = [e for e in sorted(s) if case.groups[e] == group]
        if not members or len({case.rewards[e] for e in members}) == 1:
            continue
        best = max(members, key=lambda e: case.rewards[e])
        worst = min(members, key=lambda e: case.rewards[e])
        d = beta * ((s[best] - ref[best]) - (s[worst] - ref[worst]))
        losses.append(-(1 - smoothing) * log_sigmoid(d) - smoothing * log_sigmoid(-d))
    return sum(losses) / len(losses) if losses else None


def test_online_dpo_is_the_derivative_of_the_loss_of_the_best_and_the_worst():
    """By central differences of the loss written plainly."""
    seen = set()
    for seed in range(N_CASES):
        case = made(seed)
        beta, smoothing = (0.1, 0.5)[seed % 2], (0.0, 0.1)[seed % 2]
        s, count = by_episode(case, {id(unit): c["prox"] for unit, c, _ in columns_of(case)})
        ref, _ = by_episode(case, {id(unit): c["ref"] for unit, c, _ in columns_of(case)})
        slopes = dict.fromkeys(s, 0.0)
        if pair_loss(case, s, ref, count, beta, smoothing) is not None:
            for episode in s:
                up, down = (s | {episode: s[episode] + step} for step in (1e-5, -1e-5))
                rise = pair_loss(case, up, ref, count, beta, smoothing)
                slopes[episode] = (rise - pair_loss(case, down, ref, count, beta, smoothing)) / 2e-5
        wanted = {id(unit): -len(s) * slopes[segment.episode] for unit, _, segment in columns_of(case)}
        close(case, filled(case, "dpo", beta=beta, label_smoothing=smoothing).advantage, wanted)
        seen.add(any(slopes.values()))
    assert seen == {True, False}


def test_prime_is_its_formula():
    for seed in range(N_CASES):
        case = made(seed)
        beta, gamma = (0.05, 0.5)[seed % 2], (1.0, 0.9)[seed % 2]
        r = {id(unit): beta * (c["process"] - c["ref"]) for unit, c, _ in columns_of(case)}
        sums, counts = by_episode(case, r)
        wanted, adjusted, outcome = {}, {}, {}
        for unit, _, segment in columns_of(case):
            own = segment.episode
            others = [e for e in sums if case.groups[e] == case.groups[own] and e != own]
            if not others:
                outcome[id(unit)] = None
                adjusted[id(unit)] = 0.0
                continue
            baseline = sum(sums[e] / counts[e] for e in others) / len(others)
            adjusted[id(unit)] = r[id(unit)] - baseline
            outcome[id(unit)] = case.rewards[own] - sum(case.rewards[e] for e in others) / len(others)
        later = to_go(case, adjusted, gamma)
        for name, value in later.items():
            wanted[name] = 0.0 if outcome[name] is None else value + outcome[name]
        close(case, filled(case, "prime", beta=beta, gamma=gamma, whiten=False).advantage, wanted)


def test_the_process_reward_model_learns_the_cross_entropy_of_outcomes():
    """Slopes by central differences, and the figures."""
    for seed in range(N_CASES):
        case = made(seed)
        table = filled(case, "prime")
        beta, balanced = (0.05, 1.0)[seed % 2], seed % 3 == 0
        slopes, figures = process_slopes(table, beta, balanced)
        gap = {id(unit): c["process"] - c["ref"] for unit, c, _ in columns_of(case)}
        sums, _ = by_episode(case, gap)
        right = {e: min(max(case.rewards[e], 0.0), 1.0) for e in sums}

        n, share = len(sums), 0.5
        if balanced and n > 1:
            share = min(max(sum(right[e] for e in sums) / n, 1 / n), 1 - 1 / n)

        def loss(s, right=right, beta=beta, p=share):
            terms = [
                right[e] / (2 * p) * log_sigmoid(beta * x)
                + (1 - right[e]) / (2 * (1 - p)) * log_sigmoid(-beta * x)
                for e, x in s.items()
            ]
            return -sum(terms) / max(1, len(terms))

        wanted = {}
        for e in sums:
            up, down = (sums | {e: sums[e] + step} for step in (1e-5, -1e-5))
            wanted[e] = (loss(up) - loss(down)) / 2e-5
        plain = [wanted[segment.episode] for _, _, segment in columns_of(case)]
        assert slopes.tolist() == pytest.approx(plain, abs=1e-7)
        assert figures["loss"] == pytest.approx(loss(sums), rel=1e-6)
        agree = [(beta * sums[e] > 0) == (right[e] > 0.5) for e in sums]
        assert figures["accuracy"] == pytest.approx(sum(agree) / max(1, len(agree)))
        pairs = [(sums[g], sums[b]) for g in sums for b in sums if right[g] > 0.5 >= right[b]]
        ordered = [(good > bad) + (good == bad) / 2 for good, bad in pairs]
        assert figures.get("auc") == (pytest.approx(sum(ordered) / len(pairs)) if pairs else None)
