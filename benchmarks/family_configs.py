"""Tiny configs and models of the families of `family_table.py`, in sizes for which servers have kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from families import tiny_config
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from areal_async.cli.quickstart.model import make_tokenizer
from areal_async.models.files import PLACEHOLDERS

VISION: dict[str, Any] = {"depth": 2, "embed_dim": 32, "head_dim": 16, "hidden_dim": 32, "hidden_size": 32}
VISION |= {"image_size": 16}
VISION |= {"intermediate_size": 32, "num_attention_heads": 2, "num_heads": 2, "num_hidden_layers": 2}
VISION |= {"num_key_value_heads": 2, "num_position_embeddings": 16, "patch_size": 4, "out_hidden_size": 128}
VISION |= {"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0], "window_size": 16}

WIDE = {"hidden_size": 128, "head_dim": 32, "global_head_dim": 32, "intermediate_size": 128}
WIDE |= {"mamba_d_head": 64, "mamba_head_dim": 64, "mamba_d_ssm": 256, "linear_key_head_dim": 32}
WIDE |= {"linear_value_head_dim": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
WIDE |= {
    "moe_intermediate_size": 64,
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "query_pre_attn_scalar": 32,
}
"""Sizes for which servers have kernels: heads of 32 numbers."""

HUB_FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc"},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "glm4_moe": {"head_dim": 32, "partial_rotary_factor": 0.5},
    "minimax_m2": {
        "rotary_dim": 32,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
    },
    "qwen3_next": {"full_attention_interval": 4},
}
"""Fields that models of the hub have in `config.json`, that servers read, and that transformers does not
write. They are from memory, not read from the hub."""
PIXELS: dict[str, Any] = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 64,
    "max_pixels": 1024,
}
PIXELS |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "Qwen2VLImageProcessor"}
PROCESSORS = dict.fromkeys(("qwen2_5_vl", "qwen3_5", "qwen3_vl"), PIXELS)
"""Settings of image processors, without which vLLM serves no text either."""


def config_of(name: str) -> Any:
    """Return the tiny config of a family, with a tiny vision tower if its models read images."""
    kind = CONFIG_MAPPING[name]
    default = kind()
    text = tiny_config(name)
    fields = text.to_dict()
    wide = {field: size for field, size in WIDE.items() if field in fields}
    if name == "qwen2_5_vl":
        wide["rope_parameters"] = fields["rope_parameters"] | {"mrope_section": [6, 5, 5]}
    made = type(text)(**_kept(fields) | wide)
    made.architectures = None
    if default.get_text_config() is default:
        return made
    towers = {}
    for part in ("vision_config", "audio_config"):
        if (tower := getattr(default, part, None)) is not None:
            given = tower.to_dict()
            towers[part] = given | {field: size for field, size in VISION.items() if field in given}
    first = WIDE["vocab_size"]  # No text contains the marks of images.
    marks = {field: first + place for place, field in enumerate(sorted(_marks(default)))}
    ties = {"tie_word_embeddings": default.tie_word_embeddings}
    return kind(text_config=made.to_dict(), **towers, **marks, **ties)


def _kept(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in fields.items() if name not in ("model_type", "transformers_version")
    }


def _marks(config: Any) -> Iterator[str]:
    """Yield the fields with ids of special tokens that the tiny vocabulary lacks, or of placeholders."""
    size = WIDE["vocab_size"]
    for field, value in config.to_dict().items():
        is_token = field.endswith(("token_id", "token_index")) and isinstance(value, int)
        if is_token and (value >= size or field in PLACEHOLDERS):
            yield field


def write_model(name: str, folder: Path) -> None:
    """Write a tiny model of a family with random weights, and a tokenizer."""
    config = config_of(name)
    torch.manual_seed(3)
    reads_images = config.get_text_config() is not config
    kind = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.dim() < 2 else 0.5 / parameter.shape[-1] ** 0.5
            parameter.add_(scale * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(HUB_FIELDS.get(name, {}) | json.loads(path.read_text())))
    if name in PROCESSORS:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
