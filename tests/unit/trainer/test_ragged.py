"""Attention over ragged rows: one call a layer, equal to exact attention in values and gradients."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV3Config, Qwen3Config

from tests import flash_cpu
from tests.unit.families import FAMILIES, config_of
from tests.unit.trainer.conftest import plain_row
from tests.unit.trainer.packs import LENGTHS, passes_of_step
from trainer_service.backends.fsdp import attention
from trainer_service.backends.fsdp.attention import PackedRuns, packed_attention
from trainer_service.data import ragged
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.data.prefixes import plant
from trainer_service.data.ragged import JoinedKeys, rounded_tokens
from trainer_service.errors import UnfitModel
from trainer_service.ranks import join_ranks

HEADS = [(4, 4), (4, 2), (6, 1)]
WINDOWS = [None, 1, 4, 9]


@pytest.fixture(autouse=True, scope="module")
def kernels():
    with flash_cpu.installed():
        yield


@st.composite
def packs(draw) -> MicroBatch:
    """A pack of trees whose branches begin anywhere on other branches, with single rows between them."""
    rows, groups = [], []
    for group in range(draw(st.integers(1, 4))):
        known = [[group, *draw(st.lists(st.integers(0, 2), max_size=9))]]
        for _ in range(draw(st.integers(1, 6))):
            trunk = draw(st.sampled_from(known))
            ids = trunk[: draw(st.integers(1, len(trunk)))] + draw(
                st.lists(st.integers(0, 2), min_size=1, max_size=9)
            )
            known.append(ids)
            rows.append(plain_row(ids, [len(ids) - 1], episode=len(rows)))
            groups.append(group)
    trees = plant(rows, np.array(groups), 1 << 20)
    draw(st.randoms()).shuffle(trees)
    return build_micro_batch([row for tree in trees for row in tree.rows])


def nested(*, scale: int = 1) -> MicroBatch:
    """Turns that branch off inside the answer of another row, twice, and a row without a relative."""
    rng = np.random.default_rng(0)
    trunk, one, two, three = (rng.integers(0, 50, n * scale).tolist() for n in (30, 40, 20, 25))
    ids = [
        trunk + one,
        trunk + one[: 15 * scale] + two,
        trunk + one[: 15 * scale] + two[:7] + three,
        trunk + three,
    ]
    rows = [plain_row(each, [len(each) - 1], episode=n) for n, each in enumerate([*ids, three + one])]
    trees = plant(rows, np.array([0, 0, 0, 0, 1]), 1 << 20)
    batch = build_micro_batch([row for tree in trees for row in tree.rows])
    assert batch.shared_tokens > 100 * scale
    return batch


def attended(batch: MicroBatch, inputs, *, ragged: bool, window=None) -> list[torch.Tensor]:
    """Output and gradients of attention over a pack. With `ragged` it is padded as in a pass."""
    n = batch.n_tokens
    if ragged:
        batch = batch.padded(rounded_tokens(n))
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    padded = [torch.nn.functional.pad(each, (0, 0, 0, batch.n_tokens - n), value=0.5) for each in leaves]
    runs = PackedRuns.of(batch, ragged=ragged)
    out, _ = packed_attention(
        torch.nn.Identity(), *padded, None, packed_runs=runs, scaling=0.4, sliding_window=window
    )
    out = out[:, :n]
    weight = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def drawn(batch: MicroBatch, heads, dtype=torch.float32, head=16):
    torch.manual_seed(1)
    shapes = [(1, h, batch.n_tokens, head) for h in (heads[0], heads[1], heads[1])]
    return [torch.randn(shape).to(dtype) for shape in shapes]


@settings(max_examples=80, derandomize=True, deadline=None)
@given(packs(), st.sampled_from(HEADS), st.sampled_from(WINDOWS))
def test_one_call_for_all_rows_equals_exact_attention(batch, heads, window):
    inputs = drawn(batch, heads)
    one, exact = (attended(batch, inputs, ragged=ragged, window=window) for ragged in (True, False))
    for mine, wanted in zip(one, exact, strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", [1, 5])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("heads", HEADS)
def test_in_bfloat16_it_is_as_near_to_float64_as_exact_attention(heads, window, scale):
    """Small trees are one masked call of the reference, large ones a call for each branch."""
    batch = nested(scale=scale)
    inputs = drawn(batch, heads, torch.bfloat16)
    attend = partial(attended, batch, window=window)
    truth = attend([each.double() for each in inputs], ragged=False)
    one, exact = attend(inputs, ragged=True), attend(inputs, ragged=False)
    for mine, reference, wanted in zip(one, exact, truth, strict=True):
        error, allowed = ((each.double() - wanted).square().mean().sqrt() for each in (mine, reference))
        assert error <= 1.15 * allowed
        assert (mine.double() - wanted).abs().max() <= 2 * (reference.double() - wanted).abs().max()


def test_gradients_of_a_shared_key_lose_no_bits_and_repeat():
    """Each of 500 branches adds little to the gradient of their one prefix: a sum in bfloat16 would stop."""
    torch.manual_seed(0)
    prefix, branches = 3, 500
    position = np.concatenate([np.arange(prefix), np.full(branches, prefix)])
    rows = build_micro_batch([])
    batch = MicroBatch(
        **{**vars_of(rows), "position": position, "input_ids": torch.zeros(1, len(position)).long()}
    )
    ragged = batch.ragged
    key = torch.zeros(len(position), 2, 8, dtype=torch.bfloat16, requires_grad=True)
    joined, _ = JoinedKeys.apply(key, key.detach(), ragged.keys, ragged.order, ragged.copies)
    gradient = 1 + torch.rand(joined.shape).to(torch.bfloat16)
    gradient[int(ragged.ends_k[-1]) :] = torch.nan
    found = [torch.autograd.grad(joined, key, gradient, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*found)
    wide = torch.zeros(key.shape, dtype=torch.float64)
    used = int(ragged.ends_k[-1])
    wide.index_add_(0, ragged.keys[:used].long(), gradient[:used].double())
    torch.testing.assert_close(found[0].double(), wide, rtol=2**-8, atol=0)


def vars_of(batch: MicroBatch) -> dict:
    return {name: getattr(batch, name) for name in MicroBatch.__dataclass_fields__ if name != "_padded"}


class _Calls(TorchDispatchMode):
    """Attention calls with their shapes, and the operators that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in (
            "_varlen_attn",
            "_scaled_dot_product_flash_attention_for_cpu",
            "scaled_dot_product_attention",
        ):
            self.shapes.append(
                tuple(each.shape if isinstance(each, torch.Tensor) else each for each in args[:7])
            )
        if name in ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select"):
            self.waits.append(name)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("window", [None, 5])
