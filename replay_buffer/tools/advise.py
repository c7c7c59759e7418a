"""`areal-async advise`: the part that limits a run, and changes that would balance it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from areal_async.cli.tools import AdviseRequest, print_json, run_tool
from areal_async.launch.run_handle import find_run
from areal_async.show.progress import progress
from replay_buffer.ledger.rules import Rules
from replay_buffer.simulation.advice import Advice, Variant, advise
from replay_buffer.simulation.world import Shape, predicted
from replay_buffer.tools.measured import Window, measured

SHOWN = 5  # Most alternatives shown that are not better
TRUSTED = 0.25
"""If a simulation's relative error is larger, the output says that its advice is unreliable."""


def main(request: AdviseRequest) -> None:
    """Print the advice. Raises `RunFolderError` for a run with too few records."""
    run = find_run(request.run)
    window, costs = Window.of(run), measured([run])
    rules, shape = Rules.of(run.job), Shape.of(run.job)
    seen = seen_in(window)
    with progress("simulating"):
        now = predicted(rules, shape, costs, steps=request.steps)
        off = abs(now.steps_per_s / seen["steps_per_s"] - 1)
        advice = advise(rules, shape, costs, steps=request.steps, off=min(off, TRUSTED))
    if request.as_json:
        found: dict[str, Any] = {
            "seen": seen,
            "off": off,
            "bottleneck": advice.bottleneck,
            "noise": advice.noise,
        }
        found |= {"now": advice.now, "parts": advice.parts}
        found |= {"better": [each.change for each in advice.better]}
        print_json(found | {"alternatives": advice.alternatives})
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(_table(seen, advice))
    for line in _lines(advice, off):
        console.print(line, markup=False)


def seen_in(window: Window) -> dict[str, float]:
    """Return the run's figures between its `load` records: steps per second, mean staleness, idle shares."""
    workers = len(window.named("rollout"))
    waited, took = sum(r["wait_s"] for r in window.steps), sum(r["step_s"] for r in window.steps)
    return {
        "steps_per_s": window.steps_done / window.seconds,
        "staleness_mean": window.mean("staleness_mean"),
        "trainer_idle": waited / took,
        "rollout_idle": 1 - window.used("rollout", "busy_s", "rollout") / window.seconds / workers,
    }


def _table(seen: dict[str, float], advice: Advice) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in ("", "steps/s", "staleness", "trainer idle", "engines idle", "wasted"):
        table.add_column(head, justify="left" if not head else "right")
    rest = (f"{seen['trainer_idle']:.0%}", f"{seen['rollout_idle']:.0%}", "")
    table.add_row("the run", f"{seen['steps_per_s']:.3g}", f"{seen['staleness_mean']:.2f}", *rest)
    better = advice.better
    others = [each for each in advice.alternatives if each not in better][:SHOWN]
    for mark, each in [("", advice.now), *(("+ ", one) for one in better), *(("  ", one) for one in others)]:
        table.add_row(*_row(mark, each))
    return table


def _row(mark: str, outcome: Variant) -> tuple[Any, ...]:
    p = outcome.prediction
    name = mark + ("simulated as it is" if not mark else outcome.change)
    speeds = f"{outcome.steps_per_s:.3g}", f"{p.staleness_mean:.2f}"
    return name, *speeds, f"{p.trainer_idle:.0%}", f"{p.rollout_idle:.0%}", f"{p.wasted:.1%}"


def _lines(advice: Advice, off: float) -> list[str]:
    first = advice.parts[0]
    noise = f"Differences below {advice.noise:.0%} say nothing"
    lines = [
        f"The bottleneck is {first.change}: were it 25 % faster, the job would make "
        f"{advice.gain(first):+.0%} steps a second."
        if advice.bottleneck
        else "No part by itself holds the job up: with any one 25 % faster it makes at most "
        f"{advice.gain(first):+.0%} steps a second, which is within noise.",
        f"{noise}; the simulation of the run as it is misses its steps a second by {off:.0%}.",
    ]
    if off > TRUSTED:
        lines.append(
            "That is too much to go by: other programs took the machine's time, or the run was too short."
        )
    faster = [each for each in advice.better if advice.gain(each) > advice.noise]
    if faster:
        lines.append(f"Try first: {faster[0].change} ({advice.gain(faster[0]):+.0%} steps a second).")
    elif advice.better:
        best = min(advice.better, key=lambda each: each.prediction.staleness_mean)
        lines.append(f"Nothing is faster; as fast and fresher is {best.change}.")
    else:
        lines.append("Nothing that was tried is better by more than the noise.")
    return lines


if __name__ == "__main__":
    run_tool(AdviseRequest, main)
