"""Admission: the number of groups that a worker may lease now, so that none becomes too old.

    outstanding < min(η + 1 − max(0, v_train − v_serving), steps − v_train) · B

All symbols belong to one trained policy. `v_train` counts its committed steps. `v_serving` is the version
that the asking worker serves. `outstanding` counts the groups that are leased and not yet TRAINED or DROPPED.
A step trains B groups.

The formula bounds staleness because steps take the oldest groups first. Let lag be max(0, v_train −
v_serving). The group granted last has at most (η + 1 − lag)·B − 1 groups before it. It is therefore trained
in step v_train + η − lag = v_serving + η at the latest. Without the `+ 1`, no group could be granted at η =
0. Without the lag, groups of a worker that has not yet loaded the newest weights would be too old when they
are trained. A group that several policies train needs a place for each of them.

While a resumed trainer redoes steps, batches of later steps already exist. A group BATCHED for a step takes a
place of that step only. Groups batched for steps beyond the formula's window therefore do not count.
Otherwise a step whose batch has lost groups to abandoned weights could not get replacements, and the trainer
and the workers would wait for each other.

No other limit applies to running work (docs/decisions/buffer.md#no-limit-on-running-groups-beyond-admission).
Because of the term `steps − v_train`, no group is generated for which the job has no step left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from replay_buffer.ledger.pacing import may_hold
from replay_buffer.ledger.records import Pace


@dataclass(frozen=True)
class Demand:
    """Inputs of the formula for one policy."""

    policy: str
    max_staleness: int
    batch_groups: int
    steps: int
    v_train: int
    outstanding: int
    pace: Pace | None = None
    """The pace under `buffer.pacing: fresh`, else None."""
    batched: Mapping[int, int] = field(default_factory=dict)
    """Step → number of outstanding groups that are BATCHED for it."""
    whole_batches: int = 0
    """Number of consecutive steps with whole batches, starting at the next step."""

    def outstanding_within(self, steps: int) -> int:
        """Return the number of outstanding groups that take a place in the next `steps` steps."""
        beyond = (count for step, count in self.batched.items() if step >= self.v_train + steps)
        return self.outstanding - sum(beyond)


def capacity(demand: Demand, v_serving: int) -> int:
    """Return the number of groups that may be outstanding for a worker that serves `v_serving`."""
    bound = allowed(demand, v_serving)
    if demand.pace is None:
        return bound
    return min(bound, may_hold(demand.pace, demand.batch_groups, demand.v_train - v_serving))


def allowed(demand: Demand, v_serving: int) -> int:
    """Return the capacity under the staleness limit alone, without pacing."""
    return steps_allowed(demand, v_serving) * demand.batch_groups


def steps_allowed(demand: Demand, v_serving: int) -> int:
    """Return the staleness limit in steps: how many of the next steps may train a group that begins now."""
    lag = max(0, demand.v_train - v_serving)
    return max(0, min(demand.max_staleness + 1 - lag, demand.steps - demand.v_train))


def room(demand: Demand, v_serving: int) -> tuple[int, str]:
    """Return how many groups a worker that serves `v_serving` may lease for the policy now. If 0, also return
    the reason."""
    most = capacity(demand, v_serving)
    free = allowed(demand, v_serving) - demand.outstanding_within(steps_allowed(demand, v_serving))
    if demand.pace is not None:  # the pace holds nobody back while the next batch lacks groups
        free = min(free, most - demand.outstanding_within(demand.whole_batches + 1))
    if free > 0:
        return free, ""
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
