"""Images, a small model that reads them, and the job file.

    python recipes/coloured-squares/prepare.py --out runs/squares-files --seed 0
    areal-async run runs/squares-files/job.yaml

An image of 64 x 64 pixels has 16 cells, some of which are red, green or blue squares. A task asks how many
squares have one of the colours: `r=` asks for the red ones. `small_model.py` makes the model and trains it
until it counts about a third of the images right. The job goes on from there with the right number as
its only reward.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw
from small_model import CELL, KINDS, make_model

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from preparing import copy_files, task_row, write_tasks  # noqa: E402 - beside the recipes

N_TRAIN, N_HELD_OUT = 2000, 256
CELLS = 4
"""Cells in a row of an image."""
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220)}
MOST = 4
"""Largest number of squares of one colour."""


class Example(NamedTuple):
    image: Image.Image
    colour: str
    count: int

    @property
    def prompt(self) -> str:
        return f"{self.colour[0]}="


def example(draw: random.Random) -> Example:
    """Return an image with squares of every colour, and one of the colours."""
    counts = {colour: draw.randint(0, MOST) for colour in COLOURS}
    while sum(counts.values()) > CELLS * CELLS:
        counts[draw.choice([colour for colour in counts if counts[colour]])] -= 1
    squares = [colour for colour, count in counts.items() for _ in range(count)]
    cells = draw.sample(range(CELLS * CELLS), len(squares))
    image = Image.new("RGB", (CELLS * CELL, CELLS * CELL), "white")
    pen = ImageDraw.Draw(image)
    for cell, colour in zip(cells, squares, strict=True):
        left, top = cell % CELLS * CELL, cell // CELLS * CELL
        shade = tuple(min(255, max(0, value + draw.randint(-30, 30))) for value in COLOURS[colour])
        pen.rectangle((left + 1, top + 1, left + CELL - 2, top + CELL - 2), fill=shade)
    colour = draw.choice([*COLOURS])
    return Example(image, colour, counts[colour])


def different_examples(draw: random.Random, count: int) -> list[Example]:
    """Return examples of which no two have the same image and colour."""
    found: dict[tuple[bytes, str], Example] = {}
    while len(found) < count:
        one = example(draw)
        found[one.image.tobytes(), one.colour] = one
    return [*found.values()]


def write_images(out: Path, split: str, examples: Sequence[Example]) -> Path:
    """Write the task file of a split and its images beside it. Return the task file."""
    folder = out / split
    folder.mkdir(exist_ok=True)
    rows = []
    for index, one in enumerate(examples):
        one.image.save(folder / f"{index:05}.png")
        row = task_row("coloured_squares", f"<image>{one.prompt}", str(one.count), ability="counting")
        rows.append(row | {"images": [f"{split}/{index:05}.png"]})
    write_tasks(out / f"{split}.jsonl", rows)
    return out / f"{split}.jsonl"


def prepare(out: Path, seed: int, kind: str) -> None:
    examples = different_examples(random.Random(seed), N_TRAIN + N_HELD_OUT)
    train = write_images(out, "train", examples[:N_TRAIN])
    held_out = write_images(out, "held_out", examples[N_TRAIN:])
    make_model(train, held_out, out / "model", kind=kind, seed=seed, enough=0.12)
    copy_files(HERE, out, "job.yaml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prepare(options.out, options.seed, options.kind)


if __name__ == "__main__":
    main()
