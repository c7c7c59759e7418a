"""Settings of a process that computes on a GPU. A CPU build of torch tells them, too."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from areal_async.models.accelerator import begin_on, exact_products, with_exact_rotations

CODE = """
import json, torch
from areal_async.models.accelerator import begin_on
told = begin_on({device!r}, attention="sdpa")
allocator = torch._C._accelerator_getAllocatorSettings()
own = [torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled(), allocator]
print(json.dumps([told, own]))
"""


PINNED = "pinned_max_round_threshold_mb:{0},pinned_max_cached_size_mb:{0}"
"""A kept block that was not rounded would be given out for a size above its own."""


def begun(device, **variables):
    """Return what `begin_on` returned and logged in a process of its own, and torch's settings after it."""
    kept = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    code = [sys.executable, "-c", CODE.format(device=device)]
    done = subprocess.run(code, capture_output=True, text=True, check=True, env=kept | variables)
    return json.loads(done.stdout)


def test_a_process_on_a_gpu_uses_tf32_growing_segments_and_no_cudnn_attention():
    told, (precision, cudnn, allocator) = begun("cuda:0")
    assert (precision, cudnn) == ("high", False)
    assert allocator == told["allocator"] == f"expandable_segments:True,{PINNED.format(64)}"
    assert (told["fp32_products"], told["cudnn_attention"], told["attention"]) == ("tf32", "off", "sdpa")


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_own_allocator_settings_are_kept(variable):
    told, (_, _, allocator) = begun("cuda", **{variable: "max_split_size_mb:512"})
    assert allocator == told["allocator"] == f"max_split_size_mb:512,{PINNED.format(64)}"
    told, _ = begun("cuda", **{variable: "pinned_max_round_threshold_mb:32"})
    assert told["allocator"] == PINNED.format(32)


def test_on_a_cpu_torch_is_left_as_it_is():
    assert begun("cpu") == [{}, ["highest", True, begun("cpu")[1][2]]]
    assert "expandable" not in begun("cpu")[1][2]


class Products(TorchDispatchMode):
    """Note the precision at which each matrix product is computed, by its operator."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket] = torch.get_float32_matmul_precision()
        return func(*args, **(kwargs or {}))


class OldRotaryEmbedding(nn.Module):
    """Angles as transformers 5.0 computes them."""

    def forward(self, positions):
        return (torch.ones(1, 4, 1) @ positions[:, None].float()).cos()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary_emb, self.layer = OldRotaryEmbedding(), nn.Linear(5, 3, bias=False)

    def forward(self, positions):
        return self.layer(self.rotary_emb(positions)[0])


def test_angles_of_positions_are_computed_in_fp32_and_the_rest_in_tf32():
    """TF32 rounds positions above 2,048."""
    model = Model()
    with_exact_rotations(model)
    torch.set_float32_matmul_precision("high")
    try:
        with torch.no_grad(), Products() as products:
            model(torch.arange(5)[None])
    finally:
        torch.set_float32_matmul_precision("highest")
    assert products.seen[torch.ops.aten.bmm] == "highest"
    assert products.seen[torch.ops.aten.mm] == "high"


def test_an_exact_product_ends_with_the_precision_of_before_also_after_an_error():
    @exact_products()
    def fail():
        raise ValueError(torch.get_float32_matmul_precision())

    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ValueError, match="highest"):
            fail()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_cpu_device_is_told_by_nothing():
    assert begin_on("cpu", attention="sdpa") == {}
