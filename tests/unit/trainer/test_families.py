"""Every family through the trainer's packed forward pass, against one plain sequence at a time."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.families import FAMILIES, VOCABULARY
from tests.unit.trainer.conftest import plain_row
from trainer_service.backends.fsdp.attention import PACKED_ATTENTION, PackedRuns
from trainer_service.data.microbatch import build_micro_batch

BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.4}
MEAN_BOUND = {torch.float32: 1e-5, torch.bfloat16: 0.05}
"""bfloat16 keeps 8 bits, and these models' logits are large: single units differ by rounding alone."""
MIXTURES = {"qwen3_moe", "mixtral"}
"""There, rounding sends a token whose experts are nearly tied to another: nothing bounds a single unit."""


def _model(family, dtype):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype).eval()
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=noise).to(dtype))
    return model


def _rows():
    """Rows of many lengths, several alike, with sampled units in one or two stretches."""
    rng = np.random.default_rng(2)
    rows = []
    for episode, length in enumerate([9, 9, 9, 30, 2, 17, 17, 41, 3]):
        sampled = [*range(1, length // 4), *range(max(1, length // 2), length)]
        ids = rng.integers(0, VOCABULARY, length)
        rows.append(plain_row(ids, sampled, episode=episode, temperature=0.7))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logprobs_of_packed_rows_are_those_of_single_rows(family, dtype):
    model, rows = _model(family, dtype), _rows()
    batch = build_micro_batch(rows)
    with torch.no_grad():
        model.set_attn_implementation(PACKED_ATTENTION)
        runs = {"packed_runs": PackedRuns(batch.runs), "logits_to_keep": batch.predict, "use_cache": False}
        out = model(input_ids=batch.input_ids, position_ids=batch.position_ids, **runs)
        logits = out.logits[0].float() / batch.temperature[:, None]
        packed = logits.log_softmax(-1).gather(1, batch.target[:, None])[:, 0]
        model.set_attn_implementation("eager")
        alone = []
        for row in rows:
            ids = torch.from_numpy(row.token_ids).long()
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / 0.7
            at = torch.from_numpy(row.position)
            alone.append(logits.log_softmax(-1)[at - 1].gather(1, ids[at][:, None])[:, 0])
    gap = (packed - torch.cat(alone)).abs()
    if dtype == torch.float32 or family not in MIXTURES:
        assert gap.max() < BOUND[dtype]
    assert gap.mean() < MEAN_BOUND[dtype]
