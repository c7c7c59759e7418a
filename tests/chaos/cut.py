"""A Redis that comes back without the end of its log, as after a power failure."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import psutil

from tests.chaos.job import Job, pause

LOOKS = 60
"""How often to look for a log that grows: while the trainer comes back, it may stand still."""


def log_file(run_dir: Path) -> Path:
    """The append-only file of the embedded server; from Redis 7 on, the part of it that is written to."""
    parts = [
        *(run_dir / "buffer").glob("appendonly.aof"),
        *(run_dir / "buffer").glob("appendonlydir/*.incr.aof"),
    ]
    return max(parts, key=lambda path: path.stat().st_mtime)


def cut_log(job: Job, rng: random.Random, *, longest_s: float, front_too: bool) -> bool:
    """Kill Redis, and cut off some of what it wrote in its last `longest_s`; whether that was possible.

    The front stands still meanwhile, so that it cannot start Redis again too early. `front_too`: it is killed
    as well, and its successor finds what is left."""
    front, redis = job.pid("buffer"), job.pid("redis")
    if front is None or redis is None:
        return False
    log = log_file(job.run_dir)
    for _ in range(LOOKS):
        before = log.stat().st_size
        pause(rng.uniform(0.3, 0.7) * longest_s)
        if log.stat().st_size > before:
            break
    # Either may have gone meanwhile: a front that gives Redis up starts another.
    if job.pid("redis") != redis or not job.signal("buffer", signal.SIGSTOP):
        return False
    psutil.Process(redis).kill()
    _wait_dead(redis)
    size = log.stat().st_size
    cut = size > before
    if cut:
        with log.open("r+b") as file:
            file.truncate(rng.randrange(before, size))
    if front_too:
        job.signal("buffer", signal.SIGKILL)
    else:
        job.signal("buffer", signal.SIGCONT)
    return cut


def _wait_dead(pid: int) -> None:
    """Its parent stands still, so a dead process stays as a zombie."""
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        pause(0.005)