def test_a_layer_is_one_call_without_a_mask_a_wait_or_a_list_of_lengths(window):
    batch = nested().padded(256)
    runs = PackedRuns.of(batch, ragged=True)
    assert (runs.runs, runs.branching) == ([], None)
    kinds = {type(value) for value in vars(runs.ragged).values()}
    assert kinds == {torch.Tensor, int}
    assert all(value.dim() == 1 for value in vars(runs.ragged).values() if isinstance(value, torch.Tensor))
    q, k, v = drawn(batch, (4, 2))
    with _Calls() as calls:
        packed_attention(torch.nn.Identity(), q, k, v, None, packed_runs=runs, sliding_window=window)
    assert (len(calls.shapes), calls.waits) == (1, [])


def test_the_structure_is_moved_to_the_device_once_and_in_one_copy(monkeypatch):
    batch, moved = nested(), []
    real = ragged.on_device
    monkeypatch.setattr(
        ragged, "on_device", lambda arrays, device: moved.append({*arrays}) or real(arrays, device)
    )
    assert batch.ragged is batch.ragged
    assert moved == [{"ends_q", "ends_k", "keys", "order", "copies"}]


@pytest.mark.parametrize("case", LENGTHS)
def test_a_step_meets_at_most_four_new_shapes(case, capsys):
    """Before: an SDPA call for each run and branch. After: one call a micro-batch, of few shapes."""
    seen, new, runs_seen, runs_new = set(), [], set(), []
    tokens, padded, joined, room = 0, 0, 0, 0
    for step in range(6):
        before, runs_before = len(seen), len(runs_seen)
        for rows in passes_of_step(case, step):
            batch = build_micro_batch(rows)
            runs_seen |= set(sdpa_shapes(batch))
            whole = batch.padded(rounded_tokens(batch.n_tokens))
            seen.add((whole.n_tokens, *whole.ragged.shape))
            tokens, padded = tokens + batch.n_tokens, padded + whole.n_tokens
            if whole.ragged.keys is not None:
                joined += int(whole.ragged.ends_k[-1])
                room += len(whole.ragged.keys)
        new.append(len(seen) - before)
        runs_new.append(len(runs_seen) - runs_before)
    waste = padded / tokens - 1
    with capsys.disabled():
        print(
            f"\n{case}: new shapes a step {runs_new} -> {new}; "
            f"tokens +{waste:.1%}, joined keys +{room / max(1, joined) - 1:.0%}"
        )
    assert max(new[1:]) <= 4
    assert waste < 0.05


