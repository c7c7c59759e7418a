"""Models whose packed rows are not the model's: each is right to 1e-4 or refused with a sentence."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Phi3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from areal_async.config.files import check_config, check_files
from areal_async.config.job import LoraSection, OptimizerSection
from areal_async.models.files import cannot_be_packed, carries_state, most_positions
from benchmarks import families
from tests.unit.families import config_of
from tests.unit.trainer import rank_process
from tests.unit.trainer.conftest import plain_row, write_model
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp import attention, forward
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.backends.probe import BOUND, probe_rows, refuse_unknown, require_equal
from trainer_service.data.microbatch import build_micro_batch
from trainer_service.errors import BatchError, UnfitModel
from trainer_service.ranks import join_ranks

RIGHT = ("llama", "gpt2", "gemma2", "gemma3_text", "gpt_oss", "olmo2", "mixtral")
STATE = ("qwen3_next", "qwen3_5_text", "falcon_h1", "lfm2", "nemotron_h", "bamba", "recurrent_gemma")
REFUSED = {
    "llama4_text": "attention_chunk_size|names no module of it",
    "bloom": "packed row|neighbouring tokens",
    "doge": "calls its attention with attention_mask",
    "stablelm": "forward pass fails",
    "mamba": "forward pass fails",
}


def saved(folder: Path, family: str) -> Path:
    families.tiny_model(families.tiny_config(family)).save_pretrained(folder)
    return folder


def plain(folder: Path, config: object) -> Path:
    families.tiny_model(config).save_pretrained(folder)
    return folder


def backend_of(folder: Path, dtype: torch.dtype = torch.float32, **options: object) -> FsdpBackend:
    lora = options.pop("lora", None)
    models = {"policy": ModelUse(folder, OptimizerSection(), 1, **options)}
    return FsdpBackend(models, join_ranks(0, 1), dtype=dtype, lora=lora)


@pytest.fixture
def by_probe_alone(monkeypatch):
    """The reasons that config.json names are not looked at."""
    monkeypatch.setattr(forward, "cannot_be_packed", lambda config: "")


@pytest.mark.parametrize("family", [*RIGHT, *STATE])
def test_a_family_that_is_trained_has_the_log_probs_of_the_model(family):
    (found,) = families.families([family])
    assert (found.trained, found.said) == (True, "")
    assert found.after < BOUND
    assert family in RIGHT or found.unchecked > 100 * BOUND, "its rows must not be packed"


@pytest.mark.parametrize(
    ("family", "side_by_side"),
    [("llama", False), ("gpt_oss", False), ("qwen3_next", True), ("falcon_h1", True)],
)
def test_rows_of_a_family_with_a_state_are_computed_side_by_side(family, side_by_side, tmp_path):
    assert backend_of(saved(tmp_path, family)).side_by_side == side_by_side


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_packing_gets_wrong_is_refused_by_the_probe(family, by_probe_alone):
    (found,) = families.families([family])
    assert not found.trained
    assert not isinstance(found.unchecked, float) or found.unchecked > 100 * BOUND
    assert found.said.startswith(("the model 'policy', a ", "no model can be loaded from"))
    assert "TypeError" not in found.said
    with pytest.raises(UnfitModel, match=REFUSED[family]):
        raise UnfitModel(found.said)


def test_a_reason_in_the_config_is_found_before_weights_are_loaded(tmp_path):
    families.tiny_config("llama4_text").save_pretrained(tmp_path)
    with pytest.raises(UnfitModel, match=r"the model 'policy', a \w+, cannot be trained on packed rows: it "):
        backend_of(tmp_path)


@pytest.mark.nightly
def test_every_causal_language_model_of_transformers_is_right_or_refused():
    found = list(families.families())
    assert len(found) == len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    measured = [one for one in found if isinstance(one, families.Family)]
    assert len(measured) >= 100
    for one in measured:
        if one.trained:
            assert one.after < BOUND, one
        else:
            assert "cannot be trained on packed rows: " in one.said or "no model can be loaded" in one.said


def test_the_table_of_the_page_is_what_the_script_wrote():
    table = families.PAGE.read_text().partition(families.BEGIN)[2].partition(families.END)[0].strip()
    assert table == families.table(families.measured())


@pytest.mark.parametrize("head", ["value", "both"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_critics_and_reward_models_are_probed_too(family, head, tmp_path, monkeypatch):
    folder = saved(tmp_path, family)
    assert backend_of(folder, head=head).side_by_side == (family == "qwen3_next")
    operator = attention._operator if family == "qwen3_next" else attention._explicit
    wrong = lambda *inputs, **how: 1.01 * operator(*inputs, **how)  # noqa: E731
    monkeypatch.setattr(attention, operator.__name__, wrong)
    with pytest.raises(UnfitModel, match=r"the (scores|log-probs|values) of packed rows"):
        backend_of(folder, head=head)


def test_a_frozen_companion_is_probed_and_named(tmp_path, model_dir, by_probe_alone):
    models = {
        "policy": ModelUse(model_dir, OptimizerSection(), 1),
        "teacher": ModelUse(saved(tmp_path, "llama4_text")),
    }
    with pytest.raises(UnfitModel, match="the model 'teacher', a llama4_text, cannot be trained"):
        FsdpBackend(models, join_ranks(0, 1), dtype=torch.float32)


@pytest.mark.parametrize("options", [{}, {"lora": LoraSection(rank=2)}, {"head": "both"}, {"head": "value"}])
def test_the_probe_computes_in_fp32_what_is_trained_in_bfloat16(options, tmp_path, by_probe_alone):
    backend_of(write_model(tmp_path / "right"), torch.bfloat16, **options)
    with pytest.raises(UnfitModel, match=r"Largest difference by row: \d"):
        backend_of(saved(tmp_path / "wrong", "bloom"), torch.bfloat16)


@pytest.mark.parametrize("wider", [0, 1])
def test_windows_wider_than_the_probe_are_probed(wider, tmp_path, monkeypatch):
    folder = plain(tmp_path, config_of(MistralConfig, sliding_window=4096, vocab_size=96))
    band = attention._band
    monkeypatch.setattr(
        attention, "_band", lambda n, keys, width, device: band(n, keys, width + wider, device)
    )
    if not wider:
        backend_of(folder)
        return
    with pytest.raises(UnfitModel, match="the log-probs of packed rows are not those"):
        backend_of(folder)


ONE = torch.ones(1)


def test_what_rows_with_a_shared_prefix_see_is_probed(tmp_path, monkeypatch):
    folder = plain(tmp_path, config_of(LlamaConfig, vocab_size=96))
    assert not backend_of(folder).side_by_side
    monkeypatch.setattr(attention, "_within", lambda trees, window: None)
    assert backend_of(folder).side_by_side, "rows without shared prefixes are right"


@pytest.mark.parametrize("wrong", [0.01, -0.01, float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, -1])
def test_one_row_that_differs_is_enough(wrong, place):
    rows = probe_rows(config_of(LlamaConfig))
    own = torch.linspace(-3, -1, sum(len(row.position) for row in rows))
    packed = own.clone()
    require_equal(rows, {"logp": packed}, {"logp": own})
    packed[place] += wrong
    with pytest.raises(UnfitModel, match="Largest difference by row"):
        require_equal(rows, {"logp": packed}, {"logp": own})


@pytest.mark.parametrize(
    "arguments",
    [
        {"position_bias": ONE},
        {"block_indices": ONE},
        {"indices": ONE},
        {"is_causal": False},
        {"output_attentions": True},
        {"attention_mask": ONE},
        {"an_argument_of_tomorrow": 0},
        {"sliding_window": (3, 3)},
        {"sliding_window": 0},
        {"sliding_window": -1},
        {"sliding_window": True},
    ],
    ids=str,
)
def test_attention_refuses_arguments_that_it_does_not_know(arguments):
    q, mask = torch.zeros(1, 2, 6, 4), arguments.pop("attention_mask", None)
    (name,) = arguments or ["attention_mask"]
    with pytest.raises(UnfitModel, match=rf"Identity calls its attention with {name}, which"):
        attention.packed_attention(
            torch.nn.Identity(), q, q, q, mask, packed_runs=attention.PackedRuns([(1, 6)]), **arguments
        )


def test_attention_takes_arguments_that_ask_for_nothing():
    nothing = dict.fromkeys(("s_aux", "softcap", "position_bias", "attention_mask"))
    off = {"use_cache": False, "output_attentions": False, "is_causal": True, "position_ids": ONE}
    refuse_unknown(torch.nn.Identity(), nothing | off)


def test_evaluation_has_no_dropout(tmp_path):
    folder = plain(tmp_path, config_of(LlamaConfig, attention_dropout=0.5, vocab_size=96))
    batch = build_micro_batch([plain_row(range(3, 30), slice(1, None))])
    backend = backend_of(folder)
    found = [backend.evaluate("policy", [batch], lambda _, columns: columns["logp"])[0] for _ in range(2)]
    assert torch.equal(*found)


def test_rows_longer_than_the_positions_of_a_longrope_model_are_refused(tmp_path):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 16} | factors
    sizes = {"rope_parameters": rope, "original_max_position_embeddings": 16, "vocab_size": 96}
    backend = backend_of(plain(tmp_path, config_of(Phi3Config, **sizes)))

    def evaluate(length: int) -> None:
        batch = build_micro_batch([plain_row(range(3, 3 + length), slice(1, None), feeds_last=True)])
        backend.evaluate("policy", [batch], lambda _, columns: columns)

    evaluate(16)
    with pytest.raises(BatchError, match="a row has more than 16 tokens"):
        evaluate(17)


CONFIGS = [
    ({"model_type": "qwen3"}, ""),
    ({"layer_types": ["full_attention", "sliding_attention"]}, ""),
    ({"layer_types": ["attention", "moe", "mlp"]}, ""),
    ({"attn_logit_softcapping": None, "attention_chunk_size": None}, ""),
    ({"layer_types": ["linear_attention", "full_attention"]}, ""),
    ({"attn_logit_softcapping": 50.0}, ""),
    ({"attention_chunk_size": 8192}, "attends in chunks"),
    ({"text_config": {"attention_chunk_size": 8192}}, "attends in chunks"),
]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, ""),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of kind linear_attention"),
        ({"text_config": {"layer_types": ["conv", "full_attention"]}}, "layers of kind conv"),
        ({"layers_block_type": ["mamba", "attention"]}, "layers of kind mamba"),
        ({"block_types": ["recurrent", "attention"]}, "layers of kind recurrent"),
    ],
    ids=str,
)
def test_layers_that_carry_a_state_are_named(config, said):
    assert said in carries_state(config)
    assert bool(carries_state(config)) == bool(said)


@pytest.mark.parametrize(("config", "said"), CONFIGS, ids=str)
def test_reasons_that_a_config_names(config, said):
    found = cannot_be_packed(config)
    assert bool(found) == bool(said)
    with pytest.raises(UnfitModel, match=said):
        raise UnfitModel(found)


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"max_position_embeddings": 64}, None),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 16}}, None),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 16}, 16),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 8}},
            8,
        ),
        ({"rope_parameters": {"a": {"rope_type": "dynamic"}}, "max_position_embeddings": 64}, 64),
        (
            {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 32}}
            | {"original_max_position_embeddings": 16, "max_position_embeddings": 64},
            16,
        ),
    ],
    ids=str,
)
def test_positions_of_which_rows_do_not_depend_on_each_other(config, most):
    assert most_positions(config) == most


def test_a_config_that_names_a_reason_is_a_mistake_before_the_start(tmp_path):
    for config, said in CONFIGS:
        (tmp_path / "config.json").write_text(json.dumps(config))
        job = rank_process.job_of(tmp_path, tmp_path)
        found = [mistake.problem for mistake in check_config(job) if "packed" in mistake.problem]
        assert bool(found) == bool(said)


def test_a_companion_whose_config_names_a_reason_is_a_mistake_of_its_field(tmp_path):
    (tmp_path / "config.json").write_text('{"attention_chunk_size": 64}')
    job = rank_process.job_of(tmp_path, tmp_path)
    changed = job.trainer.model_copy(
        update={"reference": job.trainer.reference.model_copy(update={"model": tmp_path})}
    )
    found = check_files(job.model_copy(update={"trainer": changed}))
    fields = {mistake.field for mistake in found if "attends in chunks" in mistake.problem}
    assert fields == {"model", "trainer.reference.model"}
