"""Admission: how many groups a worker may lease now, so that none can become too old.

    outstanding < (η + 1 − max(0, v_train − v_serving)) · B

All of it is of one trained policy: `v_train` counts its committed steps, `v_serving` is the version of it
that the asking worker serves, `outstanding` counts the groups leased and not yet TRAINED or DROPPED, and a
step trains B of them. Why it bounds staleness: steps take the oldest groups first, so the group granted last
has at most (η + 1 − lag)·B − 1 groups before it and is trained at the latest in step v_train + η − lag =
v_serving + η. Without the `+ 1` nothing could run at η = 0; without the lag a worker that has yet to load the
newest weights makes groups that are a version too old when their turn comes. A group that several policies
train needs a place of each.

Work that runs is capped by nothing else: a cap by observed durations was measured, and where it saves waste
it costs more throughput (docs/decisions/0005). What pacing cannot avoid, the job file is warned of.

A second limit keeps the last steps of a job from being over-supplied: no step is left for a group beyond
(steps − v_train) · B. And the buffer's own: groups and bytes held. When those are full, generation waits;
what is generated is never turned away.

Pure: numbers in, a number and words out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Demand:
    """What the formula knows of one policy."""

    policy: str
    max_staleness: int
    batch_groups: int
    steps: int
    v_train: int
    outstanding: int


@dataclass(frozen=True)
class Space:
    """What the buffer holds and may hold. `in_flight_bytes` is what the leased episodes are expected to
    weigh."""

    max_groups: int
    max_bytes: int
    groups: int
    payload_bytes: int
    in_flight_bytes: float
    waiting_for_checkpoint: int = 0
    """Groups that are TRAINED and held until a checkpoint covers them."""


def capacity(demand: Demand, v_serving: int) -> int:
    """Groups that may be outstanding for a worker that serves `v_serving`."""
    lag = max(0, demand.v_train - v_serving)
    steps = min(demand.max_staleness + 1 - lag, demand.steps - demand.v_train)
    return max(0, steps) * demand.batch_groups


def room(demand: Demand, v_serving: int) -> tuple[int, str]:
    """How many groups a worker that serves `v_serving` may lease for the policy now; with 0, why none."""
    most = capacity(demand, v_serving)
    if demand.outstanding < most:
        return most - demand.outstanding, ""
    if demand.v_train >= demand.steps:
        return 0, f"all {demand.steps} steps are trained"
    if most == 0:
        return 0, (
            f"this worker serves version {v_serving} and the trainer is at {demand.v_train}: with "
            f"max_staleness {demand.max_staleness} what it makes would be too old; it waits for an update"
        )
    return 0, (
        f"{demand.outstanding} groups are outstanding and at most {most} may be, for a worker at version "
        f"{v_serving} with the trainer at {demand.v_train}; generation waits for the trainer"
    )


def space(held: Space) -> tuple[int, float, str]:
    """How many groups may be new to the buffer, what they may weigh in bytes, and, where either is 0, why."""
    groups = max(0, held.max_groups - held.groups)
    size_bytes = max(0.0, held.max_bytes - held.payload_bytes - held.in_flight_bytes)
    waiting = held.waiting_for_checkpoint
    for_checkpoint = f"; {waiting} of its groups wait for a checkpoint" if waiting else ""
    full = ""
    if groups == 0:
        full = f"the buffer holds {held.groups} groups (buffer.max_groups {held.max_groups}){for_checkpoint}"
    elif size_bytes == 0:
        full = f"the buffer holds or expects buffer.max_bytes ({held.max_bytes}){for_checkpoint}"
    return groups, size_bytes, full
