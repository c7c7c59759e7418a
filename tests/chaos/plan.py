"""What is done to a run, drawn from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

FAILPOINTS = {
    "trainer.before_batch": (2, 9),
    "trainer.after_batch": (2, 9),
    "trainer.after_train": (2, 9),
    "trainer.after_publish": (2, 9),
    "trainer.before_commit": (2, 9),
    "trainer.after_commit": (2, 9),
    "trainer.mid_checkpoint": (1, 2),
    "trainer.mid_state": (1, 6),
    "trainer.after_checkpoint": (1, 2),
    "trainer.after_checkpointed": (1, 2),
    "buffer.before_write": (100, 900),
    "buffer.after_write": (100, 900),
    "buffer.before_reply": (100, 900),
    "rollout.before_put": (10, 60),
    "rollout.after_put": (10, 60),
    "reward.after_claim": (5, 40),
    "reward.before_verdict": (5, 40),
}
"""Each labelled place, and the passes of it, first and last, at which a process may be killed."""

WEIGHTS = {
    "trainer": 3,
    "buffer": 4,
    "redis": 4,
    "rollout-0": 2,
    "rollout-1": 2,
    "reward": 3,
    "evaluator": 2,
    "supervisor": 2,
}


@dataclass(frozen=True)
class Disturbance:
    kind: Literal["kill", "stop", "forget", "cut", "cut_both"]
    """`forget`: the trainer is killed, and what it wrote down of its published weights is gone: its successor
    takes them all for abandoned. `cut`: Redis is killed and loses the end of its log; `cut_both`: the
    front is killed with it."""
    role: str
    after_s: float
    """Since the one before."""
    stop_s: float = 0.0


def failpoints(rng: random.Random, n: int) -> str:
    """`n` of the labelled places, each at a pass drawn for it, as the environment variable wants them."""
    names = rng.sample(sorted(FAILPOINTS), n)
    return ",".join(f"{name}@{rng.randint(*FAILPOINTS[name])}" for name in names)


def disturbances(
    rng: random.Random, n: int, *, longest_gap_s: float, share_stops: float = 0.2
) -> Iterator[Disturbance]:
    """Kills and short stops of roles drawn by weight, at times drawn uniformly."""
    roles, weights = list(WEIGHTS), list(WEIGHTS.values())
    for _ in range(n):
        role = rng.choices(roles, weights)[0]
        gap_s = rng.uniform(0.2, longest_gap_s)
        if rng.random() < share_stops:
            yield Disturbance("stop", role, gap_s, rng.uniform(0.2, 7.0))
        elif role == "trainer" and rng.random() < 0.5:
            yield Disturbance("forget", role, gap_s)
        else:
            yield Disturbance("kill", role, gap_s)


def each_role_once(rng: random.Random, roles: list[str], *, longest_gap_s: float) -> Iterator[Disturbance]:
    """Each of `roles` is killed, in an order and at times that are drawn."""
    for role in rng.sample(roles, len(roles)):
        yield Disturbance("kill", role, rng.uniform(0.2, longest_gap_s))


def any_killed(
    rng: random.Random, roles: list[str], n: int, *, longest_gap_s: float
) -> Iterator[Disturbance]:
    """`n` kills of roles drawn with equal chances."""
    for _ in range(n):
        yield Disturbance("kill", rng.choice(roles), rng.uniform(0.2, longest_gap_s))


def cuts(n: int, *, gap_s: float) -> Iterator[Disturbance]:
    """Redis loses the end of its log, `n` times; each other time the front dies with it."""
    for number in range(n):
        yield Disturbance("cut_both" if number % 2 else "cut", "redis", gap_s)


def long_stops(rng: random.Random, roles: list[str], stop_s: float) -> Iterator[Disturbance]:
    """Each of `roles` stands still for `stop_s`, one after the other."""
    for role in rng.sample(roles, len(roles)):
        yield Disturbance("stop", role, rng.uniform(2.0, 5.0), stop_s)
