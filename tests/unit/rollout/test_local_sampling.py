import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.trajectory import Sampling
from rollout_service.engines.local.requests import Draw, draw, uniforms
from tests.unit.rollout.conftest import distribution


def parameters(samplings: list[Sampling], uniform: np.ndarray | float = 0.5) -> Draw:
    return Draw(
        temperature=np.array([s.temperature for s in samplings], np.float32),
        top_p=np.array([s.top_p for s in samplings], np.float32),
        top_k=np.array([s.top_k for s in samplings], np.int64),
        uniform=np.broadcast_to(np.asarray(uniform, np.float64), len(samplings)).copy(),
    )


def test_uniforms_depend_on_seed_and_counter_alone_and_look_uniform() -> None:
    seeds = np.arange(20_000, dtype=np.uint64)
    first = uniforms(seeds, np.zeros(20_000, np.int64))
    second = uniforms(seeds, np.ones(20_000, np.int64))
    along = uniforms(np.full(20_000, 7, np.uint64), np.arange(20_000))
    for u in (first, second, along):
        assert 0 < u.min() < u.max() < 1
        counts = np.histogram(u, bins=100, range=(0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 160  # chi-square, 99 degrees: 0.9999 quantile
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    assert abs(np.corrcoef(along[1:], along[:-1])[0, 1]) < 0.03
    assert uniforms(seeds[5:6], np.zeros(1, np.int64))[0] == first[5]


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_logprobs_are_of_the_distribution_drawn_from(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(4, 12)).astype(np.float32) * 3
    plain = Sampling()
    odd = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    samplings = [plain, odd, plain, odd]
    ids, logprobs = draw(torch.from_numpy(logits), parameters(samplings, rng.random(4)))
    for row, sampling in enumerate(samplings):
        want = distribution(logits[row], sampling)
        assert np.isfinite(want[ids[row]])
        assert logprobs[row] == pytest.approx(want[ids[row]], abs=1e-5)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0, -1.0]])
    n = 40_000
    uniform = uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64))
    ids, _ = draw(logits.expand(n, -1), parameters([Sampling(temperature=0.7)] * n, uniform))
    expected = torch.softmax(logits[0] / 0.7, -1).numpy() * n
    counts = np.bincount(ids, minlength=5)
    assert counts[2] == 0
    kept = expected > 0
    assert ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum() < 21  # 3 degrees: 0.9999 quantile


def test_extreme_uniforms_never_pick_an_impossible_id() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, -1)
    ids, logprobs = draw(logits, parameters([Sampling()] * 2, np.array([2.0**-33, 1 - 2.0**-33])))
    assert ids.tolist() == [1, 2]
    assert np.isfinite(logprobs).all()


def test_logits_that_are_not_finite_show_in_the_logprob() -> None:
    logits = torch.tensor([[0.0, 1.0], [torch.nan, 1.0]])
    _, logprobs = draw(logits, parameters([Sampling()] * 2))
    assert np.isfinite(logprobs).tolist() == [True, False]
