"""Costs of the parts of earlier runs, from their records of kind `step` and `load` (docs/metrics.md).

Services that share a machine's cores slow each other down, so the duration of a step includes waits for a
core. Therefore, if trainer and engines compute on CPUs, costs are measured in CPU time, and the simulation
itself distributes the cores. On GPUs, costs are measured in elapsed time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_async.base.errors import RunFolderError
from areal_async.config.devices import first_threads
from areal_async.config.job import JobConfig
from areal_async.launch.run_handle import Run
from areal_async.service.record import lives_of, read_run_log
from replay_buffer.simulation.costs import (
    Costs,
    EngineCosts,
    MachineCosts,
    PublicationCosts,
    RewardCosts,
    Spread,
    TrainerCosts,
)

TERMS = 4  # Terms of `with_pass` in rollout_service/engines/local/engine.py
SHORT = 0.25  # Largest idle share of a trainer whose waits are taken for waits for available batches
OF_TRAINER = 0.5  # Share of the wait for a batch in which the trainer computes; in the rest, the buffer does
REWARD_PAUSE_S = 0.0225  # Half of CLAIM_PAUSE_S, and SEND_PAUSE_S, of reward_service/server.py
ROUNDED = 4  # Digits
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Window:
    """Figures of a run between its first and last `load` records."""

    job: JobConfig
    steps: Sequence[Record]  # The step records between them
    seconds: float
    cores: int
    first: Record
    last: Record

    @classmethod
    def of(cls, run: Run) -> Window:
        """Return the window of a run. Raises `RunFolderError` if the run is too short."""
        life = lives_of(list(read_run_log(run.folder / "metrics.jsonl")))[-1]
        loads = [record for record in life if record["kind"] == "load" and record["steps"] > 0]
        # A restarted service counts from 0. Its values before the restart are left out.
        while len(loads) > 1 and set(loads[0]["services"]) != set(loads[-1]["services"]):
            del loads[0]
        steps = [record for record in life if record["kind"] == "step"]
        if len(loads) > 1:
            steps = [r for r in steps if loads[0]["time_s"] < r["time_s"] <= loads[-1]["time_s"]]
        if len(loads) < 2 or not steps:
            raise RunFolderError(
                f"{run.folder} says nothing of what its steps cost: it needs two `load` records, which a run "
                "writes every five seconds. Let it do more steps, or give the costs with --costs"
            )
        first, last = loads[0], loads[-1]
        return cls(run.job, steps, last["time_s"] - first["time_s"], last["cores"], first, last)

    @property
    def steps_done(self) -> int:
        return int(self.last["steps"] - self.first["steps"])

    def used(self, prefix: str, *path: str) -> float:
        """Return the growth of a figure, summed over the services with this name prefix."""
        return float(
            sum(_at(self.last, name, path) - _at(self.first, name, path) for name in self.named(prefix))
        )

    def sums(self, prefix: str, what: str) -> list[float]:
        """Return the growth of the sums of this name, or an empty list if there are none."""
        told = [
            (self.first["services"][name].get(what, ()), self.last["services"][name].get(what, ()))
            for name in self.named(prefix)
        ]
        grown = [[b - a for a, b in zip(first, last, strict=False)] for first, last in told]
        return [float(sum(each)) for each in zip(*grown, strict=False)]

    def named(self, prefix: str) -> list[str]:
        return [name for name in self.last["services"] if name.startswith(prefix)]

    def counted(self, prefix: str) -> int:
        """Return the number of transitions whose reason has this prefix."""
        before, after = self.first["counts"], self.last["counts"]
        return sum(count - before.get(name, 0) for name, count in after.items() if name.startswith(prefix))

    def mean(self, name: str) -> float:
        """Return the mean of a field of the step records."""
        return sum(float(record[name]) for record in self.steps) / len(self.steps)


def measured(runs: Sequence[Run]) -> Costs:
    """Return the costs measured in runs with the same parts, possibly with different settings. The more their
    batch sizes differ, the better the estimate of a step's constant cost. Raises `RunFolderError`."""
    windows = [Window.of(run) for run in runs]
    newest = windows[-1]
    shared = newest.job.trainer.device == "cpu" and newest.job.rollout.device == "cpu"
    episodes = sum(window.counted("stored") for window in windows)
    if episodes <= 0:
        raise RunFolderError(f"{runs[-1].folder} has stored no episode between its `load` records")
    groups = sum(window.counted("stored") / window.job.rollout.group_size for window in windows)
    pass_s, token_s, prefill_s, prompt_s, passes_s = _engine(windows)
    overhead_s = (sum(w.used("rollout", "cpu_s") for w in windows) - passes_s) / episodes
    scoring_s = _sum_of(windows, "reward", "calls")[1] / episodes
    desk_s = sum(window.used("reward", "cpu_s") for window in windows) / episodes - scoring_s
    step_s, unit_s = _trainer(windows, shared=shared)
    batch_s, batch_episode_s = _batch(windows)
    buffer_s = sum(w.used("buffer", "cpu_s") - (1 - OF_TRAINER) * _wait_s(w) * w.steps_done for w in windows)
    seconds = sum(window.seconds for window in windows)
    dropped = sum(w.counted("dropped:verdict") + w.counted("dropped:filter") for w in windows)
    made = dropped + sum(window.counted("trained") for window in windows)
    return Costs(
        prompt_tokens=Spread(
            mean=_rounded((newest.mean("units") - newest.mean("tokens")) / newest.mean("episodes"))
        ),
        answer_tokens=Spread(quantiles=_quantiles(newest)),
        engine=EngineCosts(
            pass_s=_rounded(pass_s),
            request_s=_rounded(token_s),
            prefill_s=_rounded(prefill_s),
            prompt_token_s=_rounded(prompt_s),
            episode_s=_rounded(max(0.0, overhead_s)) if shared and passes_s else 0.0,
            recompute=newest.job.rollout.update_mode == "recompute",
        ),
        trainer=TrainerCosts(
            step_s=_rounded(step_s),
            token_s=_rounded(unit_s),
            batch_s=_rounded(batch_s),
            batch_episode_s=_rounded(batch_episode_s),
            ranks=newest.job.trainer.ranks,
        ),
        reward=RewardCosts(
            episode_s=Spread(mean=_rounded(scoring_s)),
            dropped_share=dropped / made if dropped else 0.0,
            pause_s=REWARD_PAUSE_S,
        ),
        publication=_publication(windows, shared=shared),
        machine=MachineCosts(
            cores=float(newest.cores),
            buffer_group_s=_rounded(max(0.0, buffer_s / groups)),
            reward_episode_s=_rounded(max(0.0, desk_s)),
            others=_rounded(sum(w.used("supervisor", "cpu_s") for w in windows) / seconds),
            threads=first_threads(newest.job.trainer.torch_threads),
        )
        if shared
        else MachineCosts(),
    )


