"""The plan of a step: the same on every rank, whole groups, nothing stale, nothing twice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from areal_async.config.objective import ObjectiveSection
from areal_async.rpc.messages import Batch, BatchEpisode, BatchGroup
from tests.golden.tables import row, table_of
from trainer_service.algorithms.objective import Objective
from trainer_service.data.flops import RowCost
from trainer_service.errors import BatchError, StalenessViolation
from trainer_service.loop.report import figures_of
from trainer_service.loop.step import check_manifest, plan_step

OBJECTIVE = Objective(ObjectiveSection())


def _advantages(plan):
    """f32 [E]: those of the default objective."""
    rows = [row(index, [(1, 0, "main", 0, None, 1)]) for index in range(len(plan.episodes))]
    return OBJECTIVE.fill(table_of(rows, plan.table), 0).advantage


def _rows(n_sampled):
    """The sizes of the two rows of an episode, or of none."""
    half = n_sampled // 2
    return [(9 + n_sampled, n_sampled - half), (8 + n_sampled, half)] if n_sampled else []


def _batch(groups, step=5):
    """`groups`: a list of lists of (reward, n_sampled, min_version, max_version), each of two rows."""
    made = []
    for g, episodes in enumerate(groups):
        entries = [
            BatchEpisode(
                f"g{g}.{i}",
                i,
                10 + n,
                n,
                low,
                high,
                reward,
                rows=[(9 + n, n - n // 2), (8 + n, n // 2)] * (n > 0),
            )
            for i, (reward, n, low, high) in enumerate(episodes)
        ]
        made.append(BatchGroup(f"g{g}", f"t{g}", "", entries))
    return Batch(policy="policy", epoch=1, step=step, max_staleness=4, groups=made)


def _plan(batch, step=5, **changes):
    check_manifest(batch, step=step, max_staleness=4)
    cost = RowCost(linear=10, attention=1, head=3)
    options = {"minibatches": 1, "ranks": 1, "cost": cost, **changes}
    return plan_step(batch, **options)


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=5), min_size=1, max_size=8),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_groups_are_whole_and_every_row_has_one_place(sizes, minibatches, ranks):
    batch = _batch([[(float(n % 2), n, 5, 5) for n in group] for group in sizes])
    minibatches = min(minibatches, len(sizes))
    plan = _plan(batch, minibatches=minibatches, ranks=ranks)
    shares = [plan.share_of(rank) for rank in range(ranks)]
    placed = [(index, row) for share in shares for index, rows in share.items() for row in rows]
    units = [n for group in sizes for n in group]
    assert sorted(placed) == [(index, row) for index, n in enumerate(units) if n for row in (0, 1)]
    assert {index for share in shares for index in share} == set(range(len(units)))
    assert all(len(minibatch) == ranks for minibatch in plan.shares)
    groups = [{int(plan.groups[i]) for share in minibatch for i in share} for minibatch in plan.shares]
    assert sum(map(len, groups)) == len(set().union(*groups)), "a group is in two minibatches"


SIZES = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=1, max_size=8)


@given(SIZES, st.randoms(use_true_random=False))
def test_groups_are_whole_whatever_their_sizes_and_their_order(rewards, rng):
    """Partial groups have fewer episodes: an advantage is that of the formula over the group's own rewards,
    wherever in the manifest the group and its episodes stand."""
    batch = _batch([[(reward / 4, 2, 5, 5) for reward in group] for group in rewards])
    expected = {}
    for group in batch.groups:
        own = np.array([episode.reward for episode in group.episodes])
        spread = own.std(ddof=1) if len(own) > 1 else 0.0
        for episode, value in zip(group.episodes, own - own.mean(), strict=True):
            expected[episode.episode_id] = value / (spread + 1e-6)
    for _ in range(2):
        plan = _plan(batch)
        for episode, group, advantage in zip(
            plan.episodes, plan.groups, _advantages(plan).tolist(), strict=True
        ):
            assert advantage == pytest.approx(expected[episode.episode_id], abs=1e-5)
            assert episode.episode_id.startswith(f"{batch.groups[group].group_id}.")
        shuffled = [
            replace(group, episodes=rng.sample(group.episodes, len(group.episodes))) for group in batch.groups
        ]
        batch = replace(batch, groups=rng.sample(shuffled, len(shuffled)))


def test_staleness_is_bounded_by_the_plan_too():
    _plan(_batch([[(1.0, 2, 1, 5)]]))
    for low, high in ((0, 5), (6, 6)):
        with pytest.raises(StalenessViolation, match=r"outside 0 … 4"):
            _plan(_batch([[(1.0, 2, low, high)]]))


def test_wrong_manifests_are_refused():
    batch = _batch([[(1.0, 2, 5, 5)], [(0.0, 2, 5, 5)]])
    with pytest.raises(BatchError, match="asked for the batch of step 6"):
        _plan(batch, step=6)
    with pytest.raises(BatchError, match="group g0 twice"):
        _plan(replace(batch, groups=[batch.groups[0]] * 2))
    twice = replace(batch.groups[1], episodes=batch.groups[0].episodes)
    with pytest.raises(BatchError, match=r"episode g0\.0 twice"):
        _plan(replace(batch, groups=[batch.groups[0], twice]))
    with pytest.raises(BatchError, match="no episodes"):
        _plan(replace(batch, groups=[]))
    empty = replace(batch.groups[1], episodes=[])
    with pytest.raises(BatchError, match="group g1 of step 5 has no episodes"):
        _plan(replace(batch, groups=[batch.groups[0], empty]))


def test_figures_by_hand():
    batch = _batch([[(1.0, 2, 5, 5), (0.0, 4, 3, 5)], [(0.5, 3, 4, 4), (0.5, 0, -1, -1)]])
    figures = figures_of(batch)
    assert (figures.episodes, figures.tokens, figures.units) == (4, 9, 49)
    assert figures.reward_mean == 0.5
    assert (figures.staleness_mean, figures.staleness_max) == (1.0, 2)
    assert figures.share_stale == pytest.approx(2 / 3)
    assert figures.share_multi_version == pytest.approx(1 / 3)
    assert figures.share_reused == 0
    again = replace(batch.groups[0], uses=1)
    trained_before = figures_of(replace(batch, groups=[again, batch.groups[1]]))
    assert trained_before.share_reused == pytest.approx(0.5)


def test_units_below_the_lowest_version_count_as_masked_not_as_stale():
    """An episode of which nothing is left still has a part in the advantages of its group."""
    batch = _batch([[(1.0, 2, 0, 5), (0.0, 4, 0, 0)], [(0.5, 3, 4, 4), (0.5, 0, -1, -1)]])
    with pytest.raises(StalenessViolation):
        _plan(batch)
    masked = replace(batch, lowest_version=1)
    whole = _plan(_batch([[(1.0, 2, 5, 5), (0.0, 4, 5, 5)]]))
    assert _advantages(_plan(masked))[:2].tolist() == _advantages(whole).tolist()
    figures = figures_of(masked)
    assert (figures.staleness_max, figures.staleness_mean) == (4, 2.5)
    with pytest.raises(StalenessViolation):
        _plan(replace(batch, lowest_version=0))


def test_rows_with_images_are_dealt_by_the_work_of_the_vision_tower():
    """The two short rows with images would be on one rank if only tokens counted."""
    batch = _batch([[(0.0, 1, 5, 5)], [(0.0, 1, 5, 5)], [(0.0, 1, 5, 5)]])
    sizes = [(10, 1, 8), (20, 1, 0), (10, 1, 8)]
    groups = [
        replace(group, episodes=[replace(group.episodes[0], rows=[size])])
        for group, size in zip(batch.groups, sizes, strict=True)
    ]
    batch = replace(batch, groups=groups)
    shares = _plan(batch, ranks=2, cost=RowCost(linear=10, attention=0, head=0, vision=100)).shares[0]
    assert [sorted(share) for share in shares] == [[0, 1], [2]]
    shares = _plan(batch, ranks=2, cost=RowCost(linear=10, attention=0, head=0)).shares[0]
    assert [sorted(share) for share in shares] == [[1], [0, 2]]
