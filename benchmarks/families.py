"""Every causal language model class of transformers through the trainer, as a tiny model with random weights.

For each family: the difference between packed rows and the model's own eager forward pass without any check,
and the answer of the trainer's back end, which probes the model before it trains it. A family that passes is
compared once more on rows of other lengths. Writes `results/families.json` and the table of `docs/models.md`.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from areal_async.base.errors import first_line
from areal_async.config.job import OptimizerSection
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp.attention import PackedRuns, packed_attention
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.backends.probe import BOUND, own_columns, probe_rows, with_short_windows
from trainer_service.data.microbatch import build_micro_batch
from trainer_service.data.rows import TrainingRow, row_of
from trainer_service.errors import ModelError
from trainer_service.ranks import join_ranks

RESULTS = Path(__file__).parent / "results" / "families.json"
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
UNCHECKED = "areal_unchecked"
MOST_PARAMETERS = 3_000_000

LAYERS = 4

SIZES: tuple[tuple[str, Any], ...] = (
    (r"vocab_size\w*|.*_vocab_size\w*", 96),
    (r"(max|n|seq|model)_?(position|ctx|seq|positions|position_embeddings|sequence_length)\w*", 128),
    (r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers", LAYERS),
    (r"hidden_size|d_model|n_embd|model_dim|hidden_dim|embed_dim|embedding_size|word_embed_proj_dim", 32),
    (r"num_key_value_heads|num_kv_heads|n_head_kv|num_global_key_value_heads", 2),
    (r"num_attention_heads|n_heads?|num_heads|attention_heads|(en|de)coder_attention_heads", 4),
    (r"(global_|swa_)?head_dim|qk_(nope|rope)_head_dim|v_head_dim|rotary_dim|index_head_dim", 8),
    (r"(q|kv|o)_lora_rank|attention_hidden_size|hidden_size_per_layer_input|index_topk", 16),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|feed_forward|mlp_dim)\w*|d_ff|n_inner|lru_width", 64),
    (r"(num|n)(_local|_routed)?_experts|moe_num_experts|num_moe_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_?k|top_k_experts|num_selected_experts", 2),
    (r"n_group|topk_group|n_groups|mamba_n_groups|num_blocks_per_layer", 1),
    (r"mamba_d_state|state_size|ssm_state_size|mamba_d_conv_state", 8),
    (r"mamba_n_heads|mamba_num_heads|linear_num_(key|value)_heads|num_v_heads|index_n_heads", 4),
    (r"mamba_d_head|mamba_head_dim|linear_(key|value)_head_dim", 16),
    (r"mamba_d_ssm", 64),
    (r"mamba_dt_rank|time_step_rank", 4),
    (r"sliding_window|attention_chunk_size|window_size", 8),
)
"""Field of a config -> its size in a tiny model."""

CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
SPECIAL: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 4} for name in ("axk1", "deepseek_v3", "glm4_moe_lite", "youtu")},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "gemma2": {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8},
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS | {"num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "falcon_mamba": {"intermediate_size": 64},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 8},
}
"""Fields that some families need besides, or that make what is special about them matter."""


def tiny_config(model_type: str) -> Any:
    """The default config of a family with every size small. Raises what the family's config raises."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    if (text := default.get_text_config()) is not default:
        kind, default = type(text), text
    given = {
        name: size
        for name, value in default.to_dict().items()
        for pattern, size in SIZES
        if type(value) is int and value > 1 and re.fullmatch(pattern, name)
    }
    given |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or []))
    with_kinds: dict[str, Any] = (
        {"layer_types": (kinds * LAYERS)[: max(LAYERS, len(kinds))]} if len(kinds) > 1 else {}
    )
    with_kinds |= {"num_hidden_layers": len(with_kinds["layer_types"])} if with_kinds else {}
    special = SPECIAL.get(model_type, {})
    try:
        config = kind(**given | with_kinds | special)
    except Exception:  # of configs that compute the kinds of their layers
        config = kind(**given | special)
    config.architectures = None
    return config


def tiny_model(config: Any) -> Any:
    """A model of random weights, large enough for every part of it to matter. Raises ValueError for one of
    many parameters, and what its own forward pass raises."""
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"has {size:,} parameters in the smallest form that the generator knows")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.dim() < 2 else 1.0 / parameter.shape[-1] ** 0.5
            parameter.add_(scale * torch.randn(parameter.shape))
    own_columns(
        model.eval(), probe_rows(config), ("logp",), "cpu"
    )  # An error here is one of the tiny config.
    return model


def _unchecked(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **arguments: Any
) -> Any:
    """Attention without the check of its arguments. A model hands on its mask by place or by name."""
    names = ("packed_runs", "scaling", "dropout", "sliding_window")
    known = {name: arguments[name] for name in names if name in arguments}
    return packed_attention(module, query, key, value, None, **known)


AttentionInterface.register(UNCHECKED, _unchecked)


@dataclass(frozen=True)
class Family:
    """The figures of one family."""

    name: str
    model: str
    unchecked: float | str
    """Mean difference of a log-prob in nats without any check, or the error."""
    trained: bool
    said: str
    """Why the trainer refuses it; empty for one that it trains."""
    after: float | None
    """Largest difference of a log-prob in nats, of one that it trains."""


def other_rows(vocabulary: int) -> list[TrainingRow]:
    """Rows that the probe does not have."""
    random = np.random.default_rng(1)
    rows = []
    for length in (17, 5, 23, 2, 17):
        ids = random.integers(3, vocabulary, length).astype(np.int32)
        mask, zeros = np.arange(length) > 0, np.zeros(length, np.int32)
        row = row_of(0, ids, mask.astype(np.uint8), zeros.astype(np.float32), zeros)
        assert row is not None
        rows.append(row)
    return rows


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)[:160]}"


