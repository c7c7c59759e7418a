"""The controller's process: `python -P -m areal_async.cluster.daemon [--hold] FOLDER [CLUSTER.YAML]`.

The process takes the lock of the cluster's folder, serves the API, and checks the jobs a few times per
second. It ends on `areal-async down`, Ctrl-C or SIGTERM. Ctrl-C and SIGTERM end only the controller: jobs
keep running, and the next controller finds them. With `--hold`, it starts no job."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from areal_async.base.addresses import LOOPBACK
from areal_async.base.errors import ArealError, EndpointError
from areal_async.base.http_server import HttpServer, listen
from areal_async.base.log import end_logging, get_logger, setup_logging
from areal_async.base.own_files import private_files, tail_of, write_whole
from areal_async.cluster.api import LIMITS, ControllerApi
from areal_async.cluster.client import ControllerGone, reached
from areal_async.cluster.controller import STOP_LIMIT_S, Controller
from areal_async.cluster.folder import ClusterFolder, ClusterFolderError
from areal_async.cluster.metrics import RECONCILE_FAILURES
from areal_async.cluster.processes import RealProcesses, detached_environment, start_detached
from areal_async.cluster.resources import machine_resources
from areal_async.cluster.states import ACTIVE
from areal_async.cluster.store import JobStore
from areal_async.config.cluster import ClusterConfig, load_cluster

LOOK_S = 0.25
START_LIMIT_S = 60.0
LOG_BYTES = 16 << 20  # A larger log is renamed when a controller starts; one old log is kept
TAKEN_STATUS = 3
"""Exit status of a process that found another controller."""

T = TypeVar("T")

log = get_logger("controller")


class ControllerProcess:
    """A controller with its server, store and job processes. The calling process must hold the lock of the
    folder.

    With `hold`, it starts no job."""

    def __init__(self, folder: ClusterFolder, cluster: ClusterConfig, *, hold: bool = False) -> None:
        self._folder = folder
        self._cluster = cluster
        self._hold = hold
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jobs")
        self._wake = asyncio.Event()
        self._over = False
        self._going_down = False  # It ends when no job runs any more

    async def run(self) -> None:
        """Serve until the controller must end. Raises `ArealError` if it cannot serve."""
        self._folder.make_tokens()
        api = self._cluster.api
        try:
            listening = listen(api.host, api.port, guarded=bool(self._folder.hashes()))
        except OSError as error:
            raise EndpointError(
                f"cannot listen on {api.host}:{api.port}: {error.strerror}. Give another api.port in the "
                "cluster file, or 0 for a free one."
            ) from error
        try:
            controller = await self._on_thread(self._open)
            parts = (controller, self._cluster, self._folder, self._thread)
            served = ControllerApi(*parts, wake=self._wake.set, on_down=self._go_down)
            server = HttpServer(served.app, listening, LIMITS, name="controller")
        except BaseException:
            listening.close()
            raise
        server.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        url = server.url.replace("//0.0.0.0:", f"//{LOOPBACK}:").replace("//[::]:", "//[::1]:")
        write_whole(self._folder.address, f"{url}\n".encode(), durable=True)
        log.info("the controller serves", url=url, cluster=self._cluster.cluster)
        try:
            await self._look_after(controller)
        finally:
            self._folder.address.unlink(missing_ok=True)
            await server.close()
            await self._on_thread(controller.store.close)
            self._thread.shutdown()
            log.info("the controller ends")

    def _open(self) -> Controller:
        jobs, own_gpus = self._folder.jobs, self._cluster.launcher == "local"
        processes, total = RealProcesses(jobs, self._cluster), machine_resources(self._cluster.resources)
        store = JobStore(self._folder.database)
        controller = Controller(store, processes, jobs, total, own_gpus=own_gpus)
        controller.starts = not self._hold
        return controller

    async def _look_after(self, controller: Controller) -> None:
        """Check the jobs until the controller ends."""
        deadline_s = 0.0
        while not self._over:
            self._wake.clear()
            active = 1
            try:
                await self._on_thread(controller.reconcile)
                active = len(await self._on_thread(controller.store.in_states, ACTIVE))
            except Exception:  # for example a full disk: unstored changes are retried
                RECONCILE_FAILURES.inc()
                log.exception("a look at the jobs failed")
            if self._going_down:
                deadline_s = deadline_s or time.monotonic() + STOP_LIMIT_S + 10.0
                if not active or time.monotonic() > deadline_s:
                    return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_S)

    def _go_down(self, keep_jobs: bool) -> None:
        if keep_jobs:
            # The request is answered before the server ends.
            asyncio.get_running_loop().call_later(LOOK_S, self._end)
        self._going_down = not keep_jobs
        self._wake.set()

    def _end(self) -> None:
        self._over = True
        self._wake.set()

    async def _on_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


@private_files()
def serve(folder: ClusterFolder, cluster: ClusterConfig | None, *, hold: bool = False) -> int:
    """Run the controller of the cluster in `folder`, and return an exit status.

    If `cluster` is None, the last cluster file is used. Raises `ArealError`."""
    folder.make()
    if folder.lock() is None:  # the lock is held until this process exits
        return TAKEN_STATUS
    cluster = cluster or folder.recorded() or ClusterConfig()
    folder.record(cluster)
    setup_logging(cluster.cluster, "controller")
    try:
        asyncio.run(ControllerProcess(folder, cluster, hold=hold).run())
    finally:
        end_logging()
    return 0


def start_controller(folder: ClusterFolder, cluster_file: Path | None = None, *, hold: bool = False) -> str:
    """Start a controller that outlives this process, unless one runs. Return its URL once it answers.

    Raises `ClusterFolderError` if the controller does not start."""
    folder.make()
    if folder.log.exists() and folder.log.stat().st_size > LOG_BYTES:
        folder.log.replace(folder.log.with_suffix(".log.1"))
    module = ["areal_async.cluster.daemon", *(["--hold"] if hold else []), str(folder.path)]
    module += [] if cluster_file is None else [str(cluster_file.resolve())]
    child = start_detached(module, folder.log, Path("/"), detached_environment())
    deadline_s = time.monotonic() + START_LIMIT_S
    while True:
        with suppress(ControllerGone):
            if (url := folder.url()) is not None and reached(url):
                _end_if_late(child, folder)
                return url
        status = child.poll()
        if status not in (None, TAKEN_STATUS) or time.monotonic() > deadline_s:
            how = "has not come to serve" if status is None else f"ended with status {status}"
            raise ClusterFolderError(
                f"the controller {how}. Its log {folder.log} ends with:\n{tail_of(folder.log, 2000)}"
            )
        time.sleep(0.05)


def _end_if_late(child: subprocess.Popen[bytes], folder: ClusterFolder) -> None:
    """End a child process that started too late. Otherwise it would take over when the other controller
    ends."""
    owner = folder.controller()
    if owner is None or owner.pid != child.pid:
        child.terminate()
        child.wait(START_LIMIT_S)


def main() -> int:
    path, *files = [argument for argument in sys.argv[1:] if argument != "--hold"]
    try:
        cluster = load_cluster(Path(files[0]), queued=True) if files else None
        return serve(ClusterFolder(Path(path)), cluster, hold="--hold" in sys.argv)
    except ArealError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
