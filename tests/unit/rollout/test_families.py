"""Every family the engine promises, against transformers' own forward pass."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DogeConfig, LlamaConfig, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from areal_async.base.versions import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, GenerateRequest
from rollout_service.engines.local.core import EngineCore
from rollout_service.engines.local.model import LocalModel
from tests.unit.families import FAMILIES, config_of
from tests.unit.rollout.conftest import save_model
from tests.unit.rollout.test_local_core import run

BOUND = 1e-4
"""Bound in float32."""
ROUNDS_MORE = 1.5
"""Factor by which the engine in bfloat16 may be further from the same weights in float32 than the own pass of
transformers is, on average and at most. bfloat16 keeps 8 bits, and rounds in each layer."""
TIE = {"float32": 1e-4, "bfloat16": 0.3}
"""A greedy choice is compared only where the reference's best two logits lie further apart."""


class Snapshot:
    """Weights of a directory, randomised biases and norms included, as a trainer would publish them."""

    tag = VersionTag("policy", 1, 3)

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        if getattr(self.model.config, "attn_logit_softcapping", None):
            self.model.set_attn_implementation("eager")  # others ignore the cap
        noise = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() == 1:  # else biases were 0 and norms 1, and leaving them out went unseen
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=noise).to(dtype))
        self.tensors = revert_weight_conversion(self.model, self.model.state_dict())


def core_of(directory: Path, dtype: str, slots: int = 4) -> tuple[EngineCore, Any]:
    core = EngineCore(LocalModel(directory, dtype=dtype), slots=slots, max_model_len=96)
    snapshot = Snapshot(directory, getattr(torch, dtype))
    core.swap(snapshot)
    return core, snapshot.model


def requests(temperature: float, new_tokens: int = 24) -> list[GenerateRequest]:
    rng = np.random.default_rng(11)
    return [
        GenerateRequest(
            str(i),
            rng.integers(2, 34, int(rng.integers(1, 20))),
            Sampling(temperature=temperature, max_new_tokens=new_tokens, seed=i),
        )
        for i in range(7)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_sampled_logprobs_and_greedy_ids_are_those_of_the_models_own_forward(family, dtype, tmp_path):
    core, model = core_of(save_model(tmp_path, FAMILIES[family]()).directory, dtype)
    core.model.check()
    exact = deepcopy(model).float()
    longest = compared = 0
    gaps: dict[str, list[np.ndarray]] = {"engine": [], "own pass": []}
    for temperature in (1.0, 0.0):
        asked = requests(temperature)
        done = run(core, *asked)
        for request in asked:
            result = done[request.request_id]
            longest = max(longest, len(result.token_ids))
            with torch.inference_mode():
                ids = torch.tensor([[*request.prompt_ids, *result.token_ids]])
                logits = [m(input_ids=ids, use_cache=False).logits[0].double() for m in (model, exact)]
            rows, exactly = (each[len(request.prompt_ids) - 1 : -1] for each in logits)
            sampled = torch.from_numpy(result.token_ids).long()[:, None]
            own, want = (each.log_softmax(-1).gather(1, sampled)[:, 0].numpy() for each in (rows, exactly))
            gaps["engine"].append(np.abs(result.logprobs - want))
            gaps["own pass"].append(np.abs(own - want))
            if temperature == 0:
                best = rows.topk(2)
                clear = (best.values[:, 0] - best.values[:, 1] > TIE[dtype]).numpy()
                assert (best.indices[:, 0].numpy()[clear] == result.token_ids[clear]).all()
                compared += int(clear.sum())
    assert longest > 8  # past every window
    assert compared > 20
    engine, own_pass = (np.concatenate(gaps[name]) for name in ("engine", "own pass"))
    if dtype == "float32":
        assert engine.max() < BOUND
    assert engine.mean() < ROUNDS_MORE * own_pass.mean() + BOUND
    assert engine.max() < ROUNDS_MORE * own_pass.max() + BOUND


def test_every_one_of_several_eos_ids_ends_an_answer(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    config.eos_token_id = [1, 5, 9]
    core, _ = core_of(save_model(tmp_path, config).directory, "float32", slots=8)
    rng = np.random.default_rng(0)
    asked = [
        GenerateRequest(str(i), rng.integers(2, 34, 5), Sampling(max_new_tokens=60, seed=i))
        for i in range(40)
    ]
    done = run(core, *asked)
    ends = {int(result.token_ids[-1]) for result in done.values() if result.finish_reason == "stop"}
    assert ends == {1, 5, 9}
    for result in done.values():
        assert not set(result.token_ids[:-1].tolist()) & {1, 5, 9}


def test_a_family_with_attention_of_another_kind_is_refused(tmp_path, monkeypatch):
    """What the engine cannot do exactly it says at the start, instead of sampling from something else."""
    config: PretrainedConfig = LlamaConfig(**FAMILIES["llama"]().to_dict())
    model = LocalModel(save_model(tmp_path, config).directory)
    original = model.model.forward
    # Like a model that scales its logits: the engine applies decoder and head itself and would miss it.
    monkeypatch.setattr(
        model.model,
        "forward",
        lambda *args, **kwargs: (out := original(*args, **kwargs), setattr(out, "logits", out.logits * 2))[0],
    )
    with pytest.raises(EngineError, match="does not support this architecture"):
        model.check()


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (DogeConfig, {}, "attention_mask"),
    ],
)
def test_an_argument_that_attention_does_not_know_is_refused(kind, changes, said, tmp_path):
    model = LocalModel(save_model(tmp_path, config_of(kind, **changes)).directory)
    with pytest.raises(EngineError, match=f"calls its attention with {said}, which the local engine"):
        model.check()
