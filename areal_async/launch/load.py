"""Records of the resources that a run's processes have used, written now and then.

From two of them `areal-async simulate --from` works out what things cost. A record has, for each service, CPU
seconds of it and its children, its busy seconds, tokens and sums, and the buffer's counts of transitions.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import psutil

from areal_async.rpc.control_messages import ServiceStatus
from areal_async.service.record import RunLog

EVERY_S = 5.0


class LoadLog:
    """Writes a record every `EVERY_S` seconds in which a step was done."""

    def __init__(self, run_log: RunLog) -> None:
        self._run_log = run_log
        self._due_s = 0.0
        self._steps = -1

    def look(self, services: Mapping[str, ServiceStatus], steps: int, now_s: float) -> None:
        """`services`: the newest answer of each that is there; `steps` are done at `now_s`."""
        if now_s < self._due_s or steps == self._steps or not services:
            return
        self._due_s, self._steps = now_s + EVERY_S, steps
        counts = [status.figures.buffer.reasons for status in services.values() if status.figures.buffer]
        try:
            cpu_s = _cpu_s({status.pid for status in services.values()})
            told: dict[str, dict[str, Any]] = {
                name: {
                    "cpu_s": round(cpu_s[status.pid], 3),
                    "busy_s": {activity: round(busy_s, 4) for activity, busy_s in status.busy_s.items()},
                    "tokens": status.figures.tokens,
                    **status.figures.sums,
                }
                for name, status in services.items()
            }
        except KeyError:
            return  # One has just ended: what it used up cannot be known any more
        told["supervisor"] = {"cpu_s": round(time.process_time(), 3)}
        cores = len(os.sched_getaffinity(0))
        self._run_log.write(
            "load", steps=steps, cores=cores, services=told, counts=counts[0] if counts else {}
        )


def _cpu_s(pids: set[int]) -> dict[int, float]:
    """CPU seconds of these processes and their children, those that have ended too, from one look at all that
    run here. Raises `KeyError` where one does not."""
    spent_s: dict[int, float] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for process in psutil.process_iter(["ppid", "cpu_times"]):
        spent_s[process.pid] = sum((process.info["cpu_times"] or ())[:4])
        children[process.info["ppid"]].append(process.pid)

    def with_children(pid: int) -> float:
        return spent_s[pid] + sum(map(with_children, children[pid]))

    return {pid: with_children(pid) for pid in pids}
