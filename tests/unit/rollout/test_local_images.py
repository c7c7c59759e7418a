"""Images in the local engine, against transformers' own forward pass."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from areal_async.models.vision import ImageProcessor
from areal_async.trajectory import Sampling
from rollout_service.engines.base import (
    EngineError,
    GenerateRequest,
    GenerateResult,
    RequestError,
    RequestImage,
)
from rollout_service.engines.local.core import EngineCore
from rollout_service.engines.local.engine import LocalEngine
from rollout_service.engines.local.model import LocalModel
from tests.image_requests import IMAGE, KINDS, ImageModel, NoisyWeights, mixed, png
from tests.unit.families import FAMILIES
from tests.unit.rollout.conftest import save_model
from tests.unit.rollout.test_local_core import run, submit, swap
from tests.vision import picture, write_vision_model


class World(ImageModel):
    """A tiny model, and an engine core with its first weights."""

    def __init__(self, folder: Path, kind: str, **options: Any) -> None:
        super().__init__(folder, kind)
        self.core = EngineCore(LocalModel(folder), slots=8, max_model_len=128, **options)
        self.core.swap(self.versions[3])
        self.core.model.check()
        assert self.core.model.no_images == ""


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_with_images_equal_the_models_own_forward(kind, tmp_path):
    world = World(tmp_path, kind)
    asked = mixed(world)
    done = run(world.core, *asked)
    for request in asked:
        world.assert_true(request, done[request.request_id])
    assert max(len(result.token_ids) for result in done.values()) > 6


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_in_the_middle_of_an_answer_sees_the_images_again(kind, tmp_path):
    world = World(tmp_path, kind)
    asked = [
        replace(request, sampling=Sampling(max_new_tokens=30, seed=i))
        for i, request in enumerate(mixed(world))
    ]

    def update(step: int) -> None:
        if step == 3:
            swap(world.core, world.versions[4])

    done = run(world.core, *asked, at=update)
    for request in asked:
        world.assert_true(request, done[request.request_id])
    assert {3, 4} <= {version for result in done.values() for version in result.versions.tolist()}


def test_samples_with_the_same_images_are_computed_once_and_others_apart(tmp_path):
    world = World(tmp_path, "qwen2_5_vl")
    first = world.request(0, f"{IMAGE}=", [picture(16, 24)], seed=1)
    again = replace(first, request_id="1", media=tuple(first.media))
    other = world.request(2, f"{IMAGE}=", [picture(16, 24, seed=1)], seed=1)
    submit(world.core, first, again)
    with torch.inference_mode():
        world.core.step()
    assert world.core.prompt_tokens_total == len(first.prompt_ids)
    submit(world.core, other)
    with torch.inference_mode():
        world.core.step()
    assert world.core.prompt_tokens_total == 2 * len(first.prompt_ids)


def test_placeholder_tokens_are_never_sampled(tmp_path):
    world = World(tmp_path, "qwen2_5_vl")
    weights = world.versions[3].model.get_input_embeddings().weight
    with torch.no_grad():
        weights[18:20] = weights.mean(0) + 30 * weights.std(0)
    world.core.swap(world.versions[3])
    asked = [
        world.request(i, "1+2=", [], seed=i, max_new_tokens=20, temperature=float(i % 2)) for i in range(8)
    ]
    done = run(world.core, *asked)
    for request in asked:
        assert not {18, 19} & set(done[request.request_id].token_ids.tolist())
        world.assert_true(request, done[request.request_id])


def test_a_snapshot_without_a_tower_keeps_that_of_the_models_folder(tmp_path):
    world = World(tmp_path, "qwen3_vl")
    model = LocalModel(world.folder)
    core = EngineCore(model, slots=4, max_model_len=128)
    newest = world.versions[4]
    newest.tensors = {name: tensor for name, tensor in newest.tensors.items() if "visual" not in name}
    core.swap(newest)
    own = AutoModelForImageTextToText.from_pretrained(world.folder, dtype=torch.float32).state_dict()
    newest.model.load_state_dict({**own, **newest.tensors})
    asked = mixed(world)
    done = run(core, *asked)
    for request in asked:
        world.assert_true(request, done[request.request_id])


def refusal(core: EngineCore, request: GenerateRequest) -> str:
    """Return the error of a request, while another one is served."""
    try:
        checked = core.checked(request)
    except RequestError as error:
        return str(error)
    core.submit(checked)
    with torch.inference_mode():
        (done,) = core.step()
    assert isinstance(done.outcome, RequestError)
    assert core.idle
    return str(done.outcome)


def test_images_that_do_not_match_their_tokens_are_refused(tmp_path):
    core = (world := World(tmp_path, "qwen2_5_vl")).core
    good = world.request(0, f"1+{IMAGE}2=", [picture(16, 24)])
    (image,) = good.media
    large = png(picture(32, 24))
    assert "image 0 (x) has 12 tokens, but the prompt has 6 for it" in refusal(
        core, replace(good, media=(image._replace(data=large, digest="x"),))
    )
    assert "image 0 has tokens 2 to 8, which are no placeholder tokens (id 18)" in refusal(
        core, replace(good, media=(image._replace(first=image.first - 1),))
    )
    assert "a prompt has 6 placeholder tokens, and its images have 5" in refusal(
        core, replace(good, media=(image._replace(count=5),))
    )
    assert "a prompt has 6 placeholder tokens, and its images have 0" in refusal(
        core, replace(good, media=())
    )
    broken = image._replace(data=image.data[:60], digest="y")
    assert "image 0 cannot be used: " in refusal(core, replace(good, media=(broken,)))
    done = run(core, good)
    world.assert_true(good, done["0"])


def test_a_model_without_a_vision_tower_refuses_images(tmp_path):
    core = save_model(tmp_path, FAMILIES["llama"]()).core()
    asked = GenerateRequest("0", [3, 4, 5], Sampling(), media=(RequestImage("x", b"", 1, 1),))
    assert "the model reads no images: " in refusal(core, asked)
    assert "a model of type llama, which reads no images" in refusal(core, asked)


def test_a_model_whose_images_are_computed_otherwise_serves_text_alone(tmp_path, monkeypatch):
    world = World(tmp_path, "qwen2_5_vl")
    model = LocalModel(world.folder)
    monkeypatch.setattr(
        model.vision, "_rope_index", lambda ids, **_: (torch.arange(ids.shape[1]).expand(3, 1, -1), 0)
    )
    model.check()
    core = EngineCore(model, slots=4, max_model_len=128)
    assert "does not support this architecture" in refusal(
        core, world.request(0, f"{IMAGE}=", [picture(16, 24)])
    )
    assert len(run(core, world.request(1, "1+2=", []))["1"].token_ids) > 0


def test_the_engine_scales_images_as_the_job_says(tmp_path):
    world = World(tmp_path, "qwen2_5_vl")
    world.processor = ImageProcessor(world.folder, max_pixels=256)
    asked = world.request("0", f"{IMAGE}=", [picture(64, 64)])
    assert asked.media[0].count == 4
    assert "has 64 tokens, but the prompt has 4 for it" in refusal(world.core, asked)

    async def answer() -> GenerateResult:
        engine = LocalEngine(world.folder, slots=4, max_model_len=128, pixels=(None, 256))
        try:
            await engine.start(world.versions[3])
            return await engine.generate(asked)
        finally:
            await engine.stop()

    world.assert_true(asked, asyncio.run(answer()))


def test_a_tower_that_fails_ends_its_request_alone_and_a_failed_pass_those_that_began(tmp_path, monkeypatch):
    world = World(tmp_path, "qwen2_5_vl")
    fine, lost = world.request("fine", "1+2=", []), world.request("lost", f"{IMAGE}=", [picture(16, 16)])
    wrong = world.request("wrong", f"{IMAGE}=", [picture(8, 16)])
    vision = world.core.model.vision
    read = vision.read

    def breaks(prefix: Any) -> Any:
        if prefix.media == lost.media:
            raise torch.OutOfMemoryError("no room")
        return read(prefix)

    monkeypatch.setattr(vision, "read", breaks)
    submit(world.core, lost)
    with torch.inference_mode():
        (refused,) = world.core.step()
    assert isinstance(refused.outcome, EngineError)
    assert "could not be computed: OutOfMemoryError" in str(refused.outcome)
    done = run(world.core, fine)
    world.assert_true(fine, done["fine"])

    def fails(*_: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(world.core.model, "prefill", fails)
    submit(world.core, lost, wrong)
    with pytest.raises(RuntimeError, match="broken"), torch.inference_mode():
        world.core.step()
    assert {each.request_id for each in world.core.fail(EngineError("the step failed"))} == {"lost", "wrong"}


def test_a_model_without_an_image_processor_takes_snapshots_without_its_tower(tmp_path):
    folder = write_vision_model(tmp_path, "qwen3_vl")
    weights = NoisyWeights(folder, 3)
    (folder / "preprocessor_config.json").unlink()
    model = LocalModel(folder)
    assert "image processor" in model.no_images
    model.load({name: value for name, value in weights.tensors.items() if "visual" not in name})
