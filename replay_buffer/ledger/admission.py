"""Admission: how many groups a worker may lease now, so that none can become too old.

    outstanding < min(η + 1 − max(0, v_train − v_serving), steps − v_train) · B

All of it is of one trained policy: `v_train` counts its committed steps, `v_serving` is the version of it
that the asking worker serves, `outstanding` counts the groups leased and not yet TRAINED or DROPPED, and a
step trains B of them. Why it bounds staleness: steps take the oldest groups first, so the group granted last
has at most (η + 1 − lag)·B − 1 groups before it and is trained at the latest in step v_train + η − lag =
v_serving + η. Without the `+ 1` nothing could run at η = 0; without the lag a worker that has yet to load the
newest weights makes groups that are a version too old when their turn comes. A group that several policies
train needs a place of each.

Work that runs is capped by nothing else (docs/decisions/0005-no-cap-beyond-the-formula.md).
The term `steps − v_train` keeps the last steps of a job from being over-supplied: no step is left for a group
beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass

from replay_buffer.ledger.pacing import may_hold
from replay_buffer.ledger.records import Pace


@dataclass(frozen=True)
class Demand:
    """What the formula knows of one policy."""

    policy: str
    max_staleness: int
    batch_groups: int
    steps: int
    v_train: int
    outstanding: int
    pace: Pace | None = None
    """Under `buffer.pacing: fresh`."""


def capacity(demand: Demand, v_serving: int) -> int:
    """Groups that may be outstanding for a worker that serves `v_serving`."""
    bound = allowed(demand, v_serving)
    if demand.pace is None:
        return bound
    return min(bound, may_hold(demand.pace, demand.batch_groups, demand.v_train - v_serving))


def allowed(demand: Demand, v_serving: int) -> int:
    """Groups that may be outstanding by the staleness bound alone."""
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
    if most < (bound := allowed(demand, v_serving)):
        return 0, (
            f"{demand.outstanding} groups are outstanding: the trainer, at {demand.v_train}, need not wait; "
            f"a worker at version {v_serving} may bring them to {most} (buffer.pacing), of {bound} that the "
            "staleness bound allows"
        )
    if most == 0:
        return 0, (
            f"this worker serves version {v_serving} and the trainer is at {demand.v_train}: with "
            f"max_staleness {demand.max_staleness} what it makes would be too old; it waits for an update"
        )
    return 0, (
        f"{demand.outstanding} groups are outstanding and at most {most} may be, for a worker at version "
        f"{v_serving} with the trainer at {demand.v_train}; generation waits for the trainer"
    )
