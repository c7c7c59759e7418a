"""Models and rows shared by several ranks: all that comes of them is what one rank computes."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from areal_async.config.files import check_config
from tests.unit.trainer import rank_process, sequence_process
from tests.unit.trainer.forked_ranks import run_script
from tests.unit.trainer.sequence_process import CASES, MODELS, VOCABULARY, batches_of
from trainer_service.data import prefixes
from trainer_service.ranks import join_ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, changes in MODELS.items():
        torch.manual_seed(0)
        options = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 1 if name in ("repeated", "experts") else 2,
            "initializer_range": 0.2,
            "tie_word_embeddings": name == "repeated",
            "pad_token_id": 0,
            **changes,
        }
        if name == "experts":
            config = Qwen3MoeConfig(
                **options, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
            )
        else:
            config = Qwen2Config(**options)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory, models):
    """The folder of each case with its checkpoint, and what each of the case's ranks found."""
    out = tmp_path_factory.mktemp("shared")
    run_script(sequence_process.__file__, models, out)
    return {
        name: (out / name, [load_file(out / name / f"rank{rank}.safetensors") for rank in range(case.ranks)])
        for name, case in CASES.items()
    }


@pytest.fixture
def small_tiles(monkeypatch):
    for module, name in ((prefixes, "DENSE_TOKENS"), (prefixes, "LEAST_BRANCH")):
        monkeypatch.setattr(module, name, getattr(module, name))
    sequence_process.small_tiles()


@pytest.mark.parametrize("name", CASES)
def test_ranks_of_any_grid_compute_what_one_does(name, shared, models, small_tiles):
    """Columns, gradient norms, weights after an update, and all of it again after that. One rank reads the
    checkpoint of several and goes on as they do."""
    case, (folder, found) = CASES[name], shared[name]
    torch.set_num_threads(1)
    want = sequence_process.alone(case, models)
    owners = found[:: case.sequence]
    for each in found:
        assert each["1.norms"].tolist() == found[0]["1.norms"].tolist()
        for step in range(2):
            assert each[f"{step}.norms"].tolist() == pytest.approx(want[f"{step}.norms"].tolist(), rel=1e-5)
    for key, tensor in want.items():
        if "/" in key:
            torch.testing.assert_close(found[0][key], tensor, atol=1e-5, rtol=1e-5)
        elif not key.endswith("norms"):
            columns = torch.cat([each[key] for each in owners])
            torch.testing.assert_close(columns, tensor, atol=1e-5, rtol=1e-5)
    again = sequence_process.backend_of(case, models, join_ranks(0, 1), None)
    again.load(folder, dict.fromkeys(again.updates, 1))
    weights = sequence_process.weights_of(again)
    assert all(torch.equal(tensor, found[0][key]) for key, tensor in weights.items())
    steps = sequence_process.trained(
        again, case, range(1, 2), lambda step: batches_of(case, step, case.shares)
    )
    assert steps["1.norms"].tolist() == pytest.approx(want["1.norms"].tolist(), rel=1e-5)


def test_one_copy_of_a_model_writes_its_shards(shared):
    files = sorted(path.name for path in shared["copies"][0].iterdir())
    kinds = ("policy", "policy.exp_avg", "policy.exp_avg_sq")
    of_model = [f"{kind}-{shard:05d}-of-00002.safetensors" for kind in kinds for shard in range(2)]
    assert [name for name in files if name.startswith("policy")] == of_model
    assert len(files) == 6 + 4 + 4  # what ranks draw, and what they found


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "rope_parameters": {"rope_type": "yarn"},
            },
            "",
        ),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention, which look at several"),
        ({"text_config": {"layer_types": ["conv", "mamba"]}}, "conv, mamba, which look at several"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope, which depend on the longest row"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "dynamic, which depend"),
        ({"rope_scaling": None}, ""),
        ({"num_attention_heads": 4}, ""),
        ({"num_attention_heads": None, "text_config": None}, ""),
        ({"num_attention_heads": 3}, "2 ranks cannot share the 3 attention heads"),
    ],
)
def test_a_model_whose_tokens_meet_outside_of_attention_is_refused_before_the_start(tmp_path, config, said):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for sequence in (1, 2):
        job = rank_process.job_of(tmp_path, tmp_path, ranks=2, parallel={"sequence": sequence})
        found = [mistake for mistake in check_config(job) if mistake.field == "trainer.parallel.sequence"]
        assert len(found) == (sequence > 1 and said != "")
        assert all(said in mistake.problem for mistake in found)
