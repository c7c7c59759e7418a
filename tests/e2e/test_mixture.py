"""A whole job on a mixture of experts: the engine's routes reach the trainer, and Redis never sees them."""

from urllib.parse import quote

import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal_async.trajectory.codec import MAGIC
from areal_async.trajectory.routes import ROUTES_MAGIC
from replay_buffer.routes import PREFIX
from tests.e2e.conftest import started
from tests.jobs import make_workspace
from trainer_service.data.recording import Recording

pytestmark = pytest.mark.slow
STEPS = 8


def write_mixture(folder, tokenizer):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        max_position_embeddings=320,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def test_a_job_trains_a_mixture_by_the_routes_of_its_engine_over_a_killed_buffer(tmp_path):
    workspace = make_workspace(tmp_path)
    write_mixture(tmp_path / "model", AutoTokenizer.from_pretrained(tmp_path / "model"))
    job_file = workspace.job(
        "routed", trainer__steps=STEPS, supervisor={"first_pause_s": 0.1, "spare_after_s": None}
    )
    with started(workspace, "run", job_file) as job:
        job.wait_for_steps(2)
        held = job.folder / "buffer" / "episodes"
        job.wait_for(lambda: any(held.glob(f"{PREFIX}*")), "a file of routes")
        # Redis has written down whatever it was told.
        told = b"".join(path.read_bytes() for path in held.parent.rglob("*.aof"))
        assert MAGIC in told
        assert ROUTES_MAGIC not in told
        job.service("buffer").kill()
        run = job.end()
    assert run.summary["episodes_trained"] == STEPS * 8 * 4
    for step in run.records("step"):
        # The last token of an answer, which the engine has not fed, is not fed here either.
        assert step["replayed_tokens"] == step["packed_tokens"] > 0
    checks = run.records("self_check")
    assert checks
    assert all(check["passed"] and check["own_routes"] for check in checks)
    recorded = Recording(run.folder)
    trained = {quote(g.group_id, safe="") for step in range(STEPS) for g in recorded.read(step).batch.groups}
    left = {path.name.removeprefix(PREFIX).split(",")[0] for path in held.glob(f"{PREFIX}*")}
    assert len(trained) == STEPS * 8
    assert left.isdisjoint(trained)
