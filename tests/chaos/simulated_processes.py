"""The processes of a simulated job: each follows the protocol of its service and keeps nothing when it dies.

What outlives them is the world's: the checkpoints, the states in memory, and the list of what was published.
The buffer is in `simulated_buffer.py`.
"""

from __future__ import annotations

import copy
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal_async.base.verdicts import Failure, Score
from areal_async.base.versions import VersionTag
from areal_async.rpc.messages import (
    Arrived,
    Batch,
    Checkpointed,
    Claim,
    Claims,
    Commit,
    EpisodeVerdict,
    ExportLedger,
    Heartbeat,
    HeartbeatAck,
    Lease,
    LeasedGroup,
    Leases,
    NextBatch,
    PutAck,
    PutVerdicts,
    TrainerOpened,
    VerdictAck,
    Waiting,
)
from areal_async.rpc.schema import Fault
from replay_buffer.ledger.leasing import Arrival, GroupArrivals, StoreEpisodes
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import Versions

if TYPE_CHECKING:
    from tests.chaos.simulated import World

WAIT_MS = 2000  # Longest that the buffer holds a request for which there is nothing
BUFFER = "buffer"
SCORER = "reward"
CLAIM_EPISODES = 4
SHARE_OF_LEASE = 3  # So many heartbeats come within the life of a lease
PUBLISH_MS, RECORD_MS, SAVE_MS, LOAD_MS = 8, 3, 20, 6

Weights = tuple[int, ...]
"""Weights by what made them: a number for each step, so versions of a lineage are prefixes of each other."""


@dataclass(frozen=True)
class Sampled:
    """Weights under which a unit was sampled, and the version as which they were served."""

    tag: VersionTag
    weights: Weights


@dataclass(frozen=True)
class Saved:
    """The state of a trainer after `step` steps. `ledger` is None for a state in memory."""

    step: int
    epoch: int
    weights: Weights
    trained: tuple[tuple[str, ...], ...]
    ledger: bytes | None


