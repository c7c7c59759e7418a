"""The batching core, driven step by step: no threads, no clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, GenerateRequest, GenerateResult, RequestError
from rollout_service.engines.local import model
from rollout_service.engines.local.core import EngineCore
from rollout_service.engines.local.requests import Draw, draw, uniforms
from tests.unit.rollout.conftest import distribution

RNG = np.random.default_rng(3)


def prompts(count: int, longest: int = 12) -> list[list[int]]:
    return [RNG.integers(2, 20, RNG.integers(1, longest + 1)).tolist() for _ in range(count)]


def request(name: object, prompt: Sequence[int], **sampling: Any) -> GenerateRequest:
    return GenerateRequest(str(name), prompt, Sampling(**sampling))


def submit(core: EngineCore, *requests: GenerateRequest) -> None:
    for one in requests:
        core.submit(core.checked(one))


def run(core: EngineCore, *requests: GenerateRequest, at: Any = None) -> dict[str, GenerateResult]:
    """Submit, and step until nothing is left; `at` is called with the number of steps after each, and may
    return what it finished. Every request must come out once, and well."""
    submit(core, *requests)
    done: dict[str, GenerateResult] = {}
    with torch.inference_mode():
        for step in itertools.count(1):
            if core.idle:
                break
            for item in [*core.step(), *((at and at(step)) or ())]:
                assert item.request_id not in done
                assert isinstance(item.outcome, GenerateResult), item.outcome
                done[item.request_id] = item.outcome
    assert len(done) == len(requests)
    return done


def swap(core: EngineCore, snapshot: Any) -> None:
    core.swap(snapshot)
    core.rebuild()


MIXED = [
    {"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.8}, {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 5}, {"temperature": 1.0, "top_p": 0.9, "top_k": 9},
]  # fmt: skip


def test_logprobs_equal_a_full_forward_pass_in_a_ragged_batch(tiny: Any) -> None:
    asked = [
        request(i, prompt, max_new_tokens=int(RNG.integers(1, 30)), seed=i, **MIXED[i % len(MIXED)])
        for i, prompt in enumerate(prompts(40))
    ]
    done = run(tiny.core(slots=8), *asked)
    for one in asked:
        got = done[one.request_id]
        tiny.assert_true(one, got)
        assert got.finish_reason == ("stop" if got.token_ids[-1] == 1 else "length")
        assert got.logprobs_of == ("raw" if one.sampling.temperature == 0 else "sampled")
        if got.finish_reason == "length":
            assert len(got.token_ids) == one.sampling.max_new_tokens
    assert {r.finish_reason for r in done.values()} == {"stop", "length"}


def crowded() -> list[GenerateRequest]:
    """Samples of three prompts, of which many go on in the same way for a while, of different lengths."""
    near = [{"temperature": 0.3}, {"temperature": 0.0}, {"temperature": 0.5}]
    return [
        request(i, [5, 6, 7 + i % 3], max_new_tokens=6 + i % 7, seed=i, **near[i % len(near)])
        for i in range(24)
    ]


def test_a_prefix_is_computed_once_for_as_long_as_requests_share_it(endless, monkeypatch):
    core, asked, widths = endless.core(slots=24), crowded(), []
    hidden = core.model.hidden
    monkeypatch.setattr(
        core.model, "hidden", lambda ids, *rest: (widths.append(len(ids)), hidden(ids, *rest))[1]
    )
    done = run(core, *asked)
    distinct = []
    for n in range(13):  # what is computed to sample unit n of those that have one
        seen = [(*one.prompt_ids, *done[one.request_id].token_ids[:n]) for one in asked]
        goes_on = [len(done[one.request_id].token_ids) > n for one in asked]
        distinct.append(len({path for path, more in zip(seen, goes_on, strict=True) if more}))
    # The first units come of the prefill, in the step that decodes the second ones.
    assert widths == [n for n in distinct if n]
    assert widths[0] == 3 < max(widths) < 24
    for one in asked:
        endless.assert_true(one, done[one.request_id])


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_requests_that_share_a_prefix_are_what_they_are_alone(endless: Any, mode: Any) -> None:
    def after_an_update(core: EngineCore, *asked: GenerateRequest) -> dict[str, Any]:
        def at(step: int) -> Any:
            if step == 3:
                swap(core, endless.weights(1))
            return core.abort(["0", "7", "13"]) if step == 5 else ()

        return run(core, *asked, at=at)

    asked = crowded()
    together = after_an_update(endless.core(slots=24, update_mode=mode), *asked)
    for one in asked:
        alone = after_an_update(endless.core(slots=1, update_mode=mode), one)[one.request_id]
        got = together[one.request_id]
        assert got.token_ids.tolist() == alone.token_ids.tolist()
        assert got.versions.tolist() == alone.versions.tolist()
        assert got.finish_reason == alone.finish_reason
        np.testing.assert_allclose(got.logprobs, alone.logprobs, atol=1e-4)


def test_prompts_beyond_one_pass_are_prefilled_in_several(endless: Any) -> None:
    asked = [request(i, p, max_new_tokens=6, seed=i) for i, p in enumerate(prompts(12, longest=60))]
    core = endless.core(slots=12, prefill_tokens=24)
    done = run(core, *asked, at=lambda step: step == 4 and swap(core, endless.weights(1)))
    for one in asked:
        endless.assert_true(one, done[one.request_id])


def swapping(made: Any, mode: str, asked: list[GenerateRequest], every: int) -> tuple[Any, int]:
    """Run requests with a new version after every `every` steps. Returns results and the last version."""
    core = made.core(slots=6, update_mode=mode)
    done = run(core, *asked, at=lambda n: n % every == 0 and swap(core, made.weights(n // every)))
    return done, core.tag.version


def test_versions_are_true_across_updates_when_kv_is_recomputed(endless: Any) -> None:
    asked = [request(i, p, max_new_tokens=12, seed=i, temperature=0.9) for i, p in enumerate(prompts(24))]
    done, last = swapping(endless, "recompute", asked, every=3)
    assert last >= 10
    spans = set()
    for one in asked:
        got = done[one.request_id]
        assert len(got.token_ids) == 12
        assert (np.diff(got.versions) >= 0).all()
        endless.assert_true(one, got)
        for version in np.unique(got.versions):
            at, other = got.versions == version, int(version - 1) % (last + 1)
            assert np.abs(endless.logprobs(one, got, other) - got.logprobs)[at].max() > 1e-3
        spans.add(len(np.unique(got.versions)))
    assert max(spans) >= 4


@pytest.mark.parametrize("least_bytes", [0, 1 << 40])
def test_packed_layers_have_the_weights_of_the_newest_version(endless, monkeypatch, least_bytes):
    monkeypatch.setattr(model, "PACKED_BYTES", least_bytes)
    core = endless.core()
    packed = [layer for layer in core.model.model.modules() if isinstance(layer, torch.nn.Linear)]
    assert all(("forward" in vars(layer)) == (not least_bytes) for layer in packed)
    asked = [request(i, ids, max_new_tokens=12) for i, ids in enumerate(prompts(4))]
    done = run(core, *asked, at=lambda step: step == 4 and swap(core, endless.weights(1)))
    for one in asked:
        assert {*done[one.request_id].versions.tolist()} == {0, 1}
        endless.assert_true(one, done[one.request_id])


def test_versions_are_true_when_kv_is_kept_and_the_approximation_shows(endless: Any) -> None:
    asked = [request(i, p, max_new_tokens=12, seed=i) for i, p in enumerate(prompts(6))]
    kept, _ = swapping(endless, "keep", asked, every=5)
    exact, _ = swapping(endless, "recompute", asked, every=5)
    gaps: list[list[float]] = [[], []]
    for one in asked:
        got = kept[one.request_id]
        assert got.versions.tolist() == exact[one.request_id].versions.tolist()
        for version in (0, 1):
            gap = np.abs(got.logprobs - endless.logprobs(one, got, version))
            gaps[version] += gap[got.versions == version].tolist()
    assert max(gaps[0]) < 1e-4
    assert max(gaps[1]) > 1e-2


def test_a_stop_string_over_token_boundaries_ends_the_answer(tiny: Any) -> None:
    core = tiny.core()
    free = run(core, *(request(i, [4, 5], max_new_tokens=40, seed=i) for i in range(12)))
    checked = 0
    for name, whole in free.items():
        if len(whole.token_ids) < 10 or len(whole.text) < 12:
            continue
        stop = whole.text[5:8]
        asked = request(name, [4, 5], max_new_tokens=40, seed=int(name), stop=("never there", stop))
        got = run(core, asked)[name]
        assert got.finish_reason == "stop"
        assert got.text == whole.text[: whole.text.index(stop)]
        # The ids are what was sampled up to the token that completed the string, and no further.
        n = len(got.token_ids)
        assert got.token_ids.tolist() == whole.token_ids[:n].tolist()
        decoded = [
            core.model.tokenizer.decode(got.token_ids[:k].tolist(), skip_special_tokens=True)
            for k in (n - 1, n)
        ]
        assert stop not in decoded[0]
        assert stop in decoded[1]
        tiny.assert_true(asked, got)
        checked += 1
    assert checked >= 4


def test_an_answer_ends_at_the_models_length(endless: Any) -> None:
    core = endless.core(max_model_len=20)
    done = run(core, request("a", [3] * 15, max_new_tokens=50), request("b", [3] * 19, max_new_tokens=50))
    assert [len(done[n].token_ids) for n in "ab"] == [5, 1]
    assert done["a"].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ([], {}, "at least one"), ([3, 10_000], {}, "10000"), ([-1], {}, "-1"),
        ([3] * 96, {}, "max_model_len is 96"), ([[3]], {}, "list"), (["x"], {}, "list"),
        ([3], {"temperature": -1.0}, "temperature"), ([3], {"top_p": 0.0}, "top_p"),
        ([3], {"top_k": -1}, "top_k"), ([3], {"max_new_tokens": 0}, "max_new_tokens"),
        ([3], {"stop": ("",)}, "stop"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_served_is_refused_by_name(tiny, prompt, sampling, says):
    with pytest.raises(RequestError, match=says):
        tiny.core().checked(request("x", prompt, **sampling))


def test_weights_that_do_not_fit_change_nothing(tiny: Any) -> None:
    core = tiny.core()
    before = {n: t.clone() for n, t in core.model.model.state_dict().items()}
    good = tiny.weights(1)
    bad = {
        "lacks": {n: t for n, t in good.tensors.items() if n != "model.norm.weight"},
        "has not": good.tensors | {"model.extra": torch.ones(2)},
        "of shape (3,)": good.tensors | {"model.norm.weight": torch.ones(3)},
    }
    for says, tensors in bad.items():
        with pytest.raises(EngineError) as caught:
            core.swap(type(good)(good.tag, tensors))
        assert says in str(caught.value)
        assert core.tag.version == 0
    for name, tensor in core.model.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_one_of_two_tied_names_is_enough(tiny: Any) -> None:
    good = tiny.weights(1)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(good.tensors)
    core = tiny.core()
    core.swap(type(good)(good.tag, {n: t for n, t in good.tensors.items() if n != "lm_head.weight"}))
    assert core.tag.version == 1


def test_weights_that_are_not_finite_fail_requests_and_good_ones_heal(endless: Any) -> None:
    core = endless.core(slots=2)
    good = endless.weights(1)
    core.swap(type(good)(good.tag, {n: t * torch.nan for n, t in good.tensors.items()}))
    submit(core, request("a", [3], max_new_tokens=5))
    with torch.inference_mode():
        (done,) = core.step()
    assert isinstance(done.outcome, EngineError)
    core.swap(good)
    assert len(run(core, request("b", [3], max_new_tokens=5))["b"].token_ids) == 5


Step = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 4), st.integers(1, 9)),
    st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("swap"), st.booleans(), st.just(0)),
    st.tuples(st.just("fail"), st.just(0), st.just(0)),
)


@given(st.lists(Step, min_size=3, max_size=25))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_request_is_lost_or_truncated_whatever_happens(endless: Any, plan: list[Any]) -> None:
    core = endless.core(slots=3, max_model_len=20)
    versions = [endless.weights(v) for v in range(3)]
    wanted: dict[str, int] = {}
    done: dict[str, Any] = {}
    aborted: set[str] = set()

    def take(finished: Any) -> None:
        for item in finished:
            assert item.request_id not in done
            done[item.request_id] = item.outcome

    with torch.inference_mode():
        for action, a, b in [*plan, ("step", 200, 0)]:
            if action == "submit":
                name = str(len(wanted))
                wanted[name] = b
                submit(core, request(name, [3] * a, max_new_tokens=b, seed=len(wanted)))
            elif action == "step":
                for _ in range(a):
                    take(core.step())
            elif action == "abort":
                aborted.add(str(a))
                take(core.abort([str(a)]))
            elif action == "swap":
                core.swap(versions[(core.tag.version + 1) % 3])
                core.rebuild()
            else:
                take(core.fail(EngineError("as asked")))
    assert core.idle
    assert set(done) == set(wanted)
    for name, outcome in done.items():
        if isinstance(outcome, GenerateResult) and outcome.finish_reason != "abort":
            assert len(outcome.token_ids) == wanted[name]
        elif isinstance(outcome, GenerateResult):
            assert name in aborted


# --- what is drawn ----------------------------------------------------------------------------------------


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
@settings(max_examples=60)
def test_logprobs_are_of_the_distribution_drawn_from(seed, temperature, top_k, top_p):
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
