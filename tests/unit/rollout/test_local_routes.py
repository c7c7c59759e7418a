"""Routes that the local engine tells: those of the pass that fed each token first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from areal_async.models.files import mixture_of
from areal_async.models.routers import routers_of
from areal_async.trajectory import (
    Call,
    CodecError,
    Episode,
    EpisodeBuilder,
    Sampling,
    SegmentKind,
    pack,
    pack_routes,
    training_rows,
    unpack,
    with_routes,
)
from areal_async.trajectory.routes import route_type
from rollout_service.engines.base import GenerateRequest
from rollout_service.engines.local.core import EngineCore
from rollout_service.engines.local.engine import LocalEngine
from rollout_service.engines.local.model import LocalModel
from tests.unit.rollout.conftest import Tiny, save_model, tiny_config
from tests.unit.rollout.test_local_core import run, swap
from tests.unit.rollout.test_workflows import context

LAYERS, CHOSEN = 2, 2
SAMPLING = Sampling(max_new_tokens=6)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Three layers, the middle one dense; no end of sequence."""
    changes = {"num_experts": 6, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 24, "head_dim": 8}
    changes |= {"num_hidden_layers": 3, "mlp_only_layers": [1], "intermediate_size": 48}
    changes |= {"tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None}
    return save_model(tmp_path_factory.mktemp("mixture"), tiny_config(Qwen3MoeConfig, **changes), eos=False)


def core_of(tiny: Tiny, *, routes: bool = True, **options: Any) -> EngineCore:
    made_of = mixture_of(tiny.directory) if routes else None
    core = EngineCore(LocalModel(tiny.directory, mixture=made_of), slots=8, max_model_len=96, **options)
    core.swap(tiny.weights(0))
    return core


def routes_under(tiny: Tiny, version: int, ids: Sequence[int]) -> np.ndarray:
    """[T, L * K]: what a plain pass with the weights of a version chooses."""
    model = AutoModelForCausalLM.from_pretrained(tiny.directory).eval()
    model.load_state_dict(tiny.weights(version).tensors)
    found: list[torch.Tensor] = []
    for router in routers_of(model):
        router.register_forward_hook(lambda module, inputs, said: found.append(said[2]))
    with torch.inference_mode():
        model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return torch.stack(found, 1).flatten(1).numpy()


def asked(name: object, prompt: Sequence[int], start: int | None = 0, **sampling: Any) -> GenerateRequest:
    how = Sampling(**({"max_new_tokens": 6} | sampling))
    return GenerateRequest(str(name), prompt, how, routes_from=start)


def fed(request: GenerateRequest, ids: np.ndarray) -> list[int]:
    return [*map(int, request.prompt_ids), *ids[:-1].tolist()]


def test_routes_are_those_of_a_plain_pass_in_a_ragged_batch_of_shared_prompts(mixture: Tiny) -> None:
    prompts = [[5, 6, 7, 8], [5, 6, 7, 8], [9], [3, 4, 5, 6, 7, 8, 9, 2]]
    requests = [asked(n, ids, seed=n) for n, ids in enumerate(prompts)]
    requests.append(asked("from", prompts[3], 3, seed=9))
    requests.append(asked("unasked", prompts[0], None, seed=10))
    done = run(core_of(mixture), *requests)
    for request in requests[:-1]:
        got = done[request.request_id]
        want = routes_under(mixture, 0, fed(request, got.token_ids))[request.routes_from :]
        assert got.routes is not None
        assert got.routes.dtype == route_type(6)
        np.testing.assert_array_equal(got.routes, want)
    assert done["unasked"].routes is None
    bare = run(core_of(mixture, routes=False), asked("bare", prompts[0]))
    assert bare["bare"].routes is None


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_a_token_keeps_the_routes_under_which_the_next_one_was_sampled(mixture: Tiny, mode: str) -> None:
    core, request = core_of(mixture, update_mode=mode), asked("r", [5, 6, 7, 8], max_new_tokens=8)
    got = run(core, request, at=lambda step: step == 4 and swap(core, mixture.weights(1)))["r"]
    assert got.versions.tolist() == [0] * 5 + [1] * 3
    before = len(request.prompt_ids) + 4  # fed under version 0, and all but the newest again under version 1
    ids = fed(request, got.token_ids)
    np.testing.assert_array_equal(got.routes[:before], routes_under(mixture, 0, ids)[:before])
    if mode == "recompute":  # the tokens after it see a KV that is all of version 1
        np.testing.assert_array_equal(got.routes[before:], routes_under(mixture, 1, ids)[before:])
        assert (routes_under(mixture, 0, ids)[before:] != routes_under(mixture, 1, ids)[before:]).any()


def test_a_later_turn_adds_the_routes_of_what_was_not_fed_yet(mixture: Tiny) -> None:
    core, builder = core_of(mixture), EpisodeBuilder("job", "task", "task#0", 0)
    prompt = builder.prompt([5, 6, 7, 8])
    ids, parent = [5, 6, 7, 8], prompt
    for turn in range(2):
        request = asked(turn, ids, builder.routed(parent), seed=turn)
        assert request.routes_from == (0, 9)[turn]
        got = run(core, request)[str(turn)]
        segment = builder.sampled(
            got.token_ids,
            got.logprobs,
            got.versions,
            parent=parent,
            call=Call(sampling=SAMPLING, finish_reason="length"),
        )
        builder.routes(segment, got.routes, request.routes_from)
        ids = [*ids, *got.token_ids.tolist(), 3]
        parent = builder.observed(SegmentKind.TOOL, [3], segment)
    column = builder.build().units.columns["routes"]
    want = routes_under(mixture, 0, ids)
    np.testing.assert_array_equal(column[:-2], want[:-2])
    assert (column[-2:] == 255).all()  # the last that was sampled, and what follows it


async def test_an_episode_has_the_routes_of_all_its_calls_beside_its_blob(mixture: Tiny) -> None:
    engine = LocalEngine(mixture.directory, slots=4, max_model_len=96, mixture=mixture_of(mixture.directory))
    await engine.start(mixture.weights(0))
    ctx = context(engine, AutoTokenizer.from_pretrained(mixture.directory), routes=True)
    first = await ctx.generate("1+2=")
    tool = ctx.observe(SegmentKind.TOOL, "=7", parent=first.segment)
    await ctx.generate(parent=tool, turn=1)
    await engine.stop()
    episode = ctx.builder.build()
    blob, packed = pack(episode), pack_routes(episode)
    assert packed is not None
    assert "routes" not in unpack(blob).units.columns
    assert len(blob) == len(pack(unpack(blob)))
    (row,) = training_rows(with_routes(unpack(blob), packed))
    np.testing.assert_array_equal(
        row.columns["routes"][:-1], routes_under(mixture, 0, row.token_ids[:-1].tolist())
    )
    other = unpack(pack(another(episode)))
    for wrong, what in (
        (packed[:-1], "cut or altered"),
        (b"ARTE", "no routes"),
        (b"x" * len(packed), "reads"),
    ):
        with pytest.raises(CodecError, match=what):
            with_routes(unpack(blob), wrong)
    with pytest.raises(CodecError, match="routes are of another episode"):
        with_routes(other, packed)


def another(episode: Episode) -> Episode:
    """As long, of other tokens."""
    builder = EpisodeBuilder("job", "task", "task#0", 1)
    builder.prompt([5] * episode.n_units)
    return builder.build()


def test_a_branch_keeps_the_routes_that_its_trunk_was_given_first() -> None:
    builder = EpisodeBuilder("job", "task", "task#0", 0)
    prompt = builder.prompt([5, 6])
    leaves = [
        builder.sampled([7, 8], [-1.0] * 2, 0, parent=prompt, call=Call(sampling=SAMPLING)) for _ in range(2)
    ]
    for number, leaf in enumerate(leaves):
        builder.routes(leaf, np.full((3, 4), number, np.uint8))
    column = builder.build().units.columns["routes"]
    assert column[:, 0].tolist() == [0, 0, 0, 255, 1, 255]
    assert [builder.routed(segment) for segment in (prompt, *leaves)] == [2, 3, 3]
