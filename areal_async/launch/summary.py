"""The end of a run: the paragraph that explains a failure, and the numbers of `summary.json`."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_async.base.own_files import tail_of
from areal_async.base.processes import exit_text
from areal_async.base.records import RunRecord
from areal_async.config.files import READ_WHOLE_BYTES
from areal_async.config.job import JobConfig
from areal_async.config.trainings import FILE_KINDS
from areal_async.data.tasks import TaskFileError, task_file, task_rows
from areal_async.launch.lifecycle import Ending
from areal_async.rpc.messages import BufferStats
from areal_async.service.rank_group import LATE, LATE_START, OUT_OF_MEMORY, SILENT
from areal_async.service.record import held_out_name, lives_of

TAIL_BYTES = 16_384
TAIL_LINES = 6
LINE_LIMIT = 400
HIDDEN_FIELDS = frozenset({"time", "level", "job", "process", "event", "logger", "traceback"})


FAILURES: Mapping[str, tuple[str, str]] = {
    "not_ready": (
        "{name} did not serve within {lived_s:.0f} s of its start{nor}, so the run was stopped.",
        "If it is still loading the model, raise supervisor.ready_s; else see why it waits",
    ),
    "did_not_end": (
        "{name} had not finished {lived_s:.0f} s after the trainer, so the run was stopped. The trained "
        "model is complete.",
        "See what it waits for",
    ),
    "not_gone": (
        "{name} was killed and is still there {lived_s:.0f} s later, so the run was stopped: the kernel "
        "holds it, as a call into a driver that does not return can.",
        "Look at the device's driver (dmesg); the machine may have to be restarted",
    ),
}
"""Message and advice, by kind of ending, for runs that did not end by a service's death."""
NEEDS_MEMORY = (
    "`areal-async plan` says what fits: lower trainer.micro_batch_tokens, set trainer.backend_args.recompute "
    "or use more trainer.ranks. Its log"
)
HUNG = "See what it was doing (another rank's log may say more), then resume the run. Its log"
ADVICE: Mapping[int, str] = {
    -signal.SIGKILL: "If nobody killed it, the machine ran out of memory: lower rollout.max_concurrent, "
    "trainer.micro_batch_tokens or buffer.max_bytes. Its log",
    -signal.SIGBUS: "Make room in shared memory, or give it more (`docker run --shm-size`, a larger volume "
    "of medium Memory, `mount -o remount,size=…`). Its log",
    os.EX_TEMPFAIL: "Correct what it names; the whole log",
    0: "It ended by itself, which no service may before the trainer is done; the whole log",
}
"""Advice by the exit status of a service that died."""


def failure_text(ending: Ending, log_path: Path) -> str:
    """Return the message for the terminal about a run that ended with `ending`."""
    status, cause = ending.status or 0, ending.cause
    if ending.kind in FAILURES:
        what, fix = FAILURES[ending.kind]
        nor = f", nor did {cause}" if cause else ""
        what = what.format(name=ending.culprit, lived_s=ending.lived_s, nor=nor)
    else:
        often = f", its death number {ending.deaths} in a short time" if ending.deaths > 1 else ""
        how = f"{cause or exit_text(status)} after {ending.lived_s:.1f} s{often}"
        what, fix = f"{ending.culprit} {how}, so the run was stopped.", _advice(status, cause)
    tail = last_lines(log_path)
    said = "".join(f"\n    {line}" for line in tail) if tail else " nothing."
    return f"{what} It said last:{said}\n{fix}: {log_path}"


def _advice(status: int, cause: str) -> str:
    if cause.startswith(OUT_OF_MEMORY):
        return NEEDS_MEMORY
    if cause.startswith((SILENT, LATE, LATE_START)):
        return HUNG
    if status not in ADVICE and (status < 0 or status > 128):
        return "It was ended from outside or crashed in native code; the whole log"
    return ADVICE.get(status, "Correct what it names; the whole log")


def last_lines(log_path: Path) -> list[str]:
    """Return the last lines of a log. Structured lines become `level: event key=value`."""
    lines = [readable(line) for line in tail_of(log_path, TAIL_BYTES).splitlines() if line.strip()]
    return [line[:LINE_LIMIT] for line in lines if line][-TAIL_LINES:]


