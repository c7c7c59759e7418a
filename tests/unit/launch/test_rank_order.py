"""Ranks that follow each other are on one host, whatever order Ray gives the places of a group in."""

import itertools
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

from areal_async.config.cluster import RaySection
from areal_async.launch.plan import services_of
from areal_async.launch.ray import launcher
from areal_async.launch.ray.launcher import RayLauncher
from areal_async.launch.ray.placement import by_node, together
from tests.unit.launch.launching import changed
from tests.waiting import LIMIT_S


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


CLUSTER = """
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table
from areal_async.launch.ray.placement import by_node

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
for host in "ab":
    cluster.add_node(num_cpus=2, labels={"host": host})
ray.init(address=cluster.address, log_to_driver=False)
wanted = [{"host": host} for host in "abab"]
made = placement_group([{"CPU": 1}] * 4, strategy="PACK", bundle_label_selector=wanted)
assert made.wait(60)
nodes = placement_group_table(made)["bundles_to_node_id"]
print(by_node([nodes[index] for index in range(4)]), len({*nodes.values()}))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_ray_tells_the_node_of_each_bundle():
    """A cluster of pretended nodes whose bundles lie apart from each other."""
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", CLUSTER], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[0, 2, 1, 3] 2"
