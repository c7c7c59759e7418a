"""Tiny models of the families that the local engine and the trainer promise, each with what sets it apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import (
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 34

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short beside the tests' sequences, so that all three bands of frequencies occur.
    "original_max_position_embeddings": 16,
}


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 128}
SMALL |= {"vocab_size": VOCABULARY, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def config_of(made: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    return made(**SMALL | {"initializer_range": 0.25, "eos_token_id": 1, "bos_token_id": None} | changes)


WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
ROPE = {"rope_parameters": LLAMA3_ROPE}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
_CHANGES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen2": (Qwen2Config, TIED),
    "qwen2_untied": (Qwen2Config, UNTIED | {"num_key_value_heads": 4}),
    "qwen2_window": (Qwen2Config, WINDOW),
    # Norms of queries and keys; heads wider than hidden / heads.
    "qwen3": (Qwen3Config, TIED | {"head_dim": 24}),
    "qwen3_untied_bias": (Qwen3Config, UNTIED | {"head_dim": 4, "attention_bias": True}),
    "qwen3_window": (Qwen3Config, WINDOW | {"head_dim": 16, "sliding_window": 5, "max_window_layers": 2}),
    "llama": (LlamaConfig, UNTIED),
    "llama3_rope": (LlamaConfig, UNTIED | ROPE),
    "llama_one_key_head": (LlamaConfig, TIED | {"num_key_value_heads": 1}),
    "llama_bias": (LlamaConfig, UNTIED | {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    # Experts, of which the module holds all of a layer in two parameters; a dense layer between.
    "qwen3_moe": (Qwen3MoeConfig, UNTIED | EXPERTS | {"head_dim": 16}),
    "mixtral": (MixtralConfig, TIED | {"num_local_experts": 4}),
    "mistral_window": (MistralConfig, {"sliding_window": 7, "head_dim": 8}),
    # Capped logits; sinks. Both have windows in every other layer.
    "gemma2": (Gemma2Config, TIED | {"head_dim": 16, "attn_logit_softcapping": 1.0, "sliding_window": 6}),
    "gpt_oss": (
        GptOssConfig,
        # All experts: a router that decides otherwise in bfloat16 would change an answer.
        UNTIED | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 6},
    ),
}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    name: partial(config_of, made, **changes) for name, (made, changes) in _CHANGES.items()
}
"""Name -> configuration; several keep a window shorter than the tests' sequences."""
