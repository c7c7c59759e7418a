"""Packing: everything in exactly one place, within the budget, the same on every rank."""

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.trainer.conftest import plain_row
from trainer_service.data.microbatch import deal_groups, deal_rows, pack, plan_passes, spread
from trainer_service.data.rows import TrainingRow
from trainer_service.errors import BatchError

lengths_of_rows = st.lists(st.integers(1, 60), max_size=60)


@given(lengths_of_rows, st.integers(1, 80))
def test_every_row_is_in_one_micro_batch_within_the_budget_and_no_two_would_fit_into_one(lengths, budget):
    plan = pack(lengths, budget)
    assert sorted(i for rows in plan for i in rows) == list(range(len(lengths)))
    for rows in plan:
        inside = [lengths[i] for i in rows]
        assert inside
        assert sum(inside) <= budget or len(rows) == 1
        assert inside == sorted(inside, reverse=True), "rows of one length are neighbours"
    loads = sorted(sum(lengths[i] for i in rows) for rows in plan)
    assert len(loads) < 2 or loads[0] + loads[1] > budget


@example([40] + [1] * 50, 45, 0)  # fifty short rows cost less than the long one, and do not fit into one pass
@given(lengths_of_rows, st.integers(1, 80), st.integers(0, 8))
def test_rows_are_spread_over_as_many_passes_as_other_ranks_have(lengths, budget, more):
    """Within the budget all the same; and no pass is empty while another could give it a row."""
    needed = max(1, len(pack(lengths, budget)))
    costs = [length * (20 + length) for length in lengths]
    plan = spread(lengths, costs, budget, needed + more)
    assert sorted(i for rows in plan for i in rows) == list(range(len(lengths)))
    assert len(plan) == needed + more
    loads = [sum(costs[i] for i in rows) for rows in plan]
    assert loads == sorted(loads, reverse=True), "the costliest go first on every rank"
    for rows in plan:
        inside = [lengths[i] for i in rows]
        assert sum(inside) <= budget or len(rows) == 1
        assert inside == sorted(inside, reverse=True)
    if max(lengths, default=0) <= budget and len(lengths) >= len(plan) and sum(lengths) <= budget:
        assert min(loads) > 0


def row(tokens: int) -> TrainingRow:
    """One that takes so many tokens of a pack."""
    return plain_row([0] * (tokens + 1), slice(1, None))


@dataclass
class OneOf:
    """One rank among some, all of which call `largest` with these values in turn."""

    world: int
    largest_of_others: list[int]

    def largest(self, value: int) -> int:
        return max(value, self.largest_of_others.pop(0))


def test_ranks_that_wait_for_a_long_row_do_as_much_meanwhile():
    rows = [row(10) for _ in range(8)]

    def passes(budget: int, ranks: OneOf) -> list[int]:
        return [sum(each.packed_length for each in chosen) for chosen in plan_passes(rows, ranks, budget)]

    assert passes(20, OneOf(1, [])) == [20, 20, 20, 20]
    assert passes(20, OneOf(2, [20, 2])) == [20, 20, 20, 20], "no rank has a longer one"
    assert passes(20, OneOf(2, [40, 1])) == [40, 40]
    assert passes(5, OneOf(2, [5, 3])) == [10] * 8, "its own are longer"
    assert passes(20, OneOf(2, [40, 4])) == [20, 20, 20, 20], "as many passes as another needs"


@given(st.lists(st.lists(st.integers(0, 100), max_size=6), max_size=30), st.integers(1, 6), st.integers(1, 5))
def test_every_row_goes_to_exactly_one_rank_and_loads_are_balanced(costs, ranks, group_size):
    groups = [episode // group_size for episode in range(len(costs))]
    shares = deal_rows(costs, ranks, groups)
    assert len(shares) == ranks
    placed = [(episode, row) for share in shares for episode, rows in share.items() for row in rows]
    assert sorted(placed) == [
        (episode, row) for episode, rows in enumerate(costs) for row, cost in enumerate(rows) if cost
    ]
    assert {episode for share in shares for episode in share} == set(range(len(costs))), "each is fetched"
    loads = [sum(costs[episode][row] for episode, rows in share.items() for row in rows) for share in shares]
    every = [cost for rows in costs for cost in rows]
    assert max(loads) <= sum(every) / ranks + max(every, default=0)
    assert deal_rows([list(rows) for rows in costs], ranks, groups) == shares
    for share in shares:
        assert list(share) == sorted(share)
        assert all(rows == sorted(rows) for rows in share.values())


def test_a_group_stays_whole_unless_a_rank_would_have_more_than_its_part():
    """So that what its episodes begin with is computed on one rank alone."""
    even = [[3], [3], [3], [3], [2], [2], [2], [2]]
    assert deal_rows(even, 2, [0, 1, 0, 1, 2, 3, 2, 3]) == [
        {0: [0], 2: [0], 4: [0], 6: [0]},
        {1: [0], 3: [0], 5: [0], 7: [0]},
    ]
    assert deal_rows([[4], [4], [4], [4]], 2, [0, 0, 0, 1]) == [{0: [0], 2: [0]}, {1: [0], 3: [0]}]


def test_an_episode_stays_whole_unless_a_rank_would_have_more_than_its_part():
    assert deal_rows([[4, 4], [8], [5, 3]], 3) == [{0: [0, 1]}, {1: [0]}, {2: [0, 1]}]
    assert deal_rows([[4, 4, 4], [6], [0, 0], []], 3) == [{1: [0]}, {0: [0, 2]}, {0: [1], 2: [], 3: []}]


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
