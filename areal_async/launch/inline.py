"""All roles of a job in one process, for debuggers and profilers: `areal-async run --inline`.

The services are the same as in other runs. Each has an event loop on its own thread, and the trainer runs in
the main thread.

Promises:

- The first error of a service or of user code ends the run, and is raised with its own traceback.
- Nothing is restarted.
- Leases, claims and deadlines of episodes do not expire while a user sits in a debugger. If several threads
  hit breakpoints, only one has the prompt at a time.
- Ctrl-C ends the services in the usual order, within `STOP_LIMIT_S`. A second Ctrl-C does not wait.

Code that hangs is not ended: a reward or a workflow that does not return blocks the run. Programs such as
redis-server, sandboxes, servers of reward models and the gateway still run in separate processes."""

from __future__ import annotations

import asyncio
import bdb
import dataclasses
import os
import pdb
import pkgutil
import select
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType, TracebackType

from areal_async.base.errors import FaultError, RunFailed
from areal_async.base.log import get_logger
from areal_async.base.own_files import write_whole
from areal_async.base.processes import RUN_VARIABLE, kill_processes_of
from areal_async.base.topology import Role
from areal_async.config.devices import first_threads
from areal_async.config.job import JobConfig
from areal_async.config.load import dump_job
from areal_async.config.registry import forget_own_parts
from areal_async.launch.commands import ControlSocket, FleetChange, WorkersRequest
from areal_async.launch.folders import RunFolders
from areal_async.launch.lifecycle import STAGE_LIMITS_S, Ending
from areal_async.launch.local_launcher import write_json
from areal_async.launch.one_host import topology_here
from areal_async.launch.plan import STOP_STAGES, ready_limit_s, services_of, with_channel, with_fields
from areal_async.launch.supervisor import SAME_INTERRUPT_S, SIGNALS, TICK_S, caught_signals
from areal_async.service.context import ServiceContext
from areal_async.service.main import STOP_GRACE_S, first_cause, until_stopped
from areal_async.service.record import RunLog

MAINS: Mapping[Role, str] = {
    "buffer": "replay_buffer.server:main",
    "trainer": "trainer_service.main:train",
    "reward": "reward_service.__main__:main",
    "rollout": "rollout_service.service:main",
    "evaluator": "rollout_service.evaluator:main",
}
LONG_S = 7 * 24 * 3600.0
"""Time limit for leases, claims and deadlines, so that they do not expire in a debugger."""
SWITCH_S = 0.0005
"""Longest time for which a thread keeps the interpreter while another waits for it. Calls into torch and
sockets give the interpreter away. With Python's default of 5 ms, each would wait that long to return."""
AT_ONCE_S = 3.0  # After the second Ctrl-C, the process exits within this time, whatever its threads do
CANCEL = signal.SIGURG  # Its default action is to do nothing, and few programs use it

log = get_logger("supervisor")


def without_limits(job: JobConfig) -> JobConfig:
    """Return `job` with the changes that an inline run needs.

    Leases, deadlines and timeouts are extended to `LONG_S` or removed. All roles compute with the trainer's
    number of threads, because they share torch."""
    threads, group = first_threads(job.trainer.torch_threads), job.buffer.group
    if group.deadline_s is not None:
        group = group.model_copy(update={"deadline_s": LONG_S})
    overtaken = job.buffer.on_overtaken.model_copy(update={"limit_s": LONG_S})
    job = with_fields(job, "buffer", lease_s=LONG_S, on_overtaken=overtaken, group=group)
    job = with_fields(job, "rollout", episode_timeout_s=None, stuck_s=LONG_S, torch_threads=threads)
    return with_fields(job, "evaluation", torch_threads=threads)


class _Cancelled(BaseException):
    """Raised in the main thread, at any point, to leave the trainer."""


class InlineService(threading.Thread):
    """A service on its own thread. Its last action on that thread is the call `on_end(self)`."""

    def __init__(self, ctx: ServiceContext, on_end: Callable[[InlineService], None]) -> None:
        super().__init__(name=ctx.name, daemon=True)
        self.ctx = ctx
        self._main = _main_of(ctx.role)  # Two threads cannot import every module at once
        self.error: BaseException | None = None
        self._on_end = on_end
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """Ask the service to end. Any thread may call this, also before the start."""
        self.ctx.stopping.set()
        if self._loop is not None:
            with suppress(RuntimeError):  # the service has ended
                self._loop.call_soon_threadsafe(self.ctx.stop.set)

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.error = first_cause(error)
        self._on_end(self)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self.ctx.stopping.is_set():
            self.ctx.stop.set()
        await until_stopped(self.ctx, self._main)


