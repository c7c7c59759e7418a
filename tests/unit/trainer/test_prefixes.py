"""Shared prefixes: packed once, and everything computed as if they were not shared."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.unit.families import config_of
from tests.unit.trainer.conftest import plain_row
from trainer_service.backends.fsdp.attention import PACKED_ATTENTION, PackedRuns
from trainer_service.data.flops import RowCost
from trainer_service.data.microbatch import MicroBatch, build_micro_batch, plan_passes
from trainer_service.data.prefixes import DENSE_TOKENS, LEAST_BRANCH, rows_of
from trainer_service.data.rows import TrainingRow
from trainer_service.ranks import join_ranks

VOCABULARY = 11
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.fixture(scope="module")
def ranks():
    return join_ranks(0, 1)


def _model(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = config_of(
        Qwen2Config, **sizes | {"initializer_range": 0.3, "max_position_embeddings": 9999} | changes
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.set_attn_implementation(PACKED_ATTENTION)
    return model


def made(episode: int, ids: list[int], sampled: list[int], temperature: float = 1.0) -> TrainingRow:
    return plain_row(ids, sampled, episode=episode, temperature=temperature)


def passes_of(rows, ranks, groups, budget=1 << 20, **how) -> list[MicroBatch]:
    passes = plan_passes(rows, ranks, budget, groups=groups, **how)
    assert sorted(id_of(row) for chosen in passes for row in chosen) == sorted(map(id_of, rows))
    return [build_micro_batch(chosen) for chosen in passes]


def id_of(row: TrainingRow) -> tuple:
    return row.episode, row.token_ids.tobytes(), row.position.tobytes(), row.temperature.tobytes()


def learned(model, batches: list[MicroBatch]) -> tuple[dict[tuple, list[float]], list[torch.Tensor]]:
    """Log-probs of units by (episode, token), sorted, and the gradients of a weighted sum of them."""
    model.zero_grad()
    found: dict[tuple, list[float]] = {}
    for batch in batches:
        out = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            packed_runs=PackedRuns(batch.runs, batch.branching),
        )
        logits = out.logits[0][batch.predict] / batch.temperature[:, None]
        logp = logits.log_softmax(-1).gather(1, batch.target[:, None])[:, 0]
        (logp * (1 + batch.episode)).sum().backward()
        for episode, token, value in zip(
            batch.episode.tolist(), batch.target.tolist(), logp.tolist(), strict=True
        ):
            found.setdefault((episode, token), []).append(value)
    return {key: sorted(values) for key, values in found.items()}, [
        p.grad.clone() for p in model.parameters()
    ]


def assert_same(model, shared: list[MicroBatch], alone: list[MicroBatch]) -> None:
    """In float64, but for the norms of transformers, which compute in float32 and round gradients."""
    mine, gradients = learned(model, shared)
    theirs, others = learned(model, alone)
    assert mine.keys() == theirs.keys()
    for key, values in mine.items():
        assert values == pytest.approx(theirs[key], abs=1e-6)
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, other, atol=2e-6, rtol=1e-4)


@st.composite
def grouped_rows(draw) -> tuple[list[TrainingRow], np.ndarray]:
    """Rows of ragged trees: turns that go on from any place of any row before, in several groups, some of one
    beginning in all, at two temperatures, some rows twice."""
    rows, groups = [], []
    for group in range(draw(st.integers(1, 3))):
        known = [draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))]
        for _ in range(draw(st.integers(1, 6))):
            trunk = draw(st.sampled_from(known))
            kept = trunk[: draw(st.integers(1, len(trunk)))]
            ids = kept + draw(st.lists(st.integers(0, 2), min_size=1, max_size=7))
            known.append(ids)
            sampled = draw(st.sets(st.integers(1, len(ids) - 1), max_size=4)) | {len(ids) - 1}
            rows.append(made(len(groups), ids, sorted(sampled), draw(st.sampled_from([1.0, 0.7]))))
            groups.append(group)
    return rows, np.array(groups)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    grouped_rows(),
    st.sampled_from([{}, {"num_key_value_heads": 4}, WINDOW]),
    st.sampled_from([9, 30, 1 << 20]),
)
def test_shared_prefixes_change_neither_log_probs_nor_gradients(ranks, drawn, kind, budget):
    rows, groups = drawn
    model = _model(**kind)
    shared, alone = passes_of(rows, ranks, groups, budget), passes_of(rows, ranks, None)
    whole = sum(row.packed_length for row in rows)
    assert sum(batch.n_tokens + batch.shared_tokens for batch in shared) == whole
    assert all(batch.n_tokens <= budget or len(batch.runs) == 1 for batch in shared)
    assert_same(model, shared, alone)


@pytest.mark.parametrize("kind", [{}, WINDOW])
def test_a_large_tree_is_attended_branch_by_branch(ranks, kind):
    """Turns that branch off inside an answer of another row, and a row that another one continues."""
    rng = np.random.default_rng(0)

    def some(n):
        return rng.integers(0, VOCABULARY, n).tolist()

    prompt = some(LEAST_BRANCH + 30)
    first = prompt + some(LEAST_BRANCH + 20)
    second = first[: len(prompt) + LEAST_BRANCH] + some(40)
    rows = [
        made(0, first, list(range(len(prompt), len(first)))),
        made(1, second, list(range(len(second) - 40, len(second)))),
        made(2, prompt + some(30), [len(prompt), len(prompt) + 29], 0.7),
        made(3, first + some(25), [len(first) + 24]),
        made(4, first, [len(first) - 1]),
        made(5, some(DENSE_TOKENS), [DENSE_TOKENS - 1]),
        made(6, prompt[: LEAST_BRANCH - 1] + some(9), [LEAST_BRANCH + 7]),
    ]
    groups = np.array([0, 0, 0, 0, 0, 1, 0])
    (batch,) = passes_of(rows, ranks, groups)
    assert batch.shared_tokens > 3 * len(prompt)
    assert batch.n_tokens > DENSE_TOKENS
    assert_same(_model(**kind), [batch], passes_of(rows, ranks, None))


def test_only_rows_of_one_group_share(ranks):
    rows = [made(episode, [3, 4, 5, 6, 7], [3, 4]) for episode in range(4)]
    (batch,) = passes_of(rows, ranks, np.array([0, 0, 1, 1]))
    assert (batch.n_tokens, batch.shared_tokens) == (8, 8)
    assert batch.runs == [(2, 4)]
    assert len(set(batch.predict.tolist())) == 4, "units of equal rows are of one place"


def test_a_tree_above_the_budget_is_cut_and_its_prefix_repeated(ranks):
    rows = [made(episode, [1, 2, 3, 4, episode, 5], [5]) for episode in range(6)]
    batches = passes_of(rows, ranks, np.zeros(6, int), budget=7)
    assert [batch.n_tokens for batch in batches] == [7, 7]
    assert [batch.shared_tokens for batch in batches] == [8, 8]


def test_units_count_against_the_budget_as_tokens_do(ranks):
    """A pack of equal rows has few tokens, and a hidden state for every unit."""
    rows = [made(episode, [1, 2, 3, 4], [1, 2, 3]) for episode in range(10)]
    assert [batch.n_units for batch in passes_of(rows, ranks, np.zeros(10, int), budget=9)] == [9, 9, 9, 3]


def test_a_mask_that_costs_more_than_it_saves_is_not_used(ranks):
    """One common token of long rows: the mask over all pairs of their tokens is dearer than to repeat it."""
    rows = [made(episode, [1, *[2 + episode] * 20], [20]) for episode in range(8)]
    dear = passes_of(rows, ranks, np.zeros(8, int), cost=RowCost(linear=100, attention=10, head=1))
    assert [batch.shared_tokens for batch in dear] == [0]
    cheap = passes_of(rows, ranks, np.zeros(8, int), cost=RowCost(linear=10**6, attention=10, head=1))
    assert [batch.shared_tokens for batch in cheap] == [7]


def test_complete_rows_of_a_pack_with_shared_prefixes():
    positions = np.array([0, 1, 2, 3, 2, 3, 4, 1, 0, 1])
    places, back = rows_of(positions)
    wanted = [[0, 1, 2, 3, 3], [0, 1, 4, 5, 6], [0, 7, 7, 7, 7], [8, 9, 9, 9, 9]]
    assert places.tolist() == wanted
    assert places.flatten()[back].tolist() == list(range(10))


@pytest.mark.parametrize("seed", range(5))
def test_every_token_of_a_pack_is_in_the_complete_rows(seed):
    rng = np.random.default_rng(seed)
    rows = [plain_row(rng.integers(3, 5, int(n)), slice(1, None)) for n in rng.integers(2, 12, 9)]
    ((*chosen,),) = plan_passes(rows, join_ranks(0, 1), 1 << 20, groups=np.repeat(np.arange(3), 3))
    batch = build_micro_batch(chosen)
    places, back = batch.rows
    assert batch.shared_tokens > 0
    assert torch.equal(places.flatten()[back], torch.arange(batch.n_tokens))
    found = batch.input_ids[0][places].tolist()
    for row in chosen:  # a row that is the beginning of the next one is in it
        fed = row.token_ids[: row.packed_length].tolist()
        assert fed in [each[: len(fed)] for each in found]


@pytest.mark.parametrize("budget", [1, 7, 20, 100])
def test_rows_side_by_side_fit_with_what_fills_them_up(budget):
    rows = [plain_row(range(3, 3 + n), slice(1, None)) for n in (3, 9, 2, 9, 5, 6, 4)]
    passes = plan_passes(rows, join_ranks(0, 1), budget, groups=np.zeros(7, np.int64), side_by_side=True)
    assert sorted(len(row.token_ids) for chosen in passes for row in chosen) == [2, 3, 4, 5, 6, 9, 9]
    assert not any(row.shared for chosen in passes for row in chosen)
    for chosen in passes:
        assert len(chosen) == 1 or len(chosen) * max(row.packed_length for row in chosen) <= budget
