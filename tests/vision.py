"""Tiny models that read images, with their tokenizer and their image processor."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
)

from areal_async.cli.quickstart.model import make_tokenizer
from tests.waiting import deadline_s

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 512}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.25}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
VISION |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.25}


def config_of(kind: str, tokenizer: Any, head_size: int) -> Any:
    """Return the config of a tiny `qwen2_5_vl`, `qwen3_vl`, or `qwen3_5`, one of whose two layers carries a
    state from token to token. An image of 8 x 8 pixels is one token."""
    ids = dict(zip(("vision_start", "vision_end", "image", "video"), MARKS, strict=True))
    known = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in ids.items()}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sections = [head_size // 4, head_size // 8, head_size // 8]
    width, seen = {"hidden_size": 4 * head_size}, VISION | {"out_hidden_size": 4 * head_size}
    text = TEXT | width | ends | {"vocab_size": len(tokenizer), "bos_token_id": None}
    text["tie_word_embeddings"] = True
    if kind == "qwen2_5_vl":
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
        vision = seen | {"window_size": 16, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **known)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, "mrope_interleaved": True}
    vision = seen | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    own: dict[str, Any] = {"head_dim": head_size, "rope_parameters": rope}
    if kind == "qwen3_5":
        own |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
        own |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
        own |= {"layer_types": ["linear_attention", "full_attention"]}
        own["rope_parameters"] = rope | {"partial_rotary_factor": 1.0}
    return (Qwen3_5Config if kind == "qwen3_5" else Qwen3VLConfig)(
        text_config=text | own,
        vision_config=vision,
        tie_word_embeddings=True,
        **known,
    )


def write_vision_model(folder: Path, kind: str = "qwen2_5_vl", seed: int = 0, head_size: int = 8) -> Path:
    """Write a tiny model with random weights into `folder`, and return it. Its four heads of attention have
    `head_size` dimensions each."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = config_of(kind, tokenizer, head_size)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    patches = {name: VISION[name] for name in ("patch_size", "temporal_patch_size")}
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "merge_size": VISION["spatial_merge_size"],
        "min_pixels": 64,
        "max_pixels": 4096,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | patches))
    return folder


def write_spelling_model(folder: Path) -> Path:
    """Write a tiny model whose tokenizer has each character of the marks of images, and return it."""
    write_vision_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(sorted({*"".join(MARKS)}))
    tokenizer.save_pretrained(folder)
    return folder


def beside_the_loop(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return `work`, which now fails unless the event loop that runs at this moment goes on meanwhile."""
    loop = asyncio.get_running_loop()

    def waiting(*given: Any, **named: Any) -> Any:
        went_on = threading.Event()
        loop.call_soon_threadsafe(went_on.set)
        assert went_on.wait(deadline_s(60)), "the event loop is blocked"
        return work(*given, **named)

    return waiting


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image of random pixels."""
    noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(noise.to(torch.uint8).numpy())
