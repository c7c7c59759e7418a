"""What a service process promises, shown on stand-ins started by hand."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from areal_async.base.errors import EndpointError
from areal_async.launch.folders import write_keys
from areal_async.launch.one_host import make_host, topology_here
from areal_async.launch.plan import ready_limit_s, services_of
from areal_async.rpc.secret import RunSecret
from areal_async.service.context import ServiceContext
from tests.unit.launch.launching import changed
from tests.waiting import LIMIT_S


def write_topology(job, folder):
    host = make_host("local", run_dir=folder / "run", socket_dir=folder, shm_dir=folder / "shm")
    given = job.model_dump(mode="json")
    topology = topology_here("x", host, services_of(job), given, job.placement.pretend)
    (folder / "topology.json").write_bytes(msgspec.json.encode(topology))
    return folder / "topology.json", Path(host.socket_dir)


@pytest.fixture
def start(job, tmp_path, behave):
    """Start the stand-in `reward` with a behaviour; its folders are below tmp_path."""
    for name in ("run", "shm"):
        (tmp_path / name).mkdir()
    _, sockets = write_topology(job, tmp_path)
    sockets.mkdir(exist_ok=True)
    write_keys(RunSecret.generate(), sockets)
    processes = []

    def start_one(behaviour, *arguments, **options):
        behave({"reward": behaviour})
        command = [sys.executable, "-m", "stand_in", "--topology", str(tmp_path / "topology.json")]
        process = subprocess.Popen(
            [*command, "--name", "reward", *arguments], stderr=subprocess.PIPE, text=True, **options
        )
        processes.append(process)
        return process

    yield start_one
    for process in processes:
        process.kill()
        process.communicate()


def until_logged(process, event):
    for line in process.stderr:
        if line.startswith("{") and (record := json.loads(line))["event"] == event:
            return record
    raise AssertionError(f"never logged {event!r}")


@pytest.mark.parametrize("behaviour", ["serve", "blocks in native code"])
def test_sigterm_ends_a_service_in_order(start, behaviour):
    process = start(behaviour)
    until_logged(process, "service starts")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=LIMIT_S) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("behaviour", "traced", "last"),
    [
        ("dies at start", False, "reward: the model directory /nowhere has no config.json. Give another."),
        ("crashes at start", True, "RuntimeError: an index was out of range"),
    ],
)
def test_an_error_of_ours_is_one_paragraph_and_any_other_shows_where_it_came_from(
    start, behaviour, traced, last
):
    process = start(behaviour)
    _, text = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert ("Traceback" in text) == traced
    assert text.splitlines()[-1] == last


def test_a_second_ctrl_c_by_hand_ends_it_at_once(start):
    process = start("ignores stop")
    until_logged(process, "service starts")
    process.send_signal(signal.SIGINT)
    until_logged(process, "asked to stop")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=LIMIT_S) == 130


def test_readiness_is_told_once_through_the_descriptor(start):
    read_fd, write_fd = os.pipe()
    process = start("serve", "--ready-fd", str(write_fd), pass_fds=(write_fd,))
    os.close(write_fd)
    with os.fdopen(read_fd) as told:
        report = json.loads(told.read())  # to the end of file: the service closes it
    assert report["ready"] == "reward"
    assert report["pid"] == process.pid
    assert report["metrics_port"] > 0


def test_a_name_that_is_not_of_the_run_is_refused(start):
    process = start("serve", "--name", "nobody")
    assert "names no service 'nobody'" in process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 1


def test_the_topology_gives_each_service_its_own(job, tmp_path):
    job = changed(job, "placement", pretend={"rollout-0": "gpu-7"})
    path, sockets = write_topology(job, tmp_path)
    with pytest.raises(EndpointError, match="keys of this process"):
        ServiceContext.load(path, "rollout-0")
    sockets.mkdir(exist_ok=True)
    secret = RunSecret.make(sockets)
    write_keys(secret, sockets)
    ctx, reward = (ServiceContext.load(path, name) for name in ("rollout-0", "reward"))
    assert (ctx.keys, reward.keys) == (secret.of("rollout"), secret.of("reward"))
    assert ctx.keys.word not in path.read_text() + repr(ctx)
    assert (ctx.role, ctx.name, ctx.index) == ("rollout", "rollout-0", 0)
    assert ctx.job == job
    assert ctx.run_dir == tmp_path / "run"
    for name in ("trainer-1", "rollout", "rollout-A", "evaluator"):
        with pytest.raises(KeyError):
            ServiceContext.load(path, name)
    guest = ServiceContext.load(path, "rollout-7")
    assert (ctx.node_id, reward.node_id, guest.node_id) == ("gpu-7", "local", "local")
    assert (guest.role, guest.name, guest.index, guest.metrics_port) == ("rollout", "rollout-7", 7, 0)
    assert ServiceContext.load(path, "rollout-far-away").index == 0


def test_a_server_of_an_engine_may_take_its_own_time_to_serve(job):
    assert ready_limit_s(job) == 300
    server = job.rollout.server.model_copy(update={"ready_s": 900})
    assert ready_limit_s(changed(job, "rollout", engine="vllm", server=server)) == 1200
