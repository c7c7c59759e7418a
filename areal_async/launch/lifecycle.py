"""The life of a run as a pure state machine: events in, actions out; the clock comes with each event.

Promises:
- The buffer serves before any other process is started.
- A dead service is restarted after the pause that `base/processes.py` decides, and the others continue.
- The run ends with a reason that names the service if the service dies too often, if a restart would not
  help, or if it is not ready in time (for a service that needs weights, counted from the last start of the
  trainer). A service that joined later and has never served does not end the run.
- The ranks of a trainer live and die together. If one dies, the others, which wait for it in a collective,
  are killed. This counts as one death, and they restart at once when all have exited.
- A drained service leaves, in whatever way it exits.
- Once a stop has begun no process is started, and the stages of `plan.STOP_STAGES` are ended in order.
  `STOP_LIMIT_S` after the stop began every process has been terminated and then killed.
- The run is over only when no process is left or the limit has passed.
"""

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
"""Seconds after which each stage is killed. The first limit is above the services' own grace, so that a kill
is the exception."""
KILL_LIMIT_S = 0.4  # The next stage goes on so long after a kill, without waiting for it
STOP_LIMIT_S = sum(STAGE_LIMITS_S) + len(STAGE_LIMITS_S) * KILL_LIMIT_S
KILLED_LIMIT_S = 60.0  # A process that was killed and is still there so long after is held by the kernel
LAST_ONE_LIMIT_S = 120.0  # An evaluator that has not ended so long after the trainer is a failure


class Phase(Enum):
    WAITING = "waiting"
    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"  # Dead, and to be started again when its pause is over
    ENDED = "ended"


DRAINING = "draining"  # Shown for a service that serves and is to leave


@dataclass
class ServiceState:
    place: ServicePlace
    restarts: Restarts
    phase: Phase = Phase.WAITING
    started_s: float = 0.0
    served_s: float | None = None  # Since when it serves; None while it does not
    served_before: bool = False  # It has reported that it serves, if in a process that is gone
    status: int | None = None
    """Exit status as in subprocess: negative for a signal; None if it never ran."""
    restart_s: float = 0.0  # When it is to be started again
    unproven: bool = False  # It joined the running job, and has never served: its failure is not the job's
    leaving: bool = False  # It is not started again; once it has ended it is to be forgotten
    felled: bool = False  # It is killed because another rank of its group has died
    killed_s: float | None = None  # When it was killed, while the run goes on
    leave_by_s: float = math.inf  # When it is told to end, if it has not by itself
    kill_s: float = math.inf

    @property
    def gone(self) -> bool:
        return self.leaving and self.phase is Phase.ENDED

    @property
    def shown(self) -> str:
        """Return its phase in words, for people."""
        return DRAINING if self.leaving and self.phase is Phase.SERVING else self.phase.value

    @property
    def alive(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.SERVING)


@dataclass(frozen=True)
class Action:
    """An action for the shell: start a process, send it SIGTERM, or kill its process group."""

    do: Literal["start", "terminate", "kill"]
    name: str


EndKind = Literal["finished", "died", "not_ready", "not_gone", "did_not_end", "interrupted"]


@dataclass(frozen=True)
class Ending:
    """Why the run ends; `culprit` is the service that a failure names."""

    kind: EndKind
    culprit: str = ""
    status: int | None = None
    lived_s: float = 0.0
    deaths: int = 1  # How often the culprit, or its group, died within the window of the restart policy
    cause: str = ""
    """Cause of its death, in words, if more is known than its status; for a rank that did not serve, the
    other ranks that did not."""


def in_order_of_cause(ended: Mapping[str, int]) -> list[str]:
    """Return the names of services that ended in one look, given with their exit statuses. Killed services
    come first, then failed ones. Services whose error may follow from another's end come last."""
    return sorted(ended, key=lambda name: (ended[name] >= 0, ended[name] in (0, os.EX_TEMPFAIL)))


