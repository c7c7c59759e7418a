"""One job, served by a shared reward service."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path

from areal_async.errors import ArealError, FaultError
from areal_async.launch.registry import JobEntry, Service
from areal_async.rpc.client import Client
from areal_async.rpc.messages import Arrived
from areal_async.runtime.context import ServiceContext
from areal_async.runtime.log import get_logger
from reward_service.pool import Pool
from reward_service.router import Router
from reward_service.sdk import RewardLoadError
from reward_service.server import RewardServer

log = get_logger("reward")

SCORER = "reward"
"""Name of the scorer in every job: whoever serves a job takes the place of who served it before."""
AGAIN_S = 1.0
"""Before a job is tried again whose buffer did not answer."""
LOOK_S = 0.25


class Serving:
    """`await Serving(entry, pool).run()` until `stop` is set. What goes wrong is this job's alone: `run`
    raises nothing, `state` says it."""

    def __init__(self, entry: JobEntry, pool: Pool) -> None:
        self.entry = entry
        self.stop = asyncio.Event()
        self._pool = pool
        self._state = Service("starting")
        self._router: Router | None = None
        self._server: RewardServer | None = None

    @property
    def pending(self) -> int:
        """Episodes claimed whose verdict the buffer has not got yet."""
        return self._server.pending if self._server is not None else 0

    @property
    def state(self) -> Service:
        if self._state.state == "serving" and self._router is not None:
            return Service("serving", "", self._router.alive)
        return self._state

    async def run(self) -> None:
        while not self.stop.is_set():
            try:
                await self._serve()
                return
            except RewardLoadError as error:
                if not error.may_pass:
                    self._fail(str(error))
                    return
                self._wait(str(error))
            except FaultError as error:
                if error.kind in ("schema", "invalid", "fenced"):
                    self._fail(str(error))
                    return
                self._wait(str(error))
            except (ArealError, OSError, ValueError, KeyError) as error:
                # Its buffer is away, or its folder is: it may come back for as long as the job is registered.
                self._wait(f"{type(error).__name__}: {error}")
            except Exception as error:
                # A mistake of ours must not end the service of the other jobs.
                traceback.print_exc()
                self._fail(f"{type(error).__name__}: {error}")
                return
            stopping = asyncio.create_task(self.stop.wait())
            await asyncio.wait({stopping}, timeout=AGAIN_S)
            stopping.cancel()

    async def _serve(self) -> None:
        ctx = ServiceContext.load(Path(self.entry.context), "reward")
        section = ctx.job.reward
        async with Router(section, shared=self._pool, job=self.entry.run_id) as router:
            self._router = router
            async with Client(
                ctx.buffer_endpoint, job=ctx.job.job, role="reward", name=SCORER, access=ctx.secret
            ) as buffer:
                await buffer.call(Arrived(SCORER))
                self._server = RewardServer(buffer, router, scorer=SCORER)
                self._state = Service("serving")
                log.info("job served", served=self.entry.job, rewards=[spec.name for spec in router.specs])
                await self._server.run(self.stop)

    def _fail(self, text: str) -> None:
        self._state = Service("failed", text)
        log.warning("job cannot be served", served=self.entry.job, message=text)

    def _wait(self, text: str) -> None:
        self._state = Service("waiting", text)
        log.warning("job is tried again", served=self.entry.job, message=text)
