"""The class of transformers that a language model's files describe, and what classes compute of their own in
attention and in the output layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)


def auto_class(config: Any) -> Any:
    """Return the auto class of transformers for a config: that of causal language models, or that of models
    that also read images, such as `Qwen3VLForConditionalGeneration`.

    If both know the kind of model, `architectures` in config.json decides."""
    kind, named = config.model_type, config.architectures or ()
    multimodal = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    takes_images = multimodal is not None and (causal is None or multimodal in named)
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM


def attention_by_part(config: Any, own: str, others: str = "") -> str | dict[str, str]:
    """Return the attention `own` for the language model of a config. Other parts, such as a vision tower, get
    `others`, or transformers' choice."""
    if not is_multimodal(config):
        return own
    text = config.get_text_config()
    parts = {name: own if getattr(config, name, None) is text else others for name in config.sub_configs}
    return {"": own, **{name: attention for name, attention in parts.items() if attention}}


def is_multimodal(config: Any) -> bool:
    """Return whether the language model is one of several parts of a model with this config."""
    return config.get_text_config() is not config


def language_part(model: Any) -> Any:
    """Return the language model of a multimodal model, without its output layer. Other models are returned
    themselves."""
    return model.get_decoder() if is_multimodal(model.config) else model


def logits_scaling(config: Any) -> tuple[float, float | None]:
    """Return the scale s and the cap c that a language model applies to the output x of its output layer.
    Logits are c · tanh(s · x / c), or s · x without a cap."""
    text = config.get_text_config()
    scale = getattr(text, "logit_scale", None) or 1.0  # Cohere
    scale *= getattr(text, "output_multiplier", None) or 1.0
    scale *= getattr(text, "lm_head_multiplier", None) or 1.0  # Falcon-H1
    scale /= getattr(text, "logits_scaling", None) or 1.0  # Granite
    caps = ("final_logit_softcapping", "logits_soft_cap")  # Gemma; RecurrentGemma
    return scale, next((found for name in caps if (found := getattr(text, name, None))), None)


def names_of_other_parts(model: Any) -> set[str]:
    """Return the names of the tensors of a model outside its language model and its output layer, such as
    those of a vision tower."""
    parts: list[nn.Module] = [model.get_decoder(), model.get_output_embeddings()]
    held = [part.state_dict(keep_vars=True).values() for part in parts if part is not None]
    inside = {id(tensor) for tensors in held for tensor in tensors}
    return {name for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) not in inside}


def freeze_other_parts(model: Any) -> None:
    """Freeze all parameters of a model outside its language model and its output layer, such as a vision
    tower."""
    others = names_of_other_parts(model)
    for name, parameter in model.named_parameters():
        if name in others:
            parameter.requires_grad_(False)


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    *,
    scaling: float | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return [..., L, D] for queries [..., L, D], keys and values [..., M, D].

    `seen` is bool and broadcasts to the scores [..., L, M]. A score is q · k · `scaling` (1 / sqrt(D) by
    default). With `cap` c, a score x becomes c · tanh(x / c) (Gemma 2, arXiv:2408.00118). `sinks` broadcasts
    to [..., L, 1] and is the score of one more key, which has no value (gpt-oss, arXiv:2508.10925). Memory
    grows with L · M."""
    scores = (query @ key.mT) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights if sinks is None else weights[..., :-1], dropout) @ value
