"""Images that agents send in turns and as results of tools."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from areal_async.base.records import ImageFile, Task
from areal_async.data.images import decode_image, inspect_image
from areal_async.trajectory import SegmentKind
from rollout_service.gateway import openai as gateway_openai
from rollout_service.workflows import turns
from rollout_service.workflows.images import with_data_urls
from tests.unit.gateway import fakes
from tests.unit.gateway.fakes import (
    Scripted,
    assert_recorded_is_what_the_engine_said,
    openai_of,
    serving,
)
from tests.vision import MARKS, beside_the_loop, picture, write_spelling_model, write_vision_model

PAD = 18


def png(width: int, height: int, seed: int = 0) -> bytes:
    file = io.BytesIO()
    picture(width, height, seed).save(file, "PNG")
    return file.getvalue()


def shown(data: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def talking(folder: Path, *script: str) -> AsyncIterator[Any]:
    """An OpenAI `client`, the `engine` and the context `ctx`, and after the block the `episode`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    talk = SimpleNamespace(engine=Scripted(tokenizer, script))
    async with serving(talk.engine, tokenizer, model=folder) as (_, talk.ctx, session):
        async with openai_of(session) as talk.client:
            yield talk
    talk.episode = talk.ctx.builder.build()
    assert_recorded_is_what_the_engine_said(talk.episode, talk.engine.log)


async def ask(talk: Any, messages: list[Any], **more: Any) -> Any:
    reply = await talk.client.chat.completions.create(model="any", messages=messages, **more)
    return reply.choices[0].message


async def test_images_of_an_agent_become_tokens_media_and_requests(folder: Path) -> None:
    first, second = png(16, 24), png(40, 16, 1)
    async with talking(folder, "3", "4", "5", "6") as talk:
        messages: list[Any] = [{"role": "user", "content": [text("1+"), shown(first), text("=")]}]
        for more in ([text("2"), shown(second)], "7=", None):
            reply = await ask(talk, messages)
            messages.append({"role": "assistant", "content": reply.content})
            if more is not None:
                messages.append({"role": "user", "content": more})
        await ask(talk, messages[:1])
    digests = [inspect_image(data).digest for data in (first, second)]
    asked = [request for request, _ in talk.engine.log]
    assert [[image.digest for image in request.media] for request in asked] == [
        digests[:1],
        digests,
        digests,
        digests[:1],
    ]
    for request in asked:
        covered = np.zeros(len(request.prompt_ids), bool)
        for image in request.media:
            assert inspect_image(image.data).digest == image.digest
            covered[image.first : image.first + image.count] = True
        assert (covered == (np.asarray(request.prompt_ids) == PAD)).all()
    header, units, segments = talk.episode.header, talk.episode.units, talk.episode.segments
    assert [media.digest for media in header.media] == digests
    for media in header.media:
        placed = units.token_id[media.first_unit : media.first_unit + media.n_units]
        assert set(placed.tolist()) == {PAD}
    assert [media.n_units for media in header.media] == [6, 10]
    kinds = [SegmentKind(segments.kind[media.segment]) for media in header.media]
    assert kinds == [SegmentKind.PROMPT, SegmentKind.ENVIRONMENT]
    assert talk.ctx.new_media == dict(zip(digests, (first, second), strict=True))
    assert header.metadata["roots"] == 1


@pytest.mark.parametrize("mark", MARKS)
async def test_a_mark_in_the_text_of_an_agent_is_no_image(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays a text in the first call, in and after an answer, and in a conversation without images."""
    monkeypatch.setattr(fakes, "encoded", lambda tokenizer, said: tokenizer.convert_tokens_to_ids([*said]))
    async with talking(write_spelling_model(tmp_path / "model"), f"3{mark}", "4", "5") as talk:
        messages: list[Any] = [{"role": "user", "content": [text(f"1{mark}+"), shown(png(16, 24))]}]
        reply = await ask(talk, messages)
        messages.append({"role": "assistant", "content": reply.content})
        messages.append({"role": "user", "content": [text(f"{mark}="), shown(png(40, 16, 1))]})
        await ask(talk, messages)
        await ask(talk, [{"role": "user", "content": mark}])
    header = talk.episode.header
    image = "".join(MARKS[:1] + MARKS[2:3] + MARKS[1:2])
    assert header.prompt_text == f"1{mark}+{image}"
    assert header.metadata["roots"] == 2
    tokenizer = talk.engine.tokenizer
    for (request, _), images in zip(talk.engine.log, (1, 2, 0), strict=True):
        ids = np.asarray(request.prompt_ids)
        assert len(request.media) == images
        assert (ids == PAD).sum() == sum(each.count for each in request.media)
        for real in (MARKS[0], MARKS[1]):
            assert (ids == tokenizer.convert_tokens_to_ids(real)).sum() == images
        assert (ids == tokenizer.convert_tokens_to_ids(MARKS[3])).sum() == 0
    read = tokenizer.decode(np.asarray(talk.engine.log[1][0].prompt_ids))
    for count in (10, 6):
        read = read.replace(MARKS[2] * count, MARKS[2])
    assert read == f"1{mark}+{image}3{mark}{mark}={image}"


async def test_images_of_calls_are_read_beside_the_event_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "decode_image", beside_the_loop(decode_image))
    monkeypatch.setattr(gateway_openai, "_messages", beside_the_loop(gateway_openai._messages))
    async with talking(folder, "3") as talk:
        await ask(talk, [{"role": "user", "content": [shown(png(16, 24))]}])


async def test_an_agent_gets_the_images_of_its_task_and_sends_them_back(folder: Path) -> None:
    image = ImageFile(inspect_image(png(16, 24)), png(16, 24))
    prompt = [{"role": "user", "content": [text("1+"), {"type": "image"}]}]
    async with talking(folder, "3") as talk:
        task = with_data_urls(talk.ctx.seeing(Task("t", prompt, images=(image,))))
        assert task.prompt[0]["content"] == [
            text("1+"),
            {"type": "image_url", "image_url": {"url": shown(image.data)["image_url"]["url"]}},
        ]
        await ask(talk, task.prompt)
    assert [media.digest for media in talk.episode.header.media] == [image.facts.digest]
    assert talk.ctx.new_media == {}


async def test_prompts_that_differ_in_an_image_alone_are_two(folder: Path) -> None:
    async with talking(folder, "3", "4") as talk:
        for seed in (0, 1):
            await ask(talk, [{"role": "user", "content": [shown(png(16, 24, seed))]}])
    assert len(talk.episode.header.media) == 2
    assert talk.episode.header.metadata["roots"] == 2


async def test_images_that_cannot_be_used_are_refused_by_name(folder: Path, tokenizer: Any) -> None:
    broken = [{"role": "user", "content": [shown(b"no image")]}]
    good = [{"role": "user", "content": [shown(png(8, 8))]}]
    async with talking(folder, "3") as talk:
        await ask(talk, good)
        with pytest.raises(openai.BadRequestError, match="it is no image of a known kind"):
            await ask(talk, broken)
    async with serving(Scripted(tokenizer, ()), tokenizer) as (_, _ctx, session):
        async with openai_of(session) as client:
            with pytest.raises(openai.BadRequestError, match=r"chat template refuses|the model reads none"):
                await client.chat.completions.create(model="any", messages=good)
