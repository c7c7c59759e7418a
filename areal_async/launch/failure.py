"""The paragraph that explains why a run ended: which service, how, its last words, what to do."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from areal_async.launch.lifecycle import Ending
from areal_async.runtime.process import exit_text

TAIL_BYTES = 16_384
TAIL_LINES = 6
LINE_LIMIT = 400
HIDDEN_FIELDS = frozenset({"time", "level", "job", "process", "event", "logger", "traceback"})


def failure_text(ending: Ending, log_path: Path) -> str:
    """What to tell the person at the terminal about a run that `ending` ended."""
    name = ending.culprit
    match ending.kind:
        case "not_ready":
            what = f"{name} did not serve within {ending.lived_s:.0f} s of its start, so the run was stopped."
            fix = "If it is still loading the model, raise supervisor.ready_s; else see why it waits"
        case "did_not_end":
            what = (
                f"{name} had not finished {ending.lived_s:.0f} s after the trainer, so the run was stopped. "
                "The trained model is complete."
            )
            fix = "See what it waits for"
        case _:
            status = ending.status if ending.status is not None else 0
            often = f", its death number {ending.deaths} in a short time" if ending.deaths > 1 else ""
            what = f"{name} {exit_text(status)} after {ending.lived_s:.1f} s{often}, so the run was stopped."
            fix = _hint(status)
    tail = last_lines(log_path)
    said = "".join(f"\n    {line}" for line in tail) if tail else " nothing."
    return f"{what} It said last:{said}\n{fix}: {log_path}"


def last_lines(log_path: Path, limit: int = TAIL_LINES) -> list[str]:
    """The last lines of a log as a person reads them: structured ones become `level: event key=value`."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [readable(line) for line in text.splitlines() if line.strip()]
    return [line[:LINE_LIMIT] for line in lines if line][-limit:]


def readable(line: str) -> str:
    """One line of a log in plain words; empty for one that only repeats what is printed after it."""
    record = parse_log_line(line)
    if record is None:
        return line.rstrip()
    if record["event"] == "service failed":
        return ""
    fields = " ".join(f"{key}={value}" for key, value in record.items() if key not in HIDDEN_FIELDS)
    last = str(record.get("traceback", "")).strip().rpartition("\n")[2]
    return " ".join(
        part for part in (f"{record.get('level', 'info')}: {record['event']}", fields, last) if part
    )


def parse_log_line(line: str) -> dict[str, Any] | None:
    """The record of a structured log line; None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "event" in record else None


def _hint(status: int) -> str:
    if status == -signal.SIGKILL:
        return (
            "If nobody killed it, the machine ran out of memory: lower rollout.max_concurrent, "
            "trainer.micro_batch_tokens or buffer.max_bytes. Its log"
        )
    if status == os.EX_TEMPFAIL:
        return "Correct what it names; the whole log"
    if status < 0 or status > 128:
        return "It was ended from outside or crashed in native code; the whole log"
    if status == 0:
        return "It ended by itself, which no service may before the trainer is done; the whole log"
    return "Correct what it names and run the job again; the whole log"
