"""How a run ended: the paragraph that explains a failure, and the numbers of `summary.json`."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from areal_async.base.processes import exit_text
from areal_async.base.records import RunRecord
from areal_async.config.job import JobConfig
from areal_async.config.trainings import FILE_KINDS
from areal_async.launch.aggregator import Progress
from areal_async.launch.lifecycle import Ending
from areal_async.launch.trends import edge_of
from areal_async.rpc.messages import BufferStats
from areal_async.service.rank_group import LATE, LATE_START, OUT_OF_MEMORY, SILENT
from areal_async.service.record import held_out_name, lives_of

TAIL_BYTES = 16_384
TAIL_LINES = 6
LINE_LIMIT = 400
HIDDEN_FIELDS = frozenset({"time", "level", "job", "process", "event", "logger", "traceback"})


def failure_text(ending: Ending, log_path: Path) -> str:
    """What to tell the person at the terminal about a run that `ending` ended."""
    name = ending.culprit
    match ending.kind:
        case "not_ready":
            nor = f", nor did {ending.cause}" if ending.cause else ""
            within = f"within {ending.lived_s:.0f} s of its start"
            what = f"{name} did not serve {within}{nor}, so the run was stopped."
            fix = "If it is still loading the model, raise supervisor.ready_s; else see why it waits"
        case "did_not_end":
            what = (
                f"{name} had not finished {ending.lived_s:.0f} s after the trainer, so the run was stopped. "
                "The trained model is complete."
            )
            fix = "See what it waits for"
        case "not_gone":
            what = (
                f"{name} was killed and is still there {ending.lived_s:.0f} s later, so the run was stopped: "
                "the kernel holds it, as a call into a driver that does not return can."
            )
            fix = "Look at the device's driver (dmesg); the machine may have to be restarted"
        case _:
            status = ending.status if ending.status is not None else 0
            often = f", its death number {ending.deaths} in a short time" if ending.deaths > 1 else ""
            how = ending.cause or exit_text(status)
            what = f"{name} {how} after {ending.lived_s:.1f} s{often}, so the run was stopped."
            fix = _hint(status, ending.cause)
    tail = last_lines(log_path)
    said = "".join(f"\n    {line}" for line in tail) if tail else " nothing."
    return f"{what} It said last:{said}\n{fix}: {log_path}"


def last_lines(log_path: Path) -> list[str]:
    """The last lines of a log as a person reads them: structured ones become `level: event key=value`."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [readable(line) for line in text.splitlines() if line.strip()]
    return [line[:LINE_LIMIT] for line in lines if line][-TAIL_LINES:]


def readable(line: str) -> str:
    """One line of a log in plain words; empty for one that only repeats what is printed after it."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or "event" not in record:
        return line.rstrip()
    if record["event"] == "service failed":
        return ""
    fields = " ".join(f"{key}={value}" for key, value in record.items() if key not in HIDDEN_FIELDS)
    last = str(record.get("traceback", "")).strip().rpartition("\n")[2]
    return " ".join(
        part for part in (f"{record.get('level', 'info')}: {record['event']}", fields, last) if part
    )


def _hint(status: int, cause: str) -> str:
    if cause.startswith(OUT_OF_MEMORY):
        return (
            "`areal-async plan` says what fits: lower trainer.micro_batch_tokens, set "
            "trainer.backend_args.recompute or use more trainer.ranks. Its log"
        )
    if cause.startswith((SILENT, LATE, LATE_START)):
        return "See what it was doing (another rank's log may say more), then resume the run. Its log"
    if status == -signal.SIGKILL:
        return (
            "If nobody killed it, the machine ran out of memory: lower rollout.max_concurrent, "
            "trainer.micro_batch_tokens or buffer.max_bytes. Its log"
        )
    if status == -signal.SIGBUS:
        return (
            "Make room in shared memory, or give it more (`docker run --shm-size`, a larger volume of medium "
            "Memory, `mount -o remount,size=…`). Its log"
        )
    if status == os.EX_TEMPFAIL:
        return "Correct what it names; the whole log"
    if status < 0 or status > 128:
        return "It was ended from outside or crashed in native code; the whole log"
    if status == 0:
        return "It ended by itself, which no service may before the trainer is done; the whole log"
    return "Correct what it names and run the job again; the whole log"


Record = Mapping[str, Any]

OF_EPISODES = """
    max_staleness_bound max_staleness_seen share_stale share_multi_version staleness_mean trainer_busy
    rollout_busy episodes_trained episodes_dropped share_wasted reward_first reward_last updates
    updates_planned updates_left_out lost_writes transitions accuracy_interval best_end maj_end
    evaluation_samples accuracy_by_source held_out_rewards_start held_out_rewards_end unscored_end warning
    self_check
