"""Losses of whole sequences against their formulas, and the step that trains them."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_async.config.job import OptimizerSection
from areal_async.weights.pieces import whole_tensors
from tests.unit.trainer.conftest import plain_row
from trainer_service.algorithms.sequence_losses import LOSSES, Sequences, log_one_less
from trainer_service.backends.base import TRAINED_MODEL, ModelUse
from trainer_service.backends.fsdp import fsdp
from trainer_service.data.flops import TOKENS_ALONE
from trainer_service.data.lessons import Lesson, crossed
from trainer_service.loop.sequences import SequenceTrainer
from trainer_service.ranks import join_ranks

ARGUMENTS = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1},
    "ipo": {"beta": 0.3},
    "hinge": {"beta": 0.3},
    "orpo": {"beta": 0.3},
    "kto": {"beta": 0.3, "desirable": 1.3, "undesirable": 0.7},
}


def loss_named(name):
    return replace(LOSSES[name], arguments=ARGUMENTS.get(name, {}))


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def log_sigmoid(x):
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


def by_hand(name, i, s, ref, length, value, zero):
    """The loss of example i, as the paper writes it."""
    c, r = 2 * i, 2 * i + 1
    if name == "token":
        return -s[i] * len(s) / sum(length)
    if name == "sequence":
        return -s[i] / length[i]
    if name == "regression":
        return (s[i] - value[i]) ** 2
    if name == "bradley_terry":
        return -log_sigmoid(s[c] - s[r] - value[i])
    if name == "kto":
        z = 0.3 * (s[i] - ref[i] - zero)
        return 1.3 * (1 - sigmoid(z)) if value[i] else 0.7 * (1 - sigmoid(-z))
    d = (s[c] - ref[c]) - (s[r] - ref[r])
    if name == "dpo":
        return -0.9 * log_sigmoid(0.3 * d) - 0.1 * log_sigmoid(-0.3 * d)
    if name == "hinge":
        return max(0.0, 1 - 0.3 * d)
    if name == "ipo":
        h = (s[c] - ref[c]) / length[c] - (s[r] - ref[r]) / length[r]
        return (h - 1 / 0.6) ** 2
    assert name == "orpo"
    mean = [s[c] / length[c], s[r] / length[r]]
    odds = [p - math.log(-math.expm1(p)) for p in mean]
    return -mean[0] - 0.3 * log_sigmoid(odds[0] - odds[1])


def ragged(name, case):
    """Sequences of 1 to 40 units, some of them hardly or very likely, with a reference near or far."""
    draw = random.Random(f"{name}:{case}")
    n = draw.randint(1, 7)
    count = n * (2 if LOSSES[name].paired else 1)
    length = [draw.randint(1, 40) for _ in range(count)]
    per_unit = draw.choice([1e-6, 0.1, 1.0, 20.0])
    s = [-per_unit * size * draw.uniform(0.1, 1) for size in length]
    ref = (
        [x + draw.gauss(0, draw.choice([0.0, 1.0, 50.0])) for x in s]
        if LOSSES[name].referred
        else [0.0] * count
    )
    if LOSSES[name].column == "score":
        s = [draw.gauss(0, draw.choice([1, 30])) for _ in s]
    value = [float(draw.random() < 0.5) if name == "kto" else draw.gauss(0, 1) for _ in range(n)]
    return s, ref, length, value, draw.choice([0.0, 0.5, 10.0])


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula_in_600_ragged_cases(name):
    for case in range(600):
        s, ref, length, value, zero = ragged(name, case)
        leaf = torch.tensor(s, dtype=torch.float64, requires_grad=True)
        rest = (torch.tensor(ref).double(), torch.tensor(length), torch.tensor(value).double())
        given = Sequences(leaf, torch.tensor(ref, dtype=torch.float64), *rest[1:], zero)
        given = replace(given, value=torch.tensor(value, dtype=torch.float64))
        found = loss_named(name)(given)
        wanted = [by_hand(name, i, s, ref, length, value, zero) for i in range(len(value))]
        assert found.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
        (slopes,) = torch.autograd.grad(found.sum(), leaf)
        assert slopes.isfinite().all()
        smooth = name != "hinge" and (name != "orpo" or max(s) < -0.01)  # for differences of 1e-6
        if case < 40 and smooth:
            check = torch.autograd.gradcheck
            assert check(lambda x, g=given: loss_named(name)(replace(g, s=x)), leaf, atol=1e-4, rtol=1e-3)


def test_the_log_of_one_less_a_probability_is_exact_at_both_ends():
    p = torch.tensor(
        [-1e-9, -0.5, -0.6931, -0.7, -40.0, -800.0, 0.0], dtype=torch.float64, requires_grad=True
    )
    wanted = [math.log(-math.expm1(x)) for x in (-1e-9, -0.5, -0.6931, -0.7, -40.0)]
    assert log_one_less(p)[:5].tolist() == pytest.approx(wanted, rel=1e-12)
    (slope,) = torch.autograd.grad(log_one_less(p).sum(), p)
    assert slope.isfinite().all()


def test_what_is_right_follows_the_reward():
    def given(s, ref, length, value, zero=0.0):
        numbers = [torch.tensor(each, dtype=torch.float64) for each in (s, ref, length, value)]
        return Sequences(numbers[0], numbers[1], numbers[2], numbers[3], zero)

    pair = given([-4.0, -3.0], [-9.0, -1.0], [1, 1], [0.0])
    assert loss_named("dpo").right(pair).tolist() == [1.0]
    assert loss_named("orpo").right(pair).tolist() == [0.0]
    assert loss_named("dpo").margin(pair) == pytest.approx(7.0)
    single = given([-1.0, -1.0, -3.0], [-2.0, -2.0, -2.0], [1, 1, 1], [1.0, 0.0, 0.0], 0.5)
    assert loss_named("kto").right(single).tolist() == [1.0, 0.5, 0.5, 1.0]
    assert loss_named("kto").margin(single) == pytest.approx(1.0)
    scores = given([1.0, 2.0, 4.0], [0.0] * 3, [1] * 3, [0.0, 5.0, 3.0])
    assert loss_named("regression").right(scores).mean() == pytest.approx(2 / 3)


# --- the step ---


def lessons_of(name, n, seed=0, shared=4):
    """Ragged examples of random tokens; answers of a pair share their prompt."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        prompt = rng.integers(2, 17, int(rng.integers(1, shared + 1)))
        rows = []
        for _ in range(2 if LOSSES[name].paired else 1):
            answer = rng.integers(2, 17, int(rng.integers(1, 9)))
            scored = LOSSES[name].column == "score"
            learned = (rng.random(len(answer)) < 0.8) & (not scored)
            learned[-1] = True
            sampled = len(prompt) + learned.nonzero()[0]
            rows.append(plain_row(np.concatenate([prompt, answer]), sampled, feeds_last=scored))
        value = float(rng.integers(0, 2)) if name == "kto" else 0.3
        made.append(Lesson(tuple(rows), value))
    return crossed(made) if LOSSES[name].zeroed else made


