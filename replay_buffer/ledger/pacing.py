"""Pacing: how far ahead of its trainer a job generates, within the limit of admission (`buffer.pacing`).

The staleness limit bounds the number of outstanding groups. If the trainer is slower than generation, fewer
groups are enough. More groups would only wait after scoring and become one step staler at each step. Under
`fresh`, a job keeps at most `ahead` groups beyond the groups that the trainer works on, with B ≤ ahead ≤ η·B.
It grants a lease if

    outstanding < ahead + (1 − max(0, v_train − v_serving)) · B

This is the admission formula with ahead / B in place of η. The rule looks for the smallest `ahead` that keeps
the trainer from waiting. It changes `ahead` at each step, when the step's batch can be made:

- The trainer waited. Then `ahead` grows by the number of groups that the trainer would have trained in `GAIN`
  times its wait. The wait is limited to a running mean of waits, because a single delay needs no permanent
  lead.
- Groups that were trained before took places of new groups (`buffer.max_reuse`). Then `ahead` also grows by
  the number of such groups. In both cases it grows by at most one batch, and only if in the last `WINDOW`
  steps a worker had asked for more groups than the pace allowed.
- The trainer had enough groups. Then `ahead` shrinks by `LEAK` of a batch. Once in `WINDOW` steps, it also
  shrinks by a part of the groups that stayed unused at each of these steps.

In this way `ahead` settles where the trainer waits for about LEAK / GAIN of its time, or up to LEAK / (GAIN ·
SMOOTH) if waits are rare and long. The rule looks back over `WINDOW` steps, because the present lack of
groups may come from a worker that was held back some steps ago.

If η ≥ 1, `ahead` is at least one batch, because workers must generate the next batch while a step is trained.
"""

from __future__ import annotations

from msgspec.structs import replace

from replay_buffer.ledger.records import Pace
from replay_buffer.ledger.rules import ConsumerRules

GAIN = 4.0
LEAK = 0.01
WINDOW = 16
"""Number of recent steps that the rule checks for unused groups and for workers that it held back."""
SHARE = 4
SMOOTH = 0.2
"""Weight of a new step in all running means."""


def start(batch_groups: int, max_staleness: int) -> float:
    """Return the initial number of groups ahead: the smallest that is allowed."""
    return float(batch_groups * min(1, max_staleness))


def may_hold(pace: Pace, batch_groups: int, lag: int) -> int:
    """Return how many groups may be outstanding for a worker whose weights are `lag` steps old."""
    return max(0, int(pace.ahead) + (1 - max(0, lag)) * batch_groups)


def lacks(pace: Pace, step: int, now_ms: int) -> Pace:
    """Record that the trainer waits because `step` has too few scored groups."""
    return replace(pace, waits_for=step, since_ms=now_ms)


def enough(
    pace: Pace, rules: ConsumerRules, *, step: int, spare: int, reused: int, leads_ms: list[int], now_ms: int
) -> Pace:
    """Update the pace when the batch of `step` can be made. `spare` scored groups are left beyond the batch.
    `reused` groups of the batch were trained before. For each other group of the batch, `leads_ms` has the
    time from its first lease to its last verdict."""
    waited_ms = now_ms - pace.since_ms if pace.waits_for == step else 0
    fresh = replace(
        pace,
        waits_for=-1,
        supplied=step,
        supplied_ms=now_ms,
        lead_ms=mean(pace.lead_ms, sum(leads_ms) / max(1, len(leads_ms))),
    )
    if pace.supplied < 0:
        return fresh  # the trainer's first step: the pipeline was empty
    batch_groups, max_staleness = rules.batch_groups, rules.max_staleness
    step_ms = max(1, now_ms - pace.supplied_ms - waited_ms)
    ahead, spares = pace.ahead, pace.spares
    wait = waited_ms / step_ms
    lately = pace.lately + SMOOTH * (wait - pace.lately)
    if waited_ms or reused:
        if pace.held_back >= 0 and step - pace.held_back <= WINDOW:
            ahead += min(batch_groups, GAIN * min(wait, lately) * batch_groups + reused)
            spares = ()
    else:
        ahead -= LEAK * batch_groups
        spares = (*spares, spare)[-WINDOW:]
        if len(spares) == WINDOW and (unneeded := min(spares) // SHARE):
            ahead -= unneeded
            spares = ()
    return replace(
        fresh,
        ahead=min(max(ahead, start(batch_groups, max_staleness)), float(batch_groups * max_staleness)),
        spares=spares,
        lately=lately,
        step_ms=mean(pace.step_ms, step_ms),
        waited=mean(pace.waited, waited_ms / (step_ms + waited_ms)),
    )


def anew(pace: Pace) -> Pace:
    """Return the pace for a resumed trainer. Its first wait for a batch does not enter the mean `waited`."""
    return replace(pace, waits_for=-1, supplied=-1, held_back=-1, lately=0.0, spares=())


def later(pace: Pace, outage_ms: int) -> Pace:
    """Return the pace with an outage excluded from the trainer's waiting time."""
    return replace(pace, since_ms=pace.since_ms + outage_ms, supplied_ms=pace.supplied_ms + outage_ms)


def explained(pace: Pace, batch_groups: int, max_staleness: int) -> str:
    """Return a text that says how far ahead the job generates, and why."""
    held = f"holds {pace.ahead / batch_groups:.1f} of at most {max_staleness} steps ahead"
    if not pace.step_ms:
        return f"{held}, until the first steps tell more"
    return (
        f"{held}, because a group takes {pace.lead_ms / 1000:.3g} s from its lease to its last verdict and a "
        f"step {pace.step_ms / 1000:.3g} s, and the trainer waited for groups {pace.waited:.1%} of its time"
    )


def mean(before: float, value: float) -> float:
    """Return a running mean, which starts with its first value."""
    return value if not before else before + SMOOTH * (value - before)
