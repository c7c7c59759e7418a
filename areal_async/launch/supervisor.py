"""The supervisor carries out the lifecycle's actions with real processes, signals and time.

Promises:

- A service that died is restarted as the lifecycle decides, in the same place. The other services continue.
- A service that hangs is killed, whatever its role. If several services ended, the report names the likely
  cause.
- Workers join and leave at the request of the control socket.
- When `run` returns or raises, no process of the run is left. This takes at most `STOP_LIMIT_S` after the
  first Ctrl-C or SIGTERM. After a second signal, all processes are killed at once.
- Each service leads its own session, so it gets a stop signal only from the supervisor. If the supervisor
  dies, the kernel sends the signal.

The supervisor must run in the main thread. Signals arrive there, and the kernel ties a child's death signal
to the thread that started the child."""

from __future__ import annotations

import dataclasses
import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from areal_async.base import events
from areal_async.base.errors import FaultError
from areal_async.base.log import get_logger
from areal_async.base.metrics import elsewhere
from areal_async.base.own_files import write_whole
from areal_async.base.processes import exit_text
from areal_async.base.topology import Role, ServicePlace, Topology
from areal_async.config.job import JobConfig
from areal_async.config.load import dump_job
from areal_async.launch.commands import ControlSocket, FleetChange, LeavingWorker, WorkersRequest
from areal_async.launch.folders import RunFolders
from areal_async.launch.forks import ForkServer
from areal_async.launch.home_files import HomeFilesServer
from areal_async.launch.launcher import Child, Launcher
from areal_async.launch.lifecycle import Action, Ending, Lifecycle, Phase, in_order_of_cause
from areal_async.launch.local_launcher import LocalLauncher, write_targets
from areal_async.launch.metrics import RESTARTS
from areal_async.launch.plan import (
    MODULES,
    ready_limit_s,
    services_of,
    with_fields,
    worker_to_drain,
    workers_to_change,
)
from areal_async.launch.rank_lines import Lines
from areal_async.rpc.control_messages import DrainWorker
from areal_async.service.main import SignalHandler, ignore, signal_pipe
from areal_async.service.record import RunLog

TICK_S = 0.1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_INTERRUPT_S = 0.5  # make, shells and terminals repeat signals
BUFFER_WAIT_S = 10.0
"""Longest wait for the buffer when a worker leaves."""

log = get_logger("supervisor")


@dataclasses.dataclass(frozen=True)
class RunHooks:
    """Callbacks of a supervisor. They must return quickly."""

    on_serving: Callable[[], None] = lambda: None
    """Called once when all services serve."""
    on_ending: Callable[[Ending], None] = lambda ending: None
    """Called once when the end is decided. Services that did not cause the end still run."""
    on_restart: Callable[[str, str], None] = lambda name, text: None
    """Called with the name of a service and a line of text, if the service died and will be restarted."""
    on_death: Callable[[str, str], None] = lambda name, text: None
    """Called with the same arguments if the service died, and is not restarted or restarts only because
    another service failed."""


