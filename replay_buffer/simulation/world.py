"""Workers, rewards and a trainer with known costs."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from areal_async.config.checks import checkpoint_interval
from areal_async.config.job import JobConfig
from replay_buffer.ledger.rules import Rules
from replay_buffer.simulation.clock import Clock
from replay_buffer.simulation.costs import Costs
from replay_buffer.simulation.engine import SimulatedAnswer, SimulatedEngine
from replay_buffer.simulation.job import Figures, SimulatedJob, soon

BEGUN = 0.5  # Share of the event loop's work on an episode that comes before its first token
HELD = 0.5
"""Share of the event loop's work during which a local engine waits for the interpreter. In the rest of the
time its kernels compute, which release the interpreter. Both shares are estimates from earlier runs of
`benchmarks/simulator.py`."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the parts of a job."""

    group_size: int
    workers: int = 1
    replicas: int = 1
    """Engines of each worker."""
    max_concurrent: int = 256
    """Most episodes that one engine runs at once."""
    longest_answer: int = 1 << 30
    """Most tokens of an answer. A longer answer is truncated."""
    reward_workers: int = 1
    ranks: int = 1
    checkpoint_every: int = 1

    @classmethod
    def of(cls, job: JobConfig) -> Shape:
        """Return the shape of a job file."""
        return cls(
            group_size=job.rollout.group_size,
            workers=job.rollout.workers,
            replicas=job.rollout.replicas,
            max_concurrent=job.rollout.max_concurrent,
            longest_answer=job.rollout.sampling.max_new_tokens,
            reward_workers=job.reward.workers,
            ranks=job.trainer.ranks,
            checkpoint_every=checkpoint_interval(job),
        )


@dataclass(frozen=True)
class Prediction:
    """Prediction for a job in steady state. Shares are shares of time."""

    steps_per_s: float
    step_s: float
    episodes_per_s: float
    tokens_per_s: float
    """Sampled tokens that are trained, per second."""
    staleness_mean: float
    staleness_max: int
    trainer_idle: float
    """Share of time that the trainer waits for a batch and its bytes."""
    rollout_idle: float
    """Share of time that an engine computes nothing, as the mean over engines."""
    reward_idle: float
    """Share of time that a scoring process has nothing to score."""
    wasted: float
    """Groups dropped per group generated."""
    running: float
    """Mean number of running episodes, on all engines."""
    steps: int
    """Number of simulated steps, without the warm-up."""
    events: int


Compute = Callable[[float, Callable[[], object]], None]
"""Function that does work of so many milliseconds, and then calls back."""


class Queue:
    """Queue of work for several servers, in order of arrival."""

    def __init__(self, clock: Clock, servers: int, *, computes: bool | Compute) -> None:
        self._clock = clock
        self._servers = servers
        self._start = computes if callable(computes) else clock.compute if computes else clock.after
        self._busy = 0
        self._waiting: deque[tuple[float, Callable[[], object]]] = deque()
        self.used_ms = 0.0

    def put(self, ms: float, done: Callable[[], object]) -> None:
        """Add work of `ms` milliseconds. `done` is called at its end."""
        if not ms:
            done()
        elif self._busy < self._servers:
            self._begin(ms, done)
        else:
            self._waiting.append((ms, done))

    def _begin(self, ms: float, done: Callable[[], object]) -> None:
        self._busy += 1
        begun_ms = self._clock.now_ms
        self._start(ms, lambda: self._end(begun_ms, done))

    def _end(self, begun_ms: float, done: Callable[[], object]) -> None:
        self.used_ms += self._clock.now_ms - begun_ms
        self._busy -= 1
        if self._waiting:
            self._begin(*self._waiting.popleft())
        done()


