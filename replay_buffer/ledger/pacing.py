"""Pacing: the number of groups that a job generates ahead of its trainer, within admission's limit
(`buffer.pacing`).

The staleness bound says how many groups may be outstanding. If the trainer is the slower side, it needs fewer
of them: the others wait for their step and become stale. Under `fresh` a job holds `ahead` groups in addition
to the trainer's current ones, B ≤ ahead ≤ η·B, and grants a lease if

    outstanding < ahead + (1 − max(0, v_train − v_serving)) · B

which is admission's formula with ahead / B in place of η. The trainer's own steps determine the smallest
`ahead` that keeps the trainer from waiting. It changes when the batch of a step can be made:

- If the trainer waited or reused groups (`buffer.max_reuse`), and in the last `WINDOW` steps a worker had
  asked for more than this rule gave, `ahead` grows by at most one batch. It grows by the groups that the
  trainer would have trained in `GAIN` times the wait, and by the number of reused groups. The wait is capped
  by a running mean of waits, because a lead after a single delay is not needed later.
- If the trainer did not wait, `ahead` shrinks by `LEAK` of a batch. Once in `WINDOW` steps it also shrinks by
  a part of the scored groups that were left over at each of these steps. So the trainer of a job settles at
  waits of about LEAK / GAIN of its time, and up to LEAK / (GAIN · SMOOTH) if waits are rare and long.

If generation is as fast as training, varying durations empty the buffer now and then. The cause is then a
worker that was held back some steps ago.

With η ≥ 1 `ahead` is at least one batch, because the next batch must be in flight while a step is trained.
"""

from __future__ import annotations

from msgspec.structs import replace

from replay_buffer.ledger.records import Pace

GAIN = 4.0
LEAK = 0.01
WINDOW = 16
"""Steps over which is looked back: for the fewest groups that lay unneeded, and for a worker held back."""
SHARE = 4
SMOOTH = 0.2
"""Weight of a new step in all running means."""


def start(batch_groups: int, max_staleness: int) -> float:
    """Groups that are held ahead before anything is known: as few as there may be."""
    return float(batch_groups * min(1, max_staleness))


def may_hold(pace: Pace, batch_groups: int, lag: int) -> int:
    """Groups that may be outstanding for a worker that serves the weights of `lag` steps ago."""
    return max(0, int(pace.ahead) + (1 - max(0, lag)) * batch_groups)


def lacks(pace: Pace, step: int, now_ms: int) -> Pace:
    """Note that the trainer waits for `step` because there are too few scored groups."""
    return replace(pace, waits_for=step, since_ms=now_ms)


def enough(
    pace: Pace,
    *,
    step: int,
    spare: int,
    reused: int,
    leads_ms: list[int],
    batch_groups: int,
    max_staleness: int,
    now_ms: int,
) -> Pace:
    """Note that the batch of `step` can be made, with `spare` more scored groups. `reused` of its groups were
    trained before. `leads_ms` are the times from first lease to last verdict of the others."""
    waited_ms = now_ms - pace.since_ms if pace.waits_for == step else 0
    fresh = replace(
        pace,
        waits_for=-1,
        supplied=step,
        supplied_ms=now_ms,
        lead_ms=mean(pace.lead_ms, sum(leads_ms) / max(1, len(leads_ms))),
    )
    if pace.supplied < 0:
        return fresh  # the first of a trainer: the pipeline was empty
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
    """Return a fresh pace for a restarted trainer, whose first waits must not count."""
    return replace(pace, waits_for=-1, supplied=-1, held_back=-1, lately=0.0, spares=())


def later(pace: Pace, outage_ms: int) -> Pace:
    """Nobody could do anything for so long: it is no time that the trainer waited."""
    return replace(pace, since_ms=pace.since_ms + outage_ms, supplied_ms=pace.supplied_ms + outage_ms)


def explained(pace: Pace, batch_groups: int, max_staleness: int) -> str:
    """Return how far ahead is generated and why, in words."""
    held = f"holds {pace.ahead / batch_groups:.1f} of at most {max_staleness} steps ahead"
    if not pace.step_ms:
        return f"{held}, until the first steps tell more"
    return (
        f"{held}, because a group takes {pace.lead_ms / 1000:.3g} s from its lease to its last verdict and a "
        f"step {pace.step_ms / 1000:.3g} s, and the trainer waited for groups {pace.waited:.1%} of its time"
    )


def mean(before: float, value: float) -> float:
    """Return a running mean that begins with its first value."""
    return value if not before else before + SMOOTH * (value - before)
