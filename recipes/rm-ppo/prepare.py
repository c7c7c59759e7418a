"""Data and the job files of the small size, which goes on from the quickstart.

    areal-async quickstart trainer.steps=1
    python recipes/rm-ppo/prepare.py --out runs/rm-ppo-files --seed 0
    areal-async run runs/rm-ppo-files/reward_model.yaml
    areal-async run runs/rm-ppo-files/tiny.yaml

The quickstart leaves a policy that answers sums. Somebody has a taste, numbers of even digits, and has only
said of pairs of answers which one is better. The first job trains a reward model on those pairs, the second
trains the policy by PPO with that model as the reward. The held-out tasks have a reward of their own, the
taste itself (`reward.routes`), so the evaluation says what became of the policy, and not what the model
thinks of it.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from preparing import copy_files, prepare_command, write_tasks  # noqa: E402 - beside the recipes
from taste import even_share  # noqa: E402


def pair(prompt: str, rng: random.Random) -> dict[str, Any]:
    """Two numbers of one to three digits, the better one chosen."""
    while True:
        first, second = (str(rng.randrange(10 ** rng.randint(1, 3))) for _ in range(2))
        if even_share(first) != even_share(second):
            chosen, rejected = sorted((first, second), key=even_share, reverse=True)
            return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def prepare(out: Path, seed: int) -> None:
    """Everything into `out`; a function of `seed` and of the quickstart's tasks, which lie beside it."""
    rng = random.Random(seed)
    for name in ("held_out", "train"):
        text = (out.parent / "quickstart-files" / f"{name}.jsonl").read_text(encoding="utf-8")
        tasks = [json.loads(line) | {"data_source": name} for line in text.splitlines()]
        write_tasks(out / f"{name}.jsonl", tasks)
        write_tasks(out / f"{name}_pairs.jsonl", [pair(task["prompt"], rng) for task in tasks])
    copy_files(HERE, out, "reward_model.yaml", "tiny.yaml", "taste.py")


if __name__ == "__main__":
    prepare_command(__doc__, prepare)
