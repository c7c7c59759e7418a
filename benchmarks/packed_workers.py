"""Many real rollout workers in few processes.

`PackedLauncher` starts the services of a run as `LocalLauncher` does, but its rollout workers in packs of
`WORKERS_EACH`. Each is the product's `rollout_service.service.main` with its own context, key, clients,
status endpoint and board; what a process has one of (torch, the tokenizer, Prometheus) the workers of a pack
share.

As a program it is a pack: it reads `start NAME` and `stop NAME` lines, and writes a line of JSON for each
worker that is ready or has ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import json
import os
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from scale import Shared
from timer_engine import OVER

from areal_async.base.topology import ServicePlace
from areal_async.launch.launcher import Child
from areal_async.launch.local_launcher import LocalLauncher
from areal_async.rpc import board as status
from areal_async.rpc.client import Client
from areal_async.service.context import ServiceContext
from areal_async.service.control import answer_status

WORKERS_EACH = 128
STOPPED = 143
LONGEST_LINE = 1 << 16
LOOK_S = 0.25  # Between two looks at whether the measurement is over


# --- the supervisor's side ---------------------------------------------------------------------------


class Pack:
    """The process of some workers, and what it has said of them."""

    def __init__(self, topology: Path, log: Path, environment: Mapping[str, str], samples: Path) -> None:
        self.reports: dict[str, dict[str, Any]] = {}
        self.ended: dict[str, int] = {}
        self._rest = b""
        command = [sys.executable, __file__, str(topology), str(samples)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("ab"),
            env=dict(environment),
        )
        assert self.process.stdout is not None
        self._fd = self.process.stdout.fileno()
        os.set_blocking(self._fd, False)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def poll(self, name: str) -> int | None:
        status = self.process.poll()  # one system call for each worker, as for a process of its own
        self.look()
        return self.ended.get(name, status)

    def look(self) -> None:
        try:
            read = os.read(self._fd, LONGEST_LINE)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + read).split(b"\n")
        for said in map(json.loads, lines):
            if "ready" in said:
                self.reports[said["ready"]] = said
            else:
                self.ended[said["ended"]] = said["status"]


class PackedChild:
    """One worker of a pack, as the supervisor sees it."""

    def __init__(self, pack: Pack, name: str) -> None:
        self._pack, self._name = pack, name
        self.pid = pack.process.pid
        pack.tell(f"start {name}")

    def ready_report(self) -> dict[str, Any] | None:
        self._pack.look()
        return self._pack.reports.get(self._name)

    def poll(self) -> int | None:
        return self._pack.poll(self._name)

    def lost(self) -> str:
        return ""

    def heard(self) -> bytes:
        return b""

    def is_heard(self) -> bool:
        return True

    def terminate(self) -> None:
        self._pack.tell(f"stop {self._name}")

    def kill(self) -> None:
        self._pack.process.kill()

    def close(self) -> None:
        """Its pack is closed with the launcher."""


class PackedLauncher(LocalLauncher):
    """The launcher of one machine, whose rollout workers share processes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._packs: dict[int, Pack] = {}

    def start(self, place: ServicePlace, *, served_before: bool) -> Child:  # type: ignore[override]
        if place.role != "rollout":
            return super().start(place, served_before=served_before)
        number = place.index // WORKERS_EACH
        if number not in self._packs:
            name = f"pack-{number}"
            log = self._folders.logs / f"{name}.log"
            samples = self._folders.run_dir.parent / f"{name}.json"
            environment = self._environment(self._job, "rollout")
            self._packs[number] = Pack(self._folders.topology, log, environment, samples)
        return PackedChild(self._packs[number], place.name)

    def close(self) -> None:
        for pack in self._packs.values():
            assert pack.process.stdin is not None
            pack.process.stdin.close()
            try:
                pack.process.wait(20)
            except subprocess.TimeoutExpired:
                pack.process.kill()
                pack.process.wait()
        super().close()


# --- the pack's side ---------------------------------------------------------------------------------

_board: contextvars.ContextVar[status.StatusBoard] = contextvars.ContextVar("board")


class WorkersBoard:
    """The board of whichever worker asks: what a process has one of, each worker of a pack has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_board.get(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_board.get(), name, value)


class OwnRegistry:
    """Takes the same series from each worker of a pack."""

    def register(self, collector: Any) -> None:
        CollectorRegistry().register(collector)


def watch_calls(seen: dict[str, list[tuple[float, float]]], shared: Shared) -> None:
    """Note when each request of this process is asked, and how long its answer takes, by kind."""
    exchange = Client.exchange

    async def timed(self: Client, request: Any, **options: Any) -> Any:
        began_s = time.monotonic()
        answer = await exchange(self, request, **options)
        if shared.phase != OVER:
            seen[type(request).__name__].append((began_s, time.monotonic() - began_s))
        return answer

    Client.exchange = timed  # type: ignore[method-assign]


async def pack(topology: Path, samples: Path) -> None:
    """Run the workers that standard input names, until its end. When the measurement is over, write when each
    kind of request was asked, and how long its answer took."""
    status.board = WorkersBoard()  # type: ignore[assignment]
    from rollout_service import process, service  # now, so that it and what it imports find this board

    service.REGISTRY = OwnRegistry()  # type: ignore[assignment]
    made = cache(process.make_renderer)
    # All workers here are of one job, whose template takes no arguments, and which has no images.
    process.make_renderer = lambda model, template_args=None, *, pixels=(None, None): made(model)
    tasks: dict[str, asyncio.Task[None]] = {}
    contexts: dict[str, ServiceContext] = {}
    seen: dict[str, list[tuple[float, float]]] = defaultdict(list)

    async def write_at_end(shared: Shared) -> None:
        while shared.phase != OVER:  # noqa: ASYNC110 - another process says so, in shared memory
            await asyncio.sleep(LOOK_S)
        await asyncio.to_thread(samples.write_text, json.dumps(seen))

    async def work(name: str) -> None:
        board = status.StatusBoard()
        _board.set(board)
        ctx = dataclasses.replace(ServiceContext.load(topology, name), ready_fd=os.dup(1))
        if not contexts:
            shared = Shared(Path(ctx.job.rollout.engine_args["phase"]))
            watch_calls(seen, shared)
            tasks[""] = asyncio.create_task(write_at_end(shared))
        contexts[name] = ctx
        answer_status(ctx, board)
        code = 1
        try:
            await service.main(ctx)
            code = STOPPED
        except Exception:
            traceback.print_exc()
        finally:
            os.write(1, json.dumps({"ended": name, "status": code}).encode() + b"\n")

    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := (await lines.readline()).decode().split():
        if line[0] == "start":
            tasks[line[1]] = asyncio.create_task(work(line[1]))
        elif line[1] in contexts:
            contexts[line[1]].stopping.set()
            contexts[line[1]].stop.set()
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(pack(Path(sys.argv[1]), Path(sys.argv[2])))
    os._exit(0)
