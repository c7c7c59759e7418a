"""Data, a random model and the two job files of the small size, and levels for the large ones.

    python recipes/multi-turn-agent/prepare.py --out runs/multi-turn-agent-files --seed 0
    areal-async run runs/multi-turn-agent-files/warm_start.yaml
    areal-async run runs/multi-turn-agent-files/tiny.yaml

The model is shown one of eight maps of 4×4 fields as text with itself on it, says one move a turn (one
token), and is told its new row and column. A quarter of the places to start from are held out. The warm start
shows single moves of shortest ways, and is stopped while it still falls into holes; RL has
the environment's reward alone, 1 at the goal.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from areal_async import Task, make_tokenizer, write_model

HERE = Path(__file__).parent
WORLDS = HERE.parents[1] / "examples" / "environments"
sys.path[:0] = [str(HERE.parent), str(WORLDS)]
from frozenlake import MOVES, FrozenLake, distances, draw_map, moved  # noqa: E402 - beside the recipes
from preparing import copy_files, prepare_command, task_row, write_tasks  # noqa: E402 - beside the recipes

N_MAPS = 8
CHARACTERS = "SFHGA:0123LRUD?"
OPTIONS: dict[str, Any] = {"size": 4, "holes": 0.3, "later": "position", "terse": True}
PROMPT = "?"


def row(prompt: str, lake: str, answer: str = "") -> dict[str, Any]:
    return task_row(
        "frozenlake", prompt, answer, ability="planning", style="environment", extra={"map": lake}
    )


def lakes(rng: random.Random) -> list[str]:
    """Every map with every start from which the goal can be reached, shuffled."""
    found = []
    for _ in range(N_MAPS):
        rows = draw_map(rng.getrandbits(48), OPTIONS["size"], OPTIONS["holes"])
        bare = "/".join(rows).replace("S", "F")
        for (r, c), left in sorted(distances(rows).items()):
            at = 5 * r + c
            if left:
                found.append(f"{bare[:at]}S{bare[at + 1 :]}")
    rng.shuffle(found)
    return found


def shown(lake: str, rng: random.Random) -> list[dict[str, Any]]:
    """One row for each move of a shortest way, with everything before it as the prompt."""
    world = FrozenLake(**OPTIONS)
    seen = PROMPT + world.reset(0, Task("shown", PROMPT, extra_info={"map": lake}))
    rows, done = [], False
    while not done:
        left = distances(world.rows)
        best = [move for move in MOVES if left.get(moved(world.rows, world.at, move), 99) < left[world.at]]
        move = rng.choice(best)
        rows.append(row(seen, lake, move))
        observation, _, done, _ = world.step(move)
        seen += move + observation
    return rows


def prepare(out: Path, seed: int) -> None:
    """Everything into `out`; a function of `seed` alone."""
    rng = random.Random(seed)
    every = lakes(rng)
    held_out, train = every[: len(every) // 4], every[len(every) // 4 :]
    for name, chosen in (("train", train), ("held_out", held_out)):
        write_tasks(out / f"{name}.jsonl", [row(PROMPT, lake) for lake in chosen])
        write_tasks(out / f"shown_{name}.jsonl", [one for lake in chosen for one in shown(lake, rng)])
    write_model(out / "base", seed, make_tokenizer(CHARACTERS), positions=64)
    copy_files(HERE, out, "warm_start.yaml", "tiny.yaml")
    copy_files(WORLDS, out, "frozenlake.py")


if __name__ == "__main__":
    prepare_command(__doc__, prepare)
