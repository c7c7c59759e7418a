"""Self-check of log-probs: it tests whether the engine's log-probs match the weights of the version that the
engine names.

Every gradient assumes that they do. The check uses the first batch with units of the version from which the
step starts. It recomputes the log-probs of these units at the temperature of each call. If that batch is the
first of this process, the engines may have started with this version instead of loading it as an update. The
check then runs a second time, on the first batch with units of a version that this process made, to test
weight updates too.

The check uses the whole distribution of the differences, not the largest one, because among a million units
in bfloat16, rounding alone makes some differences large. An error that affects only few units, such as those
of one token id, shows in the mean over these units.

Guarantees: the check runs at most twice in the life of a trainer process, before any gradient of the batch.
It costs a forward pass over the compared units. If there are none, only the manifest is read. All ranks get
the same result. Units that cannot be compared are counted by reason and never reported as compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from areal_async.base.log import get_logger
from areal_async.config.engines import LogprobGap, engine_part
from areal_async.config.job import JobConfig
from areal_async.models.files import Mixture, is_mixture
from areal_async.service.record import RunRecords
from areal_async.trajectory import Episode, Row, unpack
from trainer_service import metrics
from trainer_service.backends.base import TRAINED_MODEL, Columns, TrainingBackend
from trainer_service.data.episode_rows import EpisodeBytes, cut_rows, fetched_episodes, routed
from trainer_service.data.microbatch import build_micro_batch, plan_passes
from trainer_service.data.routes import mixture_to_replay
from trainer_service.data.rows import TrainingRow
from trainer_service.durable_files import room_for
from trainer_service.errors import SelfCheckError
from trainer_service.loop.step import StepPlan
from trainer_service.ranks import Ranks

FEWEST = 8  # Fewest units whose mean can be systematic
STEADY = 6.0
"""A mean is systematic if it exceeds its standard error by this factor. The mean of a few outliers is about
one standard error. Among 150,000 token ids, none reaches this factor by chance."""
QUANTILES = (0.5, 0.9, 0.99, 0.999)
FINENESS = {"float32": 2, "bfloat16": 1}
"""Dtype -> precision; a larger number is finer. A dtype that is not listed, such as a quantised server's, is
the coarsest."""
OTHER_VERSION = "another version"
KEPT_KV = "kept KV of another version"
OLD_ROUTES = "routes of another version"
SKIPPED = (OTHER_VERSION, KEPT_KV, OLD_ROUTES)

log = get_logger("trainer")


@dataclass(frozen=True)
class ComparedUnits:
    """Units with both log-probs, in the order of their rows, as arrays of length n."""

    episode: NDArray[np.int64]
    """Index into the batch's episodes."""
    position: NDArray[np.int64]
    """Position of the unit in its row."""
    token: NDArray[np.int64]
    behaviour: NDArray[np.float64]
    """The engine's log-prob."""
    trainer: NDArray[np.float64]

    @property
    def difference(self) -> NDArray[np.float64]:
        """Absolute difference in nats. A value that is not finite counts as the largest float32."""
        with np.errstate(invalid="ignore"):
            gap = np.abs(self.behaviour - self.trainer)
        return np.nan_to_num(gap, nan=np.inf).clip(max=float(np.finfo(np.float32).max))

    @property
    def gap(self) -> LogprobGap:
        """Figures of the difference over all units. A difference that is not finite makes the mean huge."""
        gaps = self.difference
        p50, p90, p99, p999 = (float(q) for q in np.quantile(gaps, QUANTILES))
        return LogprobGap(float(gaps.mean()), p50, p90, p99, p999, self._systematic())

    def _systematic(self) -> float:
        signed = np.clip(np.nan_to_num(self.behaviour - self.trainer), -1e3, 1e3)
        follows = (np.diff(self.episode) == 0) & (np.diff(self.position) == 1)
        first = np.concatenate([np.ones(1, bool), ~follows])
        largest = 0.0
        for kind, gaps in ((self.token, signed), (np.zeros(first.sum(), int), signed[first])):
            count = np.bincount(kind).clip(min=1)
            mean = np.bincount(kind, gaps) / count
            error = np.sqrt((np.bincount(kind, gaps**2) / count - mean**2).clip(min=0) / count)
            steady = (count >= FEWEST) & (np.abs(mean) > STEADY * error)
            largest = max(largest, float(np.abs(mean[steady]).max(initial=0.0)))
        return largest


