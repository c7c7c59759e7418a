"""Which task comes next, and whether there is room for it."""

from __future__ import annotations

import json

import pytest

from areal_async.data.tasks import read_tasks
from replay_buffer.ledger.rules import TaskOrder


@pytest.fixture
def table(tmp_path):
    rows = [{"prompt": f"{i}", "reward_model": {"style": "rule", "ground_truth": i}} for i in range(50)]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_tasks(path)


def order(table, positions=range(100), **options):
    tasks = TaskOrder(table, **{"seed": 1, "shuffle": True, "passes": None} | options)
    return [tasks.at(position) for position in positions]


def test_every_pass_takes_every_row_once_in_an_order_of_its_own_and_passes_end(table):
    places = order(table)
    first, second = places[:50], places[50:]
    assert sorted(first) == [(row, 0) for row in range(50)]
    assert sorted(second) == [(row, 1) for row in range(50)]
    assert [row for row, _ in first] != [row for row, _ in second]
    assert [row for row, _ in order(table, shuffle=False)] == [*range(50), *range(50)]
    assert order(table, [99, 100, 1000], passes=2)[1:] == [None, None]


def test_the_order_depends_on_the_seed_and_the_position_alone(table):
    assert order(table) == order(table)
    assert order(table, seed=2) != order(table)
    assert order(table, [99, 3, 51, 3]) == [order(table)[i] for i in (99, 3, 51, 3)]


def test_a_task_carries_its_row_and_pass_in_its_id(table):
    tasks = TaskOrder(table, seed=1, shuffle=True, passes=None)
    task = tasks.task(7, 3)
    assert task.task_id == f"{tasks.dataset_hash}:7:3"
    assert task.ground_truth == 7
