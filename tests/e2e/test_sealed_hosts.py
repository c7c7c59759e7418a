"""One job on three hosts that share nothing but a network: no disk, no shared memory, no process ids.

Its model, tasks and reward lie on the first host; its buffer runs there, its trainer on the second and its
engine on the third. The hosts of engine and trainer are killed and replaced, and a link is cut."""

import sys
import time
from pathlib import Path

import pytest

from areal_async.config.load import load_job
from areal_async.runtime.events import read_events
from areal_async.status.record import read_run_log
from tests.chaos.history import check
from tests.chaos.job import promise_of, write_job
from tests.sealed.world import WORK, sealed_hosts, steps_in, until, unusable

STEPS = 24
PLACES = {
    "buffer": {"labels": {"part": "home"}},
    "reward": {"labels": {"part": "home"}},
    "trainer": {"labels": {"part": "trainer"}},
    "rollout": {"labels": {"part": "engine"}},
    "evaluator": {"labels": {"part": "engine"}},
}
CLUSTER = """
cluster: sealed
launcher: ray
ray: {address: "10.77.0.1:6380", ports: [21000, 21199], place_s: 200}
"""
CLI = ("-P", "-m", "areal_async.cli.main")


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.skipif(bool(unusable()), reason=unusable())
def test_a_job_on_three_hosts_outlives_two_of_them_and_a_cut_link(tmp_path: Path) -> None:
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
        words = [sys.executable, *CLI, "run", job_file.name, "--cluster", "cluster.yaml", "--plain"]
        with (tmp_path / "told").open("wb") as told:
            run = hosts.start(1, "env", "-C", WORK, *words, output=told)

        def said() -> str:
            return (tmp_path / "told").read_text()

        def steps_are(number: int) -> bool:
            return steps_in(hosts.records("sealed")) >= number

        try:
            until(lambda: steps_are(3), "three steps", run)
            assert hosts.left(2), "the trainer is there"
            hosts.script("kill", 3)
            hosts.node(hosts.add(), 2, part="engine")
            lost_at = steps_in(hosts.records("sealed"))
            until(lambda: steps_are(lost_at + 8), "steps with another engine", run)
            hosts.script("cut", 2)
            time.sleep(4)  # the fault itself
            hosts.script("mend", 2)
            until(
                lambda: steps_in(hosts.records("sealed")) >= lost_at + 11, "steps over the mended link", run
            )
            hosts.script("kill", 2)
            hosts.node(hosts.add(), 2, part="trainer")
            assert run.wait(240) == 0, said()
        except BaseException:
            print(said())
            raise
        for host in (1, 4, 5):
            until(lambda host=host: not hosts.left(host), f"nothing left on host {host}", limit_s=30)
        done = hosts.copy_out("runs", tmp_path / "back")
    run_dir = done / "sealed"
    job = load_job(job_file, files=False)
    verdict = check(read_events(run_dir), promise_of(load_job(job_file)))
    # What the processes of the killed hosts noted in their last moments is gone with them: which version a
    # worker served, that the trainer had saved a step.
    noted = ("version", "freed_early")
    others = [violation for violation in verdict.violations if violation.promise not in noted]
    assert others == [], said()
    records = read_run_log(run_dir / "metrics.jsonl")
    restarts = {record["service"] for record in records if record["kind"] == "restart"}
    assert {"rollout-0", "trainer"} <= restarts
    assert (
        max(record["staleness_max"] for record in records if record["kind"] == "step")
        <= job.buffer.max_staleness
    )
    assert (run_dir / "model" / "model.safetensors").stat().st_size > 0
    frames = captured.read_bytes()
    assert len(frames) > 1_000_000, "what the engine's host sent and received"
    for secret in (b"PutEpisodes", b"Heartbeat", b"share_of_ones", b"WaitSnapshot", b"model.safetensors"):
        assert secret not in frames, f"{secret!r} can be read on the wire"