@dataclass
class Lifecycle:
    begun_with: Sequence[ServicePlace]
    ready_limit_s: float
    restarts: RestartPolicy = NO_RESTARTS
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
        return all(state.phase in (Phase.SERVING, Phase.ENDED) for state in self.states.values())

    def begin(self, now_s: float) -> list[Action]:
        return self._start(awaited_first(self.services) or list(self.states), now_s)

    def ready(self, name: str, now_s: float) -> list[Action]:
        state = self.states[name]
        if state.phase is Phase.STARTING:
            state.phase, state.served_s, state.unproven = Phase.SERVING, now_s, False
            state.served_before = True
        if self.stopping or any(not self._served(first) for first in awaited_first(self.services)):
            return []
        waiting = [name for name, state in self.states.items() if state.phase is Phase.WAITING]
        return self._start(waiting, now_s)

    def silent(self, name: str, now_s: float) -> list[Action]:
        """Kill a service that gives no sign of life, or that others wait for in vain."""
        state = self.states[name]
        if not state.alive or state.killed_s is not None or self.stopping:
            return []
        state.killed_s = now_s
        return [Action("kill", name)]

    def exited(
        self, name: str, status: int, now_s: float, cause: str = "", *, with_host: bool = False
    ) -> list[Action]:
        """Take in the end of a service; `cause` has more than its exit status, if known. `with_host`: it is
        gone with its host, which is no failure of its own: it has left, and is not started again."""
        state = self.states[name]
        lived_s = now_s - state.started_s
        state.phase, state.status, state.killed_s = Phase.ENDED, status, None
        if self.stopping:
            return self.tick(now_s)
        state.leaving = state.leaving or with_host
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
        return []

    def join(self, place: ServicePlace, now_s: float) -> list[Action]:
        """Take in another service of the running job; it starts as soon as the buffer serves."""
        self.states[place.name] = ServiceState(place, Restarts(self.restarts), unproven=True)
        ready = all(map(self._served, awaited_first(self.services)))
        return self._start([place.name], now_s) if ready else []

    def leave(self, name: str, limit_s: float, now_s: float) -> list[Action]:
        """Let a service end by itself within `limit_s`, then terminate it, then kill it. A service that is
        not ready has nothing to finish."""
        state = self.states[name]
        state.leaving = True
        if not state.alive:
            state.phase = Phase.ENDED
            return []
        state.leave_by_s = now_s + (limit_s if state.phase is Phase.SERVING else 0.0)
        return self._advance_leaving(now_s)

    def forget(self, name: str) -> None:
        """Take out a service that is gone."""
        del self.states[name]

    def interrupt(self, now_s: float) -> list[Action]:
        """Stop the run. A second call during the stop kills the remaining processes at once."""
        if self.stopping:
            return [Action("kill", name) for name in self.alive()]
        return self._stop(Ending("interrupted"), now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Return the actions that are due by the clock."""
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
        """Return the start of the time within which it must serve: its start or, for a service that needs
        weights, the last start of the trainer if that is later."""
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
        # The others cannot come up without the buffer: to start them now would only cost them a death.
        has_room = state.place.name in first or all(map(self._served, first))
        whole = not any(other.alive for other in self._group(state))
        return has_room and whole

    def _group(self, state: ServiceState) -> list[ServiceState]:
        """Return the services that live and die with this one, itself included: the ranks of a trainer."""
        if state.place.role != "trainer":
            return [state]
        return [other for other in self._trainers() if other.place.policy == state.place.policy]

    def _trainers(self) -> list[ServiceState]:
        return [state for state in self.states.values() if state.place.role == "trainer"]

    def _died(self, state: ServiceState, lived_s: float, now_s: float, cause: str) -> list[Action]:
        """Restart the service and its group later, or end the run."""
        name, status, group = state.place.name, state.status, self._group(state)
        served = [other.served_s for other in group if other.served_s is not None]
        served_s = max(served) if len(served) == len(group) else None
        pause_s = state.restarts.died(now_s, served_s=served_s, status=status)
        if pause_s is None and state.unproven:
            state.leaving = True
            return []
        if pause_s is None or (state.place.role == "evaluator" and self._last_one_deadline_s is not None):
            # A restarted evaluator would ask a trainer that is gone for the final snapshot.
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
            # It may publish its last versions again, as another epoch: an evaluator that was done is not.
            for other in self.states.values():
                if other.place.role == "evaluator" and other.phase is Phase.ENDED:
                    other.phase, other.restart_s = Phase.RESTARTING, state.restart_s
        return actions

    def _advance_leaving(self, now_s: float) -> list[Action]:
        """Terminate services whose time to leave by themselves is over, then kill the remaining ones."""
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
        """End the current stage when it is empty, kill its remaining services at its deadline, go on."""
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
