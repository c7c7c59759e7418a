"""The entry point of every service process.

Promises:

- Files of the process and its children are readable by this user only.
- Logs (as JSON lines) and metrics are available before the service's own code runs.
- SIGTERM and SIGINT set `ctx.stop` and `ctx.stopping`, even during a long native call in the main thread.
- A service that has not returned `STOP_GRACE_S` after the signal is cancelled.
- A service whose supervisor died ends within `ORPHAN_GRACE_S`.
- An `ArealError` ends the service with one paragraph, any other error with its traceback. The exit status is
  `RETRY_STATUS` if a restart may help, else 1.

Native code is not interrupted. The supervisor kills a process that ignores both signals."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import FrameType

from areal_async.base.addresses import Address
from areal_async.base.errors import ArealError, as_ours, with_limit
from areal_async.base.events import arm_from_environment, open_events
from areal_async.base.log import end_logging, get_logger, setup_logging
from areal_async.base.metrics import start_metrics_server
from areal_async.base.own_files import PRIVATE_UMASK
from areal_async.base.processes import raise_file_limit
from areal_async.base.topology import Role
from areal_async.service.context import ServiceContext
from areal_async.service.control import answer_status
from areal_async.service.rank_group import start_pulse

STOP_GRACE_S = 3.5  # Time from the stop signal to the cancellation of the service's coroutine
STOPPED_STATUS = 128 + signal.SIGTERM  # Exit status of a service that ended on request
RETRY_STATUS = os.EX_TEMPFAIL
"""Exit status after an error that may not recur after a restart. Other errors have status 1."""
CANCEL_GRACE_S = 0.8  # Time from the cancellation to the exit of the process, whatever its threads do
ORPHAN_GRACE_S = 8.0
"""Seconds after the supervisor's death at which an orphaned service ends without further waiting."""

log = get_logger("service")


def run_service(role: Role, main: Main) -> None:
    """Run `main(ctx)` as the process of a service. Never returns; exits with status 0 when `main` has
    returned."""
    os.umask(PRIVATE_UMASK)
    raise_file_limit()
    start_pulse()
    options = _parse(role)
    served = False
    try:
        ctx = _context(role, options)
        setup_logging(ctx.job.job, ctx.name, ctx.job.observe.log_level, sys.stderr)
        supervisor_pid = os.getppid() if options.ready_fd is not None else None
        ctx = dataclasses.replace(ctx, metrics_port=start_metrics_server(ctx.metrics_port))
        if ctx.job.observe.event_log:
            open_events(ctx.run_dir, ctx.name)
        arm_from_environment(ctx.run_dir)
        if role == "trainer" and ctx.node_id != ctx.topology.home:
            _reach_home(ctx)
        if supervisor_pid is not None:
            answer_status(ctx)
        try:
            asyncio.run(_serve(ctx, main, supervisor_pid))
        finally:
            served = ctx.has_served
    except BaseException as error:
        error = first_cause(error)
        _report(options.name, error)
        _leave(RETRY_STATUS if restart_may_help(error, served=served) else 1)
    # After a stop, the work is not finished even if the service ended in order, unless the service has set
    # `finished`.
    _leave(STOPPED_STATUS if ctx.stopping.is_set() and not ctx.finished.is_set() else 0)


def _reach_home(ctx: ServiceContext) -> None:
    """Make `home://` refer to the files of the run's home."""
    from areal_async.storage.home import HomeFileSystem  # imports fsspec, which most services do not need

    address = Address(ctx.topology.control, "supervisor")
    HomeFileSystem.connect(address, job=ctx.job.job, role=ctx.role, name=ctx.name, access=ctx.keys)


def restart_may_help(error: BaseException, *, served: bool) -> bool:
    """Return whether a service that ended with `error` should be restarted.

    Return False if the error rules a restart out, or if the service has never served: the error would then
    recur."""
    helps = getattr(error, "restart_helps", None)
    return served if helps is None else helps


def first_cause(error: BaseException) -> BaseException:
    """Return the one error to report. For an exception group, this is its first `ArealError`."""
    while isinstance(error, BaseExceptionGroup):
        ours = error.subgroup(ArealError)
        if ours is None and len(error.exceptions) > 1:
            break
        error = (ours or error).exceptions[0]
    return error


