"""Which weights the final model came from: the trainer epochs of a run, and what each went on from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.chaos.fold import Event


@dataclass
class Batched:
    epoch: int
    step: int
    groups: list[str]
    versions: dict[str, int]
    """Episode → its oldest version."""
    mono_s: float


@dataclass
class Epoch:
    """One trainer: where it began, whose checkpoint that was, and what it did."""

    number: int
    start: int
    parent: int | None
    batched: list[Batched] = field(default_factory=list)
    trained: dict[int, Batched] = field(default_factory=dict)
    """Step → the batch that the optimizer used."""
    trained_s: dict[int, float] = field(default_factory=dict)
    published: dict[int, frozenset[int]] = field(default_factory=dict)
    """Version → the earlier epochs that had published it alike."""
    published_s: dict[int, float] = field(default_factory=dict)


@dataclass
class Trainers:
    epochs: dict[int, Epoch] = field(default_factory=dict)
    saved_s: dict[int, float] = field(default_factory=dict)
    """Steps → when a checkpoint after them was first known to be whole."""
    finished: int | None = None
    """The epoch that wrote the final model."""
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Trainers:
        trainers = cls()
        for event in events:
            trainers.take(event)
        return trainers

    def take(self, event: Event) -> None:
        match event["event"]:
            case "restored" | "saved":
                self.saved_s.setdefault(event["step"], event["mono_s"])
            case "opened":
                start, number = event["step"], event["epoch"]
                self.epochs[number] = Epoch(number, start, self._parent(start, number))
            case "batched":
                epoch = self.epochs[event["epoch"]]
                versions = dict(event["episodes"])
                epoch.batched.append(
                    Batched(epoch.number, event["step"], event["groups"], versions, event["mono_s"])
                )
            case "trained":
                epoch = self.epochs[event["epoch"]]
                if not epoch.batched or epoch.batched[-1].step != event["step"]:
                    self.problems.append(f"epoch {epoch.number} trained step {event['step']} without a batch")
                    return
                if event["step"] in epoch.trained:
                    self.problems.append(f"epoch {epoch.number} trained step {event['step']} twice")
                epoch.trained[event["step"]] = epoch.batched[-1]
                epoch.trained_s[event["step"]] = event["mono_s"]
            case "published":
                epoch = self.epochs[event["epoch"]]
                epoch.published[event["version"]] = frozenset(event["same_as"])
                epoch.published_s.setdefault(event["version"], event["mono_s"])
            case "finished":
                self.finished = event["epoch"]

    def _parent(self, start: int, number: int) -> int | None:
        """The newest epoch that trained the step before `start`: the checkpoint there is its work."""
        makers = [epoch for epoch, its in self.epochs.items() if start - 1 in its.trained and epoch < number]
        return max(makers, default=None)

    def owner(self, epoch: int, version: int) -> int | None:
        """The epoch that made `version` of the weights of `epoch`, itself or an ancestor."""
        current: int | None = epoch
        while current is not None and version <= self.epochs[current].start and version > 0:
            current = self.epochs[current].parent
        return current

    def is_true(self, epoch: int, sampled_epoch: int, version: int) -> bool:
        """Whether the weights of `epoch` descend from `(sampled_epoch, version)`, or from its equal."""
        current: int | None = epoch
        while current is not None:
            its = self.epochs[current]
            if version >= its.start and (
                current == sampled_epoch or sampled_epoch in its.published.get(version, frozenset())
            ):
                return True
            if version > its.start:
                return False
            current = its.parent
        # Version 0 is the model the job starts from, in every epoch.
        return version == 0

    def lineage(self) -> dict[int, Batched | None]:
        """Step → the batch that made the final model; None where no epoch trained it."""
        if self.finished is None:
            return {}
        last = max(self.epochs[self.finished].trained, default=self.epochs[self.finished].start - 1)
        steps: dict[int, Batched | None] = {}
        for step in range(last + 1):
            owner = self.owner(self.finished, step + 1)
            steps[step] = None if owner is None else self.epochs[owner].trained.get(step)
        return steps
