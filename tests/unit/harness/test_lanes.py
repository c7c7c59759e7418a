"""The scheduler of test files, with simulated workers."""

import json
from collections import deque
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.lanes import LaneScheduling, job_files_path, longest_first


class Worker:
    """Like a worker of xdist, it runs a test only once it has the next one or is told to end."""

    def __init__(self, name):
        self.gateway = SimpleNamespace(id=name)
        self.queue, self.shutting_down = deque(), False

    def send_runtest_some(self, indices):
        assert not self.shutting_down
        self.queue.extend(indices)

    def shutdown(self):
        self.shutting_down = True

    @property
    def can_run(self):
        return len(self.queue) > (0 if self.shutting_down else 1)


def play(folder, sizes, jobs, workers, choose, known=None):
    """Run files (file → number of tests); return (worker, file) of each test in the order of their ends."""
    history = Path(folder, ".pytest-history", "runs.jsonl")
    history.parent.mkdir(exist_ok=True)
    history.write_text(json.dumps({"kind": "run", "files": known or {}}) + "\n")
    config = SimpleNamespace(
        getvalue=lambda _: ["popen"] * workers,
        option=SimpleNamespace(loadscopereorder=False),
        rootpath=Path(folder),
        _tmp_path_factory=SimpleNamespace(getbasetemp=lambda: Path(folder)),
    )
    job_files_path(config).write_text(json.dumps(sorted(jobs)))
    collection = [f"{file}::test_{n}" for file, size in sizes.items() for n in range(size)]
    nodes, ran = [Worker(f"gw{n}") for n in range(workers)], []
    scheduler = LaneScheduling(config)
    for node in nodes:
        scheduler.add_node(node)
    for node in nodes:
        scheduler.add_node_collection(node, collection)
    scheduler.schedule()
    while ready := [node for node in nodes if node.can_run]:
        node = choose(ready)
        test = node.queue.popleft()
        ran.append((node.gateway.id, collection[test].split("::")[0]))
        scheduler.mark_test_complete(node, test)
        if scheduler.tests_finished:
            for each in nodes:
                each.shutdown()
    assert sorted(file for _, file in ran) == sorted(test.split("::")[0] for test in collection)
    return ran


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_every_file_runs_in_one_worker_and_all_whole_jobs_in_the_same(files, workers, random):
    sizes = {f"test_{n}.py": size for n, (_, size) in enumerate(files)}
    jobs = {f"test_{n}.py" for n, (is_job, _) in enumerate(files) if is_job}
    with TemporaryDirectory() as folder:
        ran = set(play(folder, sizes, jobs, workers, random.choice))
    assert len(ran) == len(sizes)
    assert len({worker for worker, file in ran if file in jobs}) <= 1


def test_the_lane_takes_jobs_longest_first_and_then_the_shortest_of_the_rest(tmp_path):
    sizes = dict.fromkeys(["a", "b", "c", "d", "e", "f"], 1)
    known = {"a": 1.0, "b": 30.0, "c": 2.0, "d": 50.0, "e": 5.0, "f": 9.0}
    lane_first = lambda ready: next((node for node in ready if node.gateway.id == "gw0"), ready[0])  # noqa: E731
    ran = play(tmp_path, sizes, {"a", "b"}, 2, lane_first, known)
    assert [file for worker, file in ran if worker == "gw0"] == ["b", "a", "c", "e"]
    assert [file for worker, file in ran if worker == "gw1"] == ["d", "f"]


@pytest.mark.parametrize(
    ("known", "order"),
    [
        ({}, "cba"),
        ({"a": 60.0, "b": 1.0}, "cab"),
        ({"c": 0.1, "gone": 9.0}, "cba"),
        ({"a": 9.0, "c": 3.0}, "abc"),
    ],
)
def test_a_file_without_a_known_duration_counts_by_its_tests(known, order):
    assert longest_first({"a": 1, "b": 2, "c": 3}, known) == list(order)
