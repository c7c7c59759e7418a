"""Simulate one GPU that trainer and engine share in time, against fixed shares of its memory.

    python benchmarks/turns.py [--out benchmarks/results/turns.json]

The ledger is the real one (`replay_buffer/simulation/job.py`). Everything else is a model, and no figure is a
measurement on a GPU:

- The GPU has a fixed room for KV. An engine decodes for up to `slots` requests at once, as the room allows. A
  pass takes `pass_s + n · request_s`. All costs of generation are scaled so that a batch takes `ratio` times
  as long to generate, at full concurrency with the whole GPU, as to train.
- `time`: the engine has the whole GPU and the whole room, and sleeps while the trainer steps. The trainer
  collects batches as `trainer_service/loop/device_turns.py` does, for turns of
  `areal_async.base.device_turns.turn_steps` steps. Each switch takes `SWITCH_S / 2`, in which the GPU does
  nothing useful. After it, the KV of all requests in flight is computed again.
- `fixed`: both are always on the GPU. When both compute, each gets half of the GPU's time, as the driver
  slices it between two processes. When one of them is idle, the other gets all of it. The engine has only
  `room` of the KV room (and so of the slots), because the trainer's state takes the rest. There is no switch.
- Both: η and pacing of the ledger, lognormal lengths of answers, weights that are loaded in `LOAD_S`, and
  rewards that take no time.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from areal_async.base.device_turns import turn_steps
from areal_async.rpc.messages import BufferStats
from replay_buffer.ledger.batching import lease_wait
from replay_buffer.ledger.records import GroupState
from replay_buffer.ledger.rules import Rules
from replay_buffer.simulation.clock import Clock, Event
from replay_buffer.simulation.costs import (
    Costs,
    EngineCosts,
    MachineCosts,
    PublicationCosts,
    Spread,
    TrainerCosts,
)
from replay_buffer.simulation.engine import SimulatedEngine
from replay_buffer.simulation.job import SimulatedJob
from replay_buffer.simulation.world import MeasuredWorld, Shape
from trainer_service.loop.device_turns import COLLECT_LOOK_S, CollectLimit, is_enough

GROUPS, SAMPLES, ETAS = 32, 8, (1, 4)
SLOTS = 256
STEP_S, SWITCH_S, LOAD_S = 30.0, 4.5, 1.0
RATIOS = (1 / 5, 1 / 3, 1 / 2, 1.0, 2.0, 3.0, 5.0)  # Generation to training
ROOMS = (0.08, 0.25, 0.5)  # Shares of the KV room that the trainer's state leaves
PROMPT, ANSWER, SIGMA, LONGEST = 200.0, 1000.0, 0.6, 4000.0
STEPS, WARM_UP = 40, 20


def costs_of(ratio: float, *, cores: float | None) -> Costs:
    """Return the costs of a job whose batch takes `ratio` times as long to generate as to train. Their ratios
    among each other are those of a dense model of 4B in bf16, whose weights are read in 2.4 ms, and whose KV
    of 2,000 tokens in 0.09 ms."""
    pass_s, request_s, prompt_token_s = 2.4e-3, 9e-5, 2e-5
    answers = Spread(mean=ANSWER, sigma=SIGMA, most=LONGEST)
    tokens = GROUPS * SAMPLES * answers.expected()
    took_s = tokens * (pass_s / SLOTS + request_s) + GROUPS * PROMPT * prompt_token_s
    scale = ratio * STEP_S / took_s
    return Costs(
        prompt_tokens=Spread(mean=PROMPT),
        answer_tokens=answers,
        engine=EngineCosts(
            pass_s=scale * pass_s, request_s=scale * request_s, prompt_token_s=scale * prompt_token_s
        ),
        trainer=TrainerCosts(step_s=STEP_S, token_s=0.0),
        publication=PublicationCosts(publication_s=0.5, pause_s=LOAD_S),
        machine=MachineCosts(cores=cores),
    )


# --- time sharing ------------------------------------------------------------------------------------


class GatedClock(Clock):
    """The clock of an engine that works only while it is awake. Its events happen on the clock of the job."""

    def __init__(self, outer: Clock) -> None:
        super().__init__()
        self._outer, self._open = outer, True
        self._since_ms = self._done_ms = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()
        self._planned = 0

    @property
    def now_ms(self) -> float:
        return self._outer.now_ms

    @now_ms.setter
    def now_ms(self, value: float) -> None:
        """Ignore the time of the base class."""

    @property
    def work_ms(self) -> float:
        return self._done_ms + (self._outer.now_ms - self._since_ms if self._open else 0.0)

    def when_worked(self, work_ms: float, event: Event) -> None:
        heapq.heappush(self._events, (work_ms, next(self._numbers), event))
        self._plan()

    def demand(self, change: int) -> None:
        """Whoever is awake has the GPU alone."""

    def gate(self, *, is_open: bool) -> None:
        self._done_ms, self._since_ms, self._open = self.work_ms, self._outer.now_ms, is_open
        self._plan()

    def _plan(self) -> None:
        self._planned += 1
        if self._open and self._events:
            due_ms = max(0.0, self._events[0][0] - self.work_ms)
            self._outer.after(due_ms, partial(self._due, self._planned))

    def _due(self, planned: int) -> None:
        if planned == self._planned:
            _, _, event = heapq.heappop(self._events)
            self._plan()
            event()


class TurnsJob(SimulatedJob):
    """A job whose worker takes newer weights only while its engine is awake."""

    asleep = False
    newest = 0

    def _serve(self, worker: int, version: int) -> None:
        self.newest = max(self.newest, version)
        if not self.asleep:
            super()._serve(worker, version)

    def wake(self) -> None:
        self.asleep = False
        if self.newest > self.serving[0]:
            super()._serve(0, self.newest)

    def stats(self) -> BufferStats:
        groups = {state.name: self.index.group_counts[state] for state in GroupState}
        return BufferStats(groups, {}, {}, {}, 0, 0, lease_wait=lease_wait(self.index))


class TurnsWorld(MeasuredWorld):
    """Trainer and engine take turns on the GPU."""

    def __init__(self, rules: Rules, shape: Shape, costs: Costs, *, ratio: float, seed: int) -> None:
        super().__init__(rules, shape, costs, seed=seed)
        self._gate = GatedClock(self._clock)
        self._engines = [[SimulatedEngine(self._gate, costs.engine, shape.max_concurrent)]]
        self.job: TurnsJob = TurnsJob(rules, self, self._clock, checkpoint_every=1)
        (own,) = rules.consumers.values()
        self.length = turn_steps(own.max_staleness, SWITCH_S, STEP_S * (1 + ratio))
        self._most, self._batch = own.max_staleness + 1, own.batch_groups
        self._has_device = self._trains = False
        self._trained = 0
        self.turns: list[int] = []

    def train(self, step: int, group_ids: Sequence[str]) -> None:
        self._trains = True
        if self._has_device:
            self._step()
        else:
            self._collect(CollectLimit(self._clock.now_ms / 1000))

    def _collect(self, patience: CollectLimit) -> None:
        stats = self.job.stats()
        enough = self.length == 1 or is_enough(stats, self._batch, self.length)
        if not enough and not patience.is_over(stats, self._clock.now_ms / 1000):
            self._clock.after(1000 * COLLECT_LOOK_S, lambda: self._collect(patience))
            return
        self._gate.gate(is_open=False)
        self.job.asleep = self._has_device = True
        self._trained = 0
        self._clock.after(1000 * SWITCH_S / 2, self._step)

    def _step(self) -> None:
        self._clock.after(1000 * self._costs.trainer.step_s, self._stepped)

    def _stepped(self) -> None:
        self._trained += 1
        self._trains = False
        self.job.trained()  # may call `train` for the next batch, if it is ready
        if not self._trains:
            self._clock.after(0, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if not self._trains and self._has_device:
            self.turns.append(self._trained)
            self._clock.after(1000 * SWITCH_S / 2, self._wake)
            self._has_device = False

    def _wake(self) -> None:
        self._gate.gate(is_open=True)
        self._engines[0][0].exchange(0.0)  # the KV in flight is computed again
        self.job.wake()


# --- the comparison ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    ratio: float
    eta: int
    pacing: str
    sharing: str
    slots: int
    steps_per_hour: float
    of_ideal: float
    """Throughput as a share of a GPU that trains and generates without any loss."""
    staleness_mean: float
    staleness_max: int
    wasted: float
    """Groups dropped per group generated."""
    turn: float | None
    """Mean steps of a turn."""
    switching: float | None
    """Share of time in switches."""


def row(ratio: float, eta: int, pacing: Any, room: float | None, *, steps: int = STEPS, seed: int = 0) -> Row:
    """Simulate one job: time sharing if `room` is None, else fixed shares."""
    rules = Rules.alone(batch_groups=GROUPS, max_staleness=eta, group_size=SAMPLES, pacing=pacing)
    slots = SLOTS if room is None else max(SAMPLES, int(room * SLOTS))
    shape = Shape(group_size=SAMPLES, max_concurrent=slots)
    if room is None:
        world: MeasuredWorld = TurnsWorld(rules, shape, costs_of(ratio, cores=None), ratio=ratio, seed=seed)
    else:
        world = MeasuredWorld(rules, shape, costs_of(ratio, cores=1.0), seed=seed)
    found = world.predict(steps, WARM_UP)
    turns = world.turns if isinstance(world, TurnsWorld) else []
    mean = sum(turns) / len(turns) if turns else None
    rate = found.steps_per_s
    return Row(
        round(ratio, 3),
        eta,
        pacing,
        "time" if room is None else f"fixed, {room:.0%} of the room",
        slots,
        round(3600 * rate, 2),
        round(rate * STEP_S * (1 + ratio), 3),
        round(found.staleness_mean, 2),
        found.staleness_max,
        round(found.wasted, 4),
        None if mean is None else round(mean, 2),
        None if mean is None else round(SWITCH_S * rate / mean, 4),
    )


def table(steps: int = STEPS) -> Iterator[Row]:
    for eta, pacing, ratio in itertools.product(ETAS, ("fresh",), RATIOS):
        for room in (None, *ROOMS):
            yield row(ratio, eta, pacing, room, steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/turns.json"))
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    rows = []
    for one in table(given.steps):
        rows.append(asdict(one))
        print(*asdict(one).values(), sep="\t", flush=True)
    assert all(one["staleness_max"] <= one["eta"] for one in rows)
    settings = {"step_s": STEP_S, "switch_s": SWITCH_S, "slots": SLOTS, "groups": GROUPS, "samples": SAMPLES}
    command = f"python benchmarks/turns.py --steps {given.steps}"
    head = {"what": "a simulation on the real ledger, not measured on a GPU", "command": command} | settings
    given.out.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
