"""Images, a small model that reads them, and the job file.

    python recipes/coloured-squares/prepare.py --out runs/squares-files --seed 0
    areal-async run runs/squares-files/job.yaml

An image of 32 x 32 pixels has 16 cells, some of which are red, green or blue squares. A task asks how many
squares have one of the colours: `r=` asks for the red ones. The model has the classes of Qwen2.5-VL (or of
Qwen3-VL with `--kind qwen3_vl`) and is trained here until it counts some 37 % of the held-out images
right. The job goes on from there with the right number as its only reward.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)
from transformers.utils import logging

from areal_async import make_tokenizer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from preparing import copy_files, task_row, write_tasks  # noqa: E402 - beside the recipes

N_TRAIN, N_HELD_OUT = 2000, 256
CELLS, CELL = 4, 8
"""Cells in a row of an image, and the pixels of a cell's side. A cell is one token."""
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220)}
MOST = 4
"""Largest number of squares of one colour."""
ENOUGH = 0.36
"""Share of right answers at which the training here ends."""
SPREAD = 0.05
"""Standard deviation of the first weights. With the 0.02 of large models, this small one learns slowly."""

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)


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


def config_of(kind: str, tokenizer: Any) -> Any:
    """Return the config of a small `qwen2_5_vl` or `qwen3_vl`."""
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    marks = dict(zip(names, tokenizer.convert_tokens_to_ids(list(MARKS)), strict=True))
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5]}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "initializer_range": SPREAD,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 2,
        "initializer_range": SPREAD,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "patch_size": CELL // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if kind == "qwen2_5_vl":
        vision |= {"window_size": CELLS * CELL, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **marks)
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    text |= {"head_dim": 32, "rope_parameters": rope | {"mrope_interleaved": True}}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **marks)


def write_model(folder: Path, kind: str) -> Any:
    """Write the model with random weights, its tokenizer and its image processor. Return the model."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer("0123456789=" + "".join(colour[0] for colour in COLOURS))
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    model = AutoModelForImageTextToText.from_config(config_of(kind, tokenizer), dtype=torch.float32)
    model.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": CELL // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": CELL * CELL,
        "max_pixels": (CELLS * CELL) ** 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


class Inputs:
    """The model's inputs for examples, whose prompts all have the same number of tokens."""

    def __init__(self, processor: Any, tokenizer: Any, examples: Sequence[Example]) -> None:
        cells = "<|image_pad|>" * CELLS * CELLS
        texts = [f"<|vision_start|>{cells}<|vision_end|>{one.prompt}" for one in examples]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        answers = [tokenizer.convert_tokens_to_ids(str(one.count)) for one in examples]
        self.answers = torch.tensor(answers)
        self._ids = torch.tensor([[*prompt, answer] for prompt, answer in zip(ids, answers, strict=True)])
        self._eos, self._placeholder = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(MARKS[2])
        found = processor([one.image for one in examples], return_tensors="pt")
        self._grids = found["image_grid_thw"]
        self._pixels = found["pixel_values"].view(len(examples), -1, found["pixel_values"].shape[-1])

    def logits(self, model: Any, chosen: torch.Tensor) -> torch.Tensor:
        """Return [B, 2, V]: logits of the answer and of the token after it."""
        ids = self._ids[chosen]
        kinds = (ids == self._placeholder).int()
        images = {"pixel_values": self._pixels[chosen].flatten(0, 1), "image_grid_thw": self._grids[chosen]}
        found: torch.Tensor = model(input_ids=ids, mm_token_type_ids=kinds, **images, use_cache=False).logits
        return found[:, -2:]

    def loss(self, model: Any, chosen: torch.Tensor) -> torch.Tensor:
        answer, after = self.logits(model, chosen).unbind(1)
        ends = torch.full_like(chosen, self._eos)
        return F.cross_entropy(answer, self.answers[chosen]) + F.cross_entropy(after, ends)

    @torch.no_grad()
    def accuracy(self, model: Any) -> float:
        every = torch.arange(len(self.answers))
        return float((self.logits(model, every)[:, 0].argmax(-1) == self.answers).float().mean())


def warm_up(model: Any, train: Inputs, held_out: Inputs, seed: int) -> float:
    """Train the model until it is right often enough, and return how often that is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 30, total_iters=30)
    random_ = torch.Generator().manual_seed(seed)
    accuracy = 0.0
    for step in range(1, 501):
        loss = train.loss(model, torch.randint(len(train.answers), (64,), generator=random_))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        if step % 10 == 0:
            accuracy = held_out.accuracy(model)
            print(f"warm-up: step {step}, loss {loss.item():.3f}, right {accuracy:.3f}", flush=True)
            if accuracy >= ENOUGH:
                break
    return accuracy


def write_images(out: Path, split: str, examples: Sequence[Example]) -> None:
    """Write the task file of a split, and its images beside it."""
    folder = out / split
    folder.mkdir(exist_ok=True)
    rows = []
    for index, one in enumerate(examples):
        one.image.save(folder / f"{index:05}.png")
        row = task_row("coloured_squares", f"<image>{one.prompt}", str(one.count), ability="counting")
        rows.append(row | {"images": [f"{split}/{index:05}.png"]})
    write_tasks(out / f"{split}.jsonl", rows)


def prepare(out: Path, seed: int, kind: str) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # more threads do not help a model of this size
    examples = different_examples(random.Random(seed), N_TRAIN + N_HELD_OUT)
    train, held_out = examples[:N_TRAIN], examples[N_TRAIN:]
    write_images(out, "train", train)
    write_images(out, "held_out", held_out)
    model = write_model(out / "model", kind)
    processor = AutoImageProcessor.from_pretrained(out / "model", backend="pil")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    inputs = [Inputs(processor, tokenizer, examples) for examples in (train, held_out)]
    warm_up(model, *inputs, seed)
    model.save_pretrained(out / "model")
    copy_files(HERE, out, "job.yaml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=["qwen2_5_vl", "qwen3_vl"], default="qwen2_5_vl")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prepare(options.out, options.seed, options.kind)


if __name__ == "__main__":
    main()
