"""A small model that reads images, made for the tasks of two files and trained until it gets a few right.

    python recipes/coloured-squares/small_model.py --train train.jsonl --held-out held_out.jsonl --out model

A row has a `prompt` of text, a list `images` with paths beside the file, and the right answer in
`reward_model.ground_truth`. The model has the classes of Qwen2.5-VL (or of Qwen3-VL with `--kind qwen3_vl`),
0.5 M parameters and a token for each character of the tasks. A larger image than 96 x 96 pixels is scaled
down to that many, which are 36 tokens.

The training here shows the model the right answers of the file `--train`, except those of its last quarter.
It tests the model on these, and ends when the model does better than the most frequent answer would.
Reinforcement learning goes on from this model. If the model is not that good after 600 steps, no weights are
written, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)
from transformers.utils import logging

from areal_async import make_tokenizer

CELL = 16
"""Pixels of the side of a token's part of an image."""
MOST_CELLS = 36
"""Largest number of tokens of an image. A larger image is scaled down."""
ENOUGH = 0.3
"""Share of the way from the most frequent answer to all answers right, at which the training here ends."""
BATCH = 32
"""Tasks of a step of the training here."""
FEWEST = 40
"""Smallest number of tasks in a file."""
TESTED = 256
"""Largest number of tasks that test the model."""
SMOOTHING = 0.2
"""Share of the probability that the model is shown for all tokens alike. An answer that it never gives could
not be learned later."""
STEPS = 600
"""Largest number of steps of the training here."""
SPREAD = 0.1
"""Standard deviation of the first weights. With the 0.02 of large models, this small one learns slowly."""
KINDS = ("qwen2_5_vl", "qwen3_vl")

IMAGE = "<image>"
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)


class ImageTask(NamedTuple):
    prompt: str
    images: list[Path]
    answer: str


class Shown(NamedTuple):
    """Token ids [T] of a prompt with its answer, patches [P, D] and grids [images, 3] of its images."""

    ids: torch.Tensor
    answer_tokens: int
    patches: torch.Tensor
    grids: torch.Tensor


def tasks_of(path: Path) -> list[ImageTask]:
    """Read the rows of a task file. Exits if there are too few, or if one has no text as its prompt, no paths
    of images or no answer."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        row, where = json.loads(line), f"{path}:{number}"
        prompt, images = row.get("prompt"), row.get("images")
        answer = row.get("reward_model", {}).get("ground_truth")
        if not isinstance(prompt, str):
            raise SystemExit(f"{where}: prompt is {prompt!r:.80}. Here it must be a text")
        if not images or not all(isinstance(name, str) for name in images):
            raise SystemExit(f"{where}: images is {images!r:.80}. Here it must be a list of paths")
        if not isinstance(answer, str | int):
            raise SystemExit(f"{where}: reward_model.ground_truth is {answer!r:.80}. Here it must be a text")
        if prompt.count(IMAGE) not in (0, len(images)):
            raise SystemExit(f"{where}: {len(images)} images, but {prompt.count(IMAGE)} {IMAGE}")
        prompt = prompt if IMAGE in prompt else IMAGE * len(images) + prompt
        files = [path.parent / name for name in images]
        for file in files:
            try:
                Image.open(file).load()
            except OSError as error:
                raise SystemExit(f"{where}: the image {file} cannot be read: {error}") from None
        found.append(ImageTask(prompt, files, str(answer)))
    if len(found) < FEWEST:
        raise SystemExit(f"{path}: {len(found)} rows. Give at least {FEWEST}")
    return found


def colours_of(tasks: Sequence[ImageTask]) -> tuple[list[float], float]:
    """Return the mean colour of some images and the standard deviation of their colours, from 0 to 1. Scaled
    by these, a small figure on an even ground has large values, and is learned much sooner."""
    sample = tasks[:: max(1, len(tasks) // 100)]
    pixels = torch.cat([torch.from_numpy(_small_pixels(path)) for task in sample for path in task.images])
    return pixels.mean(0).tolist(), max(0.05, float(pixels.std()))


def _small_pixels(path: Path) -> np.ndarray:
    """Return f32 [1024, 3]: the pixels of an image that is scaled to 32 x 32."""
    image = Image.open(path).convert("RGB").resize((32, 32))
    return np.asarray(image, np.float32).reshape(-1, 3) / 255


def config_of(kind: str, tokenizer: Any, tokens: int) -> Any:
    """Return the config of a small `qwen2_5_vl` or `qwen3_vl` for rows of up to `tokens` tokens."""
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
        "max_position_embeddings": tokens,
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
        vision |= {"window_size": 4 * CELL, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **marks)
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    text |= {"head_dim": 32, "rope_parameters": rope | {"mrope_interleaved": True}}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **marks)


def write_files(folder: Path, kind: str, tasks: Sequence[ImageTask]) -> Any:
    """Write the tokenizer, the image processor and the config of a model. Return it with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [text for task in tasks for text in (task.prompt.replace(IMAGE, ""), task.answer)]
    tokenizer = make_tokenizer("".join(sorted({*"".join(texts)})))
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    longest = max(len(task.prompt) + len(task.images) * MOST_CELLS + len(task.answer) for task in tasks)
    config = config_of(kind, tokenizer, max(256, 2 * longest))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    config.save_pretrained(folder)  # the weights follow when they are trained
    (folder / "model.safetensors").unlink(missing_ok=True)
    mean, deviation = colours_of(tasks)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": CELL // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": CELL * CELL,
        "max_pixels": MOST_CELLS * CELL * CELL,
        "image_mean": mean,
        "image_std": [deviation] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