def rows_to_compare(
    item: EpisodeBytes,
    *,
    policy: str,
    version: int,
    epochs: Collection[int],
    update_mode: str,
    skipped: Counter[str],
    mixture: Mixture | None = None,
) -> list[TrainingRow]:
    """Return the rows of an episode at `item.places`, cut to units that `version` of one of the trainer
    `epochs` sampled.

    Units whose log-probs the engine computes only approximately are left out and counted in `skipped`. With
    the update mode `keep`, these are units after a unit of another version. With `session`, they are all
    units of an episode with such a unit, because the episode's paths share a cache. With a `mixture`, the
    episode's routes are replayed. In that case, `recompute` leaves out units after an update too: the engine
    computed the earlier tokens again, and they then went through other experts than the ones recorded."""
    entry, places = item.entry, item.places or ()
    if entry.max_version < version:
        skipped[OTHER_VERSION] += sum(entry.rows[place][1] for place in places)
        return []
    episode = unpack(item.blob)
    if mixture is not None:
        episode = routed(episode, item.routes, mixture)
    epoch_of_unit = _epochs(episode)
    offsets = episode.segments.offset
    units = episode.units.version
    others = (units >= 0) & ~((units == version) & np.isin(epoch_of_unit, list(epochs)))
    shared_kv = update_mode == "session" and bool(others.any())

    def comparable(row: Row) -> NDArray[np.bool_]:
        spans = (np.arange(offsets[s], offsets[s] + n) for s, n in zip(row.path, row.lengths, strict=True))
        same = (row.versions == version) & np.isin(epoch_of_unit[np.concatenate([*spans])], list(epochs))
        sampled = row.mask.astype(bool)
        kept: NDArray[np.bool_] = sampled & same
        skipped[OTHER_VERSION] += int((sampled & ~same).sum())
        replays = mixture is not None and item.routes is not None
        if update_mode != "recompute" or replays:
            # Versions of all earlier units, including units that other rows train.
            approximate = kept & ((np.cumsum((row.versions >= 0) & ~same) > 0) | shared_kv)
            why = OLD_ROUTES if update_mode == "recompute" else KEPT_KV
            skipped[why] += int(approximate.sum())
            kept &= ~approximate
        return kept

    return cut_rows(episode, item.index, comparable, policy, places, mixture, item.media)


def _epochs(episode: Episode) -> NDArray[np.int64]:
    """Return i64 [units]: the trainer epoch of each sampled unit; -1 before the first."""
    epochs = np.full(episode.n_units, -1, np.int64)
    for first, epoch in episode.header.epochs:
        epochs[first:] = epoch
    return epochs


def compare(
    backend: TrainingBackend, ranks: Ranks, rows: Sequence[TrainingRow], budget: int
) -> ComparedUnits:
    """Recompute the log-probs of the rows' units in passes of at most `budget` tokens. All ranks call it, and
    each gets the units of all ranks."""
    passes = plan_passes(rows, ranks, budget, side_by_side=backend.side_by_side)
    batches = [build_micro_batch(chosen, device=ranks.device) for chosen in passes]
    found = [np.zeros((5, 0))]

    def add(index: int, columns: Columns) -> None:
        batch, chosen = batches[index], passes[index]
        wanted = (batch.episode, batch.target, columns["logp"])
        episode, token, trainer = (column.double().cpu().numpy() for column in wanted)
        positions = np.concatenate([np.zeros(0), *(row.position for row in chosen)])
        behaviour = np.concatenate([np.zeros(0), *(row.behaviour for row in chosen)])
        found.append(np.stack([episode, positions, token, behaviour, trainer]))

    backend.evaluate(TRAINED_MODEL, batches, add)
    episode, position, token, behaviour, trainer = ranks.concatenate(np.concatenate(found, axis=1))
    return ComparedUnits(
        episode.astype(np.int64), position.astype(np.int64), token.astype(np.int64), behaviour, trainer
    )


