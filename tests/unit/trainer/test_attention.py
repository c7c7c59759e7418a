"""Packed attention: the same log-probs and gradients as one sequence at a time."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.unit.families import config_of
from trainer_service.backends.fsdp.attention import PACKED_ATTENTION, PackedRuns, packed_attention
from trainer_service.data.prefixes import runs_of


def _model(**changes):
    torch.manual_seed(0)
    changes = {"vocab_size": 23, "num_hidden_layers": 2, "initializer_range": 0.1} | changes
    return AutoModelForCausalLM.from_config(config_of(Qwen2Config, **changes), dtype=torch.float32)


def _compare(model, sequences):
    """Log-probs and parameter gradients of a weighted sum, packed against one by one."""
    lengths = [len(s) for s in sequences]
    weight = torch.linspace(-1, 1, sum(lengths))[:, None] / sum(lengths)
    model.set_attn_implementation(PACKED_ATTENTION)
    out = model(
        input_ids=torch.cat(sequences)[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        use_cache=False,
        packed_runs=PackedRuns(runs_of(lengths)),
    )
    packed = out.logits[0].log_softmax(-1)
    (packed * weight).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.set_attn_implementation("eager")
    model.zero_grad()
    alone = torch.cat(
        [model(input_ids=s[None], use_cache=False).logits[0].log_softmax(-1) for s in sequences]
    )
    (alone * weight).sum().backward()
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    for mine, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-5, rtol=1e-3)


WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
KINDS = [{"num_key_value_heads": 1}, {}, {"num_key_value_heads": 4}, WINDOW]


@settings(max_examples=12, derandomize=True)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=10), st.integers(0, 2**16), st.sampled_from(KINDS))
@example([11, 11, 3], 2, WINDOW)
def test_packed_rows_equal_unpacked_rows_in_any_order_and_mix_of_lengths(lengths, seed, kind):
    generator = torch.Generator().manual_seed(seed)
    model = _model(**kind)
    assert ("sliding_attention" in model.config.layer_types) == (kind == WINDOW)
    _compare(model, [torch.randint(0, 23, (n,), generator=generator) for n in lengths])


def test_runs_are_required_and_must_add_up():
    q = torch.zeros(1, 2, 6, 4)
    with pytest.raises(ValueError, match="packed_runs"):
        packed_attention(torch.nn.Identity(), q, q, q, None)
    with pytest.raises(ValueError, match="runs that hold 5"):
        packed_attention(torch.nn.Identity(), q, q, q, None, packed_runs=PackedRuns([(1, 5)]))


def test_runs_of_names_stretches_of_equal_length():
    assert runs_of([3, 3, 2, 3]) == [(2, 3), (1, 2), (1, 3)]
    with pytest.raises(ValueError, match="at least one"):
        runs_of([3, 0])
