"""Prometheus series of the supervisor: restarts, and the disk of the run folder."""

import shutil
from pathlib import Path

from prometheus_client import Counter, Gauge

RESTARTS = Counter("areal_supervisor_restarts", "Processes that died and were started again.", ["died"])
DISK_FREE = Gauge("areal_run_disk_free_bytes", "Room left on the disk that the run folder lies on.")
DISK_SIZE = Gauge("areal_run_disk_size_bytes", "Size of the disk that the run folder lies on.")


def watch_disk(run_dir: Path) -> None:
    """Read the disk figures at each scrape."""
    DISK_FREE.set_function(lambda: shutil.disk_usage(run_dir).free)
    DISK_SIZE.set_function(lambda: shutil.disk_usage(run_dir).total)