"""
"""Figures of a summary that only a job with episodes has."""
SELF_CHECK_FIELDS = ("passed", "version", "engine", "n", "max", "p999", "mean", "bound")


def summarise(
    job: JobConfig, records: Sequence[Record], *, buffer: BufferStats | None = None
) -> dict[str, Any]:
    """The summary of all lives of a run, from its records (each step once: `as_it_became`) and the buffer's
    last figures, which a resumed run goes on with. What cannot be known is None.

    `restarts` says how often which service was started again. `wall_s` is, over all lives, from the first
    process started to the end of training (of a life that was killed, to its last record); `tokens_per_s`,
    `trainer_busy` and `rollout_busy` are over training alone. `share_stale` counts episodes with staleness of
    1 or more; `share_wasted` is dropped / (dropped + trained).
    """
    kind = "step" if job.kind == "rl" else job.kind
    beside = _beside(job, records, buffer)
    records = [record for record in records if record.get("policy", job.policy) == job.policy]
    steps = [record for record in records if record.get("kind") == kind]
    accuracies = sorted(
        (record.get("version", record.get("step", 0)), record["accuracy"])
        for record in records
        if record.get("kind") in ("evaluation", *FILE_KINDS) and record.get("accuracy") is not None
    )
    evaluations = [record for record in records if record.get("kind") == "evaluation"]
    first = min(evaluations, key=lambda record: record.get("version", 0), default={})
    last = max(evaluations, key=lambda record: record.get("version", 0), default={})
    lives = ([r for r in life if r.get("kind") == "self_check"] for life in lives_of(records)[::-1])
    checks = next(filter(None, lives), [])
    # All of a life must pass: one that did not is told rather than the newest.
    check = next((r for r in checks[::-1] if not r.get("passed")), checks[-1] if checks else None)
    own = buffer.policies[job.policy] if buffer is not None else None
    trained = own.episodes_trained if own is not None else _sum(steps, "episodes")
    dropped = buffer.episodes_dropped if buffer is not None else None
    seen = [record["staleness_max"] for record in steps if record.get("staleness_max") is not None]
    if own is not None:
        seen.append(own.max_staleness_seen)
    train_s = training_s(records, kind)
    done = max((record["step"] + (kind == "step") for record in steps), default=0)
    tokens, busy_s, step_s = _sum(steps, "tokens"), _sum(steps, "busy_s"), _sum(steps, "step_s")
    summary = {
        "accuracy_start": accuracies[0][1] if accuracies else None,
        "accuracy_end": accuracies[-1][1] if accuracies else None,
        "steps": done,
        "wall_s": round(sum(map(_wall_s, lives_of(records))), 2),
        "tokens_per_s": _ratio(tokens, train_s, digits=1),
        "max_staleness_bound": job.buffer.max_staleness,
        "max_staleness_seen": max(seen) if seen else None,
        "share_stale": _mean(steps, "share_stale"),
        "trainer_busy": _ratio(busy_s, step_s),
        "rollout_busy": _rollout_busy(records, kind),
        "episodes_trained": trained,
        "episodes_dropped": dropped,
        "share_wasted": _ratio(dropped, None if trained is None or dropped is None else trained + dropped),
        "share_multi_version": _mean(steps, "share_multi_version"),
        "staleness_mean": _mean(steps, "staleness_mean"),
        "stopped": _stopped(job, done, accuracies[-1][1] if accuracies else None),
        "training_s": None if train_s is None else round(train_s, 2),
        "steps_per_s": _ratio(done, train_s),
        "tokens": tokens,
        "reward_first": _edge_reward(steps, first=True),
        "reward_last": _edge_reward(steps, first=False),
        "updates": _sum(steps, "updates"),
        "updates_planned": _sum(steps, "updates_planned"),
        "updates_left_out": next((step["skipped"] for step in steps[::-1] if step.get("skipped")), ""),
        "lost_writes": buffer.lost_writes if buffer is not None else None,
        "transitions": dict(sorted(buffer.reasons.items())) if buffer is not None else None,
        "no_scores": {
            note.kind: {"count": note.count, "message": note.message, "episode_id": note.episode_id}
            for note in (buffer.no_scores if buffer is not None else ())
        },
        "restarts": dict(Counter(r["service"] for r in records if r.get("kind") == "restart")),
        "resumes": sum(record.get("kind") == "resume" for record in records),
        "held_out": held_out_name(records),
        "accuracy_interval": msgspec.convert(last, RunRecord).interval if last else None,
        "best_end": _first(last.get("best")),
        "maj_end": _first(last.get("maj")),
        "evaluation_samples": last.get("samples"),
        "accuracy_by_source": last.get("by_source"),
        "held_out_rewards_start": first.get("rewards") or {},
        "held_out_rewards_end": last.get("rewards") or {},
        "warning": _warning(job, records),
        "unscored_end": last.get("unscored"),
        **beside,
        "self_check": {name: check.get(name) for name in SELF_CHECK_FIELDS} if check else None,
        "job": job.job,
        "kind": job.kind,
        "seed": job.seed,
    }
    if job.kind == "rl":
        return summary
    return {name: value for name, value in summary.items() if name not in OF_EPISODES.split()}


def _stopped(job: JobConfig, done: int, accuracy: float | None) -> str:
    """Why a training on files ended before its last step; empty where it did not."""
    if job.kind == "rl" or done >= job.trainer.steps:
        return ""
    wanted = job.training.stop_between
    if wanted is not None and accuracy is not None and wanted[0] <= accuracy <= wanted[1]:
        field, (low, high) = f"{job.kind}.stop_between", wanted
        return f"held-out accuracy {accuracy:.3f} lies within {field}, {low:g} to {high:g}"
    return f"all passes over the training file are done (tasks.passes: {job.tasks.passes})"


def _warning(job: JobConfig, records: Sequence[Record]) -> str:
    progress = Progress(job.policy)
    for record in records:
        with suppress(msgspec.ValidationError):  # of a kind that is not shown
            progress.feed(msgspec.convert(record, RunRecord))
    return progress.warning


def _beside(
    job: JobConfig, records: Sequence[Record], buffer: BufferStats | None
) -> dict[str, dict[str, Any]]:
    """Of several policies, the figures of each; the rest of a summary is the first one's."""
    figures = {}
    for policy, view in job.views.items() if job.policies else ():
        steps = [r for r in records if r.get("kind") == "step" and r.get("policy") == policy]
        own = buffer.policies[policy] if buffer is not None else None
        figures[policy] = {
            "steps": max((record["step"] + 1 for record in steps), default=0),
            "max_staleness_bound": view.buffer.max_staleness,
            "max_staleness_seen": own.max_staleness_seen if own is not None else None,
            "episodes_trained": own.episodes_trained if own is not None else None,
            "reward_first": _edge_reward(steps, first=True),
            "reward_last": _edge_reward(steps, first=False),
        }
    return {"policies": figures} if figures else {}


