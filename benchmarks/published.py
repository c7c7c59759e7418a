"""What asynchrony makes of published synchronous runs: predictions of `replay_buffer/simulation/`.

    python benchmarks/published.py [--out FILE.json] [--table FILE.md]

Each configuration is given by what its synchronous row says (seconds a step, GPUs, batch). What is not
published is a parameter with a central value and two others; each prediction is made with all of them, one
changed at a time, and its range is told. Nothing is fitted to an asynchronous row.

    generating  share of the synchronous step that is generation, where no breakdown is published: three
                values, or, where it is said how the GPUs are split, that which the split balances, and those
                with a quarter more or less training
    sigma       of the lengths of answers, lognormal, cut at the longest
    crowding    share of a decode pass that is due to the number of requests in it, at the synchronous batch

Costs follow from them: the engines' pass is scaled until generating a whole batch on all GPUs, the slowest
answer included, takes the generating share of the step; training takes the rest, and k times as long on 1/k
of the GPUs. Rewards cost nothing, a publication 1 % of the synchronous step. An asynchronous job has the
same GPUs, of which a part generates, with as many requests for each engine as the synchronous batch gave
it. An eighth of each cluster and of its batch is simulated: what an engine or a rank does is the same.

A step is trained when its whole batch is there, as here: a system whose trainer begins with the first
mini-batch of a step that is still being generated overlaps more at small η than is predicted. A stale share s
is taken for η = 1 with at most 1 + s batches outstanding, what is trained among them. Some minutes of
one core.

Of 24 rows whose asynchronous figures are published, 10 lie in the predicted range. verl's rows have the
wrong sign: a slow-down is predicted where a speed-up was published. The assumption that breaks is that the
rest of the synchronous step, 178 of 356 s with the old log-probs, takes twice as long on half the GPUs: that
alone is 357 s at 64 + 64.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from replay_buffer.ledger.rules import Rules
from replay_buffer.simulation.costs import Costs, EngineCosts, PublicationCosts, Spread, TrainerCosts
from replay_buffer.simulation.world import Prediction, Shape, predicted

UNBOUNDED = 1 << 20
STEPS, WARM_UP = 10, 6
SIZE = 1 / 8  # Of each cluster that is simulated
PUBLICATION = 0.01
SIGMAS = (0.8, 0.5, 1.1)
CROWDING = (0.5, 0.2, 0.8)
TRAINING = (0.75, 1.25)


@dataclass(frozen=True)
class Published:
    """A synchronous row. `generating` are its central value and the others; one alone is published, and none
    is what `split` balances."""

    name: str
    gpus: int
    step_s: float
    generating: tuple[float, ...] = ()
    engine_gpus: int = 1  # GPUs of one engine
    prompts: int = 512
    samples: int = 16
    mean_tokens: float = 8000.0
    longest: float = 27_000.0
    split: float = 0.75  # Share of the GPUs that generate when asynchronous


@dataclass(frozen=True)
class Given:
    """One choice of what is not published."""

    generating: float | None = None
    """None: what the split balances,"""
    training: float = 1.0
    """with this much of the training that it balances."""
    sigma: float = SIGMAS[0]
    crowding: float = CROWDING[0]


def choices(row: Published) -> Iterator[Given]:
    """The central choice, then each other with one parameter changed."""
    central = Given(*row.generating[:1])
    yield central
    yield from (replace(central, generating=value) for value in row.generating[1:])
    yield from (replace(central, training=value) for value in (() if row.generating else TRAINING))
    yield from (replace(central, sigma=value) for value in SIGMAS[1:])
    yield from (replace(central, crowding=value) for value in CROWDING[1:])


class Model:
    """A published row whose parameters are chosen."""

    def __init__(self, row: Published, given: Given) -> None:
        self.row, self.given = row, given
        self.groups = max(8, round(row.prompts * SIZE))
        self.engines = max(1, round(row.gpus * SIZE / row.engine_gpus))
        self.slots = max(row.samples, round(self.groups * row.samples / self.engines))
        drained_s = self._drained_s()
        if given.generating is None:
            # An engine that is kept full does a batch in the mean length's time, not in the longest's.
            kept_full = self._answers().expected() / drained_s
            balance = row.split / (row.split + kept_full * (1 - row.split))
            self.generating = 1 - given.training * (1 - balance)
        else:
            self.generating = given.generating
        scale = self.generating * row.step_s / drained_s
        self._pass = EngineCosts(
            pass_s=scale * (1 - given.crowding), request_s=scale * given.crowding / self.slots
        )

    def _answers(self) -> Spread:
        return Spread(mean=self.row.mean_tokens, sigma=self.given.sigma, most=self.row.longest)

    def _drained_s(self) -> float:
        """Seconds in which all GPUs generate a batch, down to its last answer, if a full pass takes one."""
        crowding = self.given.crowding
        engine = EngineCosts(pass_s=1 - crowding, request_s=crowding / self.slots)
        costs = Costs(
            prompt_tokens=Spread(mean=0.0),
            answer_tokens=self._answers(),
            engine=engine,
            trainer=TrainerCosts(token_s=0.0),
        )
        return self._run(costs, 0, self.engines).step_s

    def _run(self, costs: Costs, eta: int, engines: int, most_groups: int | None = None) -> Prediction:
        rules = Rules.alone(
            group_size=self.row.samples,
            batch_groups=self.groups,
            max_staleness=eta,
            pacing="fresh" if eta < UNBOUNDED else "full",
            max_groups=most_groups or 64 * self.groups,
        )
        shape = Shape(self.row.samples, workers=engines, max_concurrent=self.slots)
        return predicted(rules, shape, costs, steps=STEPS, warm_up=WARM_UP)

    def asynchronous(
        self, eta: int, *, split: float | None = None, gpus: int | None = None, most: float | None = None
    ) -> Prediction:
        """On as many GPUs (those of the row unless given), of which `split` generate. `most`: batches that
        may be outstanding, where that is less than η allows."""
        row = self.row
        gpus, split = gpus or row.gpus, split or row.split
        engines = max(1, round(gpus * SIZE * split / row.engine_gpus))
        trainers = gpus * (1 - split)
        train_s = (1 - self.generating) * row.step_s * row.gpus / trainers
        beside_s = PUBLICATION * row.step_s
        mean = self._answers().expected()
        costs = Costs(
            prompt_tokens=Spread(mean=0.0),
            answer_tokens=self._answers(),
            engine=self._pass,
            trainer=TrainerCosts(token_s=train_s / (mean * self.groups * row.samples)),
            publication=PublicationCosts(publication_s=beside_s, pause_s=beside_s),
        )
        return self._run(costs, eta, engines, round(most * self.groups) if most else None)


def range_of(row: Published, steps_s: list[float]) -> dict[str, Any]:
    """A prediction of seconds a step, with its range and how much less that is than the synchronous step."""
    return {
        "step_s": round(steps_s[0], 1),
        "least_s": round(min(steps_s), 1),
        "most_s": round(max(steps_s), 1),
        "speedup": round(row.step_s / steps_s[0], 2),
        "speedups": [round(row.step_s / max(steps_s), 2), round(row.step_s / min(steps_s), 2)],
    }


HOURS = 3600
AREAL = [
    (Published("AReaL 1.5B maths", 128, 41.0 * HOURS / 250), 250),
    (Published("AReaL 7B maths", 192, 57.7 * HOURS / 250), 250),
    (Published("AReaL 14B code", 256, 48.8 * HOURS / 80, engine_gpus=2), 80),
    (Published("AReaL 32B code", 384, 51.1 * HOURS / 60, engine_gpus=4), 60),
]
BY_ETA = [
    (Published("AReaL 1.5B, 128 GPUs", 128, 590.0), 128.7, (1, 2, 4, 8, 16, UNBOUNDED)),
    (
        Published("AReaL 1.5B, 8 GPUs, 8k", 8, 590.0, prompts=128, samples=4, mean_tokens=4000, longest=7000),
        27.1,
        (1, 2, 4, 8, 16),
    ),
]
VERL = Published("verl 7B DAPO", 128, 356.3, (177.9 / 356.3,), longest=28_000, split=0.5)
NEMO = [
    Published(
        "NeMo-RL DeepSeek-V3",
        512,
        111.0,
        (0.6, 0.45, 0.75),
        engine_gpus=32,
        prompts=64,
        samples=32,
        split=0.5,
    ),
    Published(
        "NeMo-RL Qwen3-235B", 256, 312.0, (0.6, 0.45, 0.75), engine_gpus=16, prompts=64, samples=32, split=0.5
    ),
    Published(
        "NeMo-RL Qwen3-30B-A3B",
        32,
        192.0,
        (0.6, 0.45, 0.75),
        engine_gpus=2,
        prompts=64,
        samples=32,
        split=0.5,
    ),
    Published(
        "NeMo-RL Qwen3-30B-A3B, GB200", 16, 221.0, (0.6, 0.45, 0.75), prompts=64, samples=32, split=0.5
    ),
]


def predictions() -> Iterator[dict[str, Any]]:
    """All of them, each with the row that it is made from."""
    for row, steps in AREAL:
        found = range_of(row, [Model(row, given).asynchronous(4).step_s for given in choices(row)])
        hours = {name: round(found[name] * steps / HOURS, 1) for name in ("step_s", "least_s", "most_s")}
        yield {"row": asdict(row), "what": "η = 4, 3/4 of the GPUs generate", "hours": hours, **found}
    for row, tokens, etas in BY_ETA:
        models = [Model(row, given) for given in choices(row)]
        zero = [model.asynchronous(0).step_s for model in models]
        for eta in etas:
            ratios = [z / model.asynchronous(eta).step_s for model, z in zip(models, zero, strict=True)]
            yield {
                "row": asdict(row),
                "what": f"η = {'∞' if eta == UNBOUNDED else eta}",
                "thousand_tokens_per_s": [
                    round(tokens * r, 1) for r in (ratios[0], min(ratios), max(ratios))
                ],
                "over_eta_0": round(ratios[0], 2),
            }
    for gpus, share in [(128, 0.0), (128, 0.1), (128, 0.3), (128, 0.5), (64, 0.5), (32, 0.5)]:
        steps_s = [
            Model(VERL, given).asynchronous(int(share > 0), gpus=gpus, most=1 + share).step_s
            for given in choices(VERL)
        ]
        what = f"{gpus // 2} + {gpus // 2} GPUs, stale share {share:g}"
        what += ", beside 128 synchronous ones" if gpus != VERL.gpus else ""
        yield {"row": asdict(VERL), "what": what, **range_of(VERL, steps_s)}
    for row in NEMO:
        for split in (0.5, 0.625):
            steps_s = [Model(row, given).asynchronous(1, split=split).step_s for given in choices(row)]
            what = f"η = 1, {split:.1%} of the GPUs generate"
            yield {"row": asdict(row), "what": what, **range_of(row, steps_s)}


def line(found: dict[str, Any]) -> str:
    row = found["row"]
    if "thousand_tokens_per_s" in found:
        central, least, most = found["thousand_tokens_per_s"]
        told = f"{central:g}k tokens/s ({least:g}–{most:g}k)"
        return f"| {row['name']} | {found['what']} | | {told} | {found['over_eta_0']:.2f} × η = 0 |"
    told = f"{found['step_s']:g} s ({found['least_s']:g}–{found['most_s']:g})"
    if hours := found.get("hours"):
        told += f"; {hours['step_s']:g} h ({hours['least_s']:g}–{hours['most_s']:g})"
    low, high = found["speedups"]
    speedup = f"{found['speedup']:.2f} × ({low:.2f}–{high:.2f})"
    return f"| {row['name']} | {found['what']} | {row['step_s']:.1f} s | {told} | {speedup} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    lines = [
        "| configuration | asynchronous | synchronous step | predicted (range) | speed-up |",
        "| --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines))
    every = []
    for found in predictions():
        every.append(found)
        lines.append(line(found))
        print(lines[-1], flush=True)
    if options.table:
        head = (__doc__ or "").split("\n\n", 2)[2].rstrip()
        options.table.write_text(
            "# Predictions of published configurations\n\nMade by `python benchmarks/published.py`. "
            f"{head}\n\n" + "\n".join(lines) + "\n",
            encoding="utf-8",
        )
    if options.out:
        record = {"sigma": SIGMAS, "crowding": CROWDING, "size": SIZE, "steps": STEPS, "predictions": every}
        options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
