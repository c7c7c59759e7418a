"""What a job needs of a cluster."""

import pytest

from areal_async.cluster import resources
from areal_async.cluster.resources import Resources, machine_resources, resources_of
from areal_async.config.cluster import ResourcesSection
from areal_async.config.job import ShapeSection
from tests.unit.launch.launching import changed

PLENTY = Resources(64, 16)


def test_cores_are_the_threads_that_trainer_workers_and_evaluator_begin_with(job, tmp_path):
    assert resources_of(job, PLENTY) == Resources(2)  # a rank and a worker
    job = changed(changed(job, "trainer", ranks=2, torch_threads=3), "rollout", workers=4, torch_threads=2)
    assert resources_of(job, PLENTY).cpus == 2 * 3 + 4 * 2
    job = changed(
        changed(job, "tasks", evaluation=tmp_path / "held_out.jsonl"), "evaluation", torch_threads=5
    )
    assert resources_of(job, PLENTY).cpus == 2 * 3 + 4 * 2 + 5
    assert resources_of(job, Resources(8)).cpus == 8  # a job that is larger takes the machine
    assert resources_of(job.model_copy(update={"kind": "sft"}), PLENTY).cpus == 6


@pytest.mark.parametrize(
    ("trainer", "rollout", "gpus"),
    [
        ({"device": "cuda"}, {}, 1),
        ({"device": "cuda", "ranks": 2}, {"device": "cuda", "workers": 3}, 5),
        ({"device": "cuda"}, {"device": "cuda:0"}, 1),
        ({}, {"device": "cuda:3"}, 4),
        ({}, {}, 0),
    ],
)
def test_gpus_are_as_many_as_its_process_must_see(job, trainer, rollout, gpus):
    job = changed(changed(job, "trainer", **trainer), "rollout", **rollout)
    assert resources_of(job, PLENTY).gpus == gpus


def test_where_there_is_one_gpu_it_is_everybodys(job):
    job = changed(changed(job, "trainer", device="cuda"), "rollout", device="cuda")
    assert resources_of(job, PLENTY).gpus == 2
    assert resources_of(job, Resources(8, 1)).gpus == 1
    assert resources_of(job, Resources(8, 0)).gpus == 2  # it can never run there
    two = changed(job, "trainer", ranks=2)
    assert resources_of(two, Resources(8, 1)).gpus == 3


def test_by_ray_it_takes_what_is_reserved_for_it_there(job):
    job = changed(changed(job, "trainer", device="cuda"), "rollout", device="cuda", workers=2)
    assert resources_of(job, PLENTY, by_ray=True) == Resources(3, 3)
    parts = {"trainer": {"gpus": 0.4, "cpus": 4}, "rollout": {"gpus": 0.3}, "buffer": {"cpus": 0.5}}
    job = changed(job, "placement", **{role: ShapeSection(**shape) for role, shape in parts.items()})
    assert resources_of(job, PLENTY, by_ray=True) == Resources(7, 1)
    assert Resources(6, 1).lacks(resources_of(job, Resources(6, 1), by_ray=True)) == "7 cores"


def test_a_machine_has_what_it_has_unless_it_is_told_otherwise(tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(resources, "NVIDIA_DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = machine_resources(ResourcesSection())
    assert found.gpus == 2
    assert found.cpus >= 1
    for visible, gpus in (("1", 1), ("", 0), ("-1", 0), ("GPU-a,GPU-b,GPU-c", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine_resources(ResourcesSection()).gpus == gpus
    given = ResourcesSection(cpus=3, gpus=0)
    assert machine_resources(given) == Resources(3, 0)
