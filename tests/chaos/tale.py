"""Hand-made histories: a true one, and what a test changes in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tests.chaos.fold import Event
from tests.chaos.history import Verdict, check
from tests.chaos.material import Promise

STEPS = 3
GROUP_SIZE = 2


class Tale:
    """Events in the order in which they are told. A job of 3 steps, each of one group of two; η is 1; a
    checkpoint after each step; task `t<position>`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.pids = {"buffer": 1, "trainer": 2, "rollout-0": 3}
        self.front_epoch = 1
        self.revision = 0
        self.epoch = 0
        self.v_train = 0
        self.checkpoint = 0
        self.position = 0
        self.groups: dict[str, list[Any]] = {}
        self.leases: dict[str, str] = {}

    def tell(self, process: str, event: str, **fields: Any) -> Event:
        time_s = float(len(self.events))
        head = {"event": event, "process": process, "pid": self.pids[process], "time_s": time_s}
        self.events.append(head | {"mono_s": time_s} | fields)
        return self.events[-1]

    # --- buffer ---

    def _place(self) -> dict[str, int]:
        return {
            "trainer_epoch": self.epoch,
            "v_train": self.v_train,
            "checkpoint": self.checkpoint,
            "position": self.position,
        }

    def loaded(self, *, lost_writes: int = 0, **changes: Any) -> None:
        groups = {id_: [state, step, sorted(stored)] for id_, (state, step, stored) in self.groups.items()}
        fields = {"front_epoch": self.front_epoch, "revision": self.revision, "lost_writes": lost_writes}
        self.tell("buffer", "loaded", **fields, idle_ms=0, **self._place() | {"groups": groups} | changes)

    def decided(self, command: str, *, confirmed: bool = True, moved: Any = None, **fields: Any) -> None:
        for group_id, (_, becomes, step) in (moved or {}).items():
            if becomes:
                stored = self.groups[group_id][2] if group_id in self.groups else set()
                self.groups[group_id] = [becomes, step, stored]
            else:
                self.groups.pop(group_id, None)
        for episode_id, *_ in fields.get("stored", ()):
            group_id, _, sample = episode_id.rpartition(".")
            self.groups[group_id][2].add(int(sample))
        event = {"front_epoch": self.front_epoch, "revision": self.revision, "command": command}
        self.tell(
            "buffer", "decided", **event, **self._place(), **fields, **({"moved": moved} if moved else {})
        )
        self.revision += 1
        if confirmed:
            self.confirmed()

    def confirmed(self) -> None:
        self.tell("buffer", "confirmed", front_epoch=self.front_epoch, revision=self.revision)

    def new_front(self, **changes: Any) -> None:
        self.front_epoch += 1
        self.pids["buffer"] += 100
        self.loaded(**changes)

    # --- what happens to one group ---

    def leased(self, task: str, attempt: int = 0) -> str:
        group_id = f"{task}#{attempt}"
        self.position += attempt == 0
        self.decided("Lease", moved={group_id: ["", "LEASED", -1]})
        self.leases[group_id] = f"lease-{len(self.leases)}"
        lease = {"lease_id": self.leases[group_id], "group_id": group_id}
        self.tell("rollout-0", "leased", **lease, missing=[0, 1], epoch=self.epoch, version=self.v_train)
        return group_id

    def put(self, group_id: str, tag: tuple[int, int], *, early: bool = False, store: bool = True) -> None:
        samples = list(range(GROUP_SIZE))
        lease = {"lease_id": self.leases[group_id], "group_id": group_id}
        self.tell("rollout-0", "put", **lease, samples=samples)
        epoch, version = tag
        stored = [[f"{group_id}.{sample}", epoch, version, version] for sample in samples]
        if store:
            moved = {group_id: ["LEASED", "GENERATED", -1]}
            self.decided("StoreEpisodes", confirmed=not early, moved=moved, stored=stored)
        self.tell("rollout-0", "put_acked", **lease, stored=samples, refused=[], durability="always")
        if store:
            if early:
                self.confirmed()
            self.decided("PutVerdicts", moved={group_id: ["GENERATED", "SCORED", -1]})

    def served(self, version: int, *, replica: int = 0) -> None:
        self.tell("rollout-0", "served", replica=replica, epoch=self.epoch, version=version)

    # --- trainer ---

    def opened(self, step: int, *, moved: Any = None, **fields: Any) -> None:
        self.epoch += 1
        self.pids["trainer"] += 10
        if step:
            self.tell("trainer", "restored", step=step, folder="")
        self.v_train = step
        self.decided("OpenedWith", moved=moved, **fields)
        self.tell("trainer", "opened", epoch=self.epoch, step=step)

    def published(self, version: int, same_as: Iterable[int] = ()) -> None:
        fields = {"manifest_hash": "", "final": version == STEPS, "same_as": list(same_as)}
        self.tell("trainer", "published", epoch=self.epoch, version=version, **fields)

    def batched(self, step: int, group_id: str, version: int, **changes: Any) -> None:
        if self.groups[group_id][0] == "SCORED":
            moved = {group_id: ["SCORED", "BATCHED", step]}
            self.decided("NextBatch", moved=moved, batches={str(step): [group_id]})
        else:
            self.decided("NextBatch", batches={str(step): [group_id]})
        episodes = [[f"{group_id}.{sample}", version] for sample in range(GROUP_SIZE)]
        fields = {"epoch": self.epoch, "step": step, "groups": [group_id], "episodes": episodes}
        self.tell("trainer", "batched", **fields | changes)

    def trained(self, step: int, group_id: str, same_as: Iterable[int] = ()) -> None:
        """Trained, published and committed."""
        self.tell("trainer", "trained", epoch=self.epoch, step=step)
        self.published(step + 1, same_as)
        self.v_train = step + 1
        self.decided("Commit", moved={group_id: ["BATCHED", "TRAINED", step]})

    def saved(self, step: int, group_id: str, *, told_first: bool = False) -> None:
        if not told_first:
            self.tell("trainer", "saved", epoch=self.epoch, step=step)
        self.checkpoint = step
        moved = {group_id: ["TRAINED", "", step - 1]}
        self.decided("Checkpointed", moved=moved, counts={"committed": 1})
        if told_first:
            self.tell("trainer", "saved", epoch=self.epoch, step=step)

    def step(self, step: int, group_id: str, version: int, *, same_as: Iterable[int] = ()) -> None:
        self.batched(step, group_id, version)
        self.trained(step, group_id, same_as)
        self.saved(step + 1, group_id)

    def finished(self) -> None:
        self.tell("trainer", "finished", epoch=self.epoch, step=STEPS)

    def ended(self, group_id: str, version: int = 2, *, same_as: Iterable[int] = ()) -> Tale:
        """Its last step, and its end."""
        self.step(STEPS - 1, group_id, version, same_as=same_as)
        self.finished()
        return self

    # --- the verdict ---

    def verdict(self, **changes: Any) -> Verdict:
        promise = Promise(STEPS, 1, GROUP_SIZE, max_staleness=1, task_at=lambda position: f"t{position}")
        return check(self.events, replace(promise, **changes))

    def broken(self, **changes: Any) -> set[str]:
        """The promises that it breaks."""
        return self.verdict(**changes).kinds()


def begun() -> Tale:
    """A job whose trainer has opened and published version 0, and whose worker serves it."""
    tale = Tale()
    tale.loaded()
    tale.opened(0)
    tale.published(0)
    tale.served(0)
    return tale


def two_steps() -> Tale:
    tale = begun()
    for step in range(2):
        group_id = tale.leased(f"t{step}")
        tale.put(group_id, (1, step))
        tale.step(step, group_id, step)
        tale.served(step + 1)
    return tale


def third_stored(tag: tuple[int, int] = (1, 2), *, early: bool = False) -> tuple[Tale, str]:
    """Two steps, and the group that was stored for the third."""
    tale = two_steps()
    group_id = tale.leased("t2")
    tale.put(group_id, tag, early=early)
    return tale, group_id


def true_tale() -> Tale:
    tale, group_id = third_stored()
    return tale.ended(group_id)