def readable(line: str) -> str:
    """Return one line of a log as text. The text is empty if the line only repeats the next line."""
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
    return " ".join(filter(None, (f"{record.get('level', 'info')}: {record['event']}", fields, last)))


Record = Mapping[str, Any]
LEAST_MAJORITY = 0.1
EDGE_STEPS = 10  # Most steps in the mean of the first and of the last rewards


def summarise(
    job: JobConfig, records: Sequence[Record], *, buffer: BufferStats | None = None
) -> dict[str, Any]:
    """Return the summary of all lives of a run.

    Sources are the records of the run (each step once: `as_it_became`) and the buffer's last figures. A
    resumed run continues the buffer's figures. An unknown figure is None.

    - `restarts` counts the restarts of each service.
    - `wall_s` sums all lives, each from the start of the first process to the end of training. If a life was
      killed, it ends at its last record.
    - `tokens_per_s`, `trainer_busy` and `rollout_busy` cover training alone.
    - `share_stale` is the share of episodes with staleness of 1 or more."""
    kind = "step" if job.kind == "rl" else job.kind
    own = [record for record in records if record.get("policy", job.policy) == job.policy]
    steps = [record for record in own if record.get("kind") == kind]
    accuracies = sorted(
        (record.get("version", record.get("step", 0)), record["accuracy"])
        for record in own
        if record.get("kind") in ("evaluation", *FILE_KINDS) and record.get("accuracy") is not None
    )
    accuracy_end = accuracies[-1][1] if accuracies else None
    train_s = training_s(own, kind)
    done = max((record["step"] + (kind == "step") for record in steps), default=0)
    tokens = _sum(steps, "tokens")
    of_episodes = _of_episodes(job, own, steps, buffer) | _of_policies(job, records, buffer)
    return {
        "accuracy_start": accuracies[0][1] if accuracies else None,
        "accuracy_end": accuracy_end,
        "steps": done,
        "wall_s": round(sum(map(_wall_s, lives_of(own))), 2),
        "tokens_per_s": _ratio(tokens, train_s, digits=1),
        **(of_episodes if job.kind == "rl" else {}),
        "stopped": _stopped(job, done, accuracy_end),
        "steps_per_s": _ratio(done, train_s),
        "tokens": tokens,
        "no_scores": {
            note.kind: {"count": note.count, "message": note.message, "episode_id": note.episode_id}
            for note in (buffer.no_scores if buffer is not None else ())
        },
        "restarts": dict(Counter(r["service"] for r in own if r.get("kind") == "restart")),
        "resumes": sum(record.get("kind") == "resume" for record in own),
        "held_out": held_out_name(own),
        "held_out_majority": _majority(job) if job.kind == "rl" else None,
        "job": job.job,
        "kind": job.kind,
        "seed": job.seed,
    }


def _majority(job: JobConfig) -> dict[str, Any] | None:
    """Return the most frequent ground truth of the held-out tasks as `answer`, and its `share`. Without
    learning, a constant answer may reach this accuracy. The result is None if every ground truth has a share
    below `LEAST_MAJORITY`, if there are no such tasks, or if their file is large or cannot be read."""
    path = job.tasks.evaluation
    try:
        if path is None or task_file(path).stat().st_size > READ_WHOLE_BYTES:
            return None
        rewards = [row["reward_model"] for _, row in task_rows(path)]
        counts = Counter(str(reward["ground_truth"]) for reward in rewards)
    except (OSError, TaskFileError, LookupError, TypeError):  # the file is no longer as it was
        return None
    for answer, count in counts.most_common(1):
        if count > 1 and (share := count / counts.total()) >= LEAST_MAJORITY:
            return {"answer": answer, "share": round(share, 4)}
    return None


