"""How evenly the rows of a step are dealt to ranks: a simulation, no model and no training.

    python benchmarks/balance.py [--seeds 10] [--out FILE]

A step has 512 episodes, every second one branching. Lengths in tokens are log-normal, so that their tails
are long: prompts of median 400 (σ 0.6), answers of 1,500 (σ 1.0). A branching episode goes on from its prompt
with a shared prefix of 3,000 (σ 0.7), half of it sampled, and from there with 2 to 16 branches of 600 (σ
0.8), each a row that computes prompt and prefix again. No row is longer than 32,768 tokens. Costs are those
of a Qwen2.5-1.5B.

Per number of ranks, over the seeds: the largest rank's FLOPs over the ideal, total over ranks, as episodes
were dealt before, whole and by their units, and as rows are dealt now; and the largest row over it: where
that is above 1, it is the ideal. `lockstep` is what FSDP makes of it: all ranks wait for the slowest in each
micro-batch, so it is the sum over micro-batches of the largest rank's FLOPs, over the ideal, with 8,192 and
with 32,768 tokens in one; now at least as many as the longest row of the step has.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import Qwen2Config

from trainer_service.data.flops import RowCost, row_cost
from trainer_service.data.microbatch import Share, deal_rows, pack, spread

RANKS = (8, 32, 64)
BAR = 1.08
EPISODES = 512
LONGEST = 32_768
MODEL = Qwen2Config(
    hidden_size=1536,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    intermediate_size=8960,
    vocab_size=151_936,
)
Rows = list[tuple[int, int]]
"""(tokens, sampled units) of each row of an episode."""


def step_of(rng: np.random.Generator) -> list[tuple[int, Rows]]:
    """The episodes of a step: the units of each, each counted once, and its rows."""

    def length(median: float, sigma: float) -> int:
        return 1 + int(rng.lognormal(np.log(median), sigma))

    episodes = []
    for number in range(EPISODES):
        prompt = length(400, 0.6)
        if number % 2:
            prefix = length(3000, 0.7)
            answers = [length(600, 0.8) for _ in range(rng.integers(2, 17))]
            rows = [
                (prompt + prefix + answer, answer + (prefix // 2 if not place else 0))
                for place, answer in enumerate(answers)
            ]
            units = prompt + prefix + sum(answers)
        else:
            answer = length(1500, 1.0)
            rows, units = [(prompt + answer, answer)], prompt + answer
        episodes.append((units, [(min(tokens, LONGEST), min(n, LONGEST)) for tokens, n in rows]))
    return episodes


def dealt_by_units(episodes: Sequence[tuple[int, Rows]], ranks: int) -> list[Share]:
    """Whole episodes, that of most units first, to the rank with the fewest: what was done before."""
    shares: list[Share] = [{} for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(episodes)), key=lambda i: -episodes[i][0]):
        units, rows = episodes[index]
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + units, rank))
        shares[rank][index] = [*range(len(rows))]
    return shares


def sums(shares: Sequence[Share], costs: Sequence[Sequence[int]]) -> list[int]:
    """FLOPs of each rank."""
    return [sum(costs[index][row] for index, rows in share.items() for row in rows) for share in shares]


def lockstep(
    shares: Sequence[Share], steps: Sequence[Rows], cost: RowCost, budget: int, *, even: bool
) -> int:
    """FLOPs that the slowest ranks of each micro-batch add up to; without `even` rows are packed as full as
    they go, and the rest of the micro-batches are empty."""
    if even:
        budget = max(budget, *(tokens for rows in steps for tokens, _ in rows))
    sizes = [[steps[index][row] for index, rows in share.items() for row in rows] for share in shares]
    lengths = [[tokens for tokens, _ in rows] for rows in sizes]
    passes = max(len(pack(each, budget)) for each in lengths)
    slowest = [0] * passes
    for rows, each in zip(sizes, lengths, strict=True):
        for number, chosen in enumerate(
            spread(each, [cost.of(*row) for row in rows], budget, passes) if even else pack(each, budget)
        ):
            slowest[number] = max(slowest[number], sum(cost.of(*rows[index]) for index in chosen))
    return sum(slowest)


def measure(ranks: int, seeds: int, cost: RowCost) -> dict[str, object]:
    """The figures of one number of ranks."""
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        episodes = step_of(np.random.default_rng(seed))
        steps = [rows for _, rows in episodes]
        costs = [[cost.of(*row) for row in rows] for rows in steps]
        ideal = sum(map(sum, costs)) / ranks
        before, after = dealt_by_units(episodes, ranks), deal_rows(costs, ranks)
        figures = {
            "before": max(sums(before, costs)) / ideal,
            "after": max(sums(after, costs)) / ideal,
            "largest_row": max(map(max, costs)) / ideal,
            "fetches_per_episode": sum(map(len, after)) / len(episodes),
        }
        for budget in (8192, LONGEST):
            for name, shares in (("before", before), ("after", after)):
                slowest = lockstep(shares, steps, cost, budget, even=name == "after")
                figures[f"lockstep_{name}_{budget}"] = slowest / ideal
        for name, value in figures.items():
            found.setdefault(name, []).append(value)
    return {
        "ranks": ranks,
        **{
            name: {"median": round(statistics.median(values), 4), "worst": round(max(values), 4)}
            for name, values in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "balance.json")
    options = parser.parse_args()
    cost = row_cost(MODEL)
    results = [measure(ranks, options.seeds, cost) for ranks in RANKS]
    print(f"slowest rank over ideal, {EPISODES} episodes, {options.seeds} seeds: median (worst); bar {BAR}")
    for result in results:
        print(f"{result['ranks']:>3} ranks")
        for name, value in result.items():
            if isinstance(value, dict):
                print(f"    {name:<24} {value['median']:>7.3f} ({value['worst']:.3f})")
    met = all(result["after"]["worst"] <= BAR for result in results)  # type: ignore[index]
    print("the bar is met" if met else "the bar is MISSED")
    record = {"episodes": EPISODES, "seeds": options.seeds, "bar": BAR, "met": met, "results": results}
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