def _edge_reward(steps: Sequence[Record], *, first: bool) -> float | None:
    """Return the mean reward of the first or the last steps, of those that have one."""
    rewarded = [step for step in steps if step.get("reward_mean") is not None]
    edge = edge_of(len(rewarded))
    return _mean(rewarded[:edge] if first else rewarded[-edge:], "reward_mean")


def training_s(records: Sequence[Record], kind: str = "step") -> float | None:
    """Seconds from the start of the first step to the end of the last, without those before a `resume` in
    which nothing ran; None where no step says when."""
    total_s = 0.0
    for life in lives_of(records):
        steps = [r for r in life if r.get("kind") == kind and r.get("time_s") is not None]
        if steps:
            total_s += steps[-1]["time_s"] - steps[0]["time_s"] + (steps[0].get("step_s") or 0.0)
    return total_s or None


def _wall_s(life: Sequence[Record]) -> float:
    """What the life's end says, else the time between its first record and its last."""
    if (said := life[-1].get("wall_s")) is not None and life[-1].get("kind") == "end":
        return float(said)
    times = [record["time_s"] for record in life if record.get("time_s") is not None]
    return max(times) - min(times) if times else 0.0


def _rollout_busy(records: Sequence[Record], kind: str) -> float | None:
    """Share of the training time in which the rollout workers generated, over the lives that say it."""
    parts = [
        (life[-1]["rollout_busy"], training_s(life, kind) or 0.0)
        for life in lives_of(records)
        if life[-1].get("rollout_busy") is not None
    ]
    return _ratio(sum(share * weight_s for share, weight_s in parts), sum(weight_s for _, weight_s in parts))


def _first(figure: Any) -> float | None:
    """The value of a figure [value, low, high]."""
    return figure[0] if isinstance(figure, list) and figure else None


def _sum(steps: Sequence[Record], name: str) -> float | None:
    values = [record[name] for record in steps if record.get(name) is not None]
    return sum(values) if values else None


def _mean(steps: Sequence[Record], name: str) -> float | None:
    """Mean over episodes (over steps, where they do not say how many they hold)."""
    pairs = [(record[name], record.get("episodes") or 1) for record in steps if record.get(name) is not None]
    weight = sum(count for _, count in pairs)
    return round(sum(value * count for value, count in pairs) / weight, 4) if weight else None


def _ratio(over: float | None, under: float | None, *, digits: int = 4) -> float | None:
    return round(over / under, digits) if over is not None and under else None