class Supervisor:
    """Runs the services of one job.

    `metrics_port` is the port of this process's own metrics, 0 for none. `records` is the run's log, to which
    services write through the supervisor; without it, evaluators start with the other services. With a
    `launcher`, processes may run on other hosts and read files of this host. Without it, they are forks of
    `forks`, if that is given."""

    def __init__(
        self,
        job: JobConfig,
        folders: RunFolders,
        *,
        launcher: Launcher | None = None,
        forks: ForkServer | None = None,
        records: RunLog | None = None,
        modules: Mapping[Role, str] = MODULES,
        metrics_port: int = 0,
        hooks: RunHooks = RunHooks(),
    ) -> None:
        files = HomeFilesServer(folders.run_dir, job) if launcher is not None else None
        self.job = job
        self.folders = folders
        self._launcher = launcher or LocalLauncher(job, folders, forks=forks)
        services = self._launcher.begin(job, services_of(job, modules))
        policy = job.supervisor.restart_policy()
        self.lifecycle = Lifecycle(services, ready_limit_s(job), policy, evaluates_later=records is not None)
        self.topology = self._publish()
        """Places of all services. Any thread may read the attribute; updates replace the whole object."""
        self.children: dict[str, Child] = {}
        self._lines = Lines(self._hang_s)
        self.metrics_ports: dict[str, int] = {}
        """Metrics port of each service. This is the planned port until the service is ready, then the port
        that it reports."""
        self._hooks = hooks
        self._metrics_port = metrics_port
        self._told_serving = False
        self._named: object = None  # Services and ports in the last file for Prometheus
        self._told_ending = False
        self._interrupted_s = -math.inf
        self._socket = ControlSocket(
            job.job, self.topology, folders.secret.of("supervisor"), BUFFER_WAIT_S, records, files
        )
        self._modules = modules
        self._leaving: dict[str, LeavingWorker] = {}
        """Workers that are being drained, with the futures of clients that wait for them."""

    def run(self) -> Ending:
        """Start everything. Return the ending once no process is left."""
        try:
            self._socket.start()
            with caught_signals() as signals, selectors.DefaultSelector() as selector:
                selector.register(signals, selectors.EVENT_READ)
                self._apply(self.lifecycle.begin(time.monotonic()))
                while not self.lifecycle.over:
                    if selector.select(TICK_S):
                        self._interrupt(signals)
                    self._observe()
        finally:
            for entry in self._leaving.values():
                entry.ended.set_exception(FaultError("invalid", "the run has ended"))
            self._socket.stop()
            self._launcher.close()
        assert self.lifecycle.ending is not None
        return self.lifecycle.ending

    @property
    def services(self) -> list[ServicePlace]:
        return self.lifecycle.services

    def phases(self) -> dict[str, str]:
        """Return the phase of each service in words, by name. Any thread may call this."""
        return {name: state.shown for name, state in list(self.lifecycle.states.items())}

    def _observe(self) -> None:
        """Report all events since the last call to the lifecycle."""
        for name, state in list(self.lifecycle.states.items()):
            if state.phase is Phase.STARTING and (report := self.children[name].ready_report()) is not None:
                child = self.children[name]
                self.metrics_ports[name] = int(report["metrics_port"])
                log.info("service serves", service=name, pid=child.pid)
                events.record("ready", service=name, service_pid=child.pid)
                self._apply(self.lifecycle.ready(name, time.monotonic()))
        self._observe_ends()
        for name in self._lines.look(time.monotonic()):
            self._apply(self.lifecycle.silent(name, time.monotonic()))
        self._apply(self.lifecycle.tick(time.monotonic()))
        if self.lifecycle.evaluates_later and self._socket.trained.is_set():
            self._apply(self.lifecycle.trained(time.monotonic()))
        self._socket.carry_out(self._change_workers)
        if not self.lifecycle.stopping:
            moved = self._launcher.tend(time.monotonic(), calm=self.lifecycle.all_serve())
            for place in moved:
                if place.name in self.lifecycle.states:
                    self.lifecycle.states[place.name].place = place
            if moved:
                self.topology = self._publish()
        for name in [name for name, state in self.lifecycle.states.items() if state.gone]:
            self._forget(name)
        if self.lifecycle.stopping or not self.lifecycle.all_serve():
            return
        named = (self.services, list(self.metrics_ports.values()))
        if named != self._named:
            self._named = named
            self._write_targets()
        if not self._told_serving:
            self._told_serving = True
            self._hooks.on_serving()

    def _observe_ends(self) -> None:
        ended: dict[str, int] = {}
        # The first poll may find only deaths that another death caused. The second poll also finds that
        # death.
        for _ in range(2):
            for name in self.lifecycle.alive():
                if name not in ended and (status := self.children[name].poll()) is not None:
                    ended[name] = status
            if not ended:
                return
        states, stopping = self.lifecycle.states, self.lifecycle.stopping
        felled = {name for name in ended if states[name].felled}
        for name in in_order_of_cause(ended):
            status, pid = ended[name], self.children[name].pid
            log.info("service ended", service=name, status=status)
            events.record("ended", service=name, service_pid=pid, status=status)
            lost = self.children[name].lost()
            cause = lost or self._lines.cause_of(name, time.monotonic())
            self._lines.forget(name)
            brought_down = states[name].felled  # if not in `felled`, by a service of this look
            self._apply(self.lifecycle.exited(name, status, time.monotonic(), cause))
            if stopping or name in felled or (states[name].leaving and not lost):
                continue
            if states[name].phase is Phase.RESTARTING and not brought_down:
                self._tell_restart(name, cause or exit_text(status))
            elif status != 0 or (self.lifecycle.ending is not None and self.lifecycle.ending.culprit == name):
                self._tell_death(name, cause or exit_text(status))

    # --- workers that join and leave -----------------------------------------------------------------

    def _change_workers(self, asked: WorkersRequest) -> FleetChange:
        """Begin a requested change. Raises `FaultError` if the change is invalid."""
        if self.lifecycle.stopping:
            raise FaultError("invalid", "the run is ending")
        staying = self._staying()
        limit_s, now_s = asked.limit_ms / 1000, time.monotonic()
        if isinstance(asked, DrainWorker):
            joining: list[ServicePlace] = []
            leaving = [worker_to_drain(staying, asked.worker)]
        else:

            def is_taken(name: str) -> bool:
                return name in self.lifecycle.states or self._launcher.is_taken(name)

            joining, leaving = workers_to_change(staying, asked.workers, self._modules["rollout"], is_taken)
        joining = [self._launcher.join(place) for place in joining]
        for place in joining:
            self._apply(self.lifecycle.join(place, now_s))
            events.record("joined", service=place.name)
        ends = {}
        for place in leaving:
            entry = self._leaving[place.name] = LeavingWorker(now_s)
            ends[place.name] = entry.ended
            self._apply(self.lifecycle.leave(place.name, limit_s, now_s))
            events.record("leaving", service=place.name, limit_s=limit_s)
        self._record_workers()
        gone = {place.name for place in leaving}
        names = [place.name for place in (*staying, *joining) if place.name not in gone]
        return FleetChange([place.name for place in joining], ends, names)

    def _staying(self) -> list[ServicePlace]:
        """Return the workers that are not leaving, oldest first."""
        states = self.lifecycle.states
        return [p for p in self.services if p.role == "rollout" and not states[p.name].leaving]

    def _forget(self, name: str) -> None:
        """Stop showing and watching a worker that has exited."""
        state, entry = self.lifecycle.states[name], self._leaving.pop(name, None)
        log.info("worker is gone", service=name, status=state.status)
        events.record("left", service=name, status=state.status)
        child = self.children.pop(name, None)
        self.metrics_ports.pop(name, None)
        self.lifecycle.forget(name)
        self._launcher.leave(name)
        if child is not None:
            child.close()
        self._record_workers()
        if entry is not None:
            entry.left(name, state.status, time.monotonic())
        elif not state.served_before:
            self._hooks.on_restart(name, f"{name} joined but did not come to serve; see logs/{name}.log")

    def _record_workers(self) -> None:
        """Record the number of workers. A resumed run begins with this number."""
        self.job = with_fields(self.job, "rollout", workers=max(1, len(self._staying())))
        self.topology = self._publish()

    def _tell_restart(self, name: str, ended: str) -> None:
        state = self.lifecycle.states[name]
        died_s = state.restarts.deaths_s
        deaths, pause_s = len(died_s), state.restart_s - died_s[-1]
        ranks = sum(p.role == "trainer" and p.policy == state.place.policy for p in self.services)
        several = state.place.role == "trainer" and ranks > 1
        who = f"the {ranks} ranks of the trainer are" if several else "it is"
        text = f"{name} {ended}; {who} started again"
        log.warning(text, service=name, deaths=deaths, pause_s=round(pause_s, 2))
        events.record("restart", service=name, deaths=deaths, pause_s=pause_s)
        RESTARTS.labels(name).inc()
        when = f"in {pause_s:.1f} s" if pause_s else "at once"
        left = f"death {deaths} of {self.job.supervisor.restarts} allowed"
        self._hooks.on_restart(name, f"{text} {when} ({left})")

    def _tell_death(self, name: str, ended: str) -> None:
        """Report the death of a service that is not restarted, or that restarts only because another service
        failed."""
        log.warning(f"{name} {ended}", service=name)
        self._hooks.on_death(name, f"{name} {ended}")

    def _interrupt(self, signals: int) -> None:
        os.read(signals, 64)
        now_s = time.monotonic()
        if now_s - self._interrupted_s < SAME_INTERRUPT_S:
            return
        self._interrupted_s = now_s
        log.info("asked to stop", at_once=self.lifecycle.stopping)
        self._apply(self.lifecycle.interrupt(now_s))

    def _apply(self, actions: Sequence[Action]) -> None:
        ending = self.lifecycle.ending
        if ending is not None and not self._told_ending:
            self._told_ending = True
            log.info("the run ends", kind=ending.kind, culprit=ending.culprit)
            events.record("ending", kind=ending.kind, culprit=ending.culprit)
            self._hooks.on_ending(ending)
        for action in actions:
            log.info(action.do, service=action.name)
            if action.do == "start":
                self._start(action.name)
            else:
                getattr(self.children[action.name], action.do)()

    def _start(self, name: str) -> None:
        state = self.lifecycle.states[name]
        if name in self.children:
            self.children[name].close()
        child = self._launcher.start(state.place, served_before=state.served_before)
        self.children[name] = child
        self._lines.started(state.place, child)
        self.metrics_ports[name] = state.place.metrics_port
        RESTARTS.labels(name)  # Created with 0 before the first death, so that rates can be computed
        events.record("started", service=name, service_pid=child.pid)

    def _hang_s(self, place: ServicePlace) -> float:
        """Return the longest allowed silence of a service."""
        own = self.job.of(place.policy or self.job.policy).trainer.hang_s
        return own if place.role == "trainer" and own is not None else self.job.supervisor.hang_s

    def _publish(self) -> Topology:
        """Write the job, then the topology. The order matters: other processes find a run by its topology."""
        write_whole(self.folders.run_dir / "job.yaml", dump_job(self.job).encode())
        return self._launcher.publish(self.job, self.services)

    def _write_targets(self) -> None:
        home, targets = self.topology.home_host, []
        found = [(str(p.role), p.name, p.node_id, self.metrics_ports.get(p.name, 0)) for p in self.services]
        ours = ("supervisor", "supervisor", home.node_id, self._metrics_port)
        for service, process, host, port in (*found, ours):
            labels = {"job": self.job.job, "service": service, "process": process, "host": host}
            if host != home.node_id:  # it serves its metrics to its own host only
                port, labels["__metrics_path__"] = self._metrics_port, elsewhere(process)
            if port:
                targets.append({"targets": [f"{home.loopback}:{port}"], "labels": labels})
        write_targets(self.folders.targets, targets)


@contextmanager
def caught_signals(handler: SignalHandler = ignore, numbers: Sequence[int] = SIGNALS) -> Iterator[int]:
    """Yield a file descriptor that receives the number of each of these signals.

    In the main thread, a signal has no other effect than `handler`."""
    old_handlers = {number: signal.getsignal(number) for number in numbers}
    old_wakeup_fd = signal.set_wakeup_fd(-1)
    read_fd, write_fd = signal_pipe(numbers, handler)
    try:
        yield read_fd
    finally:
        for number, old in old_handlers.items():
            signal.signal(number, old)
        signal.set_wakeup_fd(old_wakeup_fd)
        os.close(read_fd)
        os.close(write_fd)