class InlineRun:
    """Runs the job of `folders` in this process. Create and run it in the main thread.

    `on_ending` is called once when the end is decided, while the buffer still serves."""

    def __init__(
        self, job: JobConfig, folders: RunFolders, *, records: RunLog, on_ending: Callable[[Ending], None]
    ) -> None:
        forget_own_parts()
        self.error: BaseException | None = None
        """Error that ended the run, if it failed."""
        told = with_channel(without_limits(job), several_hosts=False).model_dump(mode="json")
        write_whole(folders.run_dir / "job.yaml", dump_job(job).encode())
        self.topology = topology_here(folders.run_id, folders.host, services_of(job), told, {})
        write_json(folders.topology, self.topology)
        self._job, self._run_id = job, folders.run_id
        self._on_ending = on_ending
        self._main_thread = threading.get_ident()
        contexts = [
            dataclasses.replace(ServiceContext.load(folders.topology, place.name), inline=True)
            for place in self.topology.services
        ]
        (self._trainer,) = (ctx for ctx in contexts if ctx.role == "trainer")
        self._train = _main_of("trainer")
        self._services = [InlineService(ctx, self._ended) for ctx in contexts if ctx is not self._trainer]
        keys = folders.secret.of("supervisor")
        self._socket = ControlSocket(job.job, self.topology, keys, TICK_S, records)
        self._culprit = ""
        self._failing = threading.Lock()
        self._stopping = threading.Event()
        self._interrupts = 0
        self._in_trainer = False
        self._over = threading.Event()

    def run(self) -> Ending:
        """Run the job to its end, and return the ending. `error` is the error of a failed run."""
        with ExitStack() as stack:
            stack.enter_context(_marked(self._run_id))
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(SWITCH_S)
            stack.enter_context(one_prompt_at_a_time())
            self._socket.start()
            stack.callback(self._socket.stop)
            signals = stack.enter_context(caught_signals(self._on_signal, (*SIGNALS, CANCEL)))
            listening = threading.Thread(target=self._listen, args=(signals,), name="signals", daemon=True)
            listening.start()
            stack.callback(listening.join)
            stack.callback(self._over.set)
            with suppress(_Cancelled):
                self._in_main_thread()
            self._in_trainer = False
            ending = Ending("finished")
            if self.error is not None:
                ending = Ending("died", self._culprit, cause=repr(self.error))
            elif self._interrupts:
                ending = Ending("interrupted")
            log.info("the run ends", kind=ending.kind, culprit=ending.culprit)
            self._on_ending(ending)
            self._wind_up()
        return ending

    def _in_main_thread(self) -> None:
        try:
            self._in_trainer = True
            self._start_services()
            if not self._stopping.is_set():
                self._train(self._trainer)
            for service in self._services:
                while service.ctx.role == "evaluator" and service.is_alive():
                    service.join(TICK_S)
            self._in_trainer = False
        except _Cancelled:
            raise
        except BaseException as error:
            self._failed("trainer", first_cause(error))

    def _start_services(self) -> None:
        limit_s = ready_limit_s(self._job)
        for service in self._services:
            service.start()
            deadline_s = time.monotonic() + limit_s
            while service.ctx.role == "buffer" and not service.ctx.has_served and not self._stopping.is_set():
                if time.monotonic() > deadline_s:
                    raise RunFailed(f"{service.ctx.name} did not serve within {limit_s:g} s")
                time.sleep(TICK_S / 10)

    def _ended(self, service: InlineService) -> None:
        if service.error is not None:
            self._failed(service.ctx.name, service.error)
        elif service.ctx.role != "evaluator" and not self._stopping.is_set():
            self._failed(service.ctx.name, RunFailed(f"{service.ctx.name} ended before the trainer was done"))

    def _failed(self, culprit: str, error: BaseException) -> None:
        """End the run with its first error. Later errors are ignored, because the end of other services
        causes them."""
        with self._failing:
            if self._stopping.is_set():
                log.info("failed while the run ended", service=culprit, error=repr(error))
                return
            if isinstance(error, bdb.BdbQuit):  # the user entered `q` at the prompt
                self._interrupts = 1
            else:
                self.error, self._culprit = error, culprit
                log.info("service failed", service=culprit, error=repr(error))
            self._stopping.set()
        self._stop_first_stage()

    # --- the end -------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == CANCEL and self._in_trainer:
            self._in_trainer = False
            raise _Cancelled

    def _cancel(self) -> None:
        """Leave the trainer. The signal also interrupts a wait of the main thread."""
        if self._in_trainer:
            signal.pthread_kill(self._main_thread, CANCEL)

    def _listen(self, signals: int) -> None:
        """Handle signals, also while the main thread computes, and refuse requests to the supervisor."""
        last_s = -SAME_INTERRUPT_S
        while not self._over.is_set():
            self._socket.carry_out(_refuse)
            if not select.select([signals], [], [], TICK_S)[0]:
                continue
            numbers, now_s = os.read(signals, 64), time.monotonic()
            # If a debugger handles Ctrl-C itself, the signal is not for the run.
            asked = [number for number in numbers if signal.getsignal(number) == self._on_signal]
            if {*asked} <= {CANCEL} or now_s - last_s < SAME_INTERRUPT_S:
                continue
            last_s = now_s
            self._interrupts += 1
            log.info("asked to stop", at_once=self._interrupts > 1)
            if self._interrupts == 1:
                self._stopping.set()
                self._stop_first_stage()
                continue
            self._cancel()
            if not self._over.wait(AT_ONCE_S):
                kill_processes_of(self._run_id)
                os._exit(128 + signal.SIGINT)

    def _stop_first_stage(self) -> None:
        self._trainer.stopping.set()
        for service in self._services:
            if service.ctx.role in STOP_STAGES[0]:
                service.stop()
        timer = threading.Timer(STOP_GRACE_S, self._cancel)
        timer.daemon = True
        timer.start()

    def _wind_up(self) -> None:
        """End the services that still run, in their order."""
        self._stopping.set()
        for roles, limit_s in zip(STOP_STAGES, STAGE_LIMITS_S, strict=True):
            deadline_s = time.monotonic() + limit_s
            stage = [service for service in self._services if service.ctx.role in roles]
            for service in stage:
                service.stop()
            for service in stage:
                while service.is_alive() and self._interrupts < 2 and time.monotonic() < deadline_s:
                    service.join(TICK_S)


