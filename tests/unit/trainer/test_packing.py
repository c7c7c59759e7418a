"""Packing: everything in exactly one place, within the budget, the same on every rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_service.data.microbatch import deal_episodes, deal_groups, pack
from trainer_service.errors import BatchError

lengths_of_rows = st.lists(st.integers(1, 60), max_size=60)


@given(lengths_of_rows, st.integers(1, 80), st.integers(0, 8))
def test_every_row_is_in_one_micro_batch_within_the_budget_and_no_two_would_fit_into_one(
    lengths, budget, at_least
):
    plan = pack(lengths, budget)
    assert sorted(i for rows in plan for i in rows) == list(range(len(lengths)))
    for rows in plan:
        inside = [lengths[i] for i in rows]
        assert inside
        assert sum(inside) <= budget or len(rows) == 1
        assert inside == sorted(inside, reverse=True), "rows of one length are neighbours"
    loads = sorted(sum(lengths[i] for i in rows) for rows in plan)
    assert len(loads) < 2 or loads[0] + loads[1] > budget
    empty = [[] for _ in range(at_least - len(plan))]
    assert pack(lengths, budget, at_least=at_least) == plan + empty


@given(st.lists(st.integers(0, 100), max_size=50), st.integers(1, 6))
def test_every_episode_goes_to_exactly_one_rank_and_loads_are_balanced(units, ranks):
    shares = deal_episodes(units, ranks)
    assert len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(units)))
    loads = [sum(units[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(units, default=0)


@given(st.integers(1, 40), st.integers(1, 8))
def test_groups_are_whole_in_minibatches_of_nearly_equal_size(groups, minibatches):
    if groups < minibatches:
        with pytest.raises(BatchError, match="cannot be cut into"):
            deal_groups(groups, minibatches)
        return
    dealt = deal_groups(groups, minibatches)
    assert [g for share in dealt for g in share] == list(range(groups))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_a_plan_is_a_function_of_its_arguments_and_an_empty_row_is_refused():
    lengths = [7, 3, 3, 9, 1, 7]
    assert pack(lengths, 12) == pack(list(lengths), 12) == [[3, 1], [0, 2, 4], [5]]
    with pytest.raises(BatchError, match="row 1 has 0 tokens"):
        pack([3, 0], 10)