@dataclass(frozen=True)
class CheckOutcome:
    """Result of the comparison, the same on every rank. Its fields are written to its record in the run
    log."""

    version: int
    """Version that sampled the units and that the step starts from."""
    n: int
    max: float
    measured: LogprobGap
    allowed: LogprobGap | None
    """Limits of the differences, from the job or the engine. The value is None if the engine has no limits
    for this dtype and kind of model."""
    passed: bool
    skipped: Mapping[str, int]
    """Reason -> number of units in the batch that could not be compared."""
    engine: str
    dtype: str
    """Dtype of the engine."""
    trainer_dtype: str
    model: str
    """`dense` or `moe`"""

    def figures(self) -> str:
        """Return the measured figures as text, each with its limit if known."""
        allowed = asdict(self.allowed) if self.allowed is not None else {}
        return ", ".join(
            f"{LABELS[name]} {value:.3g}" + (f" (allowed {allowed[name]:g})" if allowed else "")
            for name, value in asdict(self.measured).items()
        )

    def describe(self, compared: ComparedUnits, episode_ids: Sequence[str], step: int) -> str:
        """Return a description of the failure for the person who has to find its cause."""
        skipped = "; not compared: " + ", ".join(f"{n} {why}" for why, n in self.skipped.items())
        at = int(compared.difference.argmax())
        return (
            f"the self-check of step {step} failed: the log-probs that the {self.engine} engine "
            f"({self.dtype}) gave with {self.n} units of version {self.version} are not those of the "
            f"trainer's same version ({self.trainer_dtype}, {self.model}). Differences in nats: "
            f"{self.figures()}; largest "
            f"{self.max:.4g}{skipped if self.skipped else ''}. Worst unit: episode "
            f"{episode_ids[compared.episode[at]]}, position {compared.position[at]}, token id "
            f"{compared.token[at]}: engine {compared.behaviour[at]:.5g}, trainer "
            f"{compared.trainer[at]:.5g}. This batch was not trained. {CAUSES} "
            "Set trainer.self_check.bound if such a difference is expected here, or "
            "trainer.self_check.action to warn to train all the same."
        )


LABELS = {
    "mean": "mean",
    "p50": "50%",
    "p90": "90%",
    "p99": "99%",
    "p999": "99.9%",
    "systematic": "mean of one token id or of first units",
}


CAUSES = (
    "Possible causes: the engine did not load what was published, or serves other weights than those of the "
    "version it names; it aligns log-probs to the wrong units; it masks or biases a token; it returns raw "
    "log-probs, or applies the temperature twice; its prompt, dtype, attention or rope differs from the "
    "trainer's."
)


