"""Hosts that share nothing but a network, on one machine, with a node of a Ray cluster on each (`hosts.sh`).

Needs root, namespaces and iproute2; `usable` says why it cannot be done here."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_async.cli.keys import make_keys
from areal_async.config.job import JobConfig
from tests.chaos.history import Verdict, Violation, check
from tests.chaos.job import promise_of
from tests.events import read_events
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("hosts.sh")
GCS_PORT = 6380
LIMIT_S = 600.0
WORK = "/tmp/work"  # On the home host
MOST_UNHEARD = 10  # Steps that a trainer does between two looks at its events, a second apart
CONTROLLER = "controller"  # Its folder, in `WORK`
CLUSTER = f"""
cluster: sealed
launcher: ray
ray: {{address: "10.77.0.1:{GCS_PORT}", ports: [21000, 21199], place_s: 200}}
resources: {{cpus: 6, gpus: 0}}
dir: {CONTROLLER}
"""
PLACES = {
    "reward": {"labels": {"part": "home"}},
    "trainer": {"labels": {"part": "trainer"}},
    "rollout": {"labels": {"part": "engine"}},
    "evaluator": {"labels": {"part": "engine"}},
}
"""Where the processes of a job go: each role to the hosts that have its label."""
RAY = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}


CERTIFICATES = "/tmp/certificates"
TLS = {
    "RAY_AUTH_TOKEN_PATH": f"{CERTIFICATES}/ray.token",
    "RAY_USE_TLS": "1",
    "RAY_TLS_SERVER_CERT": f"{CERTIFICATES}/node.crt",
    "RAY_TLS_SERVER_KEY": f"{CERTIFICATES}/node.key",
    "RAY_TLS_CA_CERT": f"{CERTIFICATES}/ca.crt",
}


def unusable() -> str:
    """Why sealed hosts cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "sealed hosts need root"
    for program in ("unshare", "nsenter", "ip", "mount"):
        if shutil.which(program) is None:
            return f"sealed hosts need {program}"
    tried = subprocess.run(
        ["unshare", "-m", "-n", "-i", "-p", "--fork", "true"], capture_output=True, check=False
    )
    return "" if tried.returncode == 0 else "namespaces cannot be made here"