def services_left() -> bool:
    """Return whether a service still runs after the end of an inline run, because the service's code did not
    return."""
    return any(isinstance(thread, InlineService) for thread in threading.enumerate())


def _main_of(role: Role) -> Callable[[ServiceContext], Awaitable[None]]:
    """Return the main function of a service; the trainer's is synchronous."""
    main: Callable[[ServiceContext], Awaitable[None]] = pkgutil.resolve_name(MAINS[role])
    return main


def _refuse(asked: WorkersRequest) -> FleetChange:
    raise FaultError("invalid", "the run is inline, and its one worker neither leaves nor gets company")


@contextmanager
def _marked(run_id: str) -> Iterator[None]:
    """Mark processes that are started in this block with the run's id. Kill them at the end of the block."""
    before = os.environ.get(RUN_VARIABLE)
    os.environ[RUN_VARIABLE] = run_id
    try:
        yield
    finally:
        kill_processes_of(run_id)
        del os.environ[RUN_VARIABLE]
        if before is not None:
            os.environ[RUN_VARIABLE] = before


# --- breakpoints -------------------------------------------------------------------------------------

_turn = threading.RLock()


class OnePrompt(pdb.Pdb):
    """The standard debugger, but only one thread has the prompt at a time, and the run keeps its own handler
    of Ctrl-C."""

    def __init__(self) -> None:
        super().__init__(nosigint=True)

    def interaction(self, frame: FrameType | None, traceback: TracebackType | None) -> None:
        with _turn:
            super().interaction(frame, traceback)


@contextmanager
def one_prompt_at_a_time() -> Iterator[None]:
    """Make `breakpoint()` wait for its turn inside this block, unless the user has chosen another
    debugger."""
    if sys.breakpointhook is not sys.__breakpointhook__ or "PYTHONBREAKPOINT" in os.environ:
        yield
        return
    sys.breakpointhook = lambda: OnePrompt().set_trace(sys._getframe(1))  # type: ignore[misc]
    try:
        yield
    finally:
        sys.breakpointhook = sys.__breakpointhook__
