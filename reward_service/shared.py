"""The shared reward service: scores the episodes of every job in a registry, with one pool for all.

    python -m reward_service.shared [--registry DIR] [--workers N] [--metrics-port PORT]

Promises: jobs are found as they come and let go as they end; built-in rewards run in one pool in which the
jobs have equal shares of the time; a job's own code runs in a pool of the job's own, and its failure is the
failure of that job alone; episodes are claimed from every buffer as that job's rewards have room, so a slow
job delays no other's claims. Killed and started again it goes on: what it had claimed comes back to it from
the buffers, which take one verdict for each episode, whoever sends it.

Does not isolate jobs from each other: they are of one user, and their code runs as that user.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from areal_async.errors import ArealError
from areal_async.launch.registry import JobEntry, Owner, Registry, Service, ServiceEntry
from areal_async.runtime.log import get_logger, setup_logging
from areal_async.runtime.metrics import start_metrics_server
from reward_service import metrics
from reward_service.crew import Limits
from reward_service.pool import Pool
from reward_service.serving import Serving

log = get_logger("reward")

LOOK_S = 0.25
MEMORY_BYTES = 4096 << 20
"""Most memory of a process of the shared pool."""
STOP_LIMIT_S = 5.0
"""For all jobs to be let go."""


class SharedService:
    """Serves the jobs of `registry` until it is told to stop. `metrics_port` is told to them."""

    def __init__(self, registry: Registry, *, workers: int, metrics_port: int = 0) -> None:
        self._registry = registry
        self._workers = workers
        self._metrics_port = metrics_port
        self._owner = Owner.of(os.getpid())
        self._jobs: dict[str, tuple[Serving, asyncio.Task[None]]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._written: ServiceEntry | None = None

    async def run(self, stop: asyncio.Event) -> None:
        lock = self._registry.hold()
        try:
            limits = Limits(memory_bytes=MEMORY_BYTES)
            async with Pool([], workers=self._workers, limits=limits, strict=False) as pool:
                metrics.watch(pool)
                metrics.PENDING.set_function(lambda: sum(job.pending for job, _ in self._jobs.values()))
                await self._serve(pool, stop)
        finally:
            self._registry.remove_service()
            os.close(lock)

    async def _serve(self, pool: Pool, stop: asyncio.Event) -> None:
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                if pool.broken.done():
                    raise pool.broken.result()
                self._look(pool)
                await asyncio.wait({stopping, *self._watched()}, timeout=LOOK_S)
        finally:
            stopping.cancel()
            for run_id in list(self._jobs):
                self._let_go(run_id)
            if self._leaving:
                await asyncio.wait(self._leaving.values(), timeout=STOP_LIMIT_S)
                for task in self._leaving.values():
                    task.cancel()

    def _look(self, pool: Pool) -> None:
        """Take up the jobs that have come, let go those that have ended, tell how all are served."""
        wanted = {entry.run_id: entry for entry in self._registry.jobs()}
        for run_id, (serving, _) in list(self._jobs.items()):
            if wanted.get(run_id) != serving.entry:
                self._let_go(run_id)
        for run_id in [run_id for run_id, task in self._leaving.items() if task.done()]:
            del self._leaving[run_id]
        for run_id, entry in wanted.items():
            if run_id not in self._jobs and run_id not in self._leaving:
                self._take_up(entry, pool)
        self._tell()

    def _take_up(self, entry: JobEntry, pool: Pool) -> None:
        log.info("job taken up", served=entry.job, run_id=entry.run_id)
        serving = Serving(entry, pool)
        self._jobs[entry.run_id] = (serving, asyncio.create_task(serving.run(), name=f"job {entry.job}"))

    def _let_go(self, run_id: str) -> None:
        serving, task = self._jobs.pop(run_id)
        log.info("job let go", served=serving.entry.job, run_id=run_id)
        serving.stop.set()
        self._leaving[run_id] = task

    def _watched(self) -> list[asyncio.Task[None]]:
        """Tasks whose end changes something."""
        return [*self._leaving.values(), *(task for _, task in self._jobs.values() if not task.done())]

    def _tell(self) -> None:
        states: dict[str, Service] = {run_id: serving.state for run_id, (serving, _) in self._jobs.items()}
        states |= dict.fromkeys(self._leaving, Service("serving", "lets go of it"))
        entry = ServiceEntry(self._owner, self._workers, self._metrics_port, states)
        if entry != self._written:
            self._registry.write_service(entry)
            self._written = entry


async def serve(options: argparse.Namespace) -> None:
    registry = Registry(options.registry)
    port = start_metrics_server(options.metrics_port)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    print(
        f"reward service: {options.workers} workers for the jobs of {registry.folder}; metrics at "
        f"http://127.0.0.1:{port}/metrics; Ctrl-C ends it",
        flush=True,
    )
    await SharedService(registry, workers=options.workers, metrics_port=port).run(stop)


def main() -> None:
    parser = argparse.ArgumentParser(description="A reward service shared by jobs.")
    parser.add_argument("--registry", type=Path, default=None, help="folder in which jobs and services meet")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes of the shared pool"
    )
    parser.add_argument("--metrics-port", type=int, default=0, help="0: any free one")
    options = parser.parse_args()
    setup_logging("shared", "reward", "info", sys.stderr)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(options))
    except ArealError as error:
        print(f"reward service: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
