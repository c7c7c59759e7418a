"""The Slurm script, run where `srun` and what it starts note how they are called, for the real parsers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.checks import HEAD_PORT, RAY_PORTS
from tests.deploy.commands import ROOT, cluster_problems, command_problems, ray_options
from tests.waiting import LIMIT_S, wait_for

SCRIPT = ROOT / "deploy" / "slurm" / "areal-async.sbatch"
Start = Callable[..., subprocess.Popen[str]]

STUB = """#!/bin/sh
printf '%s\\0' "$(basename "$0")" "$@" >> "$CALLS"; printf '\\n' >> "$CALLS"
case "$(basename "$0") $*" in
"scontrol show hostnames "*) printf 'node-a\\nnode-b\\n' ;;
"hostname --ip-address") echo 10.0.0.1 10.0.0.2 ;;
"areal-async keys "*) exec "$PYTHON" -m areal_async.cli.main "$@" ;;
"ray health-check "*) grep -aq "^ray.start" "$CALLS" || exit 1 ;;
"ray start "*) sleep 60 & trap 'kill $!; echo ended >> "$ENDED"; exit 0' TERM; wait ;;
"areal-async run "*)
    until [ "$(grep -ac "^ray.start" "$CALLS")" = 2 ]; do sleep 0.05; done
    [ -z "$STAY" ] || trap 'echo told >> "$ENDED"; exit 5' TERM
    [ "$RAY_USE_TLS" = 1 ] && openssl verify -CAfile "$RAY_TLS_CA_CERT" "$RAY_TLS_SERVER_CERT" &&
        openssl x509 -in "$RAY_TLS_SERVER_CERT" -noout -ext subjectAltName > "$CALLS.names"
    shift 2; while [ "$1" != --cluster ]; do shift; done; cat "$2" > "$CALLS.cluster"
    [ -z "$STAY" ] || { sleep 60 & wait; }
    exit 3 ;;
esac
if [ "$(basename "$0")" = srun ]; then
    while [ "${1#--}" != "$1" ]; do shift; done
    exec "$@"
fi
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Start:
    """What starts the Slurm script where programs of that name note how they are called."""
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name in ("scontrol", "srun", "ray", "areal-async", "hostname"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    (tmp_path / "job.yaml").write_text("job: a\n")

    def start(stay: str = "") -> subprocess.Popen[str]:
        environment = os.environ | {
            "PATH": f"{stubs}:{os.environ['PATH']}", "HOME": str(tmp_path), "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node-[a-b]", "CALLS": str(tmp_path / "calls"),
            "ENDED": str(tmp_path / "ended"), "STAY": stay, "PYTHON": sys.executable,
        }  # fmt: skip
        words = ["bash", SCRIPT, tmp_path / "job.yaml", "trainer.steps=3"]
        return subprocess.Popen(words, env=environment, text=True)

    return start


def calls_of(folder: Path) -> list[list[str]]:
    return [line.split("\0")[:-1] for line in (folder / "calls").read_text().splitlines()]


def test_slurm_starts_a_head_then_the_others_then_the_job(slurm: Start, tmp_path: Path) -> None:
    assert slurm().wait(LIMIT_S) == 3  # the status of the job
    calls = calls_of(tmp_path)
    starts = [call for call in calls if call[:2] == ["ray", "start"]]
    for call in calls:
        if call[0] in ("ray", "areal-async"):
            assert [*command_problems(call)] == []
    head, workers = [ray_options(call) for call in starts]
    assert (head["head"], head["node_ip_address"], int(head["port"])) == (True, "10.0.0.1", HEAD_PORT)
    assert (workers["head"], workers["address"]) == (False, f"10.0.0.1:{HEAD_PORT}")
    assert all({name: int(options[name]) for name in RAY_PORTS} == RAY_PORTS for options in (head, workers))
    runs = [call for call in calls if call[0] == "srun" and "ray start" in " ".join(call)]
    assert all({"--overlap", "--cpu-bind=none", "--gpu-bind=none"} <= {*run} for run in runs)
    assert "--nodelist=node-a" in runs[0]
    assert {"--exclude=node-a", "--nodes=1"} <= set(runs[1])
    (job,) = [call for call in calls if call[:2] == ["areal-async", "run"]]
    assert job[2:4] == [str(tmp_path / "job.yaml"), "trainer.steps=3"]
    assert [*cluster_problems((tmp_path / "calls.cluster").read_text(), tmp_path)] == []
    names = (tmp_path / "calls.names").read_text().split("\n")[1].strip().split(", ")
    assert {"IP Address:10.0.0.1", "IP Address:10.0.0.2"} <= set(names)
    assert not list(tmp_path.glob(".areal-async-slurm-*"))
    wait_for(lambda: (tmp_path / "ended").read_text().count("ended") == 2, "the end of Ray")


def test_slurm_tells_the_job_before_its_time_is_over(slurm: Start, tmp_path: Path) -> None:
    script = slurm("yes")
    wait_for(lambda: (tmp_path / "calls.cluster").exists(), "the job")
    script.send_signal(signal.SIGTERM)
    assert script.wait(LIMIT_S) == 143
    wait_for(lambda: "told" in (tmp_path / "ended").read_text(), "the job's end")
    assert not list(tmp_path.glob(".areal-async-slurm-*"))
