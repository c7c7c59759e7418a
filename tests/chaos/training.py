"""Checks of what was trained: once, whole, not too old, of weights that the model descends from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.chaos.fold import Violation
from tests.chaos.lineage import Batched
from tests.chaos.material import History, task_of

UNKNOWN_TO_CHECKPOINT = "dropped:not_in_checkpoint"


def finished(history: History) -> Iterator[Violation]:
    yield from (Violation("log", problem) for problem in history.trainers.problems)
    if history.trainers.finished is None:
        yield Violation("unfinished", "no final model was written")
        return
    if len(history.lineage) != history.promise.steps:
        yield Violation("unfinished", f"{len(history.lineage)} steps made the final model")
    for step, batch in history.lineage.items():
        if batch is None:
            yield Violation("unfinished", f"nobody trained step {step} of the final model")


def trained_once(history: History) -> Iterator[Violation]:
    steps_of: dict[str, list[int]] = {}
    for step, batch in history.lineage.items():
        for group_id in batch.groups if batch else ():
            steps_of.setdefault(group_id, []).append(step)
    for group_id, steps in steps_of.items():
        if len(steps) > history.promise.max_reuse:
            yield Violation("trained_twice", f"{group_id} is in the steps {steps} of the final model")
    attempts = Counter(task_of(group_id) for group_id in steps_of)
    for task, times in attempts.items():
        if times > 1:
            yield Violation("trained_twice", f"task {task} was trained as {times} groups")


def ends_as_it_should(history: History) -> Iterator[Violation]:
    """What is in the final model ends as COMMITTED, if it ends."""
    undone = {group_id for one in history.decided if one.fate == "lost" for group_id in one.get("moved", {})}
    for step, batch in history.lineage.items():
        for group_id in batch.groups if batch else ():
            end = history.ledger.ends.get(group_id)
            if end is not None and end.kind != "COMMITTED" and group_id not in undone:
                yield Violation(
                    "dropped", f"{group_id} was trained in step {step}, and dropped: {end.reasons}"
                )


def staleness(history: History) -> Iterator[Violation]:
    for batch in history.batched:
        for episode_id, version in batch.versions.items():
            age = batch.step - version
            if version >= 0 and not 0 <= age <= history.promise.max_staleness:
                yield Violation(
                    "stale",
                    f"{episode_id} of version {version} in step {batch.step} of epoch {batch.epoch}",
                )


def whole(history: History) -> Iterator[Violation]:
    for batch in history.batched:
        if len(batch.groups) != history.promise.batch_groups:
            yield Violation("not_whole", f"step {batch.step} has {len(batch.groups)} groups")
        expected = {f"{g}.{sample}" for g in batch.groups for sample in range(history.promise.group_size)}
        if expected != batch.versions.keys():
            odd = sorted(expected ^ batch.versions.keys())[:4]
            yield Violation(
                "not_whole", f"step {batch.step} of epoch {batch.epoch} is not whole groups: {odd}"
            )
        for episode_id, version in batch.versions.items():
            known = {stored[2] for _, stored in history.stores.get(episode_id, [])}
            if version not in known:
                yield Violation("not_stored", f"{episode_id} of version {version} is in step {batch.step}")


def redone(history: History) -> Iterator[Violation]:
    """A step done again has the groups it had, but for those of abandoned weights."""
    planned: dict[int, list[list[str]]] = {}
    undone = {
        tuple(groups)
        for one in history.decided
        if one.fate != "true"
        for groups in one.get("batches", {}).values()
        if groups
    }
    for one in history.decided:
        for step, groups in one.get("batches", {}).items():
            if groups:
                planned.setdefault(int(step), []).append(groups)
    latest: dict[int, Batched] = {}
    for batch in history.batched:
        if batch.groups not in planned.get(batch.step, []):
            yield Violation("batch", f"step {batch.step} of epoch {batch.epoch} is no batch of the buffer's")
        before, latest[batch.step] = latest.get(batch.step), batch
        if before is None or before.groups == batch.groups or tuple(before.groups) in undone:
            continue
        kept = [group_id for group_id in before.groups if group_id in batch.groups]
        gone = [group_id for group_id in before.groups if group_id not in batch.groups]
        unexplained = [
            group_id
            for group_id in gone
            if not any(
                end.reasons & {"dropped:abandoned", UNKNOWN_TO_CHECKPOINT}
                and before.mono_s < end.mono_s < batch.mono_s
                for end in history.all_ends.get(group_id, [])
            )
        ]
        if batch.groups[: len(kept)] != kept or unexplained:
            if history.promise.lost_s and any(front.lost_confirmed for front in history.fronts):
                continue
            yield Violation(
                "batch",
                f"step {batch.step} was {before.groups} in epoch {before.epoch} and is {batch.groups} in "
                f"epoch {batch.epoch}, although {unexplained} were not abandoned",
            )


def in_order(history: History) -> Iterator[Violation]:
    """What is committed is published before, and no batch is more than one step ahead of the commits."""
    done: int | None = None
    for one in history.decided:
        if one.fate != "true":
            continue
        epoch = history.trainers.epochs.get(one.event["trainer_epoch"])
        if one.event["command"] == "Commit" and done != one.event["v_train"]:
            published_s = epoch.published_s.get(one.event["v_train"]) if epoch is not None else None
            if published_s is None or published_s > one.mono_s:
                yield Violation("order", f"version {one.event['v_train']} is committed, and not published")
        done = one.event["v_train"]
        for step, groups in one.get("batches", {}).items():
            if groups and one.event["command"] == "NextBatch" and int(step) > done + 1:
                yield Violation("order", f"the batch of step {step} is given when {done} are committed")


def on_lineage(history: History) -> Iterator[Violation]:
    """What was trained was sampled from weights that the trained model descends from."""
    for epoch in history.trainers.epochs.values():
        for step, batch in epoch.trained.items():
            for episode_id, version in batch.versions.items():
                marks = {
                    (stored[1], stored[3])
                    for one, stored in history.stores.get(episode_id, [])
                    if stored[2] == version and one.mono_s < batch.mono_s
                }
                if version < 0 or not marks:
                    continue
                if not any(
                    history.trainers.is_true(epoch.number, sampled, at)
                    for sampled, newest in marks
                    for at in (version, newest)
                ):
                    yield Violation(
                        "abandoned",
                        f"step {step} of epoch {epoch.number} trained {episode_id} of version {version}, "
                        f"epochs {sorted(marks)}, which it does not descend from",
                    )


def not_freed_early(history: History) -> Iterator[Violation]:
    """TRAINED is what the trainer trained; COMMITTED is what a checkpoint on disk covers."""
    for one in history.decided:
        for group_id, (was, becomes, step) in one.get("moved", {}).items():
            if becomes == "TRAINED":
                epoch = history.trainers.epochs.get(one.event["trainer_epoch"])
                trained_s = epoch.trained_s.get(step) if epoch is not None else None
                if trained_s is None or trained_s > one.mono_s:
                    yield Violation("untrained", f"{group_id} is TRAINED in step {step}, and was not trained")
            if was == "TRAINED" and not becomes and "committed" in one.get("counts", {}):
                saved = [at for steps, at in history.trainers.saved_s.items() if steps > step]
                if not any(at <= one.mono_s for at in saved):
                    yield Violation("freed_early", f"{group_id} of step {step} is freed before a checkpoint")