class Teacher:
    """Shows a model the tasks and their answers."""

    def __init__(self, folder: Path) -> None:
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._placeholder = self._tokenizer.convert_tokens_to_ids(MARKS[2])

    def shown(self, task: ImageTask) -> Shown:
        images = [Image.open(path).convert("RGB") for path in task.images]
        found = self._processor(images, return_tensors="pt")
        text = task.prompt
        for grid in found["image_grid_thw"]:
            text = text.replace(IMAGE, f"{MARKS[0]}{MARKS[2] * (int(grid.prod()) // 4)}{MARKS[1]}", 1)
        prompt, answer = self._tokenizer([text, task.answer], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([*prompt, *answer, self._tokenizer.eos_token_id])
        return Shown(ids, len(answer) + 1, found["pixel_values"], found["image_grid_thw"])

    def scores(self, model: Any, rows: Sequence[Shown]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [B, T - 1, V], and the ids of answers [B, T - 1], which are -100 elsewhere."""
        ids = pad_sequence([row.ids for row in rows], True, self._tokenizer.pad_token_id)
        lengths = torch.tensor([len(row.ids) for row in rows])
        answers = torch.tensor([row.answer_tokens for row in rows])
        place = torch.arange(ids.shape[1])
        mask = place < lengths[:, None]
        answer = mask & (place >= (lengths - answers)[:, None])
        images = {
            "pixel_values": torch.cat([row.patches for row in rows]),
            "image_grid_thw": torch.cat([row.grids for row in rows]),
        }
        kinds = (ids == self._placeholder).int()
        found = model(input_ids=ids, attention_mask=mask.long(), mm_token_type_ids=kinds, **images)
        return found.logits[:, :-1], ids.masked_fill(~answer, -100)[:, 1:]

    def loss(self, model: Any, rows: Sequence[Shown]) -> torch.Tensor:
        logits, wanted = self.scores(model, rows)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), label_smoothing=SMOOTHING)

    @torch.no_grad()
    def accuracy(self, model: Any, rows: Sequence[Shown]) -> float:
        """Return the share of rows whose most likely answer is the right one."""
        right = 0
        for start in range(0, len(rows), 64):
            logits, wanted = self.scores(model, rows[start : start + 64])
            right += int(((logits.argmax(-1) == wanted) | (wanted < 0)).all(-1).sum())
        return right / len(rows)


def make_model(train: Path, held_out: Path, out: Path, *, kind: str, seed: int, enough: float) -> float:
    """Write the model of two task files to the folder `out`. Return the share of tests that it gets right.
    Exits if this share is too small after `STEPS` steps."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # more threads do not help a model of this size
    tasks, others = tasks_of(train), tasks_of(held_out)
    model = write_files(out, kind, [*tasks, *others])
    teacher, draw = Teacher(out), random.Random(seed)
    tests = min(TESTED, len(tasks) // 4)
    learned, tested = ([teacher.shown(task) for task in part] for part in (tasks[:-tests], tasks[-tests:]))
    ((common, times),) = Counter(task.answer for task in tasks[-tests:]).most_common(1)
    chance = times / tests
    wanted = chance + enough * (1 - chance)
    print(f"warm-up: {tests} tests, {chance:.3f} have the answer {common!r}; ends at {wanted:.3f} right")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 30, total_iters=30)
    for step in range(1, STEPS + 1):
        loss = teacher.loss(model, draw.choices(learned, k=BATCH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        if step % 5 == 0:
            accuracy = teacher.accuracy(model, tested)
            print(f"warm-up: step {step}, loss {loss.item():.3f}, right {accuracy:.3f}", flush=True)
            if accuracy >= wanted:
                model.save_pretrained(out)
                print(f"warm-up: the model is in {out}")
                return accuracy
    raise SystemExit(
        f"After {STEPS} steps the model gets {accuracy:.3f} of the tests right, and {wanted:.3f} are needed. "
        "The task is too hard for so small a model: draw larger figures, fewer answers, or more images."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="task file, .jsonl")
    used = "task file, of which the model gets the characters and the mean colour, and learns no answer"
    parser.add_argument("--held-out", type=Path, required=True, help=used)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help=f"classes of the model ({KINDS[0]})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first weights and of the order (0)")
    enough = (
        f"the training ends at this share of the way from the most frequent answer to all right ({ENOUGH})"
    )
    parser.add_argument("--enough", type=float, default=ENOUGH, help=enough)
    given = parser.parse_args()
    make_model(given.train, given.held_out, given.out, kind=given.kind, seed=given.seed, enough=given.enough)


if __name__ == "__main__":
    main()
