"""Rewards in other languages: a server that holds none of our code drives a real job, and loses nothing when
it is killed and started again in mid-job."""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.conftest import Workspace, command

pytestmark = [pytest.mark.slow, pytest.mark.alone]

SERVERS = Path(__file__).parents[2] / "examples" / "reward_servers"
STEPS = 12


class RewardServer:
    """The example server; started again at the same address."""

    def __init__(self) -> None:
        node = shutil.which("node")
        if node is None:
            pytest.skip("needs Node.js: the Debian package nodejs")
        self._command = [node, str(SERVERS / "server.js")]
        self.url = ""
        self.start()

    def start(self) -> None:
        port = [self.url.rpartition(":")[2]] if self.url else []
        # Only what it needs: none of our code is on its path.
        environment = {"PATH": os.environ["PATH"]}
        self.process = subprocess.Popen(
            [*self._command, *port], stdout=subprocess.PIPE, env=environment, cwd=SERVERS
        )
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(30), "the reward server does not start"
        self.url = self.process.stdout.readline().decode().split()[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def reward_server() -> Iterator[RewardServer]:
    server = RewardServer()
    yield server
    server.kill()


@pytest.mark.timeout(400)
def test_a_server_in_another_language_trains_a_job_and_its_death_loses_nothing(
    workspace: Workspace,
    running: Callable[..., Any],
    reward_server: RewardServer,
    nothing_is_left: Callable[[dict[str, Any]], None],
    tmp_path: Path,
) -> None:
    server = reward_server
    job_file = workspace.job(
        "node-reward",
        reward={"name": "remote", "timeout_s": 10, "args": {"urls": [server.url], "reward": "share_of_ones"}},
        trainer__steps=STEPS,
        observe={"metrics_port": 0, "event_log": True, "stall_s": 2},
    )
    with running("run", job_file) as job:
        job.wait_for(lambda: len(job.steps()) >= 4, "step 4", 200)
        server.kill()
        # What is scored and not yet trained is used up; then the job stands still for want of rewards.
        job.read_until("stalled for", 60)
        server.start()
        run = job.record
        job.read_all(200)
        assert job.process.wait(60) == 0, job.told
    nothing_is_left(run)

    assert len({step["step"] for step in job.steps()}) == STEPS
    kinds = {item[2] for event in job.events("verdicts") for item in event["items"]}
    assert kinds == {"score"}, "the death of the server became verdicts"
    rows = export(job.folder, tmp_path / "batches.parquet")
    assert len(rows) == STEPS * 8 * 4
    for row in rows:
        text = row["response_text"]
        assert row["reward"] == pytest.approx(text.count("1") / max(1, len(text)), abs=1e-6)
    rewards = [step["reward_mean"] for step in job.steps()]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2, "the job learned nothing"


def export(run: Path, out: Path) -> list[dict[str, Any]]:
    """Every episode that was trained, with its reward as it was trained."""
    subprocess.run(command("buffer", "export", run, out, "--batches"), check=True, capture_output=True)
    return pq.read_table(out, columns=["response_text", "reward"]).to_pylist()