def _engine(windows: Sequence[Window]) -> tuple[float, float, float, float, float]:
    """Return five figures in seconds: for a decode pass, for each request in it, for a pass over prompts, for
    a token of a prompt, and for all passes together. The last figure is 0 if the engine does not measure
    passes. The cost of a token is then right only for engines with the same load as in the runs."""
    told = [sums for window in windows if (sums := window.sums("rollout", "passes"))]
    if not told:
        tokens = sum(window.used("rollout", "tokens") for window in windows)
        busy_s = sum(
            window.used("rollout", "busy_s", "rollout") * window.job.rollout.replicas for window in windows
        )
        return 0.0, busy_s / max(1.0, tokens), 0.0, 0.0, 0.0
    sums = [sum(each) for each in zip(*told, strict=True)]
    products = np.zeros((TERMS, TERMS))
    pairs = [(i, j) for i in range(TERMS) for j in range(i, TERMS)]
    for (i, j), value in zip(pairs, sums, strict=False):
        products[i, j] = products[j, i] = value
    by_seconds = np.array(sums[len(pairs) :])
    a, b, c, d = _least_squares(products, by_seconds)
    return a, b, c, d, float(by_seconds[0])


def _publication(windows: Sequence[Window], *, shared: bool) -> PublicationCosts:
    updates, updates_s = _sum_of(windows, "rollout", "updates")
    fetches, fetches_s = _sum_of(windows, "rollout", "fetches")
    publish_s = windows[-1].mean("publish_s")
    return PublicationCosts(
        publish_s=0.0 if shared else _rounded(publish_s),
        publication_s=_rounded(max(0.0, windows[-1].mean("publication_s") - publish_s)),
        fetch_s=_rounded(fetches_s / fetches) if fetches else 0.0,
        pause_s=_rounded(updates_s / updates) if updates else 0.0,
    )