class SealedHosts:
    """Hosts 1 to N; host 1 is the home of jobs and the head of the Ray cluster."""

    def __init__(self, state: Path, *, patience_s: int) -> None:
        """`patience_s`: about how long a node may be silent before Ray takes it for dead."""
        kept = (Path(sys.base_prefix), ROOT, Path(sys.prefix).resolve())
        apart = [path for path in kept if not any(path != other and other in path.parents for other in kept)]
        self.environment = {
            **os.environ,
            "SEALED_HOSTS_STATE": str(state),
            "SEALED_HOSTS_KEEP": ":".join(str(path) for path in dict.fromkeys(apart)),
            "SEALED_HOSTS_PYTHON": sys.executable,
        }
        self._state = state
        state.parent.mkdir(parents=True, exist_ok=True)
        self._certificates = state.parent / "certificates"
        make_keys(self._certificates, [f"10.77.0.{n}" for n in range(1, 10)])
        self._health = {
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "1000",
            "RAY_health_check_failure_threshold": str(max(2, patience_s // 2)),
        }
        self._controller = {"AREAL_ASYNC_CLUSTER_DIR": f"{WORK}/{CONTROLLER}"}
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.up_to = 0

    def script(self, *words: object, limit_s: float = LIMIT_S) -> str:
        done = subprocess.run(
            ["bash", SCRIPT, *map(str, words)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def add(self) -> int:
        """One more host, which has the certificates of the Ray cluster's nodes; its number."""
        self.up_to += 1
        self.script("up" if self.up_to == 1 else "add", self.up_to)
        self.copy(self.up_to, self._certificates / "nodes" / f"10.77.0.{self.up_to}", CERTIFICATES)
        return self.up_to

    def on(self, host: int, *command: str) -> list[str]:
        """The command that runs `command` on a host."""
        variables = {
            **RAY,
            **TLS,
            **self._health,
            **self._controller,
            "HOME": "/root",
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
        }
        given = [f"{name}={value}" for name, value in variables.items()]
        return ["bash", str(SCRIPT), "on", str(host), "env", *given, *command]

    def start(self, host: int, *command: str, output: Any = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.on(host, *command),
            env=self.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    def tell(self, host: int, *command: str, given: bytes = b"", limit_s: float = LIMIT_S) -> bytes:
        done = subprocess.run(
            self.on(host, *command),
            env=self.environment,
            input=given,
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
        if done.returncode != 0:
            raise OSError(done.returncode, done.stderr.decode(errors="replace"))
        return done.stdout

    def node(self, host: int, cpus: int, **labels: str) -> None:
        """Start the node of the Ray cluster on a host, the head on the first."""
        address = f"10.77.0.{host}"
        head = ["--head", "--port", str(GCS_PORT), "--include-dashboard=false"]
        join = ["--address", f"10.77.0.1:{GCS_PORT}"]
        words = [
            *(head if host == 1 else join),
            "--node-ip-address", address,
            "--num-cpus", str(cpus),
            "--object-store-memory", "100000000",
            "--labels", ",".join(f"{name}={value}" for name, value in labels.items()),
            "--block",
        ]  # fmt: skip
        ray = str(Path(sys.executable).with_name("ray"))
        log = (self._state.parent / f"ray-{host}.log").open("wb")
        self._nodes[host] = self.start(host, ray, "start", *words, output=log)
        if host == 1:
            until(lambda: self._answers(ray), "the head of the Ray cluster")

    def _answers(self, ray: str) -> bool:
        with suppress(OSError):
            return bool(self.tell(1, ray, "status", "--address", f"10.77.0.1:{GCS_PORT}"))
        return False

    def areal(self, *words: str) -> str:
        """What the command `areal-async` says on the home host, in `WORK`. Raises OSError where it fails."""
        command = ["env", "-C", WORK, sys.executable, "-P", "-m", "areal_async.cli.main", *words]
        return self.tell(1, *command, limit_s=LIMIT_S).decode()

    def kill_controller(self) -> None:
        """With SIGKILL."""
        owner = json.loads(self.tell(1, "cat", f"{WORK}/{CONTROLLER}/lock"))
        self.tell(1, "kill", "-KILL", str(owner["pid"]))

    def copy_in(self, folder: Path) -> None:
        """Have the files of `folder` lie on the home host, in `WORK`."""
        self.copy(1, folder, WORK)

    def copy(self, host: int, folder: Path, there: str) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(folder, arcname=".")
        self.tell(host, "mkdir", "-p", there)
        self.tell(host, "tar", "x", "-C", there, given=packed.getvalue())

    def copy_out(self, name: str, folder: Path) -> Path:
        """Have the folder of this name in `WORK` lie in `folder`, under its last part."""
        above, _, last = name.rpartition("/")
        packed = io.BytesIO(self.tell(1, "tar", "c", "-C", f"{WORK}/{above}", last, limit_s=LIMIT_S))
        with tarfile.open(fileobj=packed) as tar:
            tar.extractall(folder, filter="data")
        return folder / last

    def left(self, host: int) -> list[str]:
        """What of runs lies on a host, and which of their processes live."""
        folders = self.tell(host, "sh", "-c", "ls -d /tmp/areal-* /dev/shm/areal-* 2>/dev/null || true")
        processes = self.tell(
            host, "sh", "-c", "grep -l AREAL_ASYNC_RUN /proc/[0-9]*/environ 2>/dev/null || true"
        )
        return [*folders.decode().split(), *processes.decode().split()]

    def down(self) -> None:
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.script("down")
        for node in self._nodes.values():
            with suppress(subprocess.TimeoutExpired):
                node.wait(300)


@contextmanager
def sealed_hosts(folder: Path, *, patience_s: int = 12) -> Iterator[SealedHosts]:
    hosts = SealedHosts(folder / "hosts", patience_s=patience_s)
    try:
        yield hosts
    finally:
        hosts.down()


def judged(run_dir: Path, job: JobConfig) -> Verdict:
    """What the checker says of a run some of whose hosts were killed. What their processes noted in their
    last moments is gone with them: which version a worker served, that the trainer had saved a step, or had
    trained and published the last few, of which the buffer knows; so the checker does not know either whose
    weights those are that its successor went on from, and that episodes sampled from them descend."""
    verdict = check(read_events(run_dir), promise_of(job))
    unpublished = re.compile(r"version (\d+) is committed, and not published")
    found = [unpublished.match(violation.text) for violation in verdict.violations]
    unheard = {int(version[1]) for version in found if version is not None}
    if unheard and max(unheard) - min(unheard) >= MOST_UNHEARD:
        unheard.clear()

    def is_gone(violation: Violation) -> bool:
        if violation.promise in ("version", "freed_early"):
            return True
        version = unpublished.match(violation.text)
        step = re.search(r"is TRAINED in step (\d+), and was not trained", violation.text)
        sampled = re.search(r"of version (\d+), epochs .* does not descend from", violation.text)
        return any(
            match is not None and int(match[1]) + later in unheard
            for match, later in ((version, 0), (step, 1), (sampled, 0))
        )

    return Verdict([one for one in verdict.violations if not is_gone(one)], verdict.figures)


def until(holds: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Each look at a host starts a process there."""
    wait_for(holds, what, limit_s=limit_s, every_s=0.3)


@dataclass(frozen=True)
class SubmittedJob:
    """A job of the controller on the home host."""

    hosts: SealedHosts
    name: str
    id: int = 1

    @property
    def folder(self) -> str:
        """Below `WORK`."""
        return f"{CONTROLLER}/jobs/{self.id}-{self.name}"

    @property
    def run(self) -> str:
        return f"{self.folder}/runs/{self.name}"

    def _read(self, command: str) -> list[dict[str, Any]]:
        with suppress(OSError):
            said = self.hosts.tell(1, "sh", "-c", f"cd {WORK}/{self.folder} && {command}")
            return [json.loads(line) for line in said.splitlines() if line.endswith(b"}")]
        return []

    def records(self, kind: str = "step") -> list[dict[str, Any]]:
        """The run's records of this kind so far."""
        found = self._read(f"cat runs/{self.name}/metrics.jsonl")
        return [record for record in found if record["kind"] == kind]

    def steps(self) -> int:
        return max((record["step"] + 1 for record in self.records()), default=0)

    def endings(self) -> list[dict[str, Any]]:
        """How each of its attempts that has ended did."""
        return self._read("for ending in attempts/*/ending.json; do cat $ending; echo; done")

    def told(self) -> dict[str, Any]:
        """What the controller says of it."""
        found: list[dict[str, Any]] = json.loads(self.hosts.areal("ps", "--all", "--json"))
        return next(job for job in found if job["id"] == self.id)

    def until_step(self, number: int, limit_s: float = LIMIT_S) -> None:
        """Wait until so many steps are trained, while the job runs."""
        ends = len(self.endings())

        def reached() -> bool:
            assert len(self.endings()) == ends, self.said()
            return self.steps() >= number

        until(reached, f"step {number}", limit_s=limit_s)

    def logged(self, process: str) -> str:
        """The log of a process of it."""
        return self._text(f"{self.run}/logs/{process}.log")

    def said(self) -> str:
        """The end of what its runs printed."""
        return self._text(f"{self.folder}/output.log")[-8000:]

    def _text(self, name: str) -> str:
        with suppress(OSError):
            return self.hosts.tell(1, "cat", f"{WORK}/{name}").decode(errors="replace")
        return ""


class KilledJob:
    """A job of the command line on the home host, of the file `<name>.yaml` in `WORK`."""

    def __init__(self, hosts: SealedHosts, name: str, output: Path) -> None:
        self.hosts, self.name, self.output = hosts, name, output
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, verb: str) -> None:
        said = self.output.open("ab")
        words = [verb, f"{self.name}.yaml", "--plain", "--cluster", "cluster.yaml"]
        areal = ["env", "-C", WORK, sys.executable, "-P", "-m", "areal_async.cli.main", *words]
        self.process = self.hosts.start(1, *areal, output=said)

    def read(self, name: str) -> str:
        """A file of its run folder; empty while it is not there."""
        try:
            return self.hosts.tell(1, "cat", f"{WORK}/runs/{self.name}/{name}").decode()
        except OSError:
            return ""

    def steps(self) -> int:
        lines = (json.loads(line) for line in self.read("metrics.jsonl").splitlines() if line.endswith("}"))
        return max((line["step"] + 1 for line in lines if line["kind"] == "step"), default=0)

    def until_step(self, number: int) -> None:
        def reached() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.output.read_text()[-4000:]
            return self.steps() >= number

        until(reached, f"step {number}")

    def kill(self) -> None:
        """End its supervisor with SIGKILL."""
        self.hosts.tell(1, "kill", "-KILL", str(json.loads(self.read("run.lock"))["pid"]))
        assert self.process is not None
        self.process.wait()
