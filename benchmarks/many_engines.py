"""What a run of 512 workers costs its head and its front: CPU, memory, admission, heartbeats, status.

    python benchmarks/many_engines.py [--workers 8,32,128,512] [--seconds 24] [--units 2048] [--json FILE]

The run is real: supervisor, status poll, records, buffer with its Redis, publisher, and for each worker the
product's own with its key, clients, leases, heartbeats and status endpoint (`packed_workers.py`). Only the
engines (`timer_engine.py`), the trainer and the scorer (`timed_services.py`) wait instead of computing. Each
number of workers is measured twice: where `generation` limits the run every lease is granted at once, and
where the `trainer` does all workers wait for room most of the time.

Latencies of admission and heartbeat are those that a client in a process of its own sees while the run goes
on. Their CPU is that of the front in a series of them while all engines hold their answers, less what the
front spends without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from buffer_service import cpu_s
from packed_workers import PackedLauncher
from scale import CHECKPOINT_STEPS, Shared, numbers, percentiles
from timer_engine import HELD, OVER, RUNS, STEP_S

import areal_async.runner.run_job as launch
from areal_async.base.errors import WireError
from areal_async.base.processes import ChildProcess
from areal_async.base.topology import Topology
from areal_async.base.versions import VersionTag
from areal_async.config.job import JobConfig
from areal_async.launch.monitor import StatusClients
from areal_async.launch.plan import MODULES
from areal_async.launch.run_handle import Run
from areal_async.rpc.client import Client
from areal_async.rpc.messages import Heartbeat, Lease, Release
from areal_async.rpc.secret import RoleKeys
from areal_async.service.context import keys_file

HERE = Path(__file__).parent
GROUP = 4
START_S = 180.0  # Longest time in which all workers come to serve
SERIES = 400  # Requests of a kind in a series
ROOM_GROUPS = 1200  # At least so many may be outstanding: those of a series, too
PROBE_S = 0.1  # Between two requests of the probe while the run goes on
LIMITS = ("generation", "trainer")
TO_FRONT = ("Lease", "Heartbeat", "PutEpisodes", "Release")
PROBE = "rollout-probe"
LOG = "head.log"
END_S = 120.0  # Longest time in which a run ends


def job_of(folder: Path, options: argparse.Namespace, workers: int, limit: str) -> dict[str, Any]:
    """A job whose batch is what its workers make in one go."""
    from areal_async.cli.quickstart.model import write_model  # torch, which a head does without

    batch, units = max(8, workers), options.units
    rows = [
        {"prompt": f"{i}+{i}=", "data_source": "sums", "reward_model": {"ground_truth": str(2 * i)}}
        for i in range(10, 50)
    ]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_model(folder / "model", 0, positions=2 * units)
    arguments = {"mean_s": options.answer_s, "units": units, "phase": str(folder / "phase")}
    return {
        "job": "many",
        "model": str(folder / "model"),
        "run_dir": str(folder / "runs"),
        "tasks": {"train": str(folder / "tasks.jsonl")},
        "trainer": {"steps": 100_000},
        "checkpoint": {"every_steps": CHECKPOINT_STEPS},
        "observe": {"metrics_port": 0},
        "supervisor": {"ready_s": START_S},
        "rollout": {
            "engine": f"{HERE / 'timer_engine.py'}:engine",
            "engine_args": arguments,
            "workers": workers,
            "group_size": GROUP,
            "max_concurrent": GROUP,
            "max_model_len": 2 * units,
            "sampling": {"max_new_tokens": units},
        },
        "buffer": {
            "batch_groups": batch,
            "max_staleness": max(4, ROOM_GROUPS // batch),
            "pacing": "full" if limit == "generation" else "fresh",
            "max_groups": max(40 * batch, 2 * ROOM_GROUPS),
            "max_bytes": 8 << 30,
            "lease_s": 30,
        },
    }


def head(job: JobConfig, samples: Path) -> None:
    """Run the job, its workers in packs; write how long each answer to a status request took."""
    asked: list[tuple[str, float, float]] = []

    class TimedClients(StatusClients):
        async def ask(self, name: str, threads: int = 0) -> Any:
            began_s = time.monotonic()
            answer = await super().ask(name, threads)
            asked.append((name, began_s, time.monotonic() - began_s))
            return answer

    launch.StatusClients = TimedClients  # type: ignore[misc]
    launch._launcher = lambda cluster, folders, console: PackedLauncher(job, folders)
    try:
        launch.run_job(
            job, plain=True, modules={**MODULES, "trainer": "timed_services", "reward": "timed_services"}
        )
    finally:
        samples.write_text(json.dumps(asked))


@contextmanager
def started(folder: Path, job: dict[str, Any], step_s: float) -> Iterator[psutil.Process]:
    """The head of the run, ended with the block, and with this process."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, STEP_S: str(step_s)}
    order = [json.dumps(job), str(folder / "head.json")]
    command = [sys.executable, __file__, "--as-head", *order]
    child = ChildProcess(command, environment=environment, output=folder / LOG)

    def ends() -> bool:
        deadline_s = time.monotonic() + END_S
        while child.alive and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return not child.alive

    try:
        yield psutil.Process(child.pid)
        if not ends() or child.poll():
            sys.exit((folder / LOG).read_text()[-4000:])
    except psutil.Error as error:
        sys.exit(f"{error}; the run said last:\n{(folder / LOG).read_text()[-4000:]}")
    finally:
        if child.alive:
            child.terminate()
            ends()
            child.kill()
            child.join()