class Process:
    """One process by its name, through all its lives. Attributes are immutable, or containers of what is."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.life = 0
        self.alive = False
        self.calls: dict[int, tuple[str, Any, str, tuple[Any, ...]]] = {}
        """Requests without a reply: to whom, what, and what to do with the reply."""
        self.call_number = 0
        self.forget()

    def forget(self) -> None:
        """Be as a process is that begins."""

    def copy(self, world: World) -> Process:
        new = copy.copy(self)
        new.world = world
        for name, value in vars(self).items():
            if type(value) in (dict, list, set):
                setattr(new, name, value.copy())
        return new

    def start(self) -> None:
        self.life += 1
        self.alive = True

    def die(self) -> None:
        self.alive = False
        self.calls.clear()
        self.forget()

    def begin(self) -> None:
        """The process has loaded."""
        raise NotImplementedError

    # --- the network ---

    def later(self, ms: int, method: str, *args: Any) -> None:
        self.world.after(ms, self.name, self.life, method, *args)

    def call(self, target: str, request: Any, then: str, *args: Any) -> None:
        """Send a request; `then(reply, *args)` is called with the reply."""
        self.call_number += 1
        self.calls[self.call_number] = target, request, then, args
        self.world.request(target, self.name, self.life, self.call_number, request)

    def ask_again(self, target: str) -> None:
        """`target` is back: send it again what it did not answer."""
        for number, (to, request, _, _) in self.calls.items():
            if to == target:
                self.world.request(to, self.name, self.life, number, request)

    def replied(self, number: int, reply: Any, sender: str, life: int) -> None:
        if number in self.calls and self.world.serves(sender, life):
            _, _, then, args = self.calls.pop(number)
            getattr(self, then)(reply, *args)

    def ignored(self, reply: Any) -> None:
        """Take a reply that says nothing."""


# --- workers ---


class Worker(Process):
    """Serves the newest weights of each policy, leases groups and puts their episodes."""

    def forget(self) -> None:
        self.serving: dict[str, Sampled] = {}
        self.leases: dict[str, LeasedGroup] = {}
        self.left: dict[str, frozenset[int]] = {}
        """Lease → samples that are not acknowledged."""
        self.begun: dict[tuple[str, int], tuple[Sampled, ...]] = {}
        """(lease, sample) that runs → the weights that it began under."""
        self.finished: dict[tuple[str, int], tuple[Sampled, ...]] = {}
        """(lease, sample) that is to be sent → the weights that it was sampled from."""
        self.asked: set[tuple[VersionTag, ...]] = set()

    def begin(self) -> None:
        self.call(BUFFER, Arrived(self.name), "arrived")

    def arrived(self, reply: Any) -> None:
        for policy in self.world.setting.policies:
            self.fetch(policy)

    def fetch(self, policy: str) -> None:
        """Ask for weights newer than those that are served."""
        newest = self.serving.get(policy)
        after = newest.tag if newest is not None else None
        self.call(trainer_of(self.world, policy), after, "offered", policy)

    def offered(self, offered: Sampled, policy: str) -> None:
        self.later(LOAD_MS, "load", policy, offered)

    def load(self, policy: str, offered: Sampled) -> None:
        first = len(self.serving) < len(self.world.setting.policies)
        self.serving[policy] = offered
        self.fetch(policy)
        if len(self.serving) < len(self.world.setting.policies):
            return
        if first:
            self.world.ready(self.name)
            self.later(self.world.rules.lease_ms // SHARE_OF_LEASE, "beat")
        else:
            self.call(BUFFER, Heartbeat(self.name, list(self.leases)), "heard")
        self.lease()

    def beat(self) -> None:
        if self.leases:
            self.call(BUFFER, Heartbeat(self.name, list(self.leases)), "heard")
        self.later(self.world.rules.lease_ms // SHARE_OF_LEASE, "beat")

    def heard(self, ack: HeartbeatAck) -> None:
        for lease_id in ack.lost:
            if any(lease_id == begun for begun, _ in self.begun):
                self.lose(lease_id)

    def lose(self, lease_id: str) -> None:
        self.leases.pop(lease_id, None)
        self.left.pop(lease_id, None)
        for table in (self.begun, self.finished):
            for key in [key for key in table if key[0] == lease_id]:
                del table[key]
        self.lease()

    def lease(self) -> None:
        wanted = self.world.setting.capacity - len(self.leases)
        tags = tuple(each.tag for each in self.serving.values())
        if wanted > 0 and tags not in self.asked:
            self.asked.add(tags)
            self.call(BUFFER, Lease(self.name, wanted, list(tags)), "granted", tags)

    def granted(self, reply: Leases, tags: tuple[VersionTag, ...]) -> None:
        self.asked.discard(tags)
        for group in reply.groups:
            self.leases[group.lease_id] = group
            self.left[group.lease_id] = frozenset(group.missing)
            row = int(group.group_id.split(":")[1])
            for sample in group.missing:
                self.begun[group.lease_id, sample] = tuple(self.serving.values())
                slow = row % 5 == 4 and not group.attempt
                ms = self.world.setting.slow_ms if slow else 12 + 7 * ((row + 2 * sample) % 4)
                self.later(ms + 5 * sample, "finish", group.lease_id, sample)
        self.lease()

    def finish(self, lease_id: str, sample: int) -> None:
        """An episode is done: it has units of the weights that it began under, and of those served now."""
        began = self.begun.pop((lease_id, sample), None)
        if began is None:
            return
        self.finished[lease_id, sample] = tuple(dict.fromkeys((*began, *self.serving.values())))
        group = self.leases[lease_id]
        together = int(group.group_id.split(":")[1]) % 2
        if not together or not any(begun == lease_id for begun, _ in self.begun):
            self.put(group)

    def put(self, group: LeasedGroup) -> None:
        arrivals = []
        for key in [key for key in self.finished if key[0] == group.lease_id]:
            sampled = self.finished.pop(key)
            self.world.judge.produced(group.lease_id, key[1], sampled)
            arrivals.append(Arrival(key[1], 10, 4, 2, versions_of(sampled)))
        command = StoreEpisodes((GroupArrivals(group.lease_id, group.group_id, tuple(arrivals)),))
        self.call(BUFFER, command, "acknowledged", group)

    def acknowledged(self, ack: PutAck, group: LeasedGroup) -> None:
        (answer,) = ack.groups
        self.world.judge.acknowledged(group.group_id, answer.stored)
        left = self.left.get(group.lease_id)
        if left is None:
            return
        if answer.refused:
            self.lose(group.lease_id)
            return
        self.left[group.lease_id] = left.difference(answer.stored)
        if not self.left[group.lease_id]:
            self.lose(group.lease_id)


def versions_of(sampled: tuple[Sampled, ...]) -> dict[str, Versions]:
    """The versions of an episode by policy, as they are read from its bytes."""
    versions = {}
    for policy in {each.tag.policy for each in sampled}:
        tags = [each.tag for each in sampled if each.tag.policy == policy]
        numbers = [tag.version for tag in tags]
        versions[policy] = Versions(min(numbers), max(numbers), min(tag.epoch for tag in tags))
    return versions


def trainer_of(world: World, policy: str) -> str:
    return "trainer" if len(world.setting.policies) == 1 else f"trainer-{policy}"


# --- the reward service ---


class Reward(Process):
    """Claims episodes and gives each a verdict: first a failure for every seventh, then a score."""

    def forget(self) -> None:
        self.held: dict[str, tuple[Any, ...]] = {}
        """Claim → its items."""

    def begin(self) -> None:
        self.call(BUFFER, Arrived(self.name), "arrived")

    def arrived(self, reply: Any) -> None:
        self.world.ready(self.name)
        self.claim()

    def claim(self) -> None:
        self.call(BUFFER, Claim(self.name, CLAIM_EPISODES, 0, list(self.held)), "claimed")

    def claimed(self, reply: Claims) -> None:
        by_claim: dict[str, list[Any]] = {}
        for item in reply.items:
            by_claim.setdefault(item.claim_id, []).append(item)
        for number, (claim_id, items) in enumerate(by_claim.items()):
            self.held[claim_id] = tuple(items)
            self.later(self.world.setting.reward_ms + 2 * number, "judge", claim_id)
        if sum(map(len, self.held.values())) < 2 * CLAIM_EPISODES:
            self.claim()
        else:
            self.later(self.world.setting.reward_ms, "claimed", Claims([]))

    def judge(self, claim_id: str) -> None:
        verdicts = []
        for item in self.held[claim_id]:
            drawn = zlib.crc32(item.episode_id.encode())
            fails = drawn % 7 == 0 and not item.tries
            # Another call gives another score: a verdict that is not final is seen by its value.
            value = float(self.world.judge.next_score())
            verdict = Failure("test", "the first try fails") if fails else Score(value, {})
            verdicts.append(EpisodeVerdict(item.episode_id, claim_id, verdict))
        self.call(BUFFER, PutVerdicts(self.name, verdicts), "taken", claim_id, tuple(verdicts))

    def taken(self, ack: VerdictAck, claim_id: str, verdicts: tuple[EpisodeVerdict, ...]) -> None:
        self.held.pop(claim_id, None)
        self.world.judge.judged(verdicts, {refusal.item for refusal in ack.refused})


# --- the trainer ---


class Trainer(Process):
    """Trains step after step; publishes, commits and saves beside the next."""

    policy = ""

    def forget(self) -> None:
        self.epoch = self.next_step = 0
        self.weights: Weights = (0,)
        self.trained: tuple[tuple[str, ...], ...] = ()
        self.same_as: tuple[int, ...] = ()
        self.newest: Sampled | None = None
        self.asked: list[tuple[str, int, int, VersionTag | None]] = []
        self.has_trained = False  # The step of the newest weights is not published yet
        self.finishing = False
        self.writing = False

    def begin(self) -> None:
        left, restored = self.world.memory.get(self.policy), self.world.disk.get(self.policy)
        if left is not None and (restored is None or left.step > restored.step):
            self.open(left)
        else:
            self.open(restored)

    def open(self, saved: Saved | None) -> None:
        last_epoch = max((epoch for epoch, _ in self.world.published[self.policy]), default=0)
        step = saved.step if saved is not None else 0
        in_memory = saved.epoch if saved is not None and saved.ledger is None else 0
        ledger = saved.ledger if saved is not None else None
        request = OpenedWith(self.policy, self.name, step, ledger, last_epoch, in_memory)
        self.call(BUFFER, request, "opened", saved)

    def opened(self, reply: Any, saved: Saved | None) -> None:
        if isinstance(reply, Fault) and saved is not None and saved.ledger is None:
            self.world.memory.pop(self.policy)
            self.open(self.world.disk.get(self.policy))
            return
        if not isinstance(reply, TrainerOpened):
            self.world.judge.fails(f"a trainer that comes back is refused: {reply}")
        self.epoch = reply.epoch
        if saved is None or saved.ledger is not None:
            self.world.memory.pop(self.policy, None)
        if saved is not None:
            self.weights, self.trained = saved.weights, saved.trained
        self.next_step = len(self.weights) - 1
        self.finishing = True
        self.later(PUBLISH_MS, "announce", self.next_step, False)

    # --- steps ---

    @property
    def steps(self) -> int:
        return self.world.setting.steps

    def ask(self) -> None:
        if self.next_step < self.steps:
            self.call(BUFFER, NextBatch(self.policy, self.epoch, self.next_step), "given")

    def given(self, reply: Any) -> None:
        if isinstance(reply, Waiting):
            self.ask()
            return
        if not isinstance(reply, Batch):
            self.world.judge.fails(f"the only trainer of a policy is refused: {reply}")
        self.world.judge.batch(self.world, self, reply)
        self.later(self.world.setting.train_ms, "train", reply)

    def train(self, batch: Batch) -> None:
        ids = tuple(group.group_id for group in batch.groups)
        salt = 0 if self.world.setting.same_again else self.epoch
        made = zlib.crc32(f"{self.policy}{self.weights}{ids}{salt}".encode())
        self.weights, self.trained = (*self.weights, made), (*self.trained, ids)
        self.has_trained = True
        self.go_on()

    def go_on(self) -> None:
        """Publish what is trained once the publication before is finished, and begin the next step."""
        version = len(self.weights) - 1
        if not self.finishing and self.has_trained and not (self.writing and self.due(version)):
            self.has_trained, self.finishing = False, True
            self.later(PUBLISH_MS, "announce", version, True)
            self.writing = self.writing or bool(self.due(version))
            self.next_step = version
            self.ask()
        elif not (self.finishing or self.writing or self.has_trained) and version == self.steps:
            self.world.ended(self.policy)

    def due(self, version: int) -> str:
        """Return the place of the state of `version`."""
        if version == self.steps or version % self.world.setting.disk_every == 0:
            return "disk"
        return "memory" if self.world.setting.memory else ""

    # --- publication ---

    def announce(self, version: int, trained: bool) -> None:
        """The snapshot is complete: workers are told of it before it is written down."""
        self.newest = Sampled(VersionTag(self.policy, self.epoch, version), self.weights[: version + 1])
        for asked in self.asked.copy():
            self.offer(asked)
        self.later(RECORD_MS, "record", version, trained)

    def requested(self, client: str, life: int, call: int, after: VersionTag | None) -> None:
        self.asked.append(asked := (client, life, call, after))
        self.offer(asked)

    def offer(self, asked: tuple[str, int, int, VersionTag | None]) -> None:
        client, life, call, after = asked
        if self.newest is not None and (after is None or after < self.newest.tag):
            self.asked.remove(asked)
            self.world.reply(self, client, life, call, self.newest)

    def record(self, version: int, trained: bool) -> None:
        weights, known = self.weights[: version + 1], self.world.published[self.policy]
        self.same_as = tuple(dict.fromkeys(e for e, held in known if held == weights and e != self.epoch))
        self.world.published[self.policy] = (*known, (self.epoch, weights))
        if trained:
            commit = Commit(self.policy, self.epoch, version - 1, list(self.same_as))
            self.call(BUFFER, commit, "committed", version)
            return
        self.finishing = False
        self.world.ready(self.name)
        self.ask()
        self.go_on()

    def committed(self, reply: Any, version: int) -> None:
        if isinstance(reply, Fault):
            self.world.judge.fails(f"the commit of the only trainer is refused: {reply}")
        if self.due(version) == "disk":
            self.call(BUFFER, ExportLedger(self.policy, self.epoch, version), "exported", version)
            return
        if self.due(version):
            self.later(SAVE_MS, "save", version, None)
        self.finish()

    def finish(self) -> None:
        self.finishing = False
        self.go_on()

    def exported(self, ledger: Any, version: int) -> None:
        if not isinstance(ledger, bytes):
            self.world.judge.fails(f"the ledger is not exported: {ledger}")
        self.later(SAVE_MS, "save", version, ledger)
        self.finish()

    def save(self, version: int, ledger: bytes | None) -> None:
        """The checkpoint has its name."""
        kept = self.world.memory if ledger is None else self.world.disk
        weights = self.weights[: version + 1]
        kept[self.policy] = Saved(version, self.epoch, weights, self.trained[:version], ledger)
        if ledger is None:
            self.writing = False
            self.go_on()
        else:
            self.call(BUFFER, Checkpointed(self.policy, self.epoch, version), "covered", version)

    def covered(self, reply: Any, version: int) -> None:
        known = self.world.published[self.policy]
        self.world.published[self.policy] = tuple(each for each in known if len(each[1]) > version)
        self.writing = False
        self.go_on()
