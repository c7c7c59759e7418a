"""Every family the engine promises, against transformers' own forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from areal_async.rpc.schema import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, GenerateRequest, GenerateResult
from rollout_service.engines.local.core import EngineCore
from rollout_service.engines.local.model import LocalModel
from tests.unit.families import FAMILIES

LOGPROB_BOUND = {"float32": 1e-4, "bfloat16": 0.15}
"""bfloat16 keeps 8 bits: logits of about 10 are rounded to 1/32, and again in every layer before."""
TIE = {"float32": 1e-4, "bfloat16": 0.3}
"""A greedy choice is compared only where the reference's best two logits lie further apart."""


class Snapshot:
    """Weights of a directory, randomised biases and norms included, as a trainer would publish them."""

    tag = VersionTag("policy", 1, 3)

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        noise = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() == 1:  # else biases were 0 and norms 1, and leaving them out went unseen
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=noise).to(dtype))
        self.tensors = self.model.state_dict()


def core_of(directory: Path, dtype: str, slots: int = 4) -> tuple[EngineCore, Any]:
    core = EngineCore(LocalModel(directory, dtype=dtype), slots=slots, max_model_len=96)
    snapshot = Snapshot(directory, getattr(torch, dtype))
    core.swap(snapshot)
    return core, snapshot.model


def generate(core: EngineCore, requests: list[GenerateRequest]) -> dict[str, GenerateResult]:
    for request in requests:
        core.submit(core.checked(request))
    done: dict[str, GenerateResult] = {}
    with torch.inference_mode():
        while not core.idle:
            for item in core.step():
                assert isinstance(item.outcome, GenerateResult), item.outcome
                done[item.request_id] = item.outcome
    return done


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
def test_sampled_logprobs_are_those_of_the_models_own_forward(
    family: str, dtype: str, make_model: Any, tmp_path: Path
) -> None:
    core, model = core_of(make_model(tmp_path, FAMILIES[family]()).directory, dtype)
    core.model.check()
    asked = requests(1.0)
    done = generate(core, asked)
    assert max(len(result.token_ids) for result in done.values()) > 8  # past every window
    for request in asked:
        result = done[request.request_id]
        with torch.inference_mode():
            ids = torch.tensor([[*request.prompt_ids, *result.token_ids]])
            logits = model(input_ids=ids, use_cache=False).logits[0].double()
        rows = logits[len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        want = rows.gather(1, torch.from_numpy(result.token_ids).long()[:, None])[:, 0].numpy()
        np.testing.assert_allclose(result.logprobs, want, atol=LOGPROB_BOUND[dtype], rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_greedy_ids_are_the_models_own(family: str, dtype: str, make_model: Any, tmp_path: Path) -> None:
    core, model = core_of(make_model(tmp_path, FAMILIES[family]()).directory, dtype)
    for request in (asked := requests(0.0)):
        core.submit(core.checked(request))
    done = generate(core, [])
    compared = 0
    for request in asked:
        result = done[request.request_id]
        with torch.inference_mode():
            ids = torch.tensor([[*request.prompt_ids, *result.token_ids]])
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
        best = logits[len(request.prompt_ids) - 1 : -1].topk(2)
        clear = (best.values[:, 0] - best.values[:, 1] > TIE[dtype]).numpy()
        assert (best.indices[:, 0].numpy()[clear] == result.token_ids[clear]).all()
        compared += int(clear.sum())
    assert compared > 20


def test_every_one_of_several_eos_ids_ends_an_answer(make_model: Any, tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    config.eos_token_id = [1, 5, 9]
    core, _ = core_of(make_model(tmp_path, config).directory, "float32", slots=8)
    rng = np.random.default_rng(0)
    asked = [
        GenerateRequest(str(i), rng.integers(2, 34, 5), Sampling(max_new_tokens=60, seed=i))
        for i in range(40)
    ]
    done = generate(core, asked)
    ends = {int(result.token_ids[-1]) for result in done.values() if result.finish_reason == "stop"}
    assert ends == {1, 5, 9}
    for result in done.values():
        assert not set(result.token_ids[:-1].tolist()) & {1, 5, 9}


def test_a_family_with_attention_of_another_kind_is_refused(
    make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine cannot do exactly it says at the start, instead of sampling from something else."""
    config: PretrainedConfig = LlamaConfig(**FAMILIES["llama"]().to_dict())
    model = LocalModel(make_model(tmp_path, config).directory)
    original = model.model.forward
    # Like a model that scales its logits: the engine applies decoder and head itself and would miss it.
    monkeypatch.setattr(
        model.model,
        "forward",
        lambda *args, **kwargs: (out := original(*args, **kwargs), setattr(out, "logits", out.logits * 2))[0],
    )
    with pytest.raises(EngineError, match="does not support this architecture"):
        model.check()
