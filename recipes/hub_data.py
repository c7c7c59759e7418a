"""Makes data files of the recipes from data sets of the hub, with each prompt once:

    python recipes/hub_data.py gsm8k "main/train*" recipes/gsm8k-grpo/data/train.jsonl

Your own data set needs a function like those in `DATA`.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from preparing import task_row, write_tasks
from pyarrow.parquet import read_table

Row = dict[str, Any]


def gsm8k(row: Row) -> Row:
    question = f"{row['question']}\nReason step by step and end with #### and the number."
    answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return task_row("gsm8k", question, answer, ability="math")


def calculations(row: Row) -> Row:
    asked = "Use the calculator for every calculation. Put the final number into \\boxed{}."
    chat = [{"role": "user", "content": f"{row['question']}\n{asked}"}]
    return gsm8k(row) | {"prompt": chat}


def task(row: Row) -> Row:
    """A row that has the columns of a task."""
    return row


def programs(row: Row) -> Row | None:
    return row if row["ability"] == "code" else None


def pair(row: Row) -> Row | None:
    """Two chats, unless neither is better."""
    chats = {"chosen": row["chosen"], "rejected": row["rejected"]}
    return chats if row["chosen"][-1] != row["rejected"][-1] else None


def prompt(row: Row) -> Row:
    """A prompt for a reward model, which needs no answer."""
    return task_row(
        "ultrafeedback", [{"role": "user", "content": row["prompt"]}], row["prompt_id"], ability=""
    )


DATA = {
    "gsm8k": ("openai/gsm8k", gsm8k),
    "calculations": ("openai/gsm8k", calculations),
    "dapo": ("BytedTsinghua-SIA/DAPO-Math-17k", task),
    "aime": ("BytedTsinghua-SIA/AIME-2024", task),
    "programs": ("PRIME-RL/Eurus-2-RL-Data", programs),
    "pairs": ("HuggingFaceH4/ultrafeedback_binarized", pair),
    "prompts": ("HuggingFaceH4/ultrafeedback_binarized", prompt),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", choices=DATA)
    parser.add_argument("files", help="pattern of the Parquet files in the data set")
    parser.add_argument("out", type=Path)
    parser.add_argument("--held-out", type=int, default=0, help="rows for held_out.jsonl beside OUT")
    parser.add_argument("--longest", type=int, default=1 << 20, help="longest prompt, in characters")
    asked = parser.parse_args()
    repository, convert = DATA[asked.name]
    folder = Path(snapshot_download(repository, repo_type="dataset", allow_patterns=asked.files))
    rows = {}
    for path in sorted(folder.glob(asked.files)):
        for row in filter(None, map(convert, read_table(path).to_pylist())):
            key = json.dumps(row.get("prompt") or row)
            if len(key) <= asked.longest:
                rows[key] = row
    made = random.Random(0).sample(list(rows.values()), len(rows))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    write_tasks(asked.out, made[asked.held_out :])
    if asked.held_out:
        write_tasks(asked.out.with_name("held_out.jsonl"), made[: asked.held_out])


if __name__ == "__main__":
    main()