def processes_of(head: psutil.Process) -> dict[str, list[psutil.Process]]:
    """The processes of the run by what they are."""
    names = {
        "replay_buffer": "front",
        "redis": "redis",
        "packed_workers": "workers",
        "--name trainer": "trainer",
    }
    found: dict[str, list[psutil.Process]] = {"head": [head]}
    for process in head.children(recursive=True):
        command = " ".join(process.cmdline())
        what = (
            "redis"
            if process.name().endswith("-server")
            else next((n for k, n in names.items() if k in command), "")
        )
        found.setdefault(what, []).append(process)
    return found


def peak_mib(process: psutil.Process) -> float:
    """The most memory that it has had at once."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


class Meter:
    """CPU seconds a second of each kind of process, over a window."""

    def __init__(self, processes: dict[str, list[psutil.Process]]) -> None:
        self._processes = processes
        self.began_s, self._began = time.monotonic(), self._spent()

    def _spent(self) -> dict[str, float]:
        return {what: sum(map(cpu_s, some)) for what, some in self._processes.items() if what}

    def read(self) -> dict[str, float]:
        elapsed_s, spent = time.monotonic() - self.began_s, self._spent()
        return {what: (spent[what] - self._began[what]) / elapsed_s for what in spent}


class Prober:
    """A client that asks the front as a worker does, and times the answers."""

    def __init__(self, client: Client, epoch: int) -> None:
        self._client, self._epoch, self.version = client, epoch, 0
        self.seconds: dict[str, list[float]] = {"lease": [], "heartbeat": []}

    async def lease(self) -> str:
        """The id of a lease; empty where there was no room."""
        wanted = Lease(PROBE, 1, [VersionTag("policy", self._epoch, self.version)])
        began_s = time.perf_counter()
        groups = (await self._client.call(wanted)).groups
        if groups:
            self.seconds["lease"].append(time.perf_counter() - began_s)
        return groups[0].lease_id if groups else ""

    async def beat(self, held: list[str]) -> None:
        began_s = time.perf_counter()
        await self._client.call(Heartbeat(PROBE, held))
        self.seconds["heartbeat"].append(time.perf_counter() - began_s)

    async def release(self, lease_id: str) -> None:
        await self._client.call(Release(PROBE, lease_id, "drained"))

    async def go_on(self, until_s: float) -> None:
        """One after the other while the run goes on."""
        while time.monotonic() < until_s:
            if lease_id := await self.lease():
                await self.beat([lease_id])
                await self.release(lease_id)
            else:
                await self.beat([])
            await asyncio.sleep(PROBE_S)

    async def series(self, front: psutil.Process, idle: float) -> dict[str, float]:
        """CPU of the front for one request of each kind, in ms. `idle` is what it spends without any."""

        def since(began: tuple[float, float]) -> float:
            spent_s = cpu_s(front) - began[0] - idle * (time.monotonic() - began[1])
            return 1e3 * max(0.0, spent_s) / SERIES

        cost = {}
        held: list[str] = []
        began = cpu_s(front), time.monotonic()
        for _ in range(SERIES):
            await self.beat(held)
        cost["heartbeat"] = since(began)
        began = cpu_s(front), time.monotonic()
        for _ in range(SERIES):
            held.append(await self.lease())
        cost["lease"] = since(began)
        for lease_id in filter(None, held):
            await self.release(lease_id)
        return cost if all(held) else {"heartbeat": cost["heartbeat"]}


async def until_serving(run: Run, workers: int, head: psutil.Process) -> None:
    deadline_s, serving = time.monotonic() + START_S, 0
    while head.status() != psutil.STATUS_ZOMBIE:
        with suppress(WireError):  # a machine that starts so much may be held up
            state = await asyncio.to_thread(run.status)
            serving = sum(each.phase == "serving" for each in state.services)
            if serving == workers + 3 and state.step >= 2:
                return
        if time.monotonic() > deadline_s:
            sys.exit(f"{serving} of {workers + 3} services serve after {START_S:g} s")
        await asyncio.sleep(1)
    sys.exit((run.folder.parent.parent / LOG).read_text()[-4000:])


async def measure(options: argparse.Namespace, workers: int, limit: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        shared = Shared(folder / "phase")
        shared.set(1, RUNS)
        job = job_of(folder, options, workers, limit)
        step_s = 0.2 if limit == "generation" else 3 * options.answer_s
        began_s = time.monotonic()
        with started(folder, job, step_s) as head:
            try:
                run = await found(folder / "runs" / "many", head)
                await until_serving(run, workers, head)
                start_s = time.monotonic() - began_s
                row = await watch(options, run, head, shared)
            finally:
                shared.set(1, OVER)
        window: list[float] = row.pop("window")
        row = {"workers": workers, "limit": limit, "start_s": start_s} | row
        row |= polls(json.loads((folder / "head.json").read_text()), window)
        row["requests_per_s"] = requests(folder / "runs", window)
        return row


async def found(folder: Path, head: psutil.Process) -> Run:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and head.status() != psutil.STATUS_ZOMBIE:
        if (folder / "topology.json").exists() and (run := Run.open(folder)).alive:
            return run
        await asyncio.sleep(0.5)
    sys.exit((folder.parent.parent / LOG).read_text()[-4000:])


async def watch(
    options: argparse.Namespace, run: Run, head: psutil.Process, shared: Shared
) -> dict[str, Any]:
    topology = run.topology
    assert isinstance(topology, Topology)
    keys = RoleKeys.read(keys_file(Path(topology.home_host.socket_dir), "rollout"))
    processes = processes_of(head)
    (front,) = processes["front"]
    async with Client(topology.buffer, job=run.job.job, role="rollout", name=PROBE, access=keys) as client:
        state = await asyncio.to_thread(run.status)
        prober = Prober(client, 1)
        prober.version = (state.version or 0) + 1
        meter, steps, views = Meter(processes), state.step, []
        probing = asyncio.create_task(prober.go_on(meter.began_s + options.seconds))
        while not probing.done():
            began_s = time.perf_counter()
            state = await asyncio.to_thread(run.status)
            views.append(time.perf_counter() - began_s)
            prober.version = (state.version or 0) + 1
            await asyncio.wait([probing], timeout=1.0)
        await probing
        cpu, ended_s = meter.read(), time.monotonic()
        row: dict[str, Any] = {
            "window": [meter.began_s, ended_s],
            "steps": state.step - steps,
            "cpu": cpu,
            "latency_ms": {what: percentiles(sorted(some)) for what, some in prober.seconds.items() if some},
            "view_ms": percentiles(sorted(views)),
        }
        shared.set(1, HELD)
        await asyncio.sleep(2 * options.answer_s + 1)
        meter = Meter(processes)
        await asyncio.sleep(options.seconds / 3)
        row["cpu_held"] = meter.read()
        row["cpu_ms"] = await prober.series(front, row["cpu_held"]["front"])
        row["peak_mib"] = {what: sum(map(peak_mib, some)) for what, some in processes.items() if what}
        row["threads"] = {
            what: sum(p.num_threads() for p in some) for what, some in processes.items() if what
        }
        row["descriptors"] = {
            what: sum(p.num_fds() for p in some) for what, some in processes.items() if what
        }
        return row


def polls(asked: list[tuple[str, float, float]], window: list[float]) -> dict[str, Any]:
    """How long services took to answer the head, and what lay between two answers of one."""
    before: dict[str, float] = {}
    took, between = [], []
    for name, began_s, seconds in asked:
        if window[0] <= began_s <= window[1]:
            took.append(seconds)
            if name in before:
                between.append(began_s - before[name])
            before[name] = began_s
    return {"poll_ms": percentiles(sorted(took)), "poll_every_ms": percentiles(sorted(between))}


def requests(folder: Path, window: list[float]) -> dict[str, float]:
    """Requests a second of all workers, by kind."""
    counts: dict[str, int] = {}
    for path in folder.glob("pack-*.json"):
        for kind, calls in json.loads(path.read_text()).items():
            inside = sum(window[0] <= began_s <= window[1] for began_s, _ in calls)
            counts[kind] = counts.get(kind, 0) + inside
    return {kind: count / (window[1] - window[0]) for kind, count in sorted(counts.items()) if count}


def line(row: dict[str, Any]) -> str:
    def pair(found: dict[str, float] | None) -> str:
        return "{p50:.1f}/{p99:.1f}".format(**found) if found else "-"

    cpu, peak, latency, each = row["cpu"], row["peak_mib"], row["latency_ms"], row["cpu_ms"]
    cells = [
        row["workers"],
        row["limit"],
        *(f"{cpu[what]:.2f}" for what in ("head", "front", "redis", "trainer", "workers")),
        *(f"{peak[what]:.0f}" for what in ("head", "front", "redis")),
        f"{sum(row['requests_per_s'].get(kind, 0.0) for kind in TO_FRONT):.0f}",
        *(pair(latency.get(what)) for what in ("lease", "heartbeat")),
        *(f"{each[what]:.2f}" if what in each else "-" for what in ("lease", "heartbeat")),
        pair(row["poll_ms"]),
        pair(row["poll_every_ms"]),
        pair(row["view_ms"]),
    ]
    return " ".join(f"{cell!s:>11}" for cell in cells)


HEADS = (
    *("workers", "limited-by", "cpu:head", "front", "redis", "trainer", "workers", "MiB:head", "front"),
    *("redis", "req/s", "lease-ms", "beat-ms", "lease-cpu", "beat-cpu", "poll-ms", "poll-every", "view-ms"),
)


async def main(options: argparse.Namespace) -> None:
    print(" ".join(f"{each:>11}" for each in HEADS), flush=True)
    for limit in options.limits:
        for workers in options.workers:
            before = os.getloadavg()[0]
            row = await measure(options, workers, limit)
            print(line(row), flush=True)
            if options.json is not None:
                write(options.json, row | {"load_before": before})


def write(path: Path, row: dict[str, Any]) -> None:
    """Put a row in the place of that of the same run."""

    def key(row: dict[str, Any]) -> tuple[int, int]:
        return LIMITS.index(row["limit"]), row["workers"]

    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = sorted([*(one for one in rows if key(one) != key(row)), row], key=key)
    command = "python " + " ".join(["benchmarks/many_engines.py", *sys.argv[1:]])
    machine = {"cores": os.cpu_count(), "system": platform.platform()}
    path.write_text(json.dumps({"command": command, "machine": machine, "rows": rows}, indent=1) + "\n")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=numbers, default=[8, 32, 128, 512])
    parser.add_argument("--limits", nargs="*", default=list(LIMITS), choices=LIMITS)
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--units", type=int, default=2048, help="tokens of an answer")
    parser.add_argument("--answer-s", type=float, default=5.0, help="mean time of an answer")
    parser.add_argument("--dir", type=Path, default=None, help="where the files lie meanwhile")
    parser.add_argument("--json", type=Path, default=None, help="rows that it has of other runs stay")
    return parser


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-head"]:
        head(JobConfig.model_validate_json(sys.argv[2]), Path(sys.argv[3]))
        sys.exit()
    asyncio.run(main(arguments().parse_args()))