def _report(name: str, error: BaseException) -> None:
    """Print one paragraph for an `ArealError` or a failure of the machine. For any other error, print the
    traceback."""
    log.error("service failed", error=type(error).__name__, message=str(error))
    if (told := as_ours(error)) is not None:
        with contextlib.suppress(OSError):  # a full disk must not change how this process ends
            print(f"{name}: {with_limit(told)}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)


Main = Callable[[ServiceContext], Awaitable[None]]
"""Main function of a service."""


async def _serve(ctx: ServiceContext, main: Main, supervisor_pid: int | None) -> None:
    stop_on_signals(ctx, asyncio.get_running_loop(), supervisor_pid=supervisor_pid)
    await until_stopped(ctx, main, on_cancel=lambda: _end_later(CANCEL_GRACE_S))


async def until_stopped(
    ctx: ServiceContext, main: Main, *, on_cancel: Callable[[], None] = lambda: None
) -> None:
    """Run `main(ctx)` until it returns. After `ctx.stop` and a grace period, it is cancelled."""
    log.info("service starts", service=ctx.name, pid=os.getpid(), metrics_port=ctx.metrics_port)
    work = asyncio.ensure_future(main(ctx))
    stop = asyncio.ensure_future(ctx.stop.wait())
    await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        await asyncio.wait({work}, timeout=STOP_GRACE_S)
        if not work.done():
            log.warning("service did not stop by itself; cancelled", grace_s=STOP_GRACE_S)
            on_cancel()
            work.cancel()
            await asyncio.wait({work})
            log.info("service ends", service=ctx.name, cancelled=True)
            return
    stop.cancel()
    work.result()
    log.info("service ends", service=ctx.name, cancelled=False)


def stop_on_signals(
    ctx: ServiceContext, loop: asyncio.AbstractEventLoop, *, supervisor_pid: int | None = None
) -> None:
    """Make SIGTERM and SIGINT set the context's stop signal. A second SIGINT ends the process at once.

    If the stop comes from the death of the supervisor, the limit is `ORPHAN_GRACE_S`.

    The C handler sends the signal number through a pipe to a thread. A Python handler would wait until the
    main thread leaves native code, and could deadlock on the lock of the stop event. A service must not use
    `loop.add_signal_handler`, which would take over that pipe."""

    def listen() -> None:
        interrupts = 0
        while numbers := os.read(read_fd, 64):
            interrupts += numbers.count(signal.SIGINT)
            if signal.SIGINT not in numbers and signal.SIGTERM not in numbers:
                continue
            if interrupts > 1:
                os._exit(130)
            if supervisor_pid is not None and os.getppid() != supervisor_pid:
                _end_later(ORPHAN_GRACE_S)
            log.info("asked to stop", signals=[signal.Signals(number).name for number in numbers])
            ctx.stopping.set()
            with contextlib.suppress(RuntimeError):  # the loop may have closed meanwhile
                loop.call_soon_threadsafe(ctx.stop.set)

    read_fd, _ = signal_pipe((signal.SIGTERM, signal.SIGINT))
    threading.Thread(target=listen, name="signals", daemon=True).start()


def ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. The C handler writes to the pipe only if a Python handler exists."""


SignalHandler = Callable[[int, FrameType | None], None]


def signal_pipe(numbers: Iterable[int], handler: SignalHandler = ignore) -> tuple[int, int]:
    """Return both ends of a pipe that receives the number of each of these signals."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, handler)
    return read_fd, write_fd


def _end_later(grace_s: float) -> None:
    timer = threading.Timer(grace_s, os._exit, args=(STOPPED_STATUS,))
    timer.daemon = True
    timer.start()


def _parse(role: Role) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"The {role} service of an areal-async run.")
    parser.add_argument("--topology", type=Path, required=True, help="topology.json of the run")
    parser.add_argument("--name", required=True, help="name of this process in it, e.g. rollout-0")
    parser.add_argument("--ready-fd", type=int, default=None, help="inherited fd that is told of readiness")
    return parser.parse_args()


def _context(role: Role, options: argparse.Namespace) -> ServiceContext:
    try:
        ctx = ServiceContext.load(options.topology, options.name, ready_fd=options.ready_fd)
    except KeyError:
        raise ArealError(
            f"{options.topology} names no service {options.name!r}; look at its `services`"
        ) from None
    except (OSError, ValueError) as error:
        raise ArealError(f"cannot read the run's topology {options.topology}: {error}") from error
    if ctx.role != role:
        raise ArealError(f"{options.name!r} is a {ctx.role} service, but this process is a {role} one")
    return ctx


def _leave(status: int) -> None:
    """End the process now, so that no non-daemon thread keeps a finished service alive."""
    end_logging()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
