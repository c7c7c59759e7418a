"""A job on a simulated clock, each of whose processes may be killed at any message.

Real: every decision of the ledger with the writes that it asks for, the edges that wake who waits, and the
supervisor's `Lifecycle`. Simulated: time, the network, and the processes (`simulated_processes.py`), which
follow the protocol of the services and compute nothing. `simulated_judge.py` checks the promises of safety;
`World.run` checks that the job gets on. Redis keeps all that was written.

A message is a request or a reply. A process that dies before its request is delivered has sent it all the
same; what it does not live to receive is lost. The replies of a dead process are lost with it, and whoever
waits for one asks again once the process is back.

A world can be copied in the middle of its run, so kill sequences with the same beginning share its cost.
"""

from __future__ import annotations

import copy
import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from areal_async.base.processes import RestartPolicy
from areal_async.base.topology import Role, ServicePlace
from areal_async.launch.lifecycle import Action, Lifecycle, Phase
from replay_buffer.ledger.batching import batch_wait, lease_wait
from replay_buffer.ledger.rules import ConsumerRules, Rules
from tests.chaos.simulated_buffer import Buffer
from tests.chaos.simulated_judge import Judge
from tests.chaos.simulated_processes import Process, Reward, Saved, Trainer, Weights, Worker

LATENCY_MS = 1
NOTICED_MS = 5
"""Time after which the supervisor knows of a death."""
RESUMED_MS = 200
"""Time after which a supervisor that was killed has a successor."""
START_MS: Mapping[str, int] = {"buffer": 60, "reward": 50, "rollout": 90, "trainer": 120}
PATIENCE_MS = 15_000
"""Most time that the whole job, and then each death, may cost a job that needs a second."""
PATIENCE_MESSAGES = 1500
MOST_DEADLINES = 1000
RESTARTS = RestartPolicy(limit=1000, first_pause_s=0.02, longest_pause_s=0.2)
SUPERVISOR = "supervisor"
STOP = "stop "
"""Prefix of a role in a kill sequence that stands still for `STOPPED_MS` and lives on."""
STOPPED_MS = 1500


@dataclass(frozen=True)
class Setting:
    """A job, and how fast its parts are. Times in simulated milliseconds."""

    name: str
    eta: int = 1
    steps: int = 4
    batch_groups: int = 1
    group_size: int = 2
    policies: tuple[str, ...] = ("policy",)
    workers: int = 2
    capacity: int = 3
    """Groups that a worker works on at once."""
    reward_ms: int = 10
    train_ms: int = 30
    slow_ms: int = 400
    """Time that every fifth task takes a worker."""
    disk_every: int = 2
    memory: bool = True
    """The trainer leaves its state in memory after the steps that are not on disk."""
    same_again: bool = True
    """A step done again makes the same weights."""
    rules: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def made(self) -> Rules:
        """The rules of its ledger."""
        own = ConsumerRules(self.batch_groups, self.eta, self.steps)
        fixed = {"lease_ms": 600, "claim_ms": 600, "call_ms": 100, "overtaken_ms": 900}
        consumers = dict.fromkeys(self.policies, own)
        return Rules(group_size=self.group_size, consumers=consumers, **{**fixed, **self.rules})

    def trainers(self) -> list[str]:
        return ["trainer"] if len(self.policies) == 1 else [f"trainer-{name}" for name in self.policies]

    def places(self) -> list[ServicePlace]:
        """The processes of the job, as the supervisor starts them."""
        roles: list[tuple[str, Role, str]] = [("buffer", "buffer", ""), ("reward", "reward", "")]
        roles += [(f"rollout-{number}", "rollout", "") for number in range(self.workers)]
        several = len(self.policies) > 1
        for name, policy in zip(self.trainers(), self.policies, strict=True):
            roles.append((name, "trainer", policy if several else ""))
        return [ServicePlace(name, role, 0, role, 0, policy=policy) for name, role, policy in roles]

    def roles(self) -> list[str]:
        """All that can be killed."""
        return [*(place.name for place in self.places()), SUPERVISOR]


