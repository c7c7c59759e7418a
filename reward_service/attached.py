"""The reward process of a job whose rewards a shared service scores: it scores nothing itself.

Promises: the job is in the registry for as long as this process runs and its supervisor lives; what it waits
for is told, in the log and as the reason of a stall; a reward that the service cannot load fails the job with
the reason. Does not promise that there is a service: it waits for one, also for the next after one died.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from areal_async.errors import ArealError
from areal_async.launch.registry import JobEntry, Owner, Registry, Service
from areal_async.runtime.context import RunPlaces, ServiceContext
from areal_async.runtime.log import get_logger
from areal_async.runtime.status import board
from reward_service import metrics

log = get_logger("reward")

LOOK_S = 0.25
LEAVE_LIMIT_S = 2.5
"""For the service to let go of the job when it ends."""
LEAVE_LOOK_S = 0.05
NO_SERVICE = "no shared reward service runs"


class SharedRewardError(ArealError):
    """The shared service cannot score the rewards of this job."""

    restart_helps = False


async def attach(ctx: ServiceContext) -> None:
    """Be served until the job stops."""
    registry = Registry(ctx.job.reward.registry)
    entry = entry_of(ctx)
    registry.add_job(entry)
    log.info("job registered", registry=str(registry.folder), run_id=entry.run_id)
    ctx.ready()
    stop = asyncio.create_task(ctx.stop.wait())
    told: Service | None = None
    try:
        while not stop.done():
            now = how_served(registry, entry.run_id)
            if now != told:
                _tell(now)
                told = now
            if now.state == "failed":
                raise SharedRewardError(f"the shared reward service cannot score this job: {now.text}")
            await asyncio.wait({stop}, timeout=LOOK_S)
    finally:
        stop.cancel()
        registry.remove_job(entry.run_id)
    for _ in range(round(LEAVE_LIMIT_S / LEAVE_LOOK_S)):
        service = registry.service()
        if service is None or entry.run_id not in service.jobs:
            break
        await asyncio.sleep(LEAVE_LOOK_S)


def entry_of(ctx: ServiceContext) -> JobEntry:
    """The job as the registry is to know it."""
    context = ctx.run_dir / "context.json"
    places = msgspec.json.decode(context.read_bytes(), type=RunPlaces)
    return JobEntry(places.run_id, ctx.job.job, str(context), Owner.of(places.supervisor_pid))


def how_served(registry: Registry, run_id: str) -> Service:
    """What the service of the registry does for the run; `waiting` when there is none."""
    service = registry.service()
    if service is None:
        return Service("waiting", f"{NO_SERVICE}; start one with `{start_command(registry.folder)}`")
    return service.jobs.get(
        run_id, Service("waiting", "the shared reward service has not taken up this job yet")
    )


def start_command(folder: Path) -> str:
    return f"areal-async reward up --registry {folder}"


def why_waits(now: Service) -> metrics.Why:
    """One word for why the job is not served; empty where it is, or never will be."""
    if now.state == "waiting":
        return "no_service" if now.text.startswith(NO_SERVICE) else "waiting"
    return "starting" if now.state == "starting" else ""


def _tell(now: Service) -> None:
    metrics.attached(now.workers_alive, why_waits(now))
    board.waits(
        "reward", "" if now.state in ("serving", "failed") else now.text or "the shared reward service"
    )
    if now.state == "waiting":
        log.warning("waiting for a shared reward service", why=now.text)
    else:
        log.info("shared reward service", state=now.state, workers_alive=now.workers_alive)
