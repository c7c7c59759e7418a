"""`areal-async run --inline`: a job in one process, under a debugger, a profiler and a person's Ctrl-C."""

from __future__ import annotations

import json
import os
import pstats
import pty
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_async.base.topology import Topology
from tests.e2e.conftest import FinishedRun, told_by
from tests.forks import start_command
from tests.jobs import Workspace
from tests.processes import processes_of
from tests.scrape import fetch_samples
from tests.waiting import deadline_s

pytestmark = pytest.mark.slow

LIMIT_S = deadline_s(600)
PROMPT = r"\(Pdb\) "

PARTS = """
import time

from areal_async import RewardInput, advantage, reward, workflow
from trainer_service.algorithms.advantages import grpo

CALLS = {"reward": 0, "workflow": 0, "advantage": 0}


def stop_at(place):
    CALLS[place] += 1
    if CALLS[place] == 1:
        place = "it is the " + place
        breakpoint()
        return place


@reward
def stopping_reward(given: RewardInput) -> float:
    stop_at("reward")
    return given.response.count("1") / max(1, len(given.response))


@reward
def failing_reward(given: RewardInput) -> float:
    return {}["there is no such key"]


@workflow
async def stopping_workflow(ctx, task):
    await ctx.generate(task.prompt)
    stop_at("workflow")


@workflow
async def failing_workflow(ctx, task):
    await ctx.generate(task.prompt)
    raise ValueError("the workflow is at its end")


@advantage(needs_group=2)
def stopping_advantage(samples):
    stop_at("advantage")
    return grpo(samples)


@advantage(needs_group=2)
def third_fails(samples):
    CALLS["advantage"] += 1
    if CALLS["advantage"] == 3:
        raise ValueError("the third advantage")
    return grpo(samples)


@advantage(needs_group=2)
def hanging_advantage(samples):
    print("it hangs", flush=True)
    time.sleep(1000)
"""


class InlineJob:
    """An inline run with a terminal of its own, as a person has it."""

    def __init__(self, workspace: Workspace, verb: str, job_file: Path, *arguments: str) -> None:
        self.folder = workspace.folder / "runs" / job_file.stem
        self.workspace = workspace
        self._terminal, theirs = pty.openpty()
        self.process = start_command([verb, job_file, "--inline", *arguments], theirs)
        os.close(theirs)
        self.told = ""
        self._read = 0

    def read_until(self, pattern: str) -> str:
        """What it printed since the last match, up to a match of this or to its end."""
        deadline_s = time.monotonic() + LIMIT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._terminal, selectors.EVENT_READ)
            while not re.search(pattern, self.told[self._read :]):
                assert selector.select(deadline_s - time.monotonic()), f"no {pattern!r} in time: {self.told}"
                try:
                    self.told += os.read(self._terminal, 1 << 16).decode(errors="replace")
                except OSError:  # its end of the terminal is closed
                    break
        new, self._read = self.told[self._read :], len(self.told)
        return new

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def end(self, *, status: int = 0) -> FinishedRun:
        """Wait until it ends with this status; it must leave nothing behind."""
        self.read_until(r"(?!)")
        assert self.process.wait(LIMIT_S) == status, self.told
        topology = Topology.read(self.folder / "topology.json")
        assert processes_of(topology.run_id) == []
        assert not Path(topology.home_host.socket_dir).exists()
        assert not Path(topology.home_host.shm_dir).exists()
        return FinishedRun(self.folder, self.workspace)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@pytest.fixture
def inline(workspace: Workspace) -> Callable[..., object]:
    """`with inline("run", job_file) as job:`"""
    (workspace.folder / "parts.py").write_text(PARTS, encoding="utf-8")

    @contextmanager
    def started(verb: str, job_file: Path, *arguments: str) -> Iterator[InlineJob]:
        job = InlineJob(workspace, verb, job_file, *arguments)
        try:
            yield job
        finally:
            job.close()

    return started


def losses(run: FinishedRun) -> list[float]:
    return [record["loss"] for record in run.records("step")]


def test_at_staleness_zero_an_inline_run_has_the_losses_of_one_in_processes(workspace, inline, finished):
    synchronous = finished("synchronous")
    with inline("run", workspace.job("inline-alike", buffer__max_staleness=0)) as job:
        alike = job.end()
    assert losses(alike)[:3] == pytest.approx(losses(synchronous)[:3], abs=1e-5)
    assert alike.summary["episodes_trained"] == synchronous.summary["episodes_trained"]
    in_processes = {path.name for path in synchronous.folder.iterdir()}
    assert {path.name for path in alike.folder.iterdir()} == in_processes
    assert [path.name for path in (alike.folder / "logs").iterdir()] == ["inline.log"]
    assert re.search(r"step=9 reward=\S+ .*staleness=0 ", job.told)
    assert alike.weights(10).is_dir()


def test_breakpoints_of_all_parts_have_one_prompt_after_the_other_and_nothing_expires_meanwhile(
    workspace, inline
):
    job_file = workspace.job(
        "inline-breakpoints",
        reward={"name": "parts.py:stopping_reward", "timeout_s": 0.25},
        rollout__workflow="parts.py:stopping_workflow",
        trainer__objective={"advantage": "parts.py:stopping_advantage"},
        buffer__lease_s=0.5,
        evaluated=True,
    )
    told = []
    with inline("run", job_file) as job:
        for _ in range(3):
            job.read_until(PROMPT)
            job.type("import time; time.sleep(2)  # four lives of a lease, two of a claim\n")
            job.read_until(PROMPT)
            job.type("p place\n")
            told.append(job.read_until(PROMPT))
            job.type("c\n")
        run = job.end()
    for place in ("reward", "workflow", "advantage"):
        assert f"it is the {place}" in "".join(told)
    assert "past its deadline" in job.told
    assert run.summary["episodes_trained"] == 10 * 8 * 4
    assert run.summary["episodes_dropped"] == 0
    lost = [reason for reason in run.summary["transitions"] if re.search("expired|timeout|again", reason)]
    assert lost == []