Kill = tuple[int, str]
"""(number of messages delivered before, role)"""


class Stalled(AssertionError):
    """Training did not get on in time."""


class World:
    """The job of a `Setting`. `step` lets the next thing happen; `kill` ends a process at once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rules = setting.made()
        self.now_ms = 1_000
        self.messages = 0
        self.kills: tuple[Kill, ...] = ()
        self.redone = 0  # Steps trained again after a checkpoint
        self.finished: frozenset[str] = frozenset()
        self.disk: dict[str, Saved] = {}
        self.memory: dict[str, Saved] = {}
        self.published: dict[str, tuple[tuple[int, Weights], ...]] = dict.fromkeys(setting.policies, ())
        self.stopped_until_ms: dict[str, int] = {}
        self.judge = Judge(setting)
        self._events: list[tuple[int, int, str, int, str, tuple[Any, ...]]] = []
        self._serial = 0
        self._deadlines = 0  # Deadlines in a row, without another event
        self._lifecycle = self._new_lifecycle()
        self.processes: dict[str, Process] = {place.name: self._made(place) for place in setting.places()}
        self._act(self._lifecycle.begin(self._now_s))

    # --- running ---

    @property
    def done(self) -> bool:
        return len(self.finished) == len(self.setting.policies)

    def step(self) -> None:
        """Let the next event happen. Raises `Broken`, `Stalled`."""
        if not self._events:
            raise Stalled(f"nobody does anything any more: {self.starving()}")
        at_ms, serial, name, life, method, args = self._events[0]
        buffer = self.processes["buffer"]
        assert isinstance(buffer, Buffer)
        if (due_ms := buffer.due_ms) is not None and due_ms <= at_ms:
            self.now_ms = max(self.now_ms, due_ms)
            self._deadlines += 1
            if self._deadlines > MOST_DEADLINES:
                raise Stalled("what is due never ends")
            buffer.deadline()
            return
        self._deadlines = 0
        heapq.heappop(self._events)
        self.now_ms = at_ms
        if name == SUPERVISOR:
            if life == self._life:
                self._supervise(method, args)
            return
        if self.stopped_until_ms and self.stopped_until_ms.get(name, 0) > at_ms:
            again = (self.stopped_until_ms[name], serial, name, life, method, args)
            heapq.heappush(self._events, again)
            return
        process = self.processes[name]
        if method in MESSAGES:
            self.messages += 1
        if process.alive and life in (process.life, ANY):
            getattr(process, method)(*args)

    def go_on_for(self, messages: int) -> None:
        """Let so many more messages be delivered, and all else that comes before the next."""
        until = self.messages + messages
        while not self.done and not (self.messages >= until and self.message_is_next):
            self.guarded_step()

    def guarded_step(self) -> None:
        """`step`, whose errors name the kills that led to them."""
        try:
            self.step()
        except AssertionError as error:
            raise type(error)(f"{self.told()}: {error}") from error

    @property
    def message_is_next(self) -> bool:
        """Whether the next event is the delivery of a message."""
        return bool(self._events) and self._events[0][4] in MESSAGES

    def run(self) -> World:
        """Run to the end of the job. Raises `Broken`, and `Stalled` when it does not come in time."""
        patience = 1 + len(self.kills)
        until_ms, most = self.now_ms + PATIENCE_MS * patience, self.messages + PATIENCE_MESSAGES * patience
        while not self.done:
            if self.now_ms > until_ms or self.messages > most:
                raise Stalled(f"{self.told()}: {self.starving()}")
            self.guarded_step()
        self.judge.end(self)
        return self

    def told(self) -> str:
        """The setting and the kills: `replay` repeats them."""
        return f"{self.setting.name} at {self.now_ms} ms, {self.messages} messages, kills {list(self.kills)}"

    def starving(self) -> str:
        """The edge that lacks, in the words of the ledger."""
        buffer = self.processes["buffer"]
        index = buffer.index if isinstance(buffer, Buffer) else None
        if index is None:
            return "the buffer does not serve"
        waits = [f"{policy}: {batch_wait(index, policy)}" for policy in self.setting.policies]
        return f"{'; '.join(waits)}; workers: {lease_wait(index) or 'may lease'}"

    # --- messages ---

    def after(self, ms: int, name: str, life: int, method: str, *args: Any) -> None:
        """Have `method` of a process called in `ms`, if it still lives then."""
        self._serial += 1
        heapq.heappush(self._events, (self.now_ms + ms, self._serial, name, life, method, args))

    def request(self, target: str, *args: Any) -> None:
        self.after(LATENCY_MS, target, ANY, "requested", *args)

    def reply(self, sender: Process, client: str, life: int, call: int, reply: Any) -> None:
        self.after(LATENCY_MS, client, life, "replied", call, reply, sender.name, sender.life)

    def serves(self, sender: str, life: int) -> bool:
        """Whether the process that sent a reply lives: what it had not handed over dies with it."""
        process = self.processes[sender]
        return process.alive and process.life == life

    def ready(self, name: str) -> None:
        """A process serves: the supervisor hears of it, and who waited for it asks again."""
        self.after(LATENCY_MS, SUPERVISOR, self._life, "ready", name)
        for process in self.processes.values():
            if process.alive:
                process.ask_again(name)

    def ended(self, policy: str) -> None:
        """The trainer of a policy has trained its last step, and all of it is on disk."""
        self.finished |= {policy}

    # --- deaths ---

    def kill(self, role: str) -> None:
        """Kill a process, or the supervisor and with it all of them; or have one stand still."""
        self.kills += ((self.messages, role),)
        if role.startswith(STOP):
            self.stopped_until_ms[role.removeprefix(STOP)] = self.now_ms + STOPPED_MS
            return
        if role != SUPERVISOR:
            self._die(role)
            return
        for name in self.processes:
            self._die(name)
        self.memory.clear()
        self._life += 1
        self.after(RESUMED_MS, SUPERVISOR, self._life, "begin")

    def can_kill(self, role: str) -> bool:
        name = role.removeprefix(STOP)
        return name == SUPERVISOR or self.processes[name].alive

    def _die(self, name: str) -> None:
        process = self.processes[name]
        if process.alive:
            process.die()
            self.stopped_until_ms.pop(name, None)
            self.after(NOTICED_MS, SUPERVISOR, self._life, "exited", name)

    _life = 0

    def _new_lifecycle(self) -> Lifecycle:
        return Lifecycle(self.setting.places(), ready_limit_s=60.0, restarts=RESTARTS)

    @property
    def _now_s(self) -> float:
        return self.now_ms / 1000

    def _supervise(self, event: str, args: tuple[Any, ...]) -> None:
        lifecycle, now_s = self._lifecycle, self._now_s
        if event == "begin":
            self._lifecycle = lifecycle = self._new_lifecycle()
            self._act(lifecycle.begin(now_s))
        elif event == "ready" and self.processes[args[0]].alive:
            self._act(lifecycle.ready(args[0], now_s))
        elif event == "exited":
            self._act(lifecycle.exited(args[0], -9, now_s))
        self._act(lifecycle.tick(now_s))
        if lifecycle.ending is not None:
            raise Stalled(f"the supervisor ends the run: {lifecycle.ending}")
        for state in lifecycle.states.values():
            if event != "tick" and state.phase is Phase.RESTARTING and state.restart_s > now_s:
                self.after(round(1000 * (state.restart_s - now_s)) + 1, SUPERVISOR, self._life, "tick")

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if action.do == "kill":
                self._die(action.name)
            elif action.do == "start":
                process = self.processes[action.name]
                process.start()
                role = self._lifecycle.states[action.name].place.role
                self.after(START_MS[role], process.name, process.life, "begin")

    def _made(self, place: ServicePlace) -> Process:
        kinds = {"buffer": Buffer, "reward": Reward, "rollout": Worker, "trainer": Trainer}
        process = kinds[place.role](self, place.name)
        if isinstance(process, Trainer):
            process.policy = place.policy or self.setting.policies[0]
        return process

    # --- forks ---

    def copy(self) -> World:
        """The same world, which goes on by itself."""
        new = copy.copy(self)
        new._events = self._events.copy()
        new.disk, new.memory = self.disk.copy(), self.memory.copy()
        new.published, new.stopped_until_ms = self.published.copy(), self.stopped_until_ms.copy()
        new.judge = self.judge.copy()
        new._lifecycle = lifecycle = copy.copy(self._lifecycle)
        lifecycle.states = {name: copy.copy(state) for name, state in lifecycle.states.items()}
        for state in lifecycle.states.values():
            state.restarts = copy.copy(state.restarts)
        new.processes = {name: process.copy(new) for name, process in self.processes.items()}
        return new


def replay(setting: Setting, kills: Sequence[Kill] = ()) -> World:
    """Run a job and deliver `kills`, as `World.told` names them. Raises `Broken`, `Stalled`."""
    world = World(setting)
    for messages, role in kills:
        while not world.done and not (world.messages >= messages and world.message_is_next):
            world.step()
        if not world.done:
            world.kill(role)
    return world.run()


@dataclass
class Tally:
    """Totals over some kill sequences."""

    sequences: int = 0
    kills: int = 0
    messages: int = 0
    """Messages delivered after the kills."""
    redone: int = 0
    """Steps that were trained again."""
    longest_ms: int = 0
    """Most simulated time that a sequence added, for each of its kills."""
    most_messages: int = 0

    def count(self, world: World, *, since: int, base: World) -> None:
        deaths = len(world.kills)
        self.sequences += 1
        self.kills += deaths
        self.messages += world.messages - since
        self.redone += world.redone
        self.longest_ms = max(self.longest_ms, (world.now_ms - base.now_ms) // deaths)
        self.most_messages = max(self.most_messages, (world.messages - base.messages) // deaths)


def explore(
    setting: Setting, *, seed: int = 0, several: int = 0, every: int = 1, roles: Sequence[str] = ()
) -> Tally:
    """Kill each of `roles` (or of all) at every message (or every `every`-th) of a job and run each of these
    to its end; and at each of those messages begin `several` sequences of two to four kills, drawn from
    `seed`, in which processes may also stand still. Raises `Broken`, `Stalled`."""
    tally, rng, roles = Tally(), random.Random(seed), list(roles or setting.roles())
    base, world = World(setting).run(), World(setting)
    boundary = 0
    while not world.done:
        if world.message_is_next:
            boundary += 1
            alone = [[role] for role in roles if world.can_kill(role)] if boundary % every == 0 else []
            drawn = several if boundary % every == 0 else 0
            victims = [*roles, *(STOP + role for role in roles if role != SUPERVISOR)]
            more = [rng.choices(victims, k=rng.randint(2, 4)) for _ in range(drawn)]
            for kills in (*alone, *more):
                child = world.copy()
                since = child.messages
                for number, role in enumerate(kills):
                    if number:
                        child.go_on_for(rng.choice(GAPS))
                    if not child.done and child.can_kill(role):
                        child.kill(role)
                if child.kills:
                    tally.count(child.run(), since=since, base=base)
        world.step()
    return tally


ANY = -1
MESSAGES = frozenset({"requested", "replied"})
GAPS = (1, 1, 2, 3, 5, 8, 13, 21, 34, 55)
"""Messages between two kills of a sequence."""
