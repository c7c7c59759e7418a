"""Images in requests to servers, and models with images that a server on a CPU cannot serve."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from areal_async.base.versions import VersionTag
from areal_async.data.images import ImageCache, decode_image, inspect_image, plain_image
from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, GenerateRequest, RequestError, RequestImage
from rollout_service.engines.http import images
from rollout_service.engines.http.adapter import ModelFacts, ServerSettings, read_model
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.engines.http.images import cache_name, collapsed, encoded
from rollout_service.engines.sglang.adapter import SGLangAdapter
from rollout_service.engines.vllm.adapter import VllmAdapter
from tests.unit.rollout.fake_sglang import FakeServer
from tests.unit.rollout.test_server_engine import PATIENCE, Offer, serving_engine
from tests.unit.rollout.test_server_launch import ENGINES, launched
from tests.vision import beside_the_loop, picture, write_vision_model

TAG = VersionTag("policy", 0, 3)
GREEDY = Sampling(temperature=0.0, max_new_tokens=1)
PAD, OTHER = 18, 19
IDS = np.array([4, 16, PAD, PAD, PAD, 17, 5, 16, PAD, 17], np.int32)
SHORT = [4, 16, PAD, 17, 5, 16, PAD, 17]


def png(image: Image.Image, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **how)
    return file.getvalue()


def image(data: bytes, first: int, count: int) -> RequestImage:
    return RequestImage(inspect_image(data).digest, data, first, count)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("model"))


MEDIA = (image(png(picture(24, 8)), 2, 3), image(png(picture(8, 8, seed=1)), 8, 1))
ASKED = GenerateRequest("r", IDS, GREEDY, media=MEDIA)


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_requests_name_images_by_data_urls_and_one_token_each(folder: Path) -> None:
    settings = ServerSettings(slots=4, max_model_len=64, url="http://localhost:1")
    vllm = VllmAdapter(folder, settings, scratch=folder / "scratch")
    asked = replace(ASKED, media=encoded(MEDIA))
    body = vllm.body("r", IDS.tolist(), asked, 1, TAG)
    assert body["token_ids"] == SHORT == collapsed(IDS.tolist(), MEDIA)
    assert body["content_parts"] == [
        {"type": "image_url", "url": url_of(each.data), "uuid": cache_name(each, TAG)} for each in MEDIA
    ]
    assert body["return_token_ids"]
    assert body["sampling_params"]["logit_bias"] == {"18": -100, "19": -100}
    sglang = SGLangAdapter(folder, settings)
    body = sglang.body("r", IDS.tolist(), asked, 1, TAG)
    assert body["input_ids"] == SHORT
    assert body["image_data"] == [url_of(each.data) for each in MEDIA]
    assert body["mm_hashes"] == [cache_name(each, TAG) for each in MEDIA]
    assert body["sampling_params"]["logit_bias"] == {"18": -1e9, "19": -1e9}
    for adapter in (vllm, sglang):
        plain = adapter.body("r", [4, 5], replace(ASKED, media=()), 1, TAG)
        assert not {"content_parts", "return_token_ids", "image_data", "mm_hashes"} & plain.keys()


def test_features_have_another_name_under_other_weights() -> None:
    newer = VersionTag("policy", 0, 4)
    names = {cache_name(each, tag) for each in MEDIA for tag in (TAG, newer)}
    assert len(names) == 4
    assert all(int(name, 16) for name in names)


def test_servers_get_the_pixels_that_we_decode() -> None:
    clear = picture(8, 8).convert("RGBA")
    clear.putalpha(100)
    turned = Image.Exif()
    turned[0x0112] = 6
    for data in (png(clear), png(picture(8, 16), exif=turned), png(picture(8, 8).convert("P"))):
        kind, plain = plain_image(data)
        shown = Image.open(io.BytesIO(plain))
        assert (kind, shown.mode) == ("image/png", "RGB")
        assert shown.tobytes() == decode_image(data).tobytes()
    data = png(picture(8, 8))
    assert plain_image(data) == ("image/png", data)


def test_data_urls_are_kept_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = MEDIA[1:], (image(png(picture(40, 40, seed=2)), 0, 25),)
    sizes = [len(encoded(media)[0].data) for media in (small, large)]
    monkeypatch.setattr(images, "_URLS", ImageCache(sum(sizes) - 1, len))
    first = encoded(small)[0].data
    assert encoded(small)[0].data is first
    encoded(large)
    again = encoded(small)[0].data
    assert again == first
    assert again is not first


@pytest.mark.parametrize(
    ("media", "said"),
    [
        ((), "a prompt has 4 placeholder tokens, and its images have 0"),
        (MEDIA[:1], "a prompt has 4 placeholder tokens, and its images have 3"),
        ((MEDIA[0]._replace(first=1), MEDIA[1]), "image 0 has tokens 1 to 4, which are no placeholder"),
        (MEDIA, "expanded a prompt with images to 9 tokens, but it has 10"),
        (
            (MEDIA[0]._replace(data=b"no image"), MEDIA[1]),
            "image 0 cannot be used: it is no image",
        ),
    ],
)
async def test_images_are_encoded_beside_the_event_loop_and_refused_if_they_do_not_match_their_tokens(
    media, said, folder, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(images, "plain_image", beside_the_loop(plain_image))
    images._URLS.clear()
    server = FakeServer()
    server.prompt_tokens = 9
    server.held.set()
    async with server.serving() as client:
        settings = ServerSettings(slots=4, max_model_len=64, url=client.url, patience=PATIENCE)
        engine = HttpEngine(SGLangAdapter(folder, settings))
        await engine.start(Offer(tmp_path, 0))
        try:
            with pytest.raises(RequestError, match=said):
                await engine.generate(replace(ASKED, media=media))
            server.prompt_tokens = 10
            assert (await engine.generate(ASKED)).token_ids.tolist() == [1]
        finally:
            await engine.stop()


@asynccontextmanager
async def attached(folder: Path, offered: Path, **info: Any) -> AsyncIterator[HttpEngine]:
    """Yield an engine of a job with bounds of pixels that is attached to a server with this information."""
    server = FakeServer(**info)
    server.prompt_tokens = 9
    server.held.set()
    async with server.serving() as client:
        settings = ServerSettings(
            slots=4, max_model_len=64, url=client.url, patience=PATIENCE, pixels=(None, 1024)
        )
        engine = HttpEngine(SGLangAdapter(folder, settings))
        try:
            await engine.start(Offer(offered, 0))
            yield engine
        finally:
            await engine.stop()


FIX = (
    "start it in an environment with SGLANG_VLM_CACHE_SIZE_MB=0 SGLANG_MM_AVOID_RETOKENIZE=1, and with "
    '--mm-process-config \'{"image":{"max_pixels":1024}}\''
)


async def test_an_attached_server_that_reads_images_otherwise_is_told_what_to_set(
    folder, tmp_path, caplog
) -> None:
    async with attached(folder, tmp_path) as engine:
        (warning,) = [each for each in caplog.records if "the attached server" in each.getMessage()]
        assert warning.__dict__["areal_fields"]["fix"].startswith(FIX)
        with pytest.raises(RequestError, match=re.escape(f"to 9 tokens, but it has 10: {FIX}")):
            await engine.generate(ASKED)


@pytest.mark.parametrize("given", [{}, {"image": None}, {"image": {"max_pixels": 512}}])
async def test_an_attached_server_with_other_bounds_of_pixels_is_refused(given, folder, tmp_path) -> None:
    with pytest.raises(EngineError, match=re.escape(FIX)):
        async with attached(folder, tmp_path, mm_process_config=given):
            pass


async def test_an_attached_server_with_the_bounds_of_pixels_is_taken(folder, tmp_path) -> None:
    async with attached(folder, tmp_path, mm_process_config={"image": {"max_pixels": 1024}}) as engine:
        assert engine.alive()


async def test_a_model_of_text_refuses_images(tmp_path) -> None:

    async with serving_engine(tmp_path) as (engine, _server):
        with pytest.raises(RequestError, match="the model reads no images"):
            await engine.generate(replace(ASKED, prompt_ids=[1, 2]))


QWEN = ModelFacts(20, 512, 2, PAD, (PAD, OTHER), "qwen2_5_vl")


def test_servers_scale_images_as_the_job_says(folder: Path) -> None:
    assert read_model(folder) == QWEN
    given = {"device": "cuda", "dtype": "bfloat16", "pixels": (None, 256)}
    words = ENGINES["vllm"].command(replace(launched(**given), facts=QWEN))
    assert words[words.index("--mm-processor-kwargs") + 1] == '{"max_pixels":256}'
    words = ENGINES["sglang"].command(replace(launched(**given), facts=QWEN))
    assert words[words.index("--mm-process-config") + 1] == '{"image":{"max_pixels":256}}'
    variables = ENGINES["sglang"].variables(replace(launched(**given), facts=QWEN), {})
    assert variables["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    assert "--mm-processor-kwargs" not in ENGINES["vllm"].command(launched(**given))


def test_what_a_server_on_a_cpu_lacks_for_images_is_said_at_the_start(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    launch = replace(launched(python=python), facts=QWEN)
    with pytest.raises(EngineError, match=r"vLLM on a CPU cannot serve qwen2_5_vl, .* has no torchvision"):
        ENGINES["vllm"].command(launch)
    (tmp_path / "lib" / "python3.11" / "site-packages" / "torchvision").mkdir(parents=True)
    assert ENGINES["vllm"].command(launch)
    with pytest.raises(EngineError, match="SGLang on a CPU cannot serve qwen2_5_vl"):
        ENGINES["sglang"].command(launch)