@pytest.mark.parametrize(
    ("change", "line", "error"),
    [
        ("reward.name=parts.py:failing_reward", 'return {}["there is no such key"]', "KeyError"),
        (
            "rollout.workflow=parts.py:failing_workflow",
            "raise ValueError",
            "ValueError: the workflow is at its end",
        ),
    ],
)
def test_an_error_of_a_users_code_ends_the_run_with_its_own_traceback(workspace, inline, change, line, error):
    job_file = workspace.job(f"inline-{error.partition(':')[0].lower()}")
    name, _, part = change.partition("=")
    with inline("run", job_file, f"{name}={workspace.folder / part}") as job:
        run = job.end(status=1)
    assert "Traceback (most recent call last)" in job.told
    assert str(workspace.folder / "parts.py") in job.told
    assert line in job.told
    assert error in job.told
    assert run.records("end")[-1]["ending"] == "died"
    assert run.records("restart") == []


def test_what_failed_or_was_interrupted_inline_is_resumed_inline_and_in_processes(workspace, inline):
    objective = {"advantage": "parts.py:third_fails"}
    with inline("run", workspace.job("inline-failed", trainer__objective=objective)) as job:
        run = job.end(status=1)
    assert "ValueError: the third advantage" in job.told
    grpo = "trainer.objective.advantage=grpo"
    with inline("resume", run.folder, grpo, "trainer.steps=60") as job:
        job.read_until("step=4 ")
        job.type("\x03")
        run = job.end(status=130)
    assert "stopped on request" in job.told
    assert "Traceback" not in job.told
    assert [record["ending"] for record in run.records("end")] == ["died", "interrupted"]
    told_by("resume", run.folder, grpo, "trainer.steps=20", "--plain")
    assert run.summary["resumes"] == 2
    assert [record["step"] for record in run.records("step")][-1] == 19
    assert run.summary["max_staleness_seen"] <= 4


PROMPTS = {
    "workflow": ({"rollout__workflow": "parts.py:stopping_workflow"}, "\x03"),
    "reward": ({"reward": {"name": "parts.py:stopping_reward"}}, "q\n"),
    "advantage": ({"trainer__objective": {"advantage": "parts.py:stopping_advantage"}}, "\x03"),
}
"""By part: the change that stops in it, and what ends the run there."""


@pytest.mark.parametrize("part", PROMPTS)
def test_a_run_is_ended_from_the_prompt_of_each_part(workspace, inline, part):
    change, typed = PROMPTS[part]
    with inline("run", workspace.job(f"inline-prompt-{part}", **change)) as job:
        job.read_until(PROMPT)
        job.type(typed)
        job.end(status=130)
    assert "stopped on request" in job.told


def test_a_second_ctrl_c_ends_what_hangs_at_once(workspace, inline):
    objective = {"advantage": "parts.py:hanging_advantage"}
    with inline("run", workspace.job("inline-hanging", trainer__objective=objective)) as job:
        job.read_until("it hangs")
        targets = workspace.folder / "runs" / "prometheus" / "inline-hanging.json"
        (listed,) = json.loads(targets.read_text())
        assert listed["labels"]["service"] == "inline"
        assert "areal_rollout_tokens_total" in fetch_samples(int(listed["targets"][0].rpartition(":")[2]))
        job.type("\x03")
        time.sleep(0.7)  # a person's two: within half a second they are taken for one
        job.type("\x03")
        run = job.end(status=130)
    assert '"at_once":true' in (run.folder / "logs" / "inline.log").read_text()


TWICE = """
import sys
from pathlib import Path

from areal_async import load_job, run

for value in ("0.25", "0.75"):
    Path("own.py").write_text(
        "import sys\\nfrom areal_async import RewardInput, advantage, reward\\n"
        "@reward\\ndef constant(given: RewardInput) -> float:\\n    return " + value + "\\n"
        "@advantage(needs_group=2)\\ndef told(samples):\\n"
        "    sys.stdout.write('advantage " + value + "\\\\n')\\n    return samples.reward\\n"  # at once
    )
    done = run(load_job(sys.argv[1]), overwrite=True, inline=True)
    assert done.wait()["reward_last"] == float(value), done.summary()
    print("steps", [step["step"] for step in done.metrics()])
print("switch interval", sys.getswitchinterval())
"""


def test_a_python_process_runs_a_job_inline_again_with_its_edited_file_and_can_be_profiled(
    workspace, tmp_path
):
    for name in ("model", "train.jsonl"):
        (tmp_path / name).symlink_to(workspace.folder / name)
    (tmp_path / "own.py").write_text("")
    objective = {"advantage": "own.py:told"}
    job_file = Workspace(tmp_path).job(
        "twice", reward={"name": "own.py:constant"}, trainer__objective=objective, trainer__steps=2
    )
    (tmp_path / "twice.py").write_text(TWICE)
    profile = tmp_path / "profile"
    done = subprocess.run(
        [sys.executable, "-m", "cProfile", "-o", profile, tmp_path / "twice.py", job_file],
        cwd=tmp_path,
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("steps [0, 1]") == 2
    assert "switch interval 0.005\n" in done.stdout, "as it was before the runs"
    for value in (0.25, 0.75):
        assert done.stdout.count(f"advantage {value}\n") == 2
    profiled = pstats.Stats(str(profile)).stats.items()
    own = {name: figures[0] for (file, _, name), figures in profiled if file.endswith("own.py")}
    assert own["told"] == 2, "two steps; the second version of the file stands in the place of the first"
