"""The search for the cause of a stall. If training stands still, it finds the edge of the pipeline that
delivers nothing. The module is pure.

    tasks → rollout workers → buffer → reward service → buffer → trainer → (weights) → rollout workers

The trainer is at the end of the pipeline. While the trainer computes, there is no stall, however slow it is.
If it has not computed for a while, the search names the first input on its way that is missing, silent or
empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from areal_async.rpc.board import SILENT_S

Edge = Literal["buffer", "redis", "trainer", "reward", "rollout", "weights", "checkpoint", "evaluator"]
"""The edge of the pipeline whose input is missing.

`weights`: every worker samples from an old version and gets no group. `checkpoint`: the buffer is full of
trained groups that are in no checkpoint yet, or the newest checkpoint is not on disk yet."""


MISSING = {
    "restarting": "died and is started again",
    "waiting": "is starting",
    "starting": "is starting",
    "draining": "is draining",
    "ended": "has ended",
}


@dataclass(frozen=True)
class Facts:
    """Facts of a run at one moment, from the supervisor's states and the statuses of the services."""

    idle_s: float  # Seconds since the trainer last computed
    phases: Mapping[str, str]
    """Phase of each process, which is waiting, starting, serving, draining, restarting or ended."""
    silent_s: Mapping[str, float] = field(default_factory=dict)  # Seconds since each process last answered
    groups: Mapping[str, int] = field(default_factory=dict)  # Groups by their state in the ledger
    redis: str = ""  # Reason why the buffer waits for Redis; empty if it does not wait
    commit: str = ""  # Part of the last step's commit that the trainer waits for, in words
    checkpoint: str = ""  # Part of a checkpoint that the trainer waits for, in words
    version: int | None = None  # Newest published version
    serving: Mapping[str, int] = field(default_factory=dict)  # Version that each rollout worker samples from
    weights: Mapping[str, str] = field(default_factory=dict)
    """Reason why the next snapshot of a rollout worker is late, as text."""
    workers_alive: int | None = None  # Scoring processes of the reward service; None if unknown
    workers: int = 0  # Number of scoring processes that the job asks for
    max_groups: int = 0
    dropped_by_verdict: int = 0
    """Groups dropped since the trainer last computed, because their verdicts had no score."""
    no_score: str = ""  # Message of the newest verdict without a score
    steps_left: int = 1


@dataclass(frozen=True)
class Stall:
    edge: Edge
    detail: str  # One line for a user: who waits for what, and why


def find_stall(facts: Facts, limit_s: float) -> Stall | None:
    """Return the starving edge of a run if its trainer has computed nothing for `limit_s`, else None."""
    if facts.idle_s < limit_s:
        return None
    if "buffer" in facts.phases and (why := _missing(facts, "buffer")):
        return Stall("buffer", f"all services wait for the buffer; {why}")
    if facts.redis:
        return Stall("redis", f"all services wait for the buffer, which waits for Redis: {facts.redis}")
    ranks = [name for name in facts.phases if name.startswith("trainer")] or ["trainer"]
    if why := next(filter(None, (_missing(facts, rank) for rank in ranks)), ""):
        return Stall("trainer", f"no step is trained; {why}")
    if facts.commit:
        return Stall("buffer", f"trainer waits for {facts.commit}")
    if facts.checkpoint:
        return Stall("checkpoint", f"trainer waits for {facts.checkpoint}")
    if "buffer" not in facts.phases:
        return Stall("trainer", "no step is trained; the trainer serves and computes nothing")
    if facts.steps_left <= 0:
        why = _missing(facts, "evaluator") or "the evaluator serves"
        return Stall("evaluator", f"the trainer is done and waits for the last evaluations; {why}")
    return _starving(facts)


def _starving(facts: Facts) -> Stall:
    """Return the missing input of a trainer that waits for a batch."""
    held = {state.lower(): count for state, count in facts.groups.items()}
    unscored, leased = held.get("generated", 0), held.get("leased", 0)
    reward = _reward_missing(facts)
    rollouts = {name: _missing(facts, name) for name in facts.phases if name.startswith("rollout")}
    serving = [name for name, why in rollouts.items() if not why]
    if facts.dropped_by_verdict > leased + unscored and serving and not reward:
        why = f"; the newest: {facts.no_score}" if facts.no_score else ""
        dropped = f"{facts.dropped_by_verdict} groups were dropped since its last step"
        return Stall("reward", f"trainer waits for scored groups; {dropped}, for they got no score{why}")
    if unscored and (reward or unscored >= leased or not serving):
        why = reward or f"{unscored} generated groups are not scored; scoring is behind"
        return Stall("reward", f"trainer waits for scored groups; {why}")
    if not serving:
        reasons = "; ".join(why for why in rollouts.values() if why)
        what = f"0 of {len(rollouts)} rollout workers serve ({reasons})"
        return Stall("rollout", f"trainer waits for generated groups; {what}")
    trained = held.get("trained", 0)
    if facts.max_groups and sum(held.values()) >= facts.max_groups and trained and not leased:
        what = f"the buffer is full, and {trained} of its groups wait for the next checkpoint"
        return Stall("checkpoint", f"trainer waits for generated groups; {what}")
    if reward and held.get("scored", 0) == 0 and not leased:
        return Stall("reward", f"trainer waits for scored groups; {reward}")
    if not leased and (behind := _behind(facts, serving)):
        return Stall("weights", f"trainer waits for generated groups; {behind}")
    what = f"{leased} groups are being generated" if leased else "no worker leases a group"
    alive = f"{len(serving)} of {len(rollouts)} rollout workers serve"
    return Stall("rollout", f"trainer waits for generated groups; {alive}, {what}")


def _behind(facts: Facts, workers: Sequence[str]) -> str:
    """Return how far the workers are behind the newest weights. The text is empty if a worker has the newest
    weights."""
    versions = [facts.serving[name] for name in workers if name in facts.serving]
    if facts.version is None or not versions or max(versions) >= facts.version:
        return ""
    waits = "".join(f"; {name}: {what}" for name, what in facts.weights.items() if name in workers)
    return (
        f"the trainer has published version {facts.version}, and no worker samples from a newer one than "
        f"{max(versions)}{waits}"
    )


def _reward_missing(facts: Facts) -> str:
    if why := _missing(facts, "reward"):
        return why.replace("reward ", "reward_service ", 1)
    if facts.workers_alive == 0:
        return f"reward_service has 0 of {facts.workers} workers alive"
    return ""


def _missing(facts: Facts, name: str) -> str:
    """Return why process `name` does not do its work. The text is empty if it seems to work."""
    if why := MISSING.get(facts.phases.get(name, "")):
        return f"{name} {why}"
    silent_s = facts.silent_s.get(name, 0.0)
    return f"{name} has not answered for {silent_s:.0f} s" if silent_s > SILENT_S else ""