def _trainer(windows: Sequence[Window], *, shared: bool) -> tuple[float, float]:
    """Return the constant seconds of a step, and the seconds per token. If all batches had the same size, the
    two cannot be separated, and all time counts as tokens."""
    points = []
    for window in windows:
        threads = first_threads(window.job.trainer.torch_threads)
        spent_s = (
            window.used("trainer", "cpu_s") / window.steps_done / threads - OF_TRAINER * _wait_s(window)
            if shared
            else window.mean("busy_s")
        )
        points.append((window.mean("units"), spent_s))
    return _line(points)


def _batch(windows: Sequence[Window]) -> tuple[float, float]:
    """Return the constant seconds of the wait for an available batch, and the seconds per episode."""
    return _line([(window.mean("episodes"), _wait_s(window)) for window in windows])


def _wait_s(window: Window) -> float:
    """Return the seconds of the wait for an available batch. If the trainer is often idle, most waits are for
    generation, and only the shortest ones are used."""
    mean_s, waits = window.mean("wait_s"), [record["wait_s"] for record in window.steps]
    return mean_s if mean_s < SHORT * window.mean("step_s") else float(np.quantile(waits, 0.1))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the constant seconds and the seconds per unit of size of (size, seconds) points."""
    sizes = np.array([size for size, _ in points])
    if sizes.max() < 1.2 * sizes.min():
        return 0.0, float(sum(spent for _, spent in points) / sizes.sum())
    rows = np.stack([np.ones(len(points)), sizes], 1)
    constant_s, each_s = _least_squares(rows.T @ rows, rows.T @ np.array([spent for _, spent in points]))
    return constant_s, each_s


def _least_squares(products: np.ndarray, by_value: np.ndarray) -> list[float]:
    """Return the least-squares coefficients. Coefficients that would be negative are removed one by one."""
    used = [i for i in range(len(by_value)) if products[i, i] > 0]
    while used:
        scale = np.sqrt(products.diagonal()[used])
        scaled = products[np.ix_(used, used)] / np.outer(scale, scale)
        found = np.linalg.lstsq(scaled, by_value[used] / scale, rcond=1e-9)[0] / scale
        if found.min() >= 0:
            break
        used.pop(int(found.argmin()))
        found = np.zeros(0)
    result = [0.0] * len(by_value)
    for i, value in zip(used, found if used else (), strict=True):
        result[i] = float(value)
    return result


def _quantiles(window: Window) -> tuple[float, ...]:
    """Return the quantiles of the answers' lengths, as means over steps."""
    each = np.array([record["sampled_quantiles"] for record in window.steps])
    quantiles = each.mean(0)
    # Values between quantiles are drawn evenly, but whole tokens are not even. This corrects the effect on
    # the mean.
    drawn = float((quantiles[1:] + quantiles[:-1]).mean() / 2)
    return tuple(_rounded(q * window.mean("tokens") / window.mean("episodes") / drawn) for q in quantiles)


def _sum_of(windows: Sequence[Window], service: str, what: str) -> tuple[float, float]:
    told = [sums for window in windows if (sums := window.sums(service, what))]
    return sum(sums[0] for sums in told), sum(sums[1] for sums in told)


def _at(record: Record, name: str, path: Sequence[str]) -> float:
    value: Any = record["services"][name]
    for key in path:
        value = value.get(key) or 0.0 if isinstance(value, dict) else 0.0
    return float(value or 0.0)


def _rounded(value: float) -> float:
    return float(f"{value:.{ROUNDED}g}")
