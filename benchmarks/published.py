"""Predict published asynchronous runs from the synchronous ones, with `replay_buffer/simulation/`.

    python benchmarks/published.py [--out FILE.json] [--table FILE.md] [--only TEXT]

Each configuration is given by its synchronous row (seconds a step, GPUs, batch). A quantity that is not
published is a parameter with a central value and other values. Each prediction is made for the central values
and for each other value of one parameter. Other values of `generating`, `old logprob`, `split` and `spread`
are combined with every value of `scaling`, because they decide together whether the trainer or the engines
are slower. The range is the smallest and the largest result. No value is fitted to an asynchronous row. The
published asynchronous figures are read only after a prediction, to count the rows in range.

    scaling     exponent of the trainer's time by GPUs: on 1/k of the GPUs, training takes k^scaling times as
                long. 1 is perfect scaling. Published synchronous rows have 0.23 (verl's update from 64 to 128
                GPUs), 0.27 and 0.34 (whole steps of NeMo-RL's DeepSeek-V3 from 256 to 512 GPUs and Qwen3-235B
                from 128 to 256) and 1.23 (verl's update from 32 to 64 GPUs)
    generating  share of the synchronous step that is generation, if no breakdown is published: three values,
                or, if the split of the GPUs is known, the share that the split balances, and the shares with
                a quarter more or less training
    sigma       of the lengths of answers, lognormal, cut at the longest
    crowding    share of a decode pass that is due to the number of requests in it, at the synchronous batch
    requests    most requests of an engine, over those that the synchronous batch gave it
    old logprob whether the asynchronous trainer computes the old log-probs, if they are a published part of
                the step (verl: its asynchronous trainer takes those of the rollout by default)
    split       share of the GPUs that generate, if it is not published
    spread      whether a batch is generated faster by more GPUs. If not, a pass takes as long with all the
                requests that the fewer engines get. verl's synchronous generation takes 177.9 s on 128 GPUs
                and 150.7 s on 64

Costs follow from them: the engines' pass is scaled until generating a whole batch on all GPUs, the slowest
answer included, takes the generating share of the step; training takes the rest. Rewards cost nothing, a
publication 1 % of the synchronous step. An asynchronous job has the same GPUs, of which a part generates. An
eighth of each cluster and of its batch is simulated, because each engine and each rank does the same.

A step is trained once its whole batch has arrived, as in this project. A system whose trainer begins with the
first mini-batch of a step that is still being generated overlaps more at small η than is predicted. A stale
share s is modelled as η = 1 with at most 1 + s batches outstanding, those in training included. So verl's
rows stay outside even if neither generation nor the trainer scales: 178 s of generation and 148 s of training
then overlap too little. The run takes about ten minutes of two cores.

An earlier count used 24 asynchronous figures. Only the 12 in `SEEN`, whose sources could be read again, are
compared here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
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
SCALING = (0.5, 0.25, 1.0)
REQUESTS = (1.0, 2.0)


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
    splits: tuple[float, ...] = ()  # Other values, if it is not published
    old_logprob: float = 0.0  # Share of the step that computes old log-probs


@dataclass(frozen=True)
class Given:
    """One choice of what is not published."""

    generating: float | None = None
    """None: what the split balances,"""
    training: float = 1.0
    """with this much of the training that it balances."""
    sigma: float = SIGMAS[0]
    crowding: float = CROWDING[0]
    scaling: float = SCALING[0]
    requests: float = REQUESTS[0]
    old_logprob: bool = False
    split: float = 0.75
    spread: bool = True


def choices(row: Published) -> Iterator[Given]:
    """Yield the central choice first, then those with other values."""
    central = Given(next(iter(row.generating), None), split=row.split)
    for scaling in SCALING:
        scaled = replace(central, scaling=scaling)
        yield scaled
        yield from (replace(scaled, generating=value) for value in row.generating[1:])
        yield from (replace(scaled, training=value) for value in (() if row.generating else TRAINING))
        yield from (replace(scaled, split=value) for value in row.splits)
        unspread = replace(scaled, spread=False, crowding=0.0)
        yield unspread
        if row.old_logprob:
            yield from (replace(each, old_logprob=True) for each in (scaled, unspread))
    yield from (replace(central, sigma=value) for value in SIGMAS[1:])
    yield from (replace(central, crowding=value) for value in CROWDING[1:])
    yield from (replace(central, requests=value) for value in REQUESTS[1:])


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
            balance = row.split / (row.split + kept_full * (1 - row.split) ** given.scaling)
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
        return self._run(costs, 0, self.engines, self.slots).step_s

    def _run(
        self, costs: Costs, eta: int, engines: int, slots: int, most_groups: int | None = None
    ) -> Prediction:
        rules = Rules.alone(
            group_size=self.row.samples,
            batch_groups=self.groups,
            max_staleness=eta,
            pacing="fresh" if eta < UNBOUNDED else "full",
            max_groups=most_groups or 64 * self.groups,
        )
        shape = Shape(self.row.samples, workers=engines, max_concurrent=slots)
        return predicted(rules, shape, costs, steps=STEPS, warm_up=WARM_UP)

    def asynchronous(self, eta: int, *, gpus: int | None = None, most: float | None = None) -> Prediction:
        """Predict the asynchronous job on as many GPUs (by default those of the row). `most` is the largest
        number of outstanding batches, if it is below what η allows."""
        row, given = self.row, self.given
        gpus = gpus or row.gpus
        engines = max(1, round(gpus * SIZE * given.split / row.engine_gpus))
        trains = 1 - self.generating - row.old_logprob * (not given.old_logprob)
        train_s = trains * row.step_s * (row.gpus / (gpus * (1 - given.split))) ** given.scaling
        beside_s = PUBLICATION * row.step_s
        mean = self._answers().expected()
        costs = Costs(
            prompt_tokens=Spread(mean=0.0),
            answer_tokens=self._answers(),
            engine=self._pass,
            trainer=TrainerCosts(token_s=train_s / (mean * self.groups * row.samples)),
            publication=PublicationCosts(publication_s=beside_s, pause_s=beside_s),
        )
        slots = round((given.requests if given.spread else self.engines / engines) * self.slots)
        return self._run(costs, eta, engines, slots, round(most * self.groups) if most else None)


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
VERL = Published(
    "verl 7B DAPO", 128, 356.3, (177.9 / 356.3,), longest=28_000, split=0.5, old_logprob=53.9 / 356.3
)
NEMO = [
    Published(
        name,
        gpus,
        step_s,
        (0.6, 0.45, 0.75),
        engine_gpus=engine_gpus,
        prompts=64,
        samples=32,
        split=0.5,
        splits=(0.625,),
    )
    for name, gpus, step_s, engine_gpus in (
        ("NeMo-RL DeepSeek-V3", 512, 111.0, 32),
        ("NeMo-RL Qwen3-235B", 256, 312.0, 16),
        ("NeMo-RL Qwen3-30B-A3B", 32, 192.0, 2),
        ("NeMo-RL Qwen3-30B-A3B, GB200", 16, 221.0, 1),
    )
]
SEEN = {
    # AReaL, blog/AReaL_v0_3.md, table 2: hours
    "AReaL 1.5B maths, η = 4": 14.8,
    "AReaL 7B maths, η = 4": 25.4,
    # verl, docs/advance/fully_async.md: seconds a step
    "verl 7B DAPO, 64 + 64 GPUs, stale share 0": 231.34,
    "verl 7B DAPO, 64 + 64 GPUs, stale share 0.1": 171.30,
    "verl 7B DAPO, 64 + 64 GPUs, stale share 0.3": 146.11,
    "verl 7B DAPO, 64 + 64 GPUs, stale share 0.5": 150.63,
    "verl 7B DAPO, 32 + 32 GPUs, stale share 0.5": 189.26,
    "verl 7B DAPO, 16 + 16 GPUs, stale share 0.5": 294.77,
    # NeMo-RL 0.6, docs/about/performance-summary.md: seconds a step
    "NeMo-RL DeepSeek-V3, η = 1": 64.1,
    "NeMo-RL Qwen3-235B, η = 1": 231.0,
    "NeMo-RL Qwen3-30B-A3B, η = 1": 152.0,
    "NeMo-RL Qwen3-30B-A3B, GB200, η = 1": 301.0,
}
"""Published asynchronous figures. No prediction reads them."""


def step_s(
    row: Published, eta: int, given: Given, gpus: int | None = None, most: float | None = None
) -> float:
    """Return the predicted seconds of a step."""
    return model_of(row, given).asynchronous(eta, gpus=gpus, most=most).step_s


@cache
def model_of(row: Published, given: Given) -> Model:
    return Model(row, given)


def predictions(pool: Executor, only: str = "") -> Iterator[dict[str, Any]]:
    """Yield the predictions, each with the row that it is made from."""

    def every(row: Published, eta: int, **others: Any) -> list[float]:
        return list(pool.map(partial(step_s, row, eta, **others), choices(row)))

    for row, steps in AREAL:
        if only in row.name:
            found = range_of(row, every(row, 4))
            hours = {name: round(found[name] * steps / HOURS, 1) for name in ("step_s", "least_s", "most_s")}
            yield {"row": asdict(row), "what": "η = 4", "hours": hours, **found}
    for row, tokens, etas in BY_ETA:
        zero = every(row, 0) if only in row.name else []
        for eta in etas if zero else ():
            ratios = [z / s for z, s in zip(zero, every(row, eta), strict=True)]
            thousands = [round(tokens * ratio, 1) for ratio in (ratios[0], min(ratios), max(ratios))]
            yield {
                "row": asdict(row),
                "what": f"η = {'∞' if eta == UNBOUNDED else eta}",
                "thousand_tokens_per_s": thousands,
                "over_eta_0": round(ratios[0], 2),
            }
    for gpus, share in [(128, 0.0), (128, 0.1), (128, 0.3), (128, 0.5), (64, 0.5), (32, 0.5)]:
        if only in VERL.name:
            steps_s = every(VERL, int(share > 0), gpus=gpus, most=1 + share)
            what = f"{gpus // 2} + {gpus // 2} GPUs, stale share {share:g}"
            yield {"row": asdict(VERL), "what": what, **range_of(VERL, steps_s)}
    for row in NEMO:
        if only in row.name:
            yield {"row": asdict(row), "what": "η = 1", **range_of(row, every(row, 1))}


def compare(found: dict[str, Any]) -> None:
    """Add the published figure, and whether it lies in the predicted range."""
    seen = SEEN.get(f"{found['row']['name']}, {found['what']}")
    if seen is not None:
        unit = found.get("hours", found)
        found["published"] = seen
        found["in_range"] = unit["least_s"] <= seen <= unit["most_s"]


def line(found: dict[str, Any]) -> str:
    row = found["row"]
    if "thousand_tokens_per_s" in found:
        central, least, most = found["thousand_tokens_per_s"]
        told = f"{central:g}k tokens/s ({least:g}–{most:g}k)"
        return f"| {row['name']} | {found['what']} | | {told} | {found['over_eta_0']:.2f} × η = 0 | – | |"
    told, unit = f"{found['step_s']:g} s ({found['least_s']:g}–{found['most_s']:g})", "s"
    if hours := found.get("hours"):
        told += f"; {hours['step_s']:g} h ({hours['least_s']:g}–{hours['most_s']:g})"
        unit = "h"
    low, high = found["speedups"]
    speedup = f"{found['speedup']:.2f} × ({low:.2f}–{high:.2f})"
    seen = "– | "
    if "published" in found:
        seen = f"{found['published']:g} {unit} | {'yes' if found['in_range'] else 'no'}"
    return f"| {row['name']} | {found['what']} | {row['step_s']:.1f} s | {told} | {speedup} | {seen} |"


def summary(every: Sequence[dict[str, Any]]) -> str:
    """Return how many published figures lie in the predicted range, as sentences."""
    compared = [found for found in every if "published" in found]
    inside = sum(found["in_range"] for found in compared)
    right = sum(
        (found["speedup"] > 1) == (found["published"] < found["row"]["step_s"])
        for found in compared
        if "hours" not in found
    )
    seconds = sum("hours" not in found for found in compared)
    return (
        f"Of {len(compared)} published asynchronous figures, {inside} lie in the predicted range. For "
        f"{right} of the {seconds} rows of verl and NeMo-RL, the central prediction has the right sign."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with this text in their name")
    options = parser.parse_args()
    columns = "configuration|asynchronous|synchronous step|predicted (range)|speed-up|published|in range"
    lines = [f"| {columns.replace('|', ' | ')} |", "| --- | --- | --- | --- | --- | --- | --- |"]
    print("\n".join(lines))
    every = []
    with ProcessPoolExecutor() as pool:
        for found in predictions(pool, options.only):
            compare(found)
            every.append(found)
            lines.append(line(found))
            print(lines[-1], flush=True)
    result = summary(every)
    print(result)
    if options.table:
        head = (__doc__ or "").split("\n\n", 2)[2].rstrip()
        options.table.write_text(
            "# Predictions of published configurations\n\nMade by `python benchmarks/published.py`. "
            f"{result}\n\n" + "\n".join(lines) + f"\n\n## Method\n\n{head}\n",
            encoding="utf-8",
        )
    if options.out:
        values = {"scaling": SCALING, "sigma": SIGMAS, "crowding": CROWDING, "requests": REQUESTS}
        record = {**values, "size": SIZE, "steps": STEPS, "summary": result, "predictions": every}
        options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