class LogprobCheck:
    """One rank's part of the self-check. All ranks make the same calls. `run_log` exists only on rank 0."""

    def __init__(
        self, job: JobConfig, ranks: Ranks, backend: TrainingBackend, *, run_log: RunRecords | None
    ) -> None:
        self._job, self._ranks, self._backend, self._run_log = job, ranks, backend, run_log
        self._mixture = mixture_to_replay(job)
        self._waited = False
        self._opened: int | None = None
        """First step of this process. Higher versions were made by this process."""
        self.done = False

    def check(
        self,
        step: int,
        plan: StepPlan,
        blobs: Mapping[str, memoryview],
        *,
        routes: Mapping[str, memoryview],
        epoch: int,
        same_as: Sequence[int],
    ) -> None:
        """Compare the units of this batch that version `step` sampled, if no version was compared before.

        `epoch` is the trainer's epoch. `same_as` lists earlier epochs that published this version with equal
        weights (rank 0's list is used). Raises `SelfCheckError` if a difference exceeds its limit and the job
        sets the action to stop."""
        if self.done:
            return
        self._opened = step if self._opened is None else self._opened
        epochs = self._ranks.share([epoch, *same_as], list[int])
        trainer, place, skipped = self._job.trainer, self._backend.place, Counter[str]()
        share = plan.share_of(place.data_rank) if place.reads else {}
        rows = [
            row
            for item in fetched_episodes(plan.episodes, share, blobs, routes)
            for row in rows_to_compare(
                item,
                policy=self._job.policy,
                version=step,
                epochs=epochs,
                update_mode=self._job.rollout.update_mode,
                skipped=skipped,
                mixture=self._mixture,
            )
        ]
        if not self._ranks.total(len(rows)):
            if self._ranks.first and not self._waited:
                log.info("self-check waits for a batch with units of the version it starts from", step=step)
            self._waited = True
            return
        compared = compare(self._backend, self._ranks, rows, trainer.micro_batch_tokens)
        self.done = step > self._opened
        self._waited = False
        outcome = self._outcome(step, compared, skipped)
        if self._ranks.first:
            self._report(step, epoch, outcome)
        if outcome.passed:
            return
        if outcome.allowed is None:
            self._warn_unknown(outcome)
            return
        words = outcome.describe(compared, [each.episode_id for each in plan.episodes], step)
        if trainer.self_check.action == "stop":
            raise SelfCheckError(words)
        if self._ranks.first:
            log.warning("self-check failed, training goes on as trainer.self_check.action says", why=words)

    def _outcome(self, version: int, compared: ComparedUnits, skipped: Counter[str]) -> CheckOutcome:
        rollout, trainer = self._job.rollout, self._job.trainer
        part = engine_part(rollout.engine)
        dtypes = (part.served_dtype(rollout), trainer.resolved_dtype)
        coarser = min(dtypes, key=lambda dtype: FINENESS.get(dtype, 0))
        if coarser == "float32" and {rollout.device, trainer.device} != {"cpu"}:
            coarser = "bfloat16"  # A GPU computes fp32 products in TF32, which has no limits of its own
        kind = "moe" if is_mixture(self._job.model) else "dense"
        allowed = part.logprob_bounds.get((coarser, kind))
        if trainer.self_check.bound is not None:
            allowed = LogprobGap.of(trainer.self_check.bound)
        owns = self._backend.place.owns  # Several ranks may read the same share
        totals = {why: self._ranks.total(skipped[why] * owns) for why in SKIPPED}
        measured = compared.gap
        passed = allowed is not None and measured.within(allowed)
        return CheckOutcome(
            version=version,
            n=len(compared.token),
            max=float(compared.difference.max()),
            measured=measured,
            allowed=allowed,
            passed=passed,
            skipped={why: count for why, count in totals.items() if count},
            engine=rollout.engine,
            dtype=dtypes[0],
            trainer_dtype=trainer.resolved_dtype,
            model=kind,
        )

    def _warn_unknown(self, outcome: CheckOutcome) -> None:
        if not self._ranks.first:
            return
        log.warning(
            "self-check: no bounds are known for this engine, dtype and kind of model, so its log-probs were "
            "not judged; set trainer.self_check.bound to have them judged",
            version=outcome.version,
            engine=outcome.engine,
            dtypes=f"{outcome.dtype}, trainer {outcome.trainer_dtype}",
            model=outcome.model,
            largest=outcome.max,
            differences=outcome.figures(),
        )

    def _report(self, step: int, epoch: int, outcome: CheckOutcome) -> None:
        measured, bound = outcome.measured, outcome.allowed.p999 if outcome.allowed is not None else 0.0
        record = asdict(outcome) | {"mean": measured.mean, "p999": measured.p999, "bound": bound}
        if self._run_log is not None:
            with room_for("the record of the self-check", self._run_log.path.parent):
                self._run_log.write("self_check", policy=self._job.policy, step=step, epoch=epoch, **record)
        metrics.SELF_CHECK.labels(self._job.policy, str(outcome.version)).set(outcome.max)
        names = ("version", "n", "max", "p999", "mean", "bound", "passed", "skipped")
        log.info("self-check", **{name: record[name] for name in names})
        if outcome.model == "moe" and self._mixture is None and step == self._opened:
            log.warning(
                "self-check: routes are not replayed, so engine and trainer may send a token to different "
                "experts, and importance weights are off by as much; an engine that returns its routes, and "
                "rollout.routes: replay, avoid it",
                mean=measured.mean,
            )
