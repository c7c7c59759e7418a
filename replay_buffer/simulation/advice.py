"""Search for the part that limits a job, and for changes that would balance it. The search simulates the job
with each part faster, and with other settings. Its result depends only on its arguments."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from replay_buffer.ledger.rules import Rules
from replay_buffer.simulation.costs import Costs, Spread
from replay_buffer.simulation.world import Prediction, Shape, predicted

FASTER = 1.25  # Speed-up of each part, to measure the job's gain
SEEDS = (0, 1, 2)
NOISE = 0.02
"""Relative gains in steps per second below this are treated as noise, even if all seeds agree."""
ETAS = (0, 1, 2, 4, 8)
SHARES = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)  # Shares of the GPUs for generation, to be tried


@dataclass(frozen=True)
class Variant:
    """One variant of a job, simulated with all seeds. `change` is its difference from the job: the name of a
    faster part, or overrides of settings."""

    change: str
    steps_per_s: float
    spread: float
    """Largest minus smallest steps per second of the seeds, divided by their mean."""
    prediction: Prediction
    """The prediction with the first seed."""


@dataclass(frozen=True)
class Advice:
    """Results of the search. Alternatives are sorted, fastest first."""

    now: Variant
    parts: list[Variant]
    """The job with each part 25 % faster, sorted by the job's gain, largest first."""
    alternatives: list[Variant]
    noise: float
    """Relative differences in steps per second below this are not significant."""

    @property
    def bottleneck(self) -> str:
        """The part that limits the job, or an empty string if no single part does."""
        first = self.parts[0]
        return first.change if self.gain(first) > self.noise else ""

    def gain(self, other: Variant) -> float:
        """Return the relative gain in steps per second over the present job."""
        return other.steps_per_s / self.now.steps_per_s - 1

    @property
    def better(self) -> list[Variant]:
        """Return the better alternatives. An alternative is better if it is faster by more than the noise, or
        if it is as fast as the job and its staleness is lower by at least a tenth of a step."""
        fresher = self.now.prediction.staleness_mean - 0.1
        return [
            each
            for each in self.alternatives
            if self.gain(each) > self.noise
            or (self.gain(each) > -NOISE / 2 and each.prediction.staleness_mean < fresher)
        ]


def advise(rules: Rules, shape: Shape, costs: Costs, *, steps: int, off: float = 0.0) -> Advice:
    """Simulate the job, the job with each part faster, and its alternatives. `off` is the relative error of
    the simulation, compared with the real job. Differences smaller than `off` are ignored."""

    def outcome(
        change: str, rules: Rules, shape: Shape, costs: Costs, seeds: tuple[int, ...] = SEEDS
    ) -> Variant:
        found = [predicted(rules, shape, costs, steps=steps, seed=seed) for seed in seeds]
        speeds = [each.steps_per_s for each in found]
        mean = statistics.mean(speeds)
        return Variant(change, mean, (max(speeds) - min(speeds)) / mean if mean else 0.0, found[0])

    now = outcome("as it is", rules, shape, costs)
    parts = [outcome(name, rules, shape, faster(costs), SEEDS[:1]) for name, faster in PARTS.items()]
    alternatives = [outcome(change, r, s, costs, SEEDS[:1]) for change, r, s in variants(rules, shape, costs)]
    return Advice(
        now,
        sorted(parts, key=lambda each: -each.steps_per_s),
        sorted(alternatives, key=lambda each: -each.steps_per_s),
        noise=max(NOISE, now.spread, off),
    )


def _spread(spread: Spread) -> Spread:
    return spread.model_copy(
        update={
            "mean": None if spread.mean is None else spread.mean / FASTER,
            "quantiles": tuple(each / FASTER for each in spread.quantiles),
        }
    )


def _faster(costs: Costs, section: str, names: tuple[str, ...]) -> Costs:
    part = getattr(costs, section)
    changed = part.model_copy(update={name: getattr(part, name) / FASTER for name in names})
    return costs.model_copy(update={section: changed})


def _reward(costs: Costs) -> Costs:
    scoring = costs.reward.model_copy(update={"episode_s": _spread(costs.reward.episode_s)})
    return _faster(costs.model_copy(update={"reward": scoring}), "machine", ("reward_episode_s",))


PARTS: dict[str, Callable[[Costs], Costs]] = {
    "generation": lambda costs: _faster(
        costs, "engine", ("pass_s", "request_s", "prefill_s", "prompt_token_s", "episode_s")
    ),
    "training": lambda costs: _faster(costs, "trainer", ("step_s", "token_s", "batch_s", "batch_episode_s")),
    "scoring": _reward,
    "publication": lambda costs: _faster(
        costs, "publication", ("publish_s", "publication_s", "fetch_s", "pause_s")
    ),
    "the buffer": lambda costs: _faster(costs, "machine", ("buffer_group_s",)),
}


def variants(rules: Rules, shape: Shape, costs: Costs) -> Iterator[tuple[str, Rules, Shape]]:
    """Yield possible settings of the job, as command-line overrides."""
    (name,) = rules.consumers
    own = rules.consumers[name]
    for eta in ETAS:
        if eta != own.max_staleness:
            changed = replace(own, max_staleness=eta)
            yield f"buffer.max_staleness={eta}", replace(rules, consumers={name: changed}), shape
    other = "full" if rules.pacing == "fresh" else "fresh"
    yield f"buffer.pacing={other}", replace(rules, pacing=other), shape  # type: ignore[arg-type]
    for factor in (0.5, 2.0):
        concurrent = int(shape.max_concurrent * factor)
        if concurrent >= shape.group_size:
            yield f"rollout.max_concurrent={concurrent}", rules, replace(shape, max_concurrent=concurrent)
    if costs.reward.episode_s.expected():
        workers = 2 * shape.reward_workers
        yield f"reward.workers={workers}", rules, replace(shape, reward_workers=workers)
    if costs.machine.cores is None:
        yield from _splits(rules, shape)


def _splits(rules: Rules, shape: Shape) -> Iterator[tuple[str, Rules, Shape]]:
    """Yield other divisions of the same GPUs between trainer and engines, with one GPU for each rank and each
    engine."""
    gpus = shape.ranks + shape.workers * shape.replicas
    seen = {shape.workers}
    for share in SHARES:
        workers = max(1, round(gpus * share / shape.replicas))
        ranks = gpus - workers * shape.replicas
        if workers in seen or ranks < 1:
            continue
        seen.add(workers)
        change = f"rollout.workers={workers} trainer.ranks={ranks}"
        yield change, rules, replace(shape, workers=workers, ranks=ranks)