class MeasuredWorld:
    """World of a job with a `shape` whose parts have `costs`. Lengths and scoring times depend only on (seed,
    group), so two jobs with different η draw the same values."""

    def __init__(self, rules: Rules, shape: Shape, costs: Costs, *, seed: int = 0) -> None:
        cores = costs.machine.cores
        self._clock = Clock(math.inf if cores is None else max(0.1, cores - costs.machine.others))
        self._shape, self._costs, self._seed = shape, costs, seed
        slots = shape.max_concurrent
        self._engines = [
            [SimulatedEngine(self._clock, costs.engine, slots) for _ in range(shape.replicas)]
            for _ in range(shape.workers)
        ]
        self._limit = slots * shape.replicas
        self._running = [0] * shape.workers
        self._rewards = Queue(self._clock, shape.reward_workers, computes=costs.reward.computes)
        self._desk = Queue(self._clock, 1, computes=True)  # The reward service's own work
        self._loops = [self._loop(worker) for worker in range(shape.workers)]
        self._front = Queue(self._clock, 1, computes=True)
        self._left: dict[str, list[int]] = {}  # Episodes left to generate and to score, by group
        self._to_score: set[str] = set()
        self._tokens: dict[str, float] = {}  # Tokens of prompts and answers, by group
        self._running_ms, self._running_since_ms = 0.0, 0.0
        self._sampled = self._dealt = 0.0  # Sampled tokens, and the groups that they belong to
        self.job = SimulatedJob(rules, self, self._clock, checkpoint_every=shape.checkpoint_every)

    def predict(self, steps: int, warm_up: int) -> Prediction:
        """Run `warm_up + steps` steps and return the prediction for the last `steps`."""
        self.job.run(warm_up, 0)
        before = self._uses()
        figures = self.job.run(steps, self.job.v_train)
        uses = [after - earlier for after, earlier in zip(self._uses(), before, strict=True)]
        return self._told(figures, *uses)

    def _uses(self) -> tuple[float, float, float]:
        self._count(0)
        busy = sum(engine.busy_ms for engines in self._engines for engine in engines)
        return busy, self._rewards.used_ms, self._running_ms

    def _told(self, figures: Figures, busy: float, scoring: float, running: float) -> Prediction:
        elapsed = max(figures.elapsed_ms, 1e-9)
        shape, mean = self._shape, self._sampled / max(1.0, self._dealt)
        return Prediction(
            steps_per_s=figures.steps_per_s,
            step_s=elapsed / 1000 / max(1, figures.steps),
            episodes_per_s=figures.throughput * shape.group_size,
            tokens_per_s=figures.throughput * mean,
            staleness_mean=figures.mean_staleness,
            staleness_max=figures.max_staleness,
            trainer_idle=figures.trainer_idle + self._batch_ms(figures.trained, figures.steps) / elapsed,
            rollout_idle=max(0.0, 1 - busy / elapsed / (shape.workers * shape.replicas)),
            reward_idle=max(0.0, 1 - scoring / elapsed / shape.reward_workers),
            wasted=figures.waste,
            running=running / elapsed,
            steps=figures.steps,
            events=self._clock.events,
        )

    # --- the world of `SimulatedJob` ---

    @property
    def workers(self) -> int:
        return self._shape.workers

    def room(self, worker: int, step: int) -> int:
        return max(0, math.ceil((self._limit - self._running[worker]) / self._shape.group_size))

    def generate(self, worker: int, group_id: str, version: int) -> None:
        shape, costs = self._shape, self._costs
        rng = random.Random(f"{self._seed}:{group_id}")
        prompt = costs.prompt_tokens.draw(rng)
        tokens = [
            max(1.0, min(costs.answer_tokens.draw(rng), shape.longest_answer))
            for _ in range(shape.group_size)
        ]
        scoring_ms = [1000 * costs.reward.episode_s.draw(rng) for _ in tokens]
        self._left[group_id] = [len(tokens), len(tokens)]
        self._tokens[group_id] = sum(tokens) + prompt * len(tokens)
        self._sampled += sum(tokens)
        self._dealt += 1
        self._count(len(tokens))
        self._running[worker] += len(tokens)
        engine = min(self._engines[worker], key=lambda one: one.load)
        engine.submit(
            [
                SimulatedAnswer(length, prompt, partial(self._answered, worker, group_id, ms))
                for length, ms in zip(tokens, scoring_ms, strict=True)
            ],
            shared_prompt=prompt,
        )
        # The event loop begins all episodes of a group before it goes on.
        self._loops[worker].put(BEGUN * 1000 * costs.engine.episode_s * len(tokens), lambda: None)

    def _count(self, change: int) -> None:
        """Update the time integral of the number of running episodes."""
        now_ms = self._clock.now_ms
        self._running_ms += (now_ms - self._running_since_ms) * sum(self._running)
        self._running_since_ms = now_ms

    def _loop(self, worker: int) -> Queue:
        shared = self._costs.machine.cores is not None
        return Queue(self._clock, 1, computes=partial(self._interpret, worker) if shared else True)

    def _interpret(self, worker: int, ms: float, done: Callable[[], object]) -> None:
        """Do work of a worker's event loop. Its engines share the interpreter, so they wait for a part of
        it."""
        held_ms = HELD * ms
        if sum(engine.interrupt(held_ms / 1000) for engine in self._engines[worker]):
            ms -= held_ms
        self._clock.compute(ms, done)

    def _answered(self, worker: int, group_id: str, scoring_ms: float) -> None:
        """Handle a sampled episode: its worker does the remaining work."""
        sent = partial(self._sent, worker, group_id, scoring_ms)
        self._loops[worker].put((1 - BEGUN) * 1000 * self._costs.engine.episode_s, sent)

    def _sent(self, worker: int, group_id: str, scoring_ms: float) -> None:
        """Handle a finished episode: its scoring begins now, independent of the other episodes of its
        group."""
        self._count(-1)
        self._running[worker] -= 1
        left = self._left[group_id]
        left[0] -= 1
        machine, pause_ms = self._costs.machine, 1000 * self._costs.reward.pause_s
        scored = partial(soon, self._clock, pause_ms, partial(self._episode_scored, group_id))
        score = partial(self._rewards.put, scoring_ms, scored)
        claimed = partial(self._desk.put, 1000 * machine.reward_episode_s, score)
        self._front.put(1000 * machine.buffer_group_s / self._shape.group_size, claimed)
        if not left[0]:
            self.job.generated(group_id)
        else:
            self.job.lease(worker)

    def _episode_scored(self, group_id: str) -> None:
        self._left[group_id][1] -= 1
        self._may_be_scored(group_id)

    def score(self, group_id: str) -> None:
        self._to_score.add(group_id)
        self._may_be_scored(group_id)

    def _may_be_scored(self, group_id: str) -> None:
        if group_id in self._to_score and not self._left[group_id][1]:
            self._to_score.remove(group_id)
            del self._left[group_id]
            share = self._costs.reward.dropped_share
            kept = not share or random.Random(f"kept:{self._seed}:{group_id}").random() >= share
            self.job.scored(group_id, kept=kept)

    def train(self, step: int, group_ids: Sequence[str]) -> None:
        costs, machine = self._costs.trainer, self._costs.machine
        tokens = sum(self._tokens[group_id] for group_id in group_ids)
        seconds = costs.step_s + tokens * costs.token_s * costs.ranks / self._shape.ranks
        # One more thread needs one more core for the same time.
        extra = machine.threads - 1 if machine.cores is not None else 0
        self._clock.demand(extra)

        def done() -> None:
            self._clock.demand(-extra)
            self.job.trained()

        fetched = partial(self._clock.compute, 1000 * seconds, done)
        self._front.put(self._batch_ms(len(group_ids)), fetched)

    def _batch_ms(self, groups: int, batches: int = 1) -> float:
        costs = self._costs.trainer
        episodes = groups * self._shape.group_size
        return 1000 * (batches * costs.batch_s + episodes * costs.batch_episode_s)

    def publish_ms(self) -> tuple[float, float]:
        costs = self._costs.publication
        return 1000 * costs.publish_s, 1000 * costs.publication_s

    def exchange_ms(self, worker: int) -> float:
        return max(1.0, 1000 * self._costs.publication.fetch_s)

    def served(self, worker: int, version: int) -> None:
        for engine in self._engines[worker]:
            engine.exchange(self._costs.publication.pause_s)


def simulated(job: JobConfig, costs: Costs, *, steps: int, seed: int = 0) -> Prediction:
    """Predict `job` over `steps` steps after a warm-up."""
    return predicted(Rules.of(job), Shape.of(job), costs, steps=steps, seed=seed)


def predicted(
    rules: Rules, shape: Shape, costs: Costs, *, steps: int, seed: int = 0, warm_up: int | None = None
) -> Prediction:
    """Predict a job with these rules and this shape. The job is assumed to have no end."""
    (name,) = rules.consumers
    endless = replace(rules, consumers={name: replace(rules.consumers[name], steps=1 << 40)})
    if warm_up is None:
        warm_up = max(20, min(100, 4 * (rules.consumers[name].max_staleness + 1)))
    return MeasuredWorld(endless, shape, costs, seed=seed).predict(steps, warm_up)
