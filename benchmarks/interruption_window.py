"""The measured windows of `interruption.py`: what each holds, and how it is shown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout_service.replicas import UpdateStall

Mode = Literal["keep", "recompute", "drain"]


@dataclass
class Window:
    mode: Mode
    every_s: float | None
    """Between two updates; None: there are none."""
    seconds: float = 0.0
    paused_s: float = 0.0
    """How long the machine itself stood still meanwhile; not in `seconds`."""
    tokens: float = 0.0
    requests: int = 0
    updates: int = 0
    stalls: list[UpdateStall] = field(default_factory=list)
    drain_waits_s: list[float] = field(default_factory=list)
    ratio: float | None = None
    """Throughput over the mean of that of the windows before and after."""
    updated_s: list[float] = field(default_factory=list)
    """When each update began."""
    period_ratios: list[float] = field(default_factory=list)
    """Of each update: throughput of the period around it, over that of the half that is far from it."""

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def within(self) -> tuple[float, float] | None:
        """The mean of `period_ratios`, and its standard error; none with fewer than two."""
        if len(self.period_ratios) < 2:
            return None
        error = statistics.stdev(self.period_ratios) / math.sqrt(len(self.period_ratios))
        return statistics.mean(self.period_ratios), error

    def compare_halves(self, per_s: Callable[[float, float], float]) -> None:
        """Fill `period_ratios` from the throughput between two times. With an update at u, and one every 4 w,
        the half from u - w to u + w holds all that it cost, the one from u + w to u + 3 w nothing of it."""
        assert self.every_s is not None
        quarter_s = self.every_s / 4
        for update_s in self.updated_s:
            near = per_s(update_s - quarter_s, update_s + quarter_s)
            far = per_s(update_s + quarter_s, update_s + 3 * quarter_s)
            self.period_ratios.append((near + far) / (2 * far))

    def figures(self) -> dict[str, Any]:
        def ms(values: Sequence[float]) -> dict[str, float] | None:
            if not values:
                return None
            return {
                "mean": round(1e3 * statistics.mean(values), 3),
                "median": round(1e3 * statistics.median(values), 3),
                "most": round(1e3 * max(values), 3),
            }

        return {
            "mode": self.mode,
            "every_s": self.every_s,
            "seconds": round(self.seconds, 2),
            "paused_s": round(self.paused_s, 2),
            "tokens_per_s": round(self.per_s, 1),
            "requests": self.requests,
            "updates": self.updates,
            "ratio": self.ratio and round(self.ratio, 4),
            "within": self.within
            and {
                "mean": round(self.within[0], 4),
                "standard_error": round(self.within[1], 4),
                "of_each_update": [round(one, 3) for one in self.period_ratios],
            },
            "stall_ms": {
                "total": ms([stall.total_s for stall in self.stalls]),
                "pause": ms([stall.pause_s for stall in self.stalls]),
                "load": ms([stall.load_s for stall in self.stalls]),
                "resume": ms([stall.resume_s for stall in self.stalls]),
                "drain_wait": ms(self.drain_waits_s),
            },
        }


def show(windows: Sequence[Window]) -> None:
    print(f"{'mode':>10} {'every s':>8} {'tokens/s':>9} {'ratio':>7} {'within':>14} {'updates':>8}", end="")
    print(f" {'stall ms':>9} {'pause':>7} {'load':>7} {'resume':>7} {'drain wait ms':>14}")

    def mean_ms(values: Sequence[float]) -> str:
        return f"{1e3 * statistics.mean(values):.1f}" if values else "–"

    for window in windows:
        every = "none" if window.every_s is None else f"{window.every_s:g}"
        ratio = "" if window.ratio is None else f"{window.ratio:.3f}"
        within = "" if window.within is None else "{:.3f} ± {:.3f}".format(*window.within)
        stalls = window.stalls
        print(
            f"{window.mode:>10} {every:>8} {window.per_s:>9.0f} {ratio:>7} {within:>14} {window.updates:>8} "
            f"{mean_ms([s.total_s for s in stalls]):>9} {mean_ms([s.pause_s for s in stalls]):>7} "
            f"{mean_ms([s.load_s for s in stalls]):>7} {mean_ms([s.resume_s for s in stalls]):>7} "
            f"{mean_ms(window.drain_waits_s):>14}"
        )
