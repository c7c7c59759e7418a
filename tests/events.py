"""The recorded events of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal_async.base.events import FOLDER


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Return every complete event of a run, ordered by `mono_s`. Events of one process keep their order."""
    events = []
    for path in sorted((run_dir / FOLDER).glob("*.jsonl")):
        *lines, _ = path.read_bytes().split(b"\n")
        events += [json.loads(line) for line in lines]
    return sorted(events, key=lambda event: event["mono_s"])