def weights_after(model_dir, name, lessons, *, budget):
    ranks = join_ranks(0, 1)
    # With so large an eps AdamW takes the gradient itself off the weights.
    optimizer = OptimizerSection(lr=1e4, eps=1e4, clip_grad_norm=1e6)
    head = "value" if LOSSES[name].column == "score" else "tokens"
    backend = fsdp({TRAINED_MODEL: ModelUse(model_dir, optimizer, 1, head)}, ranks, dtype=torch.float32)
    trainer = SequenceTrainer(backend, ranks, loss_named(name), budget=budget, cost=TOKENS_ALONE)
    given = None
    if LOSSES[name].referred:
        given = [[-2.0 * len(row.position) for row in lesson.evaluated] for lesson in lessons]
    done = trainer.train(lessons, [f"example {i}" for i in range(len(lessons))], given)
    return done, whole_tensors(backend.export(TRAINED_MODEL, gather=True))


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_depends_neither_on_packing_nor_on_order(model_dir, name):
    """With micro-batches of one row the rows of a pair are apart, and the chain rule puts them together."""
    lessons = lessons_of(name, 6)
    whole, weights = weights_after(model_dir, name, lessons, budget=1000)
    parted, same = weights_after(model_dir, name, lessons, budget=1)
    turned = lessons[::-1]
    _, other = weights_after(model_dir, name, turned, budget=1000)
    z = int(LOSSES[name].zeroed)
    assert (whole.passes, parted.passes) == (z, z + LOSSES[name].paired)
    assert parted.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parted.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    for tensor in weights:
        for found in (same, other):
            assert torch.allclose(found[tensor], weights[tensor], atol=1e-5 * max(1.0, whole.grad_norm))
