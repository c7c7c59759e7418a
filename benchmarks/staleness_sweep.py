"""Staleness, waste and throughput of the real ledger and admission on a simulated clock, swept over η.

    python benchmarks/staleness_sweep.py [--out FILE.json] [--docs PAGE...]

η × distribution of group durations × which side is slower × condition × how many groups can run at once; see
`staleness_simulation.py` for what is simulated. Throughput is relative to the same job without a staleness
bound, waste is groups dropped per group generated. Ends with status 1 when a promised line is broken: no unit
above η in any run, synchronous at η = 0, and at η = 4 with at most 0.5 B groups running at most 1 % waste and
at least 95 % of the throughput; the cells at that line are run for longer, for their waste is a matter of few
groups. `--docs` rewrites the tables of those pages. Takes under five minutes of one core.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from staleness_simulation import (
    CONDITIONS,
    DISTRIBUTIONS,
    MEAN_GROUP_MS,
    REGIMES,
    UNBOUNDED,
    Figures,
    Scenario,
    Simulation,
)

ETAS = (0, 1, 2, 4, 8)
RUNNING = (0.25, 0.5, 1.0, 2.0)
CAPS = (0.5, 1.0, 1.5)
LIMITS_MS = (0, MEAN_GROUP_MS // 4, MEAN_GROUP_MS // 2, MEAN_GROUP_MS, 4 * MEAN_GROUP_MS)
WARM_UP = 10
"""Steps of each run that are not counted."""
MOST_WASTE, LEAST_THROUGHPUT = 0.01, 0.95


@dataclass(frozen=True)
class Cell:
    """One scenario over all its seeds. `throughput` is relative to η = ∞."""

    scenario: Scenario
    throughput: float
    waste: float
    max_staleness: int
    mean_staleness: float
    overlapped: int
    """Steps that began while groups were generated."""
    runs: int


class Sweep:
    """Runs each scenario with `seeds` seeds of `steps` counted steps."""

    def __init__(self, seeds: int, steps: int) -> None:
        self.seeds, self.steps = seeds, steps
        self._unbounded: dict[Scenario, float] = {}

    def cell(self, scenario: Scenario) -> Cell:
        seen = self._run(scenario)
        trained, dropped = sum(f.trained for f in seen), sum(f.dropped for f in seen)
        return Cell(
            scenario,
            throughput=sum(f.throughput for f in seen) / self._throughput_without_bound(scenario),
            waste=dropped / max(1, trained + dropped),
            max_staleness=max(f.max_staleness for f in seen),
            mean_staleness=sum(f.mean_staleness for f in seen) / len(seen),
            overlapped=sum(f.overlapped for f in seen),
            runs=len(seen),
        )

    def _throughput_without_bound(self, scenario: Scenario) -> float:
        free = Scenario(
            UNBOUNDED, scenario.distribution, scenario.regime, scenario.condition, scenario.running
        )
        if free not in self._unbounded:
            self._unbounded[free] = sum(f.throughput for f in self._run(free))
        return self._unbounded[free]

    def _run(self, scenario: Scenario) -> list[Figures]:
        figures = [Simulation(scenario, seed).run(self.steps, WARM_UP) for seed in range(self.seeds)]
        gc.collect()
        return figures


def broken_promises(cells: Iterable[Cell]) -> list[str]:
    """Every promised line that a cell breaks, in words."""
    broken = []
    for cell in cells:
        scenario, eta = cell.scenario, cell.scenario.max_staleness
        if cell.max_staleness > eta:
            broken.append(f"staleness {cell.max_staleness} above η: {scenario}")
        if eta == 0 and (cell.overlapped or cell.waste):
            broken.append(f"not synchronous at η = 0: {scenario}")
        if eta == 4 and scenario.running <= 0.5:
            if cell.waste > MOST_WASTE:
                broken.append(f"waste {cell.waste:.2%}: {scenario}")
            if cell.throughput < LEAST_THROUGHPUT:
                broken.append(f"throughput {cell.throughput:.1%}: {scenario}")
    return broken


# --- tables ---


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def told(cells: Sequence[Cell], digits: int = 0) -> str:
    """`throughput; waste` of some cells: the range of the one, the most of the other, in percent."""
    low, high = min(c.throughput for c in cells), max(c.throughput for c in cells)
    ends = [f"{100 * value:.{digits}f}" for value in (low, high)]
    span = ends[0] if ends[0] == ends[1] else "–".join(ends)
    return f"{span} %; {100 * max(c.waste for c in cells):.{digits + 1}f} %"


def those(cells: Iterable[Cell], **wanted: object) -> list[Cell]:
    """The cells whose scenario has the `wanted` fields."""
    return [c for c in cells if all(getattr(c.scenario, name) == value for name, value in wanted.items())]


def over_all(cells: Sequence[Cell]) -> str:
    """Over every distribution, regime and condition."""
    head = ["η", *(f"{running:g} B" for running in RUNNING)]
    rows = [
        [str(eta), *(told(those(cells, max_staleness=eta, running=running)) for running in RUNNING)]
        for eta in ETAS
    ]
    return table(head, rows)


def by_regime(cells: Sequence[Cell]) -> str:
    """The plain condition, over the three distributions."""
    head = ["running", "regime", *(f"η = {eta}" for eta in ETAS)]
    plain = those(cells, condition="plain")
    rows = []
    for running, regime in product(RUNNING, REGIMES):
        here = those(plain, running=running, regime=regime)
        rows.append([f"{running:g} B", regime, *(told(those(here, max_staleness=eta)) for eta in ETAS)])
    return table(head, rows)


def at_half_a_batch(cells: Sequence[Cell]) -> str:
    """η = 4 with 0.5 B running, cell by cell."""
    here = those(cells, max_staleness=4, running=0.5)
    rows = []
    for distribution, condition in product(DISTRIBUTIONS, CONDITIONS):
        mine = those(here, distribution=distribution, condition=condition)
        rows.append([distribution, condition, *(told(those(mine, regime=r), 1) for r in REGIMES)])
    return table(["durations", "condition", *REGIMES], rows)


def of_caps(capped: Sequence[Cell], cells: Sequence[Cell]) -> str:
    """What letting fewer groups run than could (2 B) saves and costs."""
    free = those(cells, running=2.0, condition="plain")
    head = ["η", "durations", "regime", *(f"at most {cap:g} B" for cap in CAPS), "2 B, no cap"]
    rows = []
    for eta, distribution, regime in product((2, 4), DISTRIBUTIONS, REGIMES):
        here = those((*capped, *free), max_staleness=eta, distribution=distribution, regime=regime)
        rows.append([str(eta), distribution, regime, *(told([c]) for c in here)])
    return table(head, rows)


def of_limits(limited: Sequence[Cell]) -> str:
    """How long to wait for overtaken groups, as a multiple of the mean duration of a group."""
    limits = ["none: `drop`" if not limit else f"{limit / MEAN_GROUP_MS:g} × mean" for limit in LIMITS_MS]
    rows = []
    for running, distribution in product((0.5, 1.0), DISTRIBUTIONS):
        here = those(limited, running=running, distribution=distribution)
        rows.append([f"{running:g} B", distribution, *(told([c]) for c in here)])
    return table(["running", "durations", *limits], rows)


def write_docs(pages: Sequence[Path], tables: dict[str, str]) -> None:
    """Replace what stands between `<!-- table NAME -->` and `<!-- end -->`."""
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    for name, content in tables.items():
        pattern = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        holders = [page for page in pages if pattern.search(texts[page])]
        if len(holders) != 1:
            raise SystemExit(f"the table {name!r} has a place on {len(holders)} of the pages")
        texts[holders[0]] = pattern.sub(
            lambda found, content=content: f"{found[1]}{content}\n{found[2]}",  # type: ignore[misc]
            texts[holders[0]],
        )
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")


COLUMNS = (
    "running", "cap", "limit_s", "distribution", "regime", "condition", "eta",
    "throughput", "waste", "max_staleness", "mean_staleness",
)  # fmt: skip


def as_row(cell: Cell) -> list[float | int | str | None]:
    s = cell.scenario
    cap = s.cap if s.cap < s.running else None
    return [
        s.running, cap, s.limit_ms / 1000, s.distribution, s.regime, s.condition, s.max_staleness,
        round(cell.throughput, 4), round(cell.waste, 5), cell.max_staleness, round(cell.mean_staleness, 2),
    ]  # fmt: skip


def write_result(file: Path, result: Mapping[str, object], rows: Iterable[Sequence[object]]) -> None:
    """Write `result` as JSON, with `rows` in it, a line each."""
    head = json.dumps(result, indent=2, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    file.write_text(f'{head},\n  "rows": [\n{lines}\n  ]\n}}\n', encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help=f"steps counted, after {WARM_UP} of warm-up")
    parser.add_argument("--line-seeds", type=int, default=5, help="seeds of the cells at the promised line")
    parser.add_argument("--line-steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", type=Path, nargs="*", help="pages whose tables to rewrite")
    options = parser.parse_args()
    gc.disable()  # the records hold no cycles; each scenario is collected when it is done
    sweep = Sweep(options.seeds, options.steps)
    line = Sweep(options.line_seeds, options.line_steps)
    cells = [
        (line if (eta, running) == (4, 0.5) else sweep).cell(
            Scenario(eta, distribution, regime, condition, running)
        )
        for running, distribution, regime, condition in product(RUNNING, DISTRIBUTIONS, REGIMES, CONDITIONS)
        for eta in ETAS
    ]
    capped = [
        sweep.cell(Scenario(eta, distribution, regime, running=2.0, cap=cap))
        for eta, distribution, regime, cap in product((2, 4), DISTRIBUTIONS, REGIMES, CAPS)
    ]
    limited = [
        sweep.cell(Scenario(4, distribution, running=running, limit_ms=limit))
        for running, distribution, limit in product((0.5, 1.0), DISTRIBUTIONS, LIMITS_MS)
    ]
    everything = [*cells, *capped, *limited]
    broken = broken_promises(cells)
    half = [c for c in cells if c.scenario.max_staleness == 4 and c.scenario.running <= 0.5]
    summary = {
        "runs": sum(c.runs for c in everything),
        "runs_above_eta": sum(c.max_staleness > c.scenario.max_staleness for c in everything),
        "eta_4_running_up_to_half_a_batch": {
            "most_waste": round(max(c.waste for c in half), 5),
            "least_throughput": round(min(c.throughput for c in half), 4),
        },
        "steps_overlapped_at_eta_0": sum(c.overlapped for c in cells if not c.scenario.max_staleness),
        "cpu_s": round(time.process_time(), 1),
    }
    tables = {
        "all": over_all(cells),
        "half": at_half_a_batch(cells),
        "regimes": by_regime(cells),
        "caps": of_caps(capped, cells),
        "limits": of_limits(limited),
    }
    for content in tables.values():
        print(content, end="\n\n")
    print(json.dumps(summary, indent=2))
    if options.docs:
        write_docs(options.docs, tables)
    if options.out:
        result = {
            "command": " ".join(["python", *sys.argv]),
            "batch_groups": Scenario(0).batch_groups,
            "workers": Scenario(0).workers,
            "mean_group_s": MEAN_GROUP_MS / 1000,
            "seeds": options.seeds,
            "steps": options.steps,
            "line_seeds": options.line_seeds,
            "line_steps": options.line_steps,
            "warm_up_steps": WARM_UP,
            "summary": summary,
            "columns": COLUMNS,
        }
        write_result(options.out, result, [as_row(c) for c in everything])
    if broken:
        raise SystemExit("broken:\n  " + "\n  ".join(broken))


if __name__ == "__main__":
    main()