def _of_episodes(
    job: JobConfig, records: Sequence[Record], steps: Sequence[Record], buffer: BufferStats | None
) -> dict[str, Any]:
    """Return the figures that exist only for a job with episodes. With several policies, they are the figures
    of the first policy."""
    evaluations = [record for record in records if record.get("kind") == "evaluation"]
    last = max(evaluations, key=lambda record: record.get("version", 0), default={})
    trained, dropped = _sum(steps, "episodes"), None
    seen = [record["staleness_max"] for record in steps if record.get("staleness_max") is not None]
    if buffer is not None:
        own, dropped = buffer.policies[job.policy], buffer.episodes_dropped
        trained = own.episodes_trained
        seen.append(own.max_staleness_seen)
    return {
        "max_staleness_bound": job.buffer.max_staleness,
        "max_staleness_seen": max(seen) if seen else None,
        "share_stale": _mean(steps, "share_stale"),
        "trainer_busy": _ratio(_sum(steps, "busy_s"), _sum(steps, "step_s")),
        "rollout_busy": _rollout_busy(records),
        "episodes_trained": trained,
        "episodes_dropped": dropped,
        "reward_first": _edge_reward(steps, first=True),
        "reward_last": _edge_reward(steps, first=False),
        "updates": _sum(steps, "updates"),
        "updates_planned": _sum(steps, "updates_planned"),
        "updates_left_out": next((step["skipped"] for step in steps[::-1] if step.get("skipped")), ""),
        "lost_writes": buffer.lost_writes if buffer is not None else None,
        "transitions": dict(sorted(buffer.reasons.items())) if buffer is not None else None,
        "accuracy_interval": msgspec.convert(last, RunRecord).interval if last else None,
    }


def _stopped(job: JobConfig, done: int, accuracy: float | None) -> str:
    """Return why a training from files ended before its last step. The text is empty if it did not end
    early."""
    if job.kind == "rl" or done >= job.trainer.steps:
        return ""
    wanted = job.training.stop_between
    if wanted is not None and accuracy is not None and wanted[0] <= accuracy <= wanted[1]:
        field, (low, high) = f"{job.kind}.stop_between", wanted
        return f"held-out accuracy {accuracy:.3f} lies within {field}, {low:g} to {high:g}"
    return f"all passes over the training file are done (tasks.passes: {job.tasks.passes})"


def _of_policies(
    job: JobConfig, records: Sequence[Record], buffer: BufferStats | None
) -> dict[str, dict[str, Any]]:
    """Return the figures of each policy if there are several. The rest of a summary is about the first
    policy."""
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
    """Return the mean reward of the first or the last steps that have a reward."""
    rewarded = [step for step in steps if step.get("reward_mean") is not None]
    edge = max(1, min(EDGE_STEPS, len(rewarded) // 2))  # No step counts in both means
    return _mean(rewarded[:edge] if first else rewarded[-edge:], "reward_mean")


def training_s(records: Sequence[Record], kind: str = "step") -> float | None:
    """Return the seconds from the start of the first step to the end of the last step.

    Pauses before a `resume` do not count. Returns None if no step has a time."""
    total_s = 0.0
    for life in lives_of(records):
        steps = [r for r in life if r.get("kind") == kind and r.get("time_s") is not None]
        if steps:
            total_s += steps[-1]["time_s"] - steps[0]["time_s"] + (steps[0].get("step_s") or 0.0)
    return total_s or None


def _wall_s(life: Sequence[Record]) -> float:
    """Return the duration in the life's end record. Without an end record, return the time from its first to
    its last record."""
    if (said := life[-1].get("wall_s")) is not None and life[-1].get("kind") == "end":
        return float(said)
    times = [record["time_s"] for record in life if record.get("time_s") is not None]
    return max(times) - min(times) if times else 0.0


def _rollout_busy(records: Sequence[Record]) -> float | None:
    """Return the share of the training time in which rollout workers generated. Only lives with this figure
    count."""
    lives = [life for life in lives_of(records) if life[-1].get("rollout_busy") is not None]
    weights_s = [training_s(life) or 0.0 for life in lives]
    busy_s = [life[-1]["rollout_busy"] * weight_s for life, weight_s in zip(lives, weights_s, strict=True)]
    return _ratio(sum(busy_s), sum(weights_s))


def _sum(steps: Sequence[Record], name: str) -> float | None:
    values = [record[name] for record in steps if record.get(name) is not None]
    return sum(values) if values else None


def _mean(steps: Sequence[Record], name: str) -> float | None:
    """Return the mean over episodes, or over steps if the records do not say how many episodes each step
    had."""
    pairs = [(record[name], record.get("episodes") or 1) for record in steps if record.get(name) is not None]
    weight = sum(count for _, count in pairs)
    return round(sum(value * count for value, count in pairs) / weight, 4) if weight else None


def _ratio(over: float | None, under: float | None, *, digits: int = 4) -> float | None:
    return round(over / under, digits) if over is not None and under else None