def sdpa_shapes(batch: MicroBatch):
    """Shapes of the calls that exact attention makes: (rows, queries, keys)."""
    for (count, length), trees in zip(batch.runs, batch.branching, strict=True):
        if isinstance(trees, list):
            for tree in trees:
                for queries, sees in zip(tree.queries, tree.sees, strict=True):
                    yield 1, queries, sum(tree.cuts[n] for n in sees)
        else:
            yield count, length, length


CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "dtype", "config", "said"),
    [
        (CUDA, torch.bfloat16, config_of(Qwen3Config, head_dim=128), ""),
        (CUDA, torch.float16, config_of(Qwen3Config), ""),
        (CPU, torch.bfloat16, config_of(Qwen3Config), "the device is cpu"),
        (CUDA, torch.float32, config_of(Qwen3Config), "the dtype is torch.float32"),
        (CUDA, torch.bfloat16, config_of(Qwen3Config, head_dim=12), "heads have [12] numbers"),
        (CUDA, torch.bfloat16, config_of(Qwen3Config, head_dim=512), "heads have [512] numbers"),
        (CUDA, torch.bfloat16, DeepseekV3Config(), "numbers"),
        (CUDA, torch.bfloat16, config_of(Qwen3Config, attention_dropout=0.1), "dropout of 0.1"),
        (CUDA, torch.bfloat16, FAMILIES["gemma2"](), "capped"),
    ],
)
def test_the_choice_of_path_has_a_reason(device, dtype, config, said):
    found = attention.why_not_ragged(config, device, dtype)
    assert bool(found) == bool(said)
    assert said in found


ONE_CALL = config_of(Qwen3Config, head_dim=16)


@pytest.mark.parametrize("reason", ["", "the device is slow"])
def test_the_choice_of_path_is_logged(reason, monkeypatch, caplog):
    monkeypatch.setattr(attention, "why_not_ragged", lambda *_: reason)
    with caplog.at_level(logging.INFO):
        assert attention.takes_ragged("policy", ONE_CALL, join_ranks(0, 1), torch.bfloat16) == (not reason)
    assert reason in str(caplog.records[-1].__dict__)
    assert ("exact SDPA" in str(caplog.records[-1].__dict__)) == bool(reason)


def test_sinks_and_capped_logits_never_reach_a_kernel_that_lacks_them(monkeypatch):
    monkeypatch.setattr(attention, "why_not_ragged", lambda *_: "")
    ranks = join_ranks(0, 1)
    assert not attention.takes_ragged("policy", ONE_CALL, ranks, torch.bfloat16, has_sinks=True)
    q, runs = torch.ones(1, 2, 3, 8), PackedRuns.of(build_micro_batch([]), ragged=True)
    for argument in ({"s_aux": torch.ones(2)}, {"softcap": 1.0}):
        with pytest.raises(UnfitModel, match=f"calls its attention with {next(iter(argument))}"):
            packed_attention(torch.nn.Identity(), q, q, q, None, packed_runs=runs, **argument)


def _raises(*args, **how):
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            lambda *args, window_size, **how: varlen_attn(*args, window_size=(window_size[0], -1), **how),
            "differs",
        ),
        (lambda *args, window_size, **how: varlen_attn(*args, window_size=(-1, 0), **how), "differs"),
        (_raises, "no kernel image"),
    ],
    ids=["not causal", "without windows", "without a kernel"],
)
def test_a_kernel_that_does_not_compute_the_same_is_not_used(wrong, said, monkeypatch, caplog):
    monkeypatch.setattr(attention, "why_not_ragged", lambda *_: "")
    monkeypatch.setattr(attention, "varlen_attn", wrong)
    assert not attention.takes_ragged("policy", ONE_CALL, join_ranks(0, 1), torch.bfloat16)
    (record,) = [each for each in caplog.records if "is not used" in each.getMessage()]
    assert said in str(record.__dict__)
