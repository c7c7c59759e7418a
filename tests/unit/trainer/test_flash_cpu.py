"""The CPU kernels of FlashAttention that other tests use: equal to SDPA, and strict about their arguments."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from tests import flash_cpu

LENGTHS = [(5, 5), (3, 9), (0, 0), (1, 4), (8, 8)]


@pytest.fixture(autouse=True)
def kernels():
    with flash_cpu.installed():
        yield


def _ends(lengths):
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def _drawn(dtype, kv_heads, head=16):
    torch.manual_seed(0)
    n_q, n_k = (sum(each) for each in zip(*LENGTHS, strict=True))
    shapes = [(n_q, 4, head), (n_k, kv_heads, head), (n_k, kv_heads, head)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def _by_sdpa(q, k, v, window):
    """Attention of one sequence after another, by SDPA with a mask."""
    found = []
    n_q, n_k = zip(*LENGTHS, strict=True)
    for part, keys, values in zip(q.split(n_q), k.split(n_k), v.split(n_k), strict=True):
        distance = torch.arange(len(keys) - len(part), len(keys))[:, None] - torch.arange(len(keys))[None]
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        if len(part):
            heads = [each.transpose(0, 1)[None] for each in (part, keys, values)]
            out = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=0.3, enable_gqa=True)
            found.append(out[0].transpose(0, 1))
    return torch.cat(found)


def _by_varlen(q, k, v, window):
    ends = [_ends(each) for each in zip(*LENGTHS, strict=True)]
    sizes = (-1 if window is None else window - 1, 0)
    return varlen_attn(q, k, v, *ends, 8, 9, scale=0.3, window_size=sizes, enable_gqa=True)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_values_and_gradients_are_those_of_sdpa(dtype, bound, window, kv_heads):
    inputs = _drawn(dtype, kv_heads)
    weight = torch.randn(inputs[0].shape, dtype=dtype)
    found = []
    for attend in (_by_varlen, _by_sdpa):
        out = attend(*inputs, window)
        found.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, atol=bound, rtol=bound * 10)


def test_bfloat16_has_the_error_of_bfloat16():
    exact, rounded = (
        [each.detach().to(d) for each in _drawn(torch.bfloat16, 2)] for d in (torch.float64, torch.bfloat16)
    )
    error = (_by_varlen(*rounded, None).double() - _by_varlen(*exact, None)).abs().max()
    assert 1e-4 < error < 2e-2


def test_tokens_beyond_the_last_sequence_are_not_a_number():
    q, k, v = (F.pad(each.detach(), (0, 0, 0, 0, 0, 2)).requires_grad_() for each in _drawn(torch.float32, 2))
    out = _by_varlen(q, k, v, None)
    assert out[-2:].isnan().all()
    assert not out[:-2].isnan().any()
    for grad in torch.autograd.grad(out[:-2].sum(), (q, k, v)):
        assert grad[-2:].isnan().all()
        assert not grad[:-2].isnan().any()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cu_seq_q": _ends([17]).long()}, "int32"),
        ({"cu_seq_q": _ends([18])}, "does not describe 17 tokens"),
        ({"cu_seq_q": _ends([9, 8])}, "2 sequences of queries and 1 of keys"),
        ({"max_q": 16}, "max_q is 16"),
        ({"max_k": 25}, "max_k is 25"),
        ({"key": torch.zeros(26, 2, 8)}, "shapes"),
        ({"query": torch.zeros(17, 4, 16, dtype=torch.bfloat16)}, "dtypes"),
        ({"query": torch.zeros(17, 16, 4).transpose(1, 2)}, "contiguous"),
    ],
)
def test_a_call_that_a_gpu_would_compute_in_part_is_an_error(changed, said):
    q, k, v = _drawn(torch.float32, 2)
    given = {"query": q, "key": k, "value": v, "max_q": 17, "max_k": 26}
    given |= {"cu_seq_q": _ends([17]), "cu_seq_k": _ends([26])}
    varlen_attn(**given, enable_gqa=True)
    with pytest.raises(ValueError, match=said):
        varlen_attn(**given | changed, enable_gqa=True)
