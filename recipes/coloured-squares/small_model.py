"""A small model that reads images, made for the tasks of two files and trained until it gets a few right.

    python recipes/coloured-squares/small_model.py --train train.jsonl --held-out held_out.jsonl --out model

A row has a `prompt` of text, a list `images` with paths beside the file, and the right answer in
`reward_model.ground_truth`. The model has the classes of Qwen2.5-VL (or of Qwen3-VL with `--kind qwen3_vl`),
0.5 M parameters and a token for each character of the tasks. An image takes at most 64 tokens. The training
here shows the model the right answers, and ends when it gives the share `--enough` of the held-out ones by
itself. Reinforcement learning goes on from there.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

CELL = 8
"""Pixels of the side of a token's part of an image."""
MOST_CELLS = 64
"""Largest number of tokens of an image. A larger image is scaled down."""
ENOUGH = 0.36
SMOOTHING = 0.2
"""Share of the probability that the model is shown for all tokens alike. An answer that it never gives could
not be learned later."""
STEPS = 1000
"""Largest number of steps of the training here."""
SPREAD = 0.05
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
    """Read the rows of a task file. Exits if one has no text as its prompt, no image or no answer."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(line)
        prompt, images = row.get("prompt"), row.get("images")
        answer = row.get("reward_model", {}).get("ground_truth")
        if not (isinstance(prompt, str) and isinstance(answer, str) and images):
            raise SystemExit(f"{path}:{number}: needs prompt (a text), images and reward_model.ground_truth")
        if prompt.count(IMAGE) not in (0, len(images)):
            raise SystemExit(f"{path}:{number}: {len(images)} images, but {prompt.count(IMAGE)} {IMAGE}")
        prompt = prompt if IMAGE in prompt else IMAGE * len(images) + prompt
        found.append(ImageTask(prompt, [path.parent / name for name in images], answer))
    return found


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
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": CELL // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": CELL * CELL,
        "max_pixels": MOST_CELLS * CELL * CELL,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
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
    """Write the model of two task files to the folder `out`, and return its accuracy on held-out tasks."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # more threads do not help a model of this size
    tasks = tasks_of(train), tasks_of(held_out)
    model = write_files(out, kind, [*tasks[0], *tasks[1]])
    teacher, draw, accuracy = Teacher(out), random.Random(seed), 0.0
    learned, tested = ([teacher.shown(task) for task in part] for part in tasks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 30, total_iters=30)
    for step in range(1, STEPS + 1):
        loss = teacher.loss(model, draw.choices(learned, k=64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        if step % 5 == 0:
            accuracy = teacher.accuracy(model, tested)
            print(f"warm-up: step {step}, loss {loss.item():.3f}, right {accuracy:.3f}", flush=True)
            if accuracy >= enough:
                break
    model.save_pretrained(out)
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--enough", type=float, default=ENOUGH)
    given = parser.parse_args()
    make_model(given.train, given.held_out, given.out, kind=given.kind, seed=given.seed, enough=given.enough)


if __name__ == "__main__":
    main()
