"""The life of a run as a pure state machine. Events go in, actions come out. Each event carries the time.

Promises:

- The buffer serves before any other service starts. With `evaluates_later`, an evaluator starts once a
  trainer has trained its first step, or has ended.
- A service that dies is restarted after the pause that `base/processes.py` decides. The other services
  continue.
- The run ends with a reason that names the service in three cases: the service dies too often, a restart
  would not help, or the service does not begin to serve in time. For a service that needs weights, this time
  counts from the last start of the trainer. A service that joined later and has never served does not end the
  run.
- The ranks of a trainer live and die together. If one rank dies, the other ranks are killed, because they
  wait for it in a collective. This counts as one death. All ranks restart once all have exited.
- A drained service leaves, whatever its exit status.
- After a stop has begun, nothing is started. The stages of `plan.STOP_STAGES` are ended in order. By
  `STOP_LIMIT_S` after the stop began, every process was asked to end, and killed if it did not.
- The run is over if no process is left or the limit has passed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from areal_async.base.processes import NO_RESTARTS, RestartPolicy, Restarts
from areal_async.base.topology import ServicePlace
from areal_async.launch.plan import STOP_STAGES, awaited_first, ends_the_job

STAGE_LIMITS_S = (4.5, 1.5, 2.0)
"""Seconds after which each stage is killed. The first limit is longer than the grace period after which a
service ends by itself, so that kills are rare."""
KILL_LIMIT_S = 0.4  # Time from a kill to the next stage
STOP_LIMIT_S = sum(STAGE_LIMITS_S) + len(STAGE_LIMITS_S) * KILL_LIMIT_S
KILLED_LIMIT_S = 60.0  # A killed process that still exists after this time is stuck in the kernel
LAST_ONE_LIMIT_S = 120.0  # Longest time that an evaluator may run after the trainer has ended


class Phase(Enum):
    WAITING = "waiting"
    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"  # Dead, and restarted after its pause
    ENDED = "ended"


DRAINING = "draining"  # Shown for a service that serves and is leaving


@dataclass
class ServiceState:
    place: ServicePlace
    restarts: Restarts
    phase: Phase = Phase.WAITING
    started_s: float = 0.0
    served_s: float | None = None  # Time since when it serves; None while it does not serve
    served_before: bool = False  # Whether an earlier or the present process has served
    status: int | None = None
    """Exit status as in subprocess (negative for a signal); None if it never ran."""
    restart_s: float = 0.0  # Time of the restart
    unproven: bool = False  # It joined the running job and has never served: its failure does not end the job
    leaving: bool = False  # It is not restarted, and is forgotten once it has exited
    felled: bool = False  # It was killed because another rank of its group died
    killed_s: float | None = None  # Time at which it was killed while the run continued
    leave_by_s: float = math.inf  # Time at which it is asked to end
    kill_s: float = math.inf

    @property
    def gone(self) -> bool:
        return self.leaving and self.phase is Phase.ENDED

    @property
    def shown(self) -> str:
        """The phase in words."""
        return DRAINING if self.leaving and self.phase is Phase.SERVING else self.phase.value

    @property
    def alive(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.SERVING)


@dataclass(frozen=True)
class Action:
    """An action for the supervisor: start a process, send it SIGTERM, or kill its process group."""

    do: Literal["start", "terminate", "kill"]
    name: str


EndKind = Literal["finished", "died", "not_ready", "not_gone", "did_not_end", "interrupted"]


@dataclass(frozen=True)
class Ending:
    """The reason why the run ends. For a failure, `culprit` is the service that failed."""

    kind: EndKind
    culprit: str = ""
    status: int | None = None
    lived_s: float = 0.0
    deaths: int = 1  # Deaths of the culprit or its group within the window of the restart policy
    cause: str = ""
    """Cause of the culprit's death as text, if more than its exit status is known. If a rank did not serve in
    time, this names the other ranks that did not serve."""


def in_order_of_cause(ended: Mapping[str, int]) -> list[str]:
    """Return the names of ended services, in the order of likely cause.

    `ended` has the exit statuses of services that ended between two checks. Killed services come first, then
    failed ones. Last come services with an error that may follow from the end of another service."""
    return sorted(ended, key=lambda name: (ended[name] >= 0, ended[name] in (0, os.EX_TEMPFAIL)))


@dataclass
class Lifecycle:
    begun_with: Sequence[ServicePlace]
    ready_limit_s: float
    restarts: RestartPolicy = NO_RESTARTS
    evaluates_later: bool = False
    ending: Ending | None = None
    over: bool = False
    states: dict[str, ServiceState] = field(init=False)
    _stage: int = -1
    _stage_deadline_s: float = 0.0
    _stage_killed: bool = False
    _last_one_deadline_s: float | None = None

    def __post_init__(self) -> None:
        groups: dict[str, Restarts] = {}  # One count for all ranks of a trainer
        self.states = {}
        for place in self.begun_with:
            restarts = Restarts(self.restarts)
            if place.role == "trainer":
                restarts = groups.setdefault(place.policy, restarts)
            self.states[place.name] = ServiceState(place, restarts)

    @property
    def services(self) -> list[ServicePlace]:
        return [state.place for state in self.states.values()]

    @property
    def stopping(self) -> bool:
        return self.ending is not None

    def alive(self) -> list[str]:
        return [name for name, state in self.states.items() if state.alive]

    def all_serve(self) -> bool:
        """Return whether every service serves now, or has finished."""
        return all(
            state.phase in (Phase.SERVING, Phase.ENDED) or self._is_held(state)
            for state in self.states.values()
        )

    def begin(self, now_s: float) -> list[Action]:
        return self._start(awaited_first(self.services) or list(self.states), now_s)

    def ready(self, name: str, now_s: float) -> list[Action]:
        state = self.states[name]
        if state.phase is Phase.STARTING:
            state.phase, state.served_s, state.unproven = Phase.SERVING, now_s, False
            state.served_before = True
        return self._start_waiting(now_s)

    def trained(self, now_s: float) -> list[Action]:
        """Handle the end of the first step, or of the whole training if no step was left."""
        self.evaluates_later = False
        return self._start_waiting(now_s)

    def _start_waiting(self, now_s: float) -> list[Action]:
        if self.stopping or any(not self._served(first) for first in awaited_first(self.services)):
            return []
        states = self.states.items()
        waiting = [name for name, each in states if each.phase is Phase.WAITING and not self._is_held(each)]
        return self._start(waiting, now_s)

    def _is_held(self, state: ServiceState) -> bool:
        """Return whether the service is an evaluator that must not compete with the first step."""
        return self.evaluates_later and state.place.role == "evaluator" and state.phase is Phase.WAITING

    def silent(self, name: str, now_s: float) -> list[Action]:
        """Kill a service that hangs, or a rank that other ranks reported as missing."""
        state = self.states[name]
        if not state.alive or state.killed_s is not None or self.stopping:
            return []
        state.killed_s = now_s
        return [Action("kill", name)]

    def exited(self, name: str, status: int, now_s: float, cause: str = "") -> list[Action]:
        """Handle the exit of a service. `cause` is the cause of the exit as text, if more than the status is
        known."""
        state = self.states[name]
        lived_s = now_s - state.started_s
        state.phase, state.status, state.killed_s = Phase.ENDED, status, None
        if self.stopping:
            return self.tick(now_s)
        if state.leaving:
            return []
        if state.felled:
            state.phase, state.felled = Phase.RESTARTING, False
            return []
        enders = ends_the_job(self.services)
        if status != 0 or name not in enders:
            return self._died(state, lived_s, now_s, cause)
        if all(self.states[ender].phase is Phase.ENDED for ender in enders):
            return self._stop(Ending("finished"), now_s)
        if all(rank.phase is Phase.ENDED for rank in self._trainers()):
            self._last_one_deadline_s = now_s + LAST_ONE_LIMIT_S
        return self.trained(now_s) if state.place.role == "trainer" else []

    def join(self, place: ServicePlace, now_s: float) -> list[Action]:
        """Add a service to the running job. It starts as soon as the buffer serves."""
        self.states[place.name] = ServiceState(place, Restarts(self.restarts), unproven=True)
        ready = all(map(self._served, awaited_first(self.services)))
        return self._start([place.name], now_s) if ready else []

    def leave(self, name: str, limit_s: float, now_s: float) -> list[Action]:
        """Let a service end by itself within `limit_s`. If it still runs, ask it to end, and later kill it.

        A service that does not serve yet is asked to end at once, because it has no work to finish."""
        state = self.states[name]
        state.leaving = True
        if not state.alive:
            state.phase = Phase.ENDED
            return []
        state.leave_by_s = now_s + (limit_s if state.phase is Phase.SERVING else 0.0)
        return self._advance_leaving(now_s)

    def forget(self, name: str) -> None:
        """Remove a service that has exited."""
        del self.states[name]

    def interrupt(self, now_s: float) -> list[Action]:
        """Handle a request to stop. A second request during the stop kills all remaining services at once."""
        if self.stopping:
            return [Action("kill", name) for name in self.alive()]
        return self._stop(Ending("interrupted"), now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Return the actions that are due at this time."""
        if self.stopping:
            return self._advance_stop(now_s)
        for name, state in self.states.items():
            lived_s = now_s - self._could_serve_from_s(state, now_s)
            if state.leaving or state.phase is not Phase.STARTING or lived_s <= self.ready_limit_s:
                continue
            if state.unproven:
                return self.leave(name, 0.0, now_s)
            others = [other.place.name for other in self._group(state) if other.phase is Phase.STARTING]
            nor = ", ".join(other for other in others if other != name)
            return self._stop(Ending("not_ready", name, lived_s=lived_s, cause=nor), now_s)
        for name, state in self.states.items():
            if state.killed_s is not None and now_s - state.killed_s > KILLED_LIMIT_S:
                return self._stop(Ending("not_gone", name, lived_s=now_s - state.killed_s), now_s)
        if leaving := self._advance_leaving(now_s):
            return leaving
        if due := [name for name, state in self.states.items() if self._may_restart(state, now_s)]:
            return self._start(due, now_s)
        if self._last_one_deadline_s is not None and now_s > self._last_one_deadline_s:
            enders = ends_the_job(self.services)
            late = next(name for name in enders if self.states[name].phase is not Phase.ENDED)
            return self._stop(Ending("did_not_end", late, lived_s=LAST_ONE_LIMIT_S), now_s)
        return []

    def _could_serve_from_s(self, state: ServiceState, now_s: float) -> float:
        """Return the start of the time within which a service must begin to serve.

        This is the start of the service. For a service that needs weights, it is the last start of the
        trainer, if later."""
        begun_s = [state.started_s]
        if state.place.role in ("rollout", "evaluator"):
            trainers = self._trainers()
            begun_s += [now_s if each.phase is Phase.RESTARTING else each.started_s for each in trainers]
        return max(begun_s)

    def _served(self, name: str) -> bool:
        return self.states[name].phase is Phase.SERVING

    def _start(self, names: Sequence[str], now_s: float) -> list[Action]:
        for name in names:
            state = self.states[name]
            state.phase, state.started_s, state.served_s = Phase.STARTING, now_s, None
            state.killed_s, state.felled = None, False
        return [Action("start", name) for name in names]

    def _may_restart(self, state: ServiceState, now_s: float) -> bool:
        if state.phase is not Phase.RESTARTING or now_s < state.restart_s:
            return False
        first = awaited_first(self.services)
        # The other services need the buffer. If they started now, they would only fail.
        has_room = state.place.name in first or all(map(self._served, first))
        whole = not any(other.alive for other in self._group(state))
        return has_room and whole

    def _group(self, state: ServiceState) -> list[ServiceState]:
        """Return the services that are started and killed together with this service, including itself. For a
        rank, these are all ranks of its trainer."""
        if state.place.role != "trainer":
            return [state]
        return [other for other in self._trainers() if other.place.policy == state.place.policy]

    def _trainers(self) -> list[ServiceState]:
        return [state for state in self.states.values() if state.place.role == "trainer"]

    def _died(self, state: ServiceState, lived_s: float, now_s: float, cause: str) -> list[Action]:
        """Schedule a restart of the service and its group, or end the run."""
        name, status, group = state.place.name, state.status, self._group(state)
        served = [other.served_s for other in group if other.served_s is not None]
        served_s = max(served) if len(served) == len(group) else None
        pause_s = state.restarts.died(now_s, served_s=served_s, status=status)
        if pause_s is None and state.unproven:
            state.leaving = True
            return []
        if pause_s is None or (state.place.role == "evaluator" and self._last_one_deadline_s is not None):
            # A restarted evaluator would need the final snapshot from a trainer that has exited.
            deaths = len(state.restarts.deaths_s)
            return self._stop(Ending("died", name, status, lived_s, deaths, cause), now_s)
        actions = []
        for other in group:
            other.restart_s = now_s + pause_s
            if other.alive:
                other.felled, other.killed_s = True, now_s
                actions.append(Action("kill", other.place.name))
            else:
                other.phase = Phase.RESTARTING
        if state.place.role == "trainer":
            # The trainer may publish its last versions again under another epoch, so a finished evaluator
            # must run again.
            for other in self.states.values():
                if other.place.role == "evaluator" and other.phase is Phase.ENDED:
                    other.phase, other.restart_s = Phase.RESTARTING, state.restart_s
        return actions

    def _advance_leaving(self, now_s: float) -> list[Action]:
        """Ask leaving services to end once their time limit has passed. Kill those that still run some time
        later."""
        actions: list[Action] = []
        for name, state in self.states.items():
            if not (state.leaving and state.alive):
                continue
            if now_s >= state.kill_s:
                state.kill_s = math.inf
                actions.append(Action("kill", name))
            elif now_s >= state.leave_by_s:
                state.leave_by_s, state.kill_s = math.inf, now_s + STAGE_LIMITS_S[0]
                actions.append(Action("terminate", name))
        return actions

    def _stop(self, ending: Ending, now_s: float) -> list[Action]:
        self.ending = ending
        return self._advance_stop(now_s)

    def _advance_stop(self, now_s: float) -> list[Action]:
        """Advance the stop: kill the remaining services of a stage at its deadline, and begin the next stage
        when none is left."""
        actions: list[Action] = []
        while not self.over:
            left = self._left_in_stage()
            if self._stage >= 0 and left and now_s < self._stage_deadline_s:
                break
            if left and not self._stage_killed:
                self._stage_killed = True
                self._stage_deadline_s = now_s + KILL_LIMIT_S
                actions += [Action("kill", name) for name in left]
                break
            self._stage += 1
            if self._stage == len(STOP_STAGES):
                self.over = True
                break
            self._stage_killed = False
            self._stage_deadline_s = now_s + STAGE_LIMITS_S[self._stage]
            actions += [Action("terminate", name) for name in self._left_in_stage()]
        if not self.alive():
            self.over = self.stopping
        return actions

    def _left_in_stage(self) -> list[str]:
        if self._stage < 0:
            return []
        roles = STOP_STAGES[self._stage]
        return [name for name, state in self.states.items() if state.alive and state.place.role in roles]
