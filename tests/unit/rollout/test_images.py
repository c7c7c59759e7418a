"""Images in prompts, in results of tools and in observations: tokens, media and requests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from areal_async.base.records import ImageFile, Task
from areal_async.data.images import decode_image, inspect_image
from areal_async.models.vision import ImageProcessor
from areal_async.trajectory import EpisodeBuilder, Sampling, SegmentKind
from rollout_service.engines.base import GenerateRequest, GenerateResult
from rollout_service.environments import Step
from rollout_service.workflows import PolicyEngine, Renderer, TurnError, images, tool, turns
from rollout_service.workflows.context import Context
from rollout_service.workflows.multi_turn import MultiTurn, opening
from rollout_service.workflows.tool_use import ToolUse
from rollout_service.workflows.tools import WorkflowResources
from tests.vision import MARKS, beside_the_loop, picture, write_spelling_model, write_vision_model

PAD = 18


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def file_of(image: Image.Image) -> ImageFile:
    data = png(image)
    return ImageFile(inspect_image(data), data)


class Scripted:
    """An engine that says the next of some texts."""

    def __init__(self, tokenizer: Any, *said: str) -> None:
        self._tokenizer, self._said = tokenizer, list(said)
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.asked.append(request)
        text = self._said.pop(0)
        spelled = [*text] if text.startswith("<|") else [text]  # no model samples a mark
        found = self._tokenizer(spelled, add_special_tokens=False)["input_ids"]
        ids = np.array([token for some in found for token in some], np.int32)
        zeros = np.zeros(len(ids), np.int32)
        return GenerateResult(ids, -np.ones(len(ids), np.float32), zeros, zeros, "stop", text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("model"))


def context(folder: Path, *said: str, processor: bool = True) -> tuple[Context, Scripted]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["look", "(", ")"])
    engine = Scripted(tokenizer, *said)
    render = Renderer(tokenizer, processor=(lambda: ImageProcessor(folder)) if processor else None)
    voice: Any = PolicyEngine(engine, render, Sampling(max_new_tokens=8))  # type: ignore[arg-type]
    builder = EpisodeBuilder("job", "task", "group", 0)
    return Context({"policy": voice}, builder, episode_id="e", seed=0), engine


def task_of(*parts: Any, images: tuple[ImageFile, ...]) -> Task:
    return Task("t", [{"role": "user", "content": list(parts)}], images=images)


IMAGE = {"type": "image"}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def assert_whole(ctx: Context, engine: Scripted) -> Any:
    """Each request names the images of its prompt, and the episode has the same media. Return the episode."""
    episode = ctx.builder.build()
    for request in engine.asked:
        ids = np.asarray(request.prompt_ids)
        covered = np.zeros(len(ids), bool)
        for image in request.media:
            assert inspect_image(image.data).digest == image.digest
            covered[image.first : image.first + image.count] = True
        assert (covered == (ids == PAD)).all()
    for media in episode.header.media:
        units = slice(media.first_unit, media.first_unit + media.n_units)
        assert set(episode.units.token_id[units].tolist()) == {PAD}
        begin = episode.segments.offset[media.segment]
        assert begin <= media.first_unit < begin + episode.segments.length[media.segment]
    assert sum(media.n_units for media in episode.header.media) == (episode.units.token_id == PAD).sum()
    return episode


async def test_a_prompt_with_images_becomes_tokens_media_and_a_request(folder: Path) -> None:
    ctx, engine = context(folder, "3")
    given = (file_of(picture(16, 24)), file_of(picture(40, 16, seed=1)))
    task = ctx.seeing(task_of(text("1+"), IMAGE, text("2="), IMAGE, images=given))
    await ctx.generate(task.prompt)
    episode = assert_whole(ctx, engine)
    (request,) = engine.asked
    assert [(image.digest, image.count) for image in request.media] == [
        (given[0].facts.digest, 6),
        (given[1].facts.digest, 10),
    ]
    first = episode.header.media[0]
    assert (first.media_type, first.size_bytes, first.segment) == ("image/png", len(given[0].data), 0)
    assert episode.header.prompt_text.count("<|image_pad|>") == 2
    assert ctx.new_media == {}


async def test_images_of_tools_and_users_follow_an_answer(folder: Path) -> None:
    ctx, engine = context(folder, "3", "4", "5")
    task = ctx.seeing(task_of(IMAGE, text("1="), images=(file_of(picture(16, 24)),)))
    reply = await ctx.generate(task.prompt)

    @tool(inline=True)
    def zoom(where: str) -> Any:
        return [text(where), {"type": "image", "image": picture(8, 16, seed=3)}]

    shown = await ctx.tool(zoom, "2", parent=reply.segment)
    again = await ctx.generate(parent=shown.segment)
    user = ctx.as_user(ctx.content([picture(24, 8, seed=4), text("+")]), again.segment)
    last = await ctx.generate(user, parent=again.segment)
    episode = assert_whole(ctx, engine)
    assert [len(request.media) for request in engine.asked] == [1, 2, 3]
    assert [image.count for image in engine.asked[-1].media] == [6, 2, 3]
    kinds = [SegmentKind(episode.segments.kind[media.segment]) for media in episode.header.media]
    assert kinds == [SegmentKind.PROMPT, SegmentKind.TOOL, SegmentKind.ENVIRONMENT]
    assert set(ctx.new_media) == {media.digest for media in episode.header.media[1:]}
    assert engine.asked[-1].prompt_ids.tolist() == episode.units.token_id[: -len(last.token_ids)].tolist()


async def test_images_are_decoded_and_written_beside_the_event_loop(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "decode_image", beside_the_loop(decode_image))
    ctx, engine = context(folder, "3", "4", "5")
    task = ctx.seeing(task_of(IMAGE, text("1="), images=(file_of(picture(16, 24)),)))
    monkeypatch.setattr(images, "inspect_image", beside_the_loop(inspect_image))
    reply = await ctx.generate(task.prompt)

    @tool(inline=True)
    def zoom(where: str) -> Any:
        return picture(8, 16, seed=3)

    assert not (await ctx.tool(zoom, "2", parent=reply.segment)).error
    world = tmp_path / "world.py"
    world.write_text("from tests.unit.rollout.test_images import Camera\n")
    await MultiTurn(MultiTurn.Arguments(environment=f"{world}:Camera", max_turns=2), WorkflowResources())(
        ctx, Task("t", [{"role": "user", "content": "1+2="}])
    )
    assert [len(request.media) for request in engine.asked] == [1, 1, 2]


async def test_samples_share_the_tokens_of_a_prompt_and_other_images_have_their_own(folder: Path) -> None:
    ctx, _ = context(folder)
    render = ctx.engines["policy"].render
    one, other = file_of(picture(16, 24)), file_of(picture(16, 24, seed=1))
    shown = "<|image_pad|>="
    assert render.expanded(shown, [one]) is render.expanded(shown, [one])
    assert render.expanded(shown, [one]).media != render.expanded(shown, [other]).media


async def test_prompts_with_images_are_kept_up_to_a_number_of_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = file_of(picture(8, 8)), file_of(picture(40, 40, seed=1))
    monkeypatch.setattr(turns, "REMEMBERED_BYTES", len(large.data) + len(small.data))
    ctx, _ = context(folder)
    render = ctx.engines["policy"].render
    first = render.expanded("<|image_pad|>", [small])
    assert render.expanded("<|image_pad|>", [small]) is first
    render.expanded("<|image_pad|>", [large])
    assert render.expanded("<|image_pad|>", [small]) is not first


async def test_images_are_refused_by_name_if_nothing_can_read_them(folder: Path) -> None:
    image = (file_of(picture(8, 8)),)
    ctx, _ = context(folder, "3", processor=False)
    with pytest.raises(TurnError, match="the model reads none"):
        await ctx.generate(ctx.seeing(task_of(IMAGE, images=image)).prompt)
    ctx, _ = context(folder, "3")
    with pytest.raises(TurnError, match="1 images are rendered with 2 placeholders"):
        ctx.engines["policy"].render.expanded("<|image_pad|>" * 2, image)
    reply = await ctx.generate("1+2=")
    with pytest.raises(TurnError, match="a path that began with messages"):
        ctx.as_user(ctx.content(picture(8, 8)), reply.segment)
    unknown = [{"role": "user", "content": [{"type": "image", "image": "blake3:0"}]}]
    with pytest.raises(Exception, match="names the image 'blake3:0', which the episode does not have"):
        await ctx.generate(unknown)


async def test_an_image_of_pillow_in_any_mode_becomes_a_file_or_an_error(folder: Path) -> None:
    ctx, _ = context(folder)
    for mode in ("CMYK", "YCbCr", "F", "I", "1", "P", "LA"):
        (part,) = ctx.content(picture(8, 8).convert("L").convert(mode))
        assert part["image"].startswith("blake3:")


@pytest.fixture(scope="module")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spelling_model(tmp_path_factory.mktemp("spelling"))


@pytest.mark.parametrize("mark", MARKS)
async def test_a_mark_in_a_text_is_no_image(spelling: Path, mark: str) -> None:
    """Neither in a prompt, nor in a reply, an answer of a tool or a text that goes on with a path."""
    ctx, engine = context(spelling, "3", "4", "5", "6")
    half = len(mark) // 2
    split = [text(mark[:half]), text(mark[half:])]
    task = ctx.seeing(task_of(text(f"1{mark}+"), IMAGE, *split, images=(file_of(picture(16, 24)),)))
    reply = await ctx.generate(task.prompt)
    assert ctx.builder.build().header.prompt_text.count(mark) == 2 + (mark in MARKS[:3])

    @tool(inline=True)
    def zoom(where: str) -> Any:
        return [text(where), picture(8, 16, seed=3)] if where.startswith("2") else where

    for where in (f"2{mark}", f"1{mark}{mark}"):
        shown = await ctx.tool(zoom, where, parent=reply.segment)
        reply = await ctx.generate(parent=shown.segment)
    user = ctx.as_user(ctx.content([picture(24, 8, seed=4), text(mark)]), reply.segment)
    await ctx.generate(user, parent=reply.segment)
    episode = assert_whole(ctx, engine)
    assert [len(request.media) for request in engine.asked] == [1, 2, 2, 3]
    said = ctx.decoded(episode.units.token_id)
    for real in MARKS[:2]:  # the template has one around each image
        token = ctx.tokenizer.convert_tokens_to_ids(real)  # type: ignore[attr-defined]
        assert (episode.units.token_id == token).sum() == 3
    assert said.count(mark) == 6 + {MARKS[0]: 3, MARKS[1]: 3, MARKS[2]: 11}.get(mark, 0)
    plain, other = context(spelling, "1", "2")
    reply = await plain.generate(f"{mark}=")
    await plain.generate(f"{mark}+", parent=reply.segment)
    assert plain.decoded(np.asarray(other.asked[1].prompt_ids)) == f"{mark}=1{mark}+"
    assert not {*map(plain.tokenizer.get_added_vocab().get, MARKS)} & {*other.asked[1].prompt_ids.tolist()}
    assert_whole(plain, other)


async def test_a_mark_that_a_model_spells_stays_a_text(spelling: Path) -> None:
    """Both on the path of its reply, and if the template drops the first message, so that a path begins."""
    for dropped, asked in ((0, ["1=", "1=<|image_pad|>+ ="]), (1, ["1=", "<|image_pad|>+ ="])):
        ctx, engine = context(spelling, "<|image_pad|>", "3")
        tokenizer: Any = ctx.tokenizer
        skip = f"in (messages[{dropped}:] if messages | length > 2 else messages)"
        tokenizer.chat_template = tokenizer.chat_template.replace("in messages", skip)
        reply = await ctx.generate([{"role": "user", "content": "1="}])
        more = [{"role": "user", "content": ctx.content([text("+"), picture(8, 8), text("=")])}]
        await ctx.generate(more, parent=reply.segment, rewritten="root")
        image = "<|vision_start|><|image_pad|><|vision_end|>"
        read = [ctx.decoded(np.asarray(request.prompt_ids)) for request in engine.asked]
        assert read == [each.replace(" ", image) for each in asked]
        kinds = assert_whole(ctx, engine).segments.kind
        assert (kinds == SegmentKind.PROMPT).sum() == 1 + dropped


class Camera:
    """An environment that shows the place to which an action leads."""

    blocking = False

    def reset(self, seed: int, task: Task) -> Any:
        return [text("0"), {"type": "image", "image": png(picture(16, 8))}]

    def step(self, action: str) -> Step:
        return Step(picture(8, 8, seed=int(action)), 1.0, action == "5")


async def test_an_environment_shows_images_in_every_turn(folder: Path, tmp_path: Path) -> None:
    world = tmp_path / "world.py"
    world.write_text("from tests.unit.rollout.test_images import Camera\n")
    arguments = MultiTurn.Arguments(environment=f"{world}:Camera", max_turns=3)
    ctx, engine = context(folder, "3", "4", "5")
    task = Task("t", [{"role": "user", "content": "1+2="}])
    await MultiTurn(arguments, WorkflowResources())(ctx, task)
    episode = assert_whole(ctx, engine)
    assert [len(request.media) for request in engine.asked] == [1, 2, 3]
    assert episode.header.rewards == {"reward": 3.0}


async def test_a_tool_of_the_tool_loop_returns_an_image(folder: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools.py"
    tools.write_text(
        "from rollout_service.workflows import tool\nfrom tests.vision import picture\n"
        "@tool(inline=True)\ndef look(what):\n    return picture(8, 24)\n"
    )
    arguments = ToolUse.Arguments(tools=(f"{tools}:look",), format="plain")
    resources = WorkflowResources()
    loop = ToolUse(arguments, resources)
    ctx, engine = context(folder, "look(1)", "7")
    ctx.resources = resources
    await loop(ctx, Task("t", [{"role": "user", "content": "1+2="}]))
    assert_whole(ctx, engine)
    assert [len(request.media) for request in engine.asked] == [0, 1]
    assert engine.asked[1].media[0].count == 3


def test_an_observation_joins_the_prompt_of_the_task() -> None:
    shown = [{"type": "image", "image": "blake3:1"}]
    assert opening("a", shown) == [
        {"role": "user", "content": [text("a"), text("\n\n"), *shown]},
    ]
    assert opening([{"role": "user", "content": "a"}], "b") == [{"role": "user", "content": "a\n\nb"}]
