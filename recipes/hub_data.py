"""Makes data files of the recipes from data sets of the hub, with each prompt once and images as files:

    python recipes/hub_data.py gsm8k "main/train*" recipes/gsm8k-grpo/data/train.jsonl

Your own data set needs a function like those in `DATA`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from PIL import Image
from preparing import task_row, write_tasks
from pyarrow.parquet import ParquetFile

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


THINK = "Think first, inside <think> </think>. Then put the final answer into"


def geometry(row: Row) -> Row:
    made = task_row("geometry3k", f"{row['problem']}\n{THINK} \\boxed{{}}.", row["answer"], ability="math")
    return made | {"images": row["images"]}


def four(rows: Sequence[Row]) -> Row:
    """Four problems in one prompt, with their answers in order."""
    asked = "\n\n".join(f"{number}. {row['problem']}" for number, row in enumerate(rows, 1))
    answers = ", ".join(row["answer"] for row in rows)
    prompt = f"{asked}\n\n{THINK} \\boxed{{(a, b, c, d)}}, with the answers in order."
    made = task_row("geometry3k", prompt, f"({answers})", ability="math")
    return made | {"images": [image for row in rows for image in row["images"]]}


def boxes(row: Row) -> Iterator[Row]:
    """A task for each expression that names the object. Its box is in thousandths of the image's width and
    height, as Qwen3-VL writes boxes."""
    across, down = Image.open(io.BytesIO(row["image"]["bytes"])).size
    x, y, width, height = row["bbox"]
    ends = (x, across), (y, down), (x + width, across), (y + height, down)
    box = json.dumps([round(1000 * end / side) for end, side in ends])
    asked = 'Answer with its box alone, as JSON: {"bbox_2d": [x1, y1, x2, y2]}'
    for said in row["answer"]:
        made = task_row("refcocog", f"<image>Find this: {said}\n{asked}", box, ability="grounding")
        yield made | {"images": [row["image"]]}


DATA = {
    "gsm8k": ("openai/gsm8k", gsm8k),
    "calculations": ("openai/gsm8k", calculations),
    "dapo": ("BytedTsinghua-SIA/DAPO-Math-17k", task),
    "aime": ("BytedTsinghua-SIA/AIME-2024", task),
    "programs": ("PRIME-RL/Eurus-2-RL-Data", programs),
    "pairs": ("HuggingFaceH4/ultrafeedback_binarized", pair),
    "prompts": ("HuggingFaceH4/ultrafeedback_binarized", prompt),
    "geometry": ("hiyouga/geometry3k", geometry),
    "four": ("hiyouga/geometry3k", four),
    "boxes": ("lmms-lab/RefCOCOg", boxes),
}


def converted(path: Path, convert: Any, out: Path) -> Iterator[Row]:
    """The rows of a Parquet file. Their images are written into `out`, once each, and named by their path."""
    for batch in ParquetFile(path).iter_batches(256):
        rows: Iterable[Any] = batch.to_pylist()
        for made in map(convert, zip(*[iter(rows)] * 4, strict=False) if convert is four else rows):
            for row in [made] if isinstance(made, dict) else made or ():
                images = row.pop("images", [])
                yield row | {"images": [written(each["bytes"], out) for each in images]} if images else row


def written(data: bytes, out: Path) -> str:
    kind = str(Image.open(io.BytesIO(data)).format).lower()
    place = out / f"images/{hashlib.sha256(data).hexdigest()[:24]}.{kind}"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    return str(place.relative_to(out))


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
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    rows = {}
    for path in sorted(folder.glob(asked.files)):
        for row in converted(path, convert, asked.out.parent):
            key = json.dumps(row.get("prompt") or row)
            if len(key) <= asked.longest:
                rows[key, *row.get("images", ())] = row
    made = random.Random(0).sample(list(rows.values()), len(rows))
    write_tasks(asked.out, made[asked.held_out :])
    if asked.held_out:
        write_tasks(asked.out.with_name("held_out.jsonl"), made[: asked.held_out])


if __name__ == "__main__":
    main()
