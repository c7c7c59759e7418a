"""One job on three hosts that share nothing but a network: no disk, no shared memory, no process ids.

Its model, tasks and reward lie on the first host; its buffer runs there, its trainer on the second and its
engine on the third. The controller is killed, the hosts of engine and trainer are killed and replaced, the
job is paused and resumed, and a link is cut."""

import time
from pathlib import Path

import pytest

from areal_async.config.load import load_job
from areal_async.service.record import read_run_log
from tests.chaos.job import write_job
from tests.sealed.world import CLUSTER, PLACES, SubmittedJob, judged, sealed_hosts, until, unusable

STEPS = 60
"""So many that the job does not end by itself while its pause is on the way."""


@pytest.mark.slow
@pytest.mark.skipif(bool(unusable()), reason=unusable())
@pytest.mark.nightly
def test_a_job_on_three_hosts_outlives_two_of_them_a_cut_link_and_its_controller(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    job_file = write_job(
        folder, "sealed", steps=STEPS, seed=5, durability="everysec", rollout__workers=1, placement=PLACES
    )
    (folder / "cluster.yaml").write_text(CLUSTER)
    captured = tmp_path / "frames"
    with sealed_hosts(tmp_path) as hosts:
        for part in ("home", "trainer", "engine"):
            hosts.node(hosts.add(), 2, part=part)
        hosts.copy_in(folder)
        hosts.script("capture", 3, captured)
        hosts.areal("up", "cluster.yaml")
        hosts.areal("submit", job_file.name)
        hosts.areal("submit", job_file.name, "job=waits", "placement.rollout.labels.part=nowhere")
        submitted, waits = SubmittedJob(hosts, "sealed"), SubmittedJob(hosts, "waits", 2)
        try:
            until(lambda: "waiting for room" in waits.logged("supervisor"), "that it waits for room")
            hosts.areal("pause", "waits")
            assert (waits.told()["state"], waits.told()["reason"]) == ("PAUSED", "paused on request")
            submitted.until_step(3)
            assert hosts.left(2), "the trainer is there"
            hosts.kill_controller()
            hosts.script("kill", 3)
            hosts.node(hosts.add(), 2, part="engine")
            lost_at = submitted.steps()
            hosts.areal("up")
            submitted.until_step(lost_at + 8)
            hosts.areal("pause", "sealed")
            assert submitted.told()["reason"] == "paused on request"
            hosts.areal("resume", "sealed")
            submitted.until_step(submitted.steps() + 1)
            hosts.script("cut", 2)
            time.sleep(4)  # the fault itself
            hosts.script("mend", 2)
            submitted.until_step(submitted.steps() + 1)
            hosts.script("kill", 2)
            hosts.node(hosts.add(), 2, part="trainer")
            until(lambda: len(submitted.endings()) == 2, "the end of the job")
            until(lambda: submitted.told()["state"] == "SUCCEEDED", "its success")
            assert submitted.told()["attempt"] == 2
            hosts.areal("down")
        except BaseException:
            print(submitted.said())
            raise
        for host in (1, 4, 5):
            until(lambda host=host: not hosts.left(host), f"nothing left on host {host}")
        run_dir = hosts.copy_out(submitted.run, tmp_path / "back")
    job = load_job(job_file, files=False)
    assert judged(run_dir, load_job(job_file)).violations == []
    records = read_run_log(run_dir / "metrics.jsonl")
    restarts = {record["service"] for record in records if record["kind"] == "restart"}
    assert {"rollout-0", "trainer"} <= restarts
    assert "load" not in {record["kind"] for record in records}, "their numbers are others' here"
    assert (
        max(record["staleness_max"] for record in records if record["kind"] == "step")
        <= job.buffer.max_staleness
    )
    assert (run_dir / "model" / "model.safetensors").stat().st_size > 0
    frames = captured.read_bytes()
    assert len(frames) > 1_000_000, "what the engine's host sent and received"
    for secret in (b"PutEpisodes", b"Heartbeat", b"share_of_ones", b"WaitSnapshot", b"model.safetensors"):
        assert secret not in frames, f"{secret!r} can be read on the wire"
