"""Megatron-Core configuration of a Hugging Face model, and the checks that refuse a model or a grid of ranks.

Some configurations would silently compute something other than the model, so they are refused with a reason.
`reasons_against` is pure. It is called when the job file is read, and again when the model is created.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal_async.config.parallel import RankGrid

if TYPE_CHECKING:
    import torch

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Supported values of `model_type`."""


@dataclass(frozen=True)
class MegatronOptions:
    """Options of all models of a back end: `Megatron.Arguments`, and the grid of ranks."""

    dtype: torch.dtype
    grid: RankGrid
    recompute: str = "none"
    virtual_stages: int = 1


@dataclass(frozen=True)
class Dimensions:
    """Sizes and kinds of a model's layers, from its `config.json`."""

    kind: str
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_width: int
    mlp: int
    vocabulary: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    experts: int = 0
    """Number of experts in each layer; 0 if every layer has one MLP."""
    experts_per_token: int = 0
    expert_mlp: int = 0
    norm_topk: bool = False
    """Whether the weights of a token's experts are normalised to sum to 1."""
    pad: int | None = None
    """Padding token. Its row of the embedding gets no gradient from look-ups, as in transformers
    (`torch.nn.Embedding`'s `padding_idx`)."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Dimensions:
        """Read the dimensions. Raises `ValueError` if the model is not in `FAMILIES` or its config lacks a
        dimension."""
        if not isinstance(config, Mapping):
            raise ValueError("its config.json is no mapping")
        kind = str(config.get("model_type"))
        if "vision_config" in config:
            raise ValueError(
                f"it reads images (model_type {kind}), and the back end megatron trains language models "
                "alone. Use the back end fsdp"
            )
        if kind not in FAMILIES:
            raise ValueError(
                f"its model_type is {kind}: the back end megatron loads {', '.join(FAMILIES)}. Use the back "
                "end fsdp, which trains the families of docs/models.md"
            )
        try:
            heads, hidden = (_positive(config, name) for name in ("num_attention_heads", "hidden_size"))
            experts = 0
            if "moe" in kind:  # files use either name
                experts = _positive(config, "num_experts" if "num_experts" in config else "num_local_experts")
            return cls(
                kind=kind,
                layers=_positive(config, "num_hidden_layers"),
                hidden=hidden,
                heads=heads,
                key_heads=_positive(config, "num_key_value_heads", heads),
                head_width=_positive(config, "head_dim", hidden // heads),
                mlp=_positive(config, "intermediate_size"),
                vocabulary=_positive(config, "vocab_size"),
                norm_eps=float(config["rms_norm_eps"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
                qk_norm=kind in ("qwen3", "qwen3_moe"),
                experts=experts,
                experts_per_token=_positive(config, "num_experts_per_tok") if experts else 0,
                expert_mlp=_positive(config, "moe_intermediate_size") if experts else 0,
                norm_topk=bool(config.get("norm_topk_prob", False)),
                pad=_pad(config),
            )
        except KeyError as error:
            raise ValueError(f"its config.json lacks {error.args[0]}") from None
        except TypeError:
            raise ValueError("rms_norm_eps of its config.json is no number") from None


def _pad(config: Mapping[str, Any]) -> int | None:
    """Return the padding token. A negative one counts from the end of the vocabulary, as in torch."""
    pad, vocabulary = config.get("pad_token_id"), _positive(config, "vocab_size")
    if pad is None:
        return None
    if not isinstance(pad, int) or not -vocabulary <= pad < vocabulary:
        raise ValueError(f"pad_token_id of its config.json is {pad!r} and no token of {vocabulary}")
    return pad % vocabulary


def _positive(config: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    """Return a positive integer of the config, or `otherwise` if it is missing. Raises `KeyError` or
    `ValueError`."""
    value = config.get(name)
    if value is None and otherwise is not None:
        return otherwise
    if value is None:
        raise KeyError(name)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} of its config.json is {value!r} and no whole number above 0")
    return value


def reasons_against(
    config: Mapping[str, Any], grid: RankGrid, virtual_stages: int = 1
) -> Iterator[tuple[str, str, str]]:
    """Yield (field of the job file, problem, fix) for every reason why the back end would not compute the
    same as the model.

    `config` is a `config.json` that `Dimensions.of` can read. A field is either `model` or a field of
    `trainer`."""
    found = Dimensions.of(config)
    stages = grid.pipeline * virtual_stages
    if config.get("use_sliding_window") or (config.get("layer_types") or []).count("sliding_attention"):
        yield "model", "it has layers with a sliding window", "Use the back end fsdp"
    if config.get("attention_bias") and found.kind != "qwen2":
        yield "model", "its attention has biases on the output projection", "Use the back end fsdp"
    if config.get("hidden_act", "silu") != "silu":
        yield "model", f"its activation is {config['hidden_act']}", "Use the back end fsdp"
    if config.get("mlp_bias"):
        yield "model", "its MLPs have biases", "Use the back end fsdp"
    if config.get("attention_dropout"):
        yield "model", "its attention has dropout, which training here does without", "Set it to 0"
    if found.experts and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        yield "model", "some of its layers have experts and others not", "Use the back end fsdp"
    width = found.expert_mlp if found.experts else found.mlp
    for field, ranks, number, what, divided in (
        ("tensor", grid.tensor, found.key_heads, "key and value heads", "num_key_value_heads"),
        ("tensor", grid.tensor, width, "rows of an MLP", "them"),
        ("expert", grid.expert, found.experts, "experts", "num_experts"),
    ):
        if number % ranks:
            problem = f"{ranks} ranks do not share {number} {what} evenly"
            yield f"parallel.{field}", problem, f"Set it to a divisor of {divided}"
    if found.layers % stages:
        yield (
            "parallel.pipeline",
            f"{stages} stages do not share {found.layers} layers evenly",
            "Set it, or backend_args.virtual_stages, so that their product divides the number of layers",
        )
    if virtual_stages > 1 and grid.pipeline == 1:
        yield (
            "backend_args.virtual_stages",
            "stages are interleaved on several ranks alone",
            "Set it to 1, or trainer.parallel.pipeline to 2 or more",
        )
    if found.tied and grid.pipeline > 1:
        yield (
            "parallel.pipeline",
            "the model's output layer is its embedding: the first and the last stage would each hold one, "
            "and nothing but the sum of their gradients would keep them equal",
            "Set it to 1, or use a model whose tie_word_embeddings is false",
        )
    if grid.expert > 1 and not found.experts:
        yield "parallel.expert", "the model has no experts", "Set it to 1"
