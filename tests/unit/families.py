"""Tiny models of the families that the local engine and the trainer promise, each with what sets it apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
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


def config_of(made: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    return made(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.25,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
            **changes,
        }
    )


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2": lambda: config_of(Qwen2Config, tie_word_embeddings=True),
    "qwen2_untied": lambda: config_of(Qwen2Config, tie_word_embeddings=False, num_key_value_heads=4),
    "qwen2_window": lambda: config_of(
        Qwen2Config, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    # Norms of queries and keys; heads wider than hidden / heads.
    "qwen3": lambda: config_of(Qwen3Config, head_dim=24, tie_word_embeddings=True),
    "qwen3_untied_bias": lambda: config_of(
        Qwen3Config, head_dim=4, tie_word_embeddings=False, attention_bias=True
    ),
    "qwen3_window": lambda: config_of(
        Qwen3Config, head_dim=16, use_sliding_window=True, sliding_window=5, max_window_layers=2
    ),
    "llama": lambda: config_of(LlamaConfig, tie_word_embeddings=False),
    "llama3_rope": lambda: config_of(LlamaConfig, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False),
    "llama_one_key_head": lambda: config_of(LlamaConfig, num_key_value_heads=1, tie_word_embeddings=True),
    "llama_bias": lambda: config_of(
        LlamaConfig, attention_bias=True, mlp_bias=True, head_dim=16, tie_word_embeddings=False
    ),
    # Experts, of which the module holds all of a layer in two parameters; a dense layer between.
    "qwen3_moe": lambda: config_of(
        Qwen3MoeConfig,
        head_dim=16,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_only_layers=[1],
        tie_word_embeddings=False,
    ),
    "mixtral": lambda: config_of(MixtralConfig, num_local_experts=4, tie_word_embeddings=True),
    "mistral_window": lambda: config_of(MistralConfig, sliding_window=7, head_dim=8),
}
"""Name -> configuration; several keep a window shorter than the tests' sequences."""
