"""History of test runs: one JSON line per run and per flaky test, appended at once.

The file is `.pytest-history/runs.jsonl` in the repository. `AREAL_ASYNC_TEST_HISTORY` names another one,
which fresh clones can share. `python -m tests.harness.history` prints the tests that were flaky recently.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "AREAL_ASYNC_TEST_HISTORY"
FILE = Path(".pytest-history", "runs.jsonl")
RECENT_RUNS, RECENT_DURATIONS = 50, 10
MOST_BYTES = 8 << 20
"""The older half of a longer file is dropped."""


def path_of(config: pytest.Config) -> Path:
    return Path(os.environ.get(VARIABLE) or config.rootpath / FILE)


def append(config: pytest.Config, **fields: Any) -> None:
    """Append a line with the date and the revision of the repository."""
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    append_line(path_of(config), {"date": when, "revision": revision(config.rootpath), **fields})


def append_line(path: Path, record: dict[str, Any], most_bytes: int = MOST_BYTES) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_size > most_bytes:
            file.seek(0)
            lines = file.readlines()
            file.truncate(0)
            file.writelines(lines[len(lines) // 2 :])
        file.write(json.dumps(record) + "\n")


def revision(root: Path) -> str:
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what the file holds, oldest first; a line that was cut short is passed over."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def durations(path: Path) -> dict[str, float]:
    """Return the longest time of each test file in the last runs that ran it: file → seconds."""
    recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_DURATIONS))
    for record in records(path):
        for file, seconds in record.get("files", {}).items():
            recent[file].append(seconds)
    return {file: max(times) for file, times in recent.items()}


def flaky_lines(path: Path, runs: int = RECENT_RUNS) -> list[str]:
    """Return one line per test that was flaky in or after the last `runs` runs, the most frequent first."""
    every = list(records(path))
    begins = [index for index, record in enumerate(every) if record["kind"] == "run"]
    since = begins[-runs - 1] if len(begins) > runs else 0
    dates: defaultdict[str, list[str]] = defaultdict(list)
    for record in every[since:]:
        if record["kind"] == "flaky":
            dates[record["test"]].append(f"{record['date'][:16]} {record['revision']}")
    ranked = sorted(dates.items(), key=lambda each: (-len(each[1]), each[0]))
    return [f"{len(when):4} times  {test}  ({', '.join(when)})" for test, when in ranked]


def main(arguments: Sequence[str]) -> None:
    path = Path(arguments[0] if arguments else os.environ.get(VARIABLE) or FILE)
    lines = flaky_lines(path)
    print("\n".join(lines) or f"No test was flaky in the last {RECENT_RUNS} runs of {path}.")


if __name__ == "__main__":
    main(sys.argv[1:])
