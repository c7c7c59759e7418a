"""Admission: how many groups a worker may lease now, so that none can become too old.

    outstanding < (η + 1 − max(0, v_train − v_serving)) · B

`v_train` counts committed steps, `v_serving` is the version that the asking worker serves, `outstanding`
counts the groups leased and not yet TRAINED or DROPPED, and a step trains B of them. Why it bounds staleness:
steps take the oldest groups first, so the group granted last has at most (η + 1 − lag)·B − 1 groups before it
and is trained at the latest in step v_train + η − lag = v_serving + η. Without the `+ 1` nothing could run at
η = 0; without the lag a worker that has yet to load the newest weights makes groups that are a version too
old when their turn comes.

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
class AdmissionLimits:
    max_staleness: int
    batch_groups: int
    steps: int
    max_groups: int
    max_bytes: int


@dataclass(frozen=True)
class BufferLoad:
    """What the buffer holds. `in_flight_bytes` is what the leased episodes are expected to weigh."""

    v_train: int
    outstanding: int
    groups: int
    payload_bytes: int
    in_flight_bytes: float
    waiting_for_checkpoint: int = 0
    """Groups that are TRAINED and held until a checkpoint covers them."""


@dataclass(frozen=True)
class Admission:
    """`outstanding`: groups that may be leased; `new`: how many of them may be new to the buffer;
    `bytes`: what they may weigh. `reason` says what is full, or is empty."""

    outstanding: int
    new: int
    bytes: float
    reason: str = ""


def capacity(limits: AdmissionLimits, v_train: int, v_serving: int) -> int:
    """Groups that may be outstanding for a worker that serves `v_serving`."""
    lag = max(0, v_train - v_serving)
    steps = min(limits.max_staleness + 1 - lag, limits.steps - v_train)
    return max(0, steps) * limits.batch_groups


def room(limits: AdmissionLimits, load: BufferLoad, v_serving: int) -> Admission:
    """What a worker that serves `v_serving` may lease now."""
    most = capacity(limits, load.v_train, v_serving)
    free = Admission(
        outstanding=max(0, most - load.outstanding),
        new=max(0, limits.max_groups - load.groups),
        bytes=max(0.0, limits.max_bytes - load.payload_bytes - load.in_flight_bytes),
    )
    return Admission(free.outstanding, free.new, free.bytes, _reason(limits, load, free, most, v_serving))


def _reason(limits: AdmissionLimits, load: BufferLoad, free: Admission, most: int, v_serving: int) -> str:
    waiting = load.waiting_for_checkpoint
    held = f"; {waiting} of its groups wait for a checkpoint" if waiting else ""
    if free.outstanding == 0:
        if load.v_train >= limits.steps:
            return f"all {limits.steps} steps are trained"
        if most == 0:
            return (
                f"this worker serves version {v_serving} and the trainer is at {load.v_train}: with "
                f"max_staleness {limits.max_staleness} what it makes would be too old; it waits for an update"
            )
        return (
            f"{load.outstanding} groups are outstanding and at most {most} may be, for a worker at version "
            f"{v_serving} with the trainer at {load.v_train}; generation waits for the trainer"
        )
    if free.new == 0:
        return f"the buffer holds {load.groups} groups (buffer.max_groups {limits.max_groups}){held}"
    if free.bytes == 0:
        return f"the buffer holds or expects buffer.max_bytes ({limits.max_bytes}){held}"
    return ""
