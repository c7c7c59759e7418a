"""Ranks that follow each other are on one host, whatever order Ray gives the places of a group in."""

import itertools
import random
from types import SimpleNamespace

import pytest

from areal_async.config.cluster import RaySection
from areal_async.launch.plan import services_of
from areal_async.launch.ray import launcher
from areal_async.launch.ray.launcher import RayLauncher
from areal_async.launch.ray.placement import by_node, together
from tests.unit.launch.launching import changed


@pytest.mark.parametrize("sizes", [(8, 8), (4, 4, 4, 4), (3, 4, 1), (1,), (1, 1, 1)])
def test_each_node_has_one_run_of_ranks_whatever_the_order_of_its_bundles(sizes):
    nodes = [f"node-{number}" for number, size in enumerate(sizes) for _ in range(size)]
    for seed in range(20):
        shuffled = random.Random(seed).sample(nodes, len(nodes))
        order = by_node(shuffled)
        assert sorted(order) == list(range(len(nodes)))
        runs = [(node, len([*run])) for node, run in itertools.groupby(shuffled[index] for index in order)]
        assert len(runs) == len(sizes), "a node has two runs"
        assert [size for _, size in runs] == sorted(sizes, reverse=True), "groups of ranks are cut early"


def test_a_placement_that_is_in_order_already_is_kept():
    assert by_node(["b", "b", "a", "a"]) == [0, 1, 2, 3]


def test_the_launcher_gives_ranks_their_bundles_by_node(job, folders, monkeypatch):
    """`PACK` may return the bundles of a node apart from each other."""
    job = changed(changed(job, "trainer", ranks=4), "rollout", workers=2)
    made = SimpleNamespace(wait=lambda _: True)
    monkeypatch.setattr(launcher, "placement_group", lambda *_, **__: made)
    nodes = {0: "a", 1: "b", 2: "a", 3: "b"}
    monkeypatch.setattr(launcher, "placement_group_table", lambda _: {"bundles_to_node_id": nodes})
    bundle = "placement_group_bundle_index"
    monkeypatch.setattr(launcher, "PlacementGroupSchedulingStrategy", lambda _, **given: given[bundle])
    ours = RayLauncher(RaySection(address="auto"), folders, print)
    ours.job = job
    for group in together(services_of(job)):
        ours._reserve(group, "")
    found = {name: place.options["scheduling_strategy"] for name, place in ours._places.items()}
    ranks = ["trainer", "trainer-1", "trainer-2", "trainer-3"]
    assert [nodes[found[name]] for name in ranks] == ["a", "a", "b", "b"]
    assert (found["rollout-0"], found["rollout-1"]) == (0, 1)


def test_processes_on_other_hosts_get_the_users_gpu_variables_but_not_its_gpus(job, folders, monkeypatch):
    given = {
        "NCCL_DEBUG": "INFO", "TORCH_NCCL_TRACE_BUFFER_SIZE": "20", "PYTORCH_ALLOC_CONF": "x:1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_VISIBLE_DEVICES": "3", "UNKNOWN": "1",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    ours = RayLauncher(RaySection(address="auto"), folders, print)
    ours.job = job
    for place in services_of(job):
        told = ours.environment_of(place, False)
        assert {name: told.get(name) for name in given} == given | {
            "CUDA_VISIBLE_DEVICES": None,
            "UNKNOWN": None,
        }
