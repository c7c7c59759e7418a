"""The controller's process and the commands that talk to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from areal_async.cli.main import app
from areal_async.cli.targets import job_names, run_target
from areal_async.cluster.client import ControllerClient
from areal_async.cluster.daemon import start_controller
from areal_async.cluster.folder import ClusterFolder, ClusterFolderError, hash_of
from areal_async.cluster.resources import Resources
from areal_async.cluster.store import JobStore, StoredJob
from tests.processes import is_gone, words_of
from tests.waiting import LIMIT_S, wait_for


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """The folder of a cluster of its own, whose controller is gone at the end."""
    folder = ClusterFolder(tmp_path / "cluster")
    monkeypatch.setenv("AREAL_ASYNC_CLUSTER_DIR", str(folder.path))
    monkeypatch.delenv("AREAL_ASYNC_CONTROLLER", raising=False)
    yield folder
    if (owner := folder.controller()) is not None:
        os.kill(owner.pid, signal.SIGTERM)
        wait_for(lambda: folder.controller() is None, "its end")


@pytest.fixture
def job_file(tmp_path):
    """A job whose model does not exist."""
    path = tmp_path / "sums.yaml"
    path.write_text("job: sums\nmodel: /models/tiny\ntasks: {train: /data/train.parquet}\n")
    return path


def call(*arguments, status=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, (arguments, result.output, result.exception)
    return result


def hold(cluster):
    """Have the controller start nothing, so that what is submitted waits: there is no such model."""
    return start_controller(cluster, hold=True)


def test_commands_without_a_controller_say_how_to_get_one(cluster, job_file, tmp_path):
    for command in (["ps"], ["status"], ["logs", "x"], ["ps", "--watch"], ["pause", "x"], ["stop", "x"]):
        assert "`areal-async up` brings one up" in call(*command, status=3).stderr
    assert "no controller is up" in call("down").stdout
    assert job_names("s") == []
    missing = call("resume", "nowhere", status=2)
    assert "there is no run folder or job file nowhere" in missing.stderr
    cluster_file = tmp_path / "cluster.yaml"
    cluster_file.write_text("launcher: slurm\n")
    assert "launcher: 'slurm' is not a choice" in call("up", cluster_file, status=2).stderr
    assert not cluster.path.exists()  # nothing was begun


def test_of_several_that_come_up_at_once_one_is_the_controller_and_nobody_waits_for_its_end(cluster):
    with ThreadPoolExecutor(3) as threads:
        (url,) = set(threads.map(lambda _: start_controller(cluster), range(3)))
    assert url == start_controller(cluster) == json.loads(call("up", "--json").stdout)["url"]
    here = [process for process in psutil.process_iter() if str(cluster.path) in words_of(process)]
    owner = cluster.controller()
    assert [process.pid for process in here] == [owner.pid]
    os.kill(owner.pid, signal.SIGTERM)
    wait_for(lambda: cluster.controller() is None, "its end")
    assert not cluster.address.exists()
    wait_for(lambda: is_gone(owner.pid), "the end of its process")


def test_jobs_are_submitted_shown_changed_and_there_again(cluster, job_file, tmp_path):
    hold(cluster)
    assert call("submit", job_file).stdout == "submitted sums (id 1): waits for the cluster to come up\n"
    for rate in ("1e-3", "2e-3"):
        changes = (f"job=sums-lr-{rate}", f"trainer.optimizer.lr={rate}", "seed=5")
        submitted = call("submit", job_file, *changes, "--priority", 7, "--json")
        assert [job["name"] for job in json.loads(submitted.stdout)] == [f"sums-lr-{rate}"]
    config = json.loads(call("status", "sums-lr-2e-3", "--json").stdout)["config"]
    assert (config["seed"], config["trainer"]["optimizer"]["lr"]) == (5, 2e-3)
    assert job_names("sums-") == ["sums-lr-1e-3", "sums-lr-2e-3"]
    table = call("ps").stdout
    assert [line.split()[1] for line in table.splitlines()[2:]] == ["sums", "sums-lr-1e-3", "sums-lr-2e-3"]
    assert "3 PENDING" in call("status").stdout
    assert "sums-lr-1e-3" in call("ps", "--watch").stdout

    assert call("pause", "sums").stdout == "sums is PAUSED: paused before its turn came\n"
    assert call("stop", "sums-lr-1e-3").stdout == "sums-lr-1e-3 is STOPPED: stopped on request\n"
    assert "PENDING: resumed on request" in call("resume", "sums", "trainer.steps=3").stdout
    assert "trainer.stepz" in call("resume", "sums-lr-1e-3", "trainer.stepz=3", status=2).stderr
    assert "keeps its name" in call("resume", "sums-lr-1e-3", "job=other", status=2).stderr
    assert "waits for its turn" in call("resume", "sums", status=2).stderr
    assert "is PENDING" in call("scale", "sums", "--workers", 2, status=2).stderr
    assert "sums is PENDING already" in call("submit", job_file, status=2).stderr
    assert "trainer.stepz" in call("submit", job_file, "trainer.stepz=1", status=2).stderr
    assert "has no such log" in call("logs", "sums", "trainer", status=2).stderr
    page = call("status", "sums").stdout.partition("SINCE")[2]
    assert page.index("submitted") < page.index("paused before its turn came") < page.index("resumed")

    # It is killed, and another comes: everything is there.
    os.kill(cluster.controller().pid, signal.SIGKILL)
    wait_for(lambda: cluster.controller() is None, "its death")
    hold(cluster)
    states = {job["name"]: job["state"] for job in json.loads(call("ps", "--all", "--json").stdout)}
    assert states == {"sums": "PENDING", "sums-lr-1e-3": "STOPPED", "sums-lr-2e-3": "PENDING"}
    assert "note: 2 jobs that wait" in call("down").stderr


def test_submit_starts_a_controller_where_there_is_none_and_says_so(cluster, job_file):
    result = call("submit", job_file, "--json")
    assert "note: a controller was started at http://127.0.0.1:" in result.stderr
    (job,) = json.loads(result.stdout)
    assert job["name"] == "sums"
    wait_for(lambda: json.loads(call("status", "sums", "--json").stdout)["job"]["state"] == "FAILED", "it")
    failed = call("status", "sums").stdout
    assert "/models/tiny does not exist" in failed
    assert "/models/tiny does not exist" in call("logs", "-f", "sums").stdout
    assert run_target("sums") == "sums"  # it has no run folder


def test_a_token_that_is_not_let_in_is_status_4(cluster, job_file, monkeypatch, tmp_path):
    url = hold(cluster)
    monkeypatch.setenv("AREAL_ASYNC_CONTROLLER", url)
    assert "AREAL_ASYNC_TOKEN_FILE" in call("ps", status=4).stderr
    monkeypatch.setenv("AREAL_ASYNC_TOKEN_FILE", str(cluster.path / "look.token"))
    assert "JOB" in call("ps").stdout
    assert "may only look" in call("submit", job_file, status=4).stderr
    (tmp_path / "mine").write_text("mine\n")
    monkeypatch.setenv("AREAL_ASYNC_TOKEN_FILE", str(tmp_path / "mine"))
    assert "let in" in call("ps", status=4).stderr
    cluster.tokens.write_text(f"submit {hash_of('mine')}\n")  # a new file of tokens, while it serves
    assert "submitted sums" in call("submit", job_file).stdout
    monkeypatch.setenv("AREAL_ASYNC_CONTROLLER", "ftp://nowhere")
    assert "'ftp://nowhere' is no URL" in call("submit", job_file, status=2).stderr


def test_an_address_that_others_reach_is_served_only_while_there_are_tokens(cluster, tmp_path):
    cluster.make()
    cluster.tokens.touch(mode=0o600)
    cluster_file = tmp_path / "cluster.yaml"
    cluster_file.write_text("api: {host: 0.0.0.0}\n")
    with pytest.raises(ClusterFolderError, match=r"refusing to serve 0\.0\.0\.0 without a token"):
        start_controller(cluster, cluster_file)
    cluster.tokens.unlink()
    assert start_controller(cluster, cluster_file).startswith("http://127.0.0.1:")
    assert ControllerClient.find().cluster().launcher == "local"


def test_a_port_that_is_taken_and_a_folder_that_is_broken_are_said(cluster, tmp_path):
    url = hold(cluster)
    taken = tmp_path / "taken.yaml"
    taken.write_text(f"dir: other\napi: {{port: {url.rpartition(':')[2]}}}\n")
    assert "cannot listen on 127.0.0.1" in call("up", taken, status=1).stderr
    call("down")
    cluster.database.write_text("no database, however long it is looked at")
    assert "no database of a controller" in call("up", status=1).stderr


def test_up_in_the_foreground_is_the_controller_until_a_signal(cluster, tmp_path):
    cluster_file = tmp_path / "cluster.yaml"
    cluster_file.write_text("cluster: big\nresources: {cpus: 3, gpus: 2}\n")
    command = [sys.executable, "-m", "areal_async.cli.main", "up", str(cluster_file), "--foreground"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        reading = threading.Thread(target=process.stderr.read)
        reading.start()
        wait_for(lambda: cluster.url() is not None, "its address")
        answer = ControllerClient.find().cluster()
        assert (answer.cluster, answer.total) == ("big", Resources(3, 2))
        umask = os.umask(0o022)
        assert "is up already" in call("up", "--foreground", status=1).stderr
        umask_left = os.umask(umask)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
        reading.join()
    assert umask_left == 0o022
    start_controller(cluster)  # as it was brought up last
    assert ControllerClient.find().cluster().total == Resources(3, 2)


def test_down_after_a_death_ends_what_runs_and_starts_nothing(cluster, job_file):
    cluster.make()
    store = JobStore(cluster.database)
    content = {"job": "sums", "model": "/models/tiny", "tasks": {"train": "/data/train.parquet"}}
    fields = {"priority": 0, "submitted_s": 1.0, "content": content, "needs": Resources(1)}
    store.add(StoredJob(id=1, name="sums", key="key-of-sums", **fields, state="STARTING", attempt=1))
    store.add(StoredJob(id=2, name="next", key="key-of-next", **fields))
    store.close()
    (cluster.jobs / "1-sums" / "files").mkdir(parents=True, mode=0o700)
    assert "stopped sums" in call("down").stdout
    store = JobStore(cluster.database)
    states = {job.name: job.state for job in store.in_states(("STOPPED", "PENDING", "STARTING", "FAILED"))}
    store.close()
    assert states["next"] == "PENDING"
    assert states["sums"] in ("STOPPED", "FAILED")
    assert "no controller is up" in call("down").stdout


def test_a_job_of_the_controller_is_found_by_name_where_a_run_is_asked_for(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for id in (2, 10, 9):
        (cluster.jobs / f"{id}-sums" / "runs" / "sums").mkdir(parents=True)
    (cluster.jobs / "11-more-sums" / "runs" / "sums").mkdir(parents=True)
    assert run_target("sums") == str(cluster.jobs / "10-sums" / "runs" / "sums")
    assert run_target("./sums") == "./sums"
    assert run_target("../10-sums") == "../10-sums"
    Path("sums").mkdir()
    assert run_target("sums") == "sums"  # what is here comes first