@torch.no_grad()
def unchecked_gap(config: Any, model: Any) -> float | str:
    """Mean difference of packed rows from the eager forward pass when nothing refuses anything."""
    rows = probe_rows(config)
    batch = build_micro_batch(rows)
    try:
        narrow = AutoModelForCausalLM.from_config(with_short_windows(config), dtype=torch.float32).eval()
        narrow.load_state_dict(model.state_dict())
        narrow.set_attn_implementation(UNCHECKED)
        packing = {"packed_runs": PackedRuns(batch.runs, batch.branching)}
        place = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        logits = narrow(**place, **packing, use_cache=False).logits[0]
        logp = logits.float().log_softmax(-1)[batch.predict].gather(1, batch.target[:, None])[:, 0]
        own = own_columns(narrow, rows, ("logp",), "cpu")["logp"]
    except Exception as error:  # of code that is not ours, which is what is reported
        return _told(error)
    return float((logp - own).abs().mean())


@torch.no_grad()
def trained_gap(folder: Path, model: Any) -> float:
    """Largest difference of the back end's log-probs from the model's own. Raises `ModelError`."""
    backend = FsdpBackend(
        {"policy": ModelUse(folder, OptimizerSection(), 1)}, join_ranks(0, 1), dtype=torch.float32
    )
    rows = other_rows(model.config.get_text_config().vocab_size)
    (found,) = backend.evaluate("policy", [build_micro_batch(rows)], lambda _, columns: columns["logp"])
    return float((found - own_columns(model, rows, ("logp",), "cpu")["logp"]).abs().max())


def families(names: Sequence[str] = ()) -> Iterator[Family | tuple[str, str]]:
    """Each family, or its name and why no tiny model of it can be made."""
    for name, kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if names and name not in names:
            continue
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            try:
                config = tiny_config(name)
                model = tiny_model(config)
                model.save_pretrained(folder)
            except Exception as error:  # of code that is not ours
                yield name, _told(error)
                continue
            unchecked, after, said = unchecked_gap(config, model), None, ""
            try:
                after = trained_gap(Path(folder), model)
            except ModelError as error:
                said = str(error).replace(folder, "FOLDER")
            yield Family(name, str(kind), unchecked, not said, said, after)


NO_MODEL = "no tiny model"


def measured() -> dict[str, dict[str, Any]]:
    """The result file: name of a family -> its figures, or the reason why no tiny model of it was made."""
    return json.loads(RESULTS.read_text())["families"] if RESULTS.exists() else {}


REASONS = (
    ("attends in chunks", "attention in chunks"),
    ("calls its attention with", "an attention argument that packing does not support"),
    ("classes of its own", "attention that packed rows cannot use"),
    ("managed by another FSDP group", "tied parameters that FSDP2 does not shard"),
    ("would overwrite", "a weight that transformers overwrites when it initialises a model"),
    ("does not compute the buffers", "buffers that transformers does not compute beside sharded parameters"),
    ("own forward pass", "different log-probs"),
    ("forward pass fails", "a forward pass that fails"),
)
"""Words of a refusal → reason on the page."""


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the two tables of `docs/models.md`: families that are trained, and those that are refused."""
    models = {name: one for name, one in sorted(found.items()) if NO_MODEL not in one}
    lines = ["| trained `model_type` | without the check | largest |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {_nats(one['unchecked'])} | {_nats(one['after'])} |"
        for name, one in models.items()
        if one["trained"]
    ]
    refused: dict[str, list[str]] = {}
    for name, one in models.items():
        if not one["trained"]:
            refused.setdefault(_reason(one["said"]), []).append(
                f"`{name}` {_nats(one['unchecked'])}".rstrip()
            )
    lines += ["", "| refused for | `model_type`, and its difference without the check |", "|---|---|"]
    return "\n".join(
        lines + [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(refused.items())]
    )


def _reason(said: str) -> str:
    """Return the page's words for a refusal. Raises `LookupError` for one that no row of `REASONS` knows."""
    for words, reason in REASONS:
        if words in said:
            return reason
    raise LookupError(f"no reason is known for {said!r}: add it to REASONS")


def _nats(difference: float | str) -> str:
    """Return a mean difference with one digit, or nothing for a family that fails without the check."""
    return "" if isinstance(difference, str) else f"{difference:.1g}"


BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"


def write_page(found: dict[str, dict[str, Any]]) -> None:
    """Replace the table of `docs/models.md`."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="families to measure; without any, all")
    parser.add_argument("--missing", action="store_true", help="leave out those that the result file has")
    parser.add_argument("--table", action="store_true", help="measure nothing, write the table alone")
    chosen = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    found = measured()
    skipped = set(found) if chosen.missing else set()
    names = (
        []
        if chosen.table
        else [n for n in chosen.names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if n not in skipped]
    )
    for one in families(names) if names else ():
        name = one.name if isinstance(one, Family) else one[0]
        found[name] = asdict(one) if isinstance(one, Family) else {NO_MODEL: one[1]}
        print(name, found[name], flush=True)
        versions = {"transformers": transformers.__version__, "torch": torch.__version__, "bound": BOUND}
        RESULTS.write_text(json.dumps(versions | {"families": dict(sorted(found.items()))}, indent=1) + "\n")
    write_page(found)


if __name__ == "__main__":
    main()
