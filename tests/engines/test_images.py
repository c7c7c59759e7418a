"""Images in prompts to the real vLLM server: log-probs as transformers gives them, also after an update of
the language model alone, and in the middle of an answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from areal_async.config.engines import find_engine_python
from areal_async.trajectory import Sampling
from areal_async.weights.snapshot import Snapshot, open_snapshot
from rollout_service.engines.http.adapter import ServerSettings
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.engines.vllm.adapter import VllmAdapter
from tests.engines.servers import START_S
from tests.image_requests import KINDS, ImageModel, NoisyWeights, mixed
from tests.snapshots import write_snapshot

pytestmark = pytest.mark.engine
LONG = Sampling(max_new_tokens=60)


def written(weights: NoisyWeights, root: Path, folder: Path) -> Snapshot:
    """Write weights as a trainer publishes them whose vision tower is frozen."""
    tensors = {
        name: tensor
        for name, tensor in weights.model.state_dict().items()
        if name != "lm_head.weight" and "visual" not in name
    }
    files = {path.name: path for path in folder.glob("*.json")}
    tied = {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    return open_snapshot(write_snapshot(root, weights.tag, tensors, files=files, tied=tied).path)


@pytest.mark.parametrize("kind", KINDS)
async def test_vllm_sees_images_as_transformers_does(kind: str, tmp_path: Path) -> None:
    model = ImageModel(tmp_path / "model", kind, head_size=32)
    first, second = model.versions.values()
    for weights in (first, second):
        weights.keep_tower(model.folder)
    python = find_engine_python("vllm")
    settings = ServerSettings(
        log_path=tmp_path / "vllm.log", slots=8, max_model_len=256, python=python, ready_s=START_S
    )
    engine = HttpEngine(VllmAdapter(model.folder, settings, scratch=tmp_path / "scratch"))
    await engine.start(written(first, tmp_path / "weights", model.folder))
    try:
        asked = mixed(model)
        for request, result in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
            assert set(result.versions.tolist()) == {first.tag.version}
            model.assert_true(request, result)
        long = [replace(request, request_id=f"long-{i}", sampling=LONG) for i, request in enumerate(asked)]
        begun = asyncio.Event()
        answers = [
            asyncio.ensure_future(engine.generate(request, lambda *_: begun.set())) for request in long
        ]
        await begun.wait()
        await engine.pause()
        await engine.load(written(second, tmp_path / "weights", model.folder))
        await engine.resume()
        again = [replace(request, request_id=f"again-{i}") for i, request in enumerate(asked)]
        done = [*await asyncio.gather(*answers), *await asyncio.gather(*map(engine.generate, again))]
        for request, result in zip([*long, *again], done, strict=True):
            model.assert_true(request, result)
        spanning = [result for result in done[: len(long)] if len({*result.versions.tolist()}) == 2]
        assert spanning
        assert {second.tag.version} == {v for result in done[len(long) :] for v in result.versions.tolist()}
    finally:
        await engine.stop()
