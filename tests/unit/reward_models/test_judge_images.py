"""The judge of episodes with images: it gets them as data URLs, in bounds, and a text without their marks."""

from __future__ import annotations

import base64
import io
import time
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from areal_async.base.verdicts import FaultOf, Score
from areal_async.config.reward_routing import RewardSpec
from areal_async.data.images import decode_image, digest_of, inspect_image
from reward_service.backends.judge.backend import NEUTRAL
from reward_service.backends.judge.images import SENT_SIDE, without_marks
from reward_service.inputs import RewardMedia
from reward_service.sdk import RewardInput, sees_images
from tests.scoring import verdicts_of
from tests.unit.reward_models.conftest import DEADLINE_S, JudgeServer, judge_of


def png(width: int, height: int, color: str = "red", mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height), color).save(file, "PNG")
    return file.getvalue()


def seeing(response: str, *images: bytes, prompt: str = "p") -> RewardInput:
    media = [RewardMedia(digest_of(data), "image/png", len(data), data) for data in images]
    return RewardInput(prompt=prompt, response=response, ground_truth="1", media=media)


async def judged(answer: Any, inputs: list[RewardInput], **arguments: Any) -> Any:
    async with JudgeServer(answer) as server, judge_of(server.url, **arguments) as judge:
        verdicts = await verdicts_of(judge.submit, inputs, limit_s=DEADLINE_S)
    return verdicts, [body["messages"][-1]["content"] for body in server.bodies]


def sent(part: dict[str, Any]) -> tuple[str, bytes]:
    assert part["type"] == "image_url"
    head, _, data = part["image_url"]["url"].partition(",")
    return head, base64.b64decode(data)


async def test_a_judge_sees_the_images_and_each_is_one_mark_of_the_text() -> None:
    small, clear, large = png(20, 10), png(8, 8, "#00000000", "RGBA"), png(4000, 1000)
    prompt = "<|vision_start|><|image_pad|><|vision_end|>, <image> and [IMG][IMG_END]: how many <b>s?"
    found = [seeing("3", small, clear, large, prompt=prompt)]
    verdicts, (content,) = await judged(lambda body, n: "5", found, template="{prompt} {response}")
    assert verdicts == [Score(0.5)]
    *images, text = content
    assert text == {"type": "text", "text": "[image], [image] and [image]: how many <b>s? 3"}
    assert sent(images[0]) == ("data:image/png;base64", small)
    head, data = sent(images[1])  # servers do not agree on what is behind transparent pixels
    assert head == "data:image/png;base64"
    assert decode_image(data).getpixel((4, 4)) == (255, 255, 255)
    head, data = sent(images[2])
    assert (head, inspect_image(data)[3:]) == ("data:image/jpeg;base64", (SENT_SIDE, SENT_SIDE // 4))
    assert sees_images(RewardSpec("judge"))  # its inputs come with their bytes
    assert not sees_images(RewardSpec("judge", {"max_images": 0}))


@pytest.mark.parametrize(("most", "kept"), [(3, "012"), (2, "0 2"), (1, "0 "), (0, "")])
async def test_the_first_and_the_last_images_are_kept(most: int, kept: str) -> None:
    files = [png(8 + number, 8) for number in range(3)]
    _, (content,) = await judged(lambda body, n: "5", [seeing("<image>", *files)], max_images=most)
    if not most:
        assert content == "[image]"
        return
    left_out = {"type": "text", "text": f"({3 - most} more images are not shown.)"}
    shown = [left_out if part == left_out else str(files.index(sent(part)[1])) for part in content[:-1]]
    assert shown == [left_out if each == " " else each for each in kept]


async def test_a_judge_that_reads_no_images_names_what_to_change() -> None:
    def refuse(body: Any, n: int) -> Any:
        if isinstance(body["messages"][-1]["content"], str):
            return "5"
        told = {"error": {"message": "At most 0 image(s) may be provided in one prompt."}}
        return web.json_response(told, status=400)

    (verdict, other), contents = await judged(refuse, [seeing("x", png(8, 8)), seeing("x")])
    assert verdict.fault is FaultOf.INFRASTRUCTURE
    assert "At most 0 image(s) may be provided in one prompt. The request had 1 images" in verdict.message
    assert "max_images (0: it reads only texts)" in verdict.message
    assert other == Score(0.5)
    asked = [each[-1]["text"] for each in contents if isinstance(each, list)]
    assert asked == ["x", NEUTRAL]


async def test_an_image_that_is_not_there_or_damaged_is_an_error_of_the_input() -> None:
    for data in (b"", b"no image"):
        (verdict,), contents = await judged(lambda body, n: "5", [seeing("x", data)])
        assert (verdict.kind, contents) == ("input", [])
        assert f"the image {digest_of(data)} cannot be sent: it is" in verdict.message


def test_marks_are_found_in_linear_time() -> None:
    began_s = time.process_time()
    assert len(without_marks("<" + "image" * 200_000)) == 1_000_001
    assert time.process_time() - began_s < 2
    assert without_marks("<|media_pad|><img></img><start_of_image><fake_token_around_image>") == "[image]"
    assert without_marks("a < b, <i>c</i>, imagine <imp") == "a < b, <i>c</i>, imagine <imp"
