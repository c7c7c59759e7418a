import asyncio
import base64
import io
import json
import stat

import numpy as np
import pytest
from PIL import Image

from areal_async.base.errors import FaultError
from areal_async.data import images
from areal_async.data.images import decode_image, digest_of, previews_of
from areal_async.service import samples
from areal_async.service.record import RunLog, open_records
from areal_async.service.samples import (
    file_name,
    lines_of,
    read_samples,
    sample_files,
    sample_of,
    short_text,
    write_samples,
)
from areal_async.trajectory import Call, EpisodeBuilder
from areal_async.trajectory.layout import SegmentKind
from tests.contexts import context_for_test
from tests.unit.status.test_record import home


def decode(ids):
    return "".join(chr(token) for token in ids)


def a_turn_with_a_tool():
    builder = EpisodeBuilder("job", "task", "task#0", 1)
    prompt = builder.prompt([*b"2+3="])
    call = builder.sampled([*b"calc"], [-0.25] * 4, [3, 3, 4, 4], parent=prompt, mask=[0, 1, 1, 1])
    tool = builder.observed(SegmentKind.TOOL, [*b"5"], call, turn=1)
    builder.sampled([*b"5."], [-1 / 3, 0.0], 4, parent=tool, call=Call(finish_reason="length"), turn=1)
    return builder.build()


def test_an_episode_is_told_segment_by_segment_with_what_is_known_of_its_units(monkeypatch):
    told = sample_of(
        a_turn_with_a_tool(), decode, lowest_version=4, advantages={6: 0.5, 9: -1.0}, reward=1.0, step=4
    )
    whole = {"episode": "task#0.1", "task": "task", "finish": "length", "reward": 1.0}
    assert told.items() >= whole.items()
    found = [[part[name] for name in ("author", "text", "turn", "agent")] for part in told["segments"]]
    assert found == [
        ["prompt", "2+3=", 0, "main"], ["assistant", "calc", 0, "main"],
        ["tool", "5", 1, "main"], ["assistant", "5.", 1, "main"],
    ]  # fmt: skip
    _, first, tool, last = told["segments"]
    assert "tokens" not in tool
    assert first["tokens"] == ["c", "a", "l", "c"]
    assert first["version"] == [3, 3, 4, 4]
    assert first["mask"] == [0, 0, 1, 1]  # one by the workflow, one for its age
    assert first["advantage"] == [0.0, 0.0, 0.5, 0.0]
    assert last["logp"] == [-0.33333, 0.0]
    assert last["advantage"] == [-1.0, 0.0]
    assert short_text(told) == "calc 5."

    monkeypatch.setattr(samples, "MOST_UNITS", 6)
    cut = sample_of(a_turn_with_a_tool(), decode)
    assert [segment["text"] for segment in cut["segments"]] == ["2+3=", "ca", "", ""]
    assert cut["units_left_out"] == 5
    assert "advantage" not in cut["segments"][1]


def test_images_are_small_pictures_and_each_is_one_token_of_the_text(monkeypatch):
    files = [png_of(700, 300), png_of(8, 8), b"no image"]
    facts = [(digest_of(data), "image/png", len(data)) for data in files]
    builder = EpisodeBuilder("job", "task", "task#0", 1)
    prompt = builder.prompt([*b"<*****>?"])
    call = builder.sampled([*b"look"], [-0.25] * 4, 3, parent=prompt)
    tool = builder.observed(SegmentKind.TOOL, [*b"**and***and*"], call, turn=1)
    builder.media(prompt, *facts[0], 1, 5)
    for first, count, fact in ((5, 3, facts[1]), (0, 2, facts[0]), (11, 1, facts[2])):
        builder.media(tool, *fact, first, count)
    media = {fact[0]: data for fact, data in zip(facts, files, strict=True)}
    told = sample_of(builder.build(), decode, previews=previews_of(media))
    assert [segment["text"] for segment in told["segments"]] == ["<*>?", "look", "*and*and*"]
    digests = [fact[0] for fact in facts]
    assert [segment.get("images") for segment in told["segments"]] == [digests[:1], None, digests]
    assert [*told["images"]] == digests[:2]  # the bytes of the third cannot be decoded
    sizes = [preview(url).size for url in told["images"].values()]
    assert sizes == [(128, 55), (8, 8)]
    assert all(len(url) < 16_000 for url in told["images"].values())
    assert json.loads(lines_of([told])) == told

    monkeypatch.setattr(images, "MOST_PREVIEWS", 1)
    assert [*previews_of(media)] == digests[:1]
    assert sample_of(builder.build(), decode)["images"] == {}


def png_of(width, height):
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def preview(url):
    kind, _, data = url.partition(",")
    assert kind == "data:image/jpeg;base64"
    return decode_image(base64.b64decode(data))


def test_files_are_the_users_alone_and_the_whole_run_stays_in_view_within_the_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "MOST_FILES", 8)
    for step in range(0, 400, 10):
        write_samples(tmp_path, file_name("step", step), lines_of([{"step": step}]))
    write_samples(tmp_path, file_name("evaluation", 50), lines_of([{"version": 50, "reward": float("nan")}]))
    found = sample_files(tmp_path)
    steps = [number for kind, number, _ in found if kind == "step"]
    assert len(found) <= 8
    assert (steps[0], steps[-1]) == (0, 390)
    assert steps == sorted(steps)
    assert ("evaluation", 50) in [entry[:2] for entry in found]
    path = found[-1][2]
    assert read_samples(path) == [{"step": 390}]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    monkeypatch.setattr(samples, "MOST_BYTES", 100)
    write_samples(tmp_path, file_name("step", 400), b"x" * 300)
    assert [number for _, number, _ in sample_files(tmp_path)] == [400]
    assert sample_files(tmp_path / "none") == []


async def test_samples_come_to_the_home_of_the_run(job, tmp_path):
    ctx = context_for_test(job, tmp_path, "trainer", "trainer")
    with RunLog(tmp_path / "metrics.jsonl") as run_log:
        async with home(ctx, run_log) as there:
            remote = await asyncio.to_thread(open_records, there)
            name, data = file_name("step", 20), lines_of([{"step": 20}])
            await asyncio.to_thread(remote.write_samples, "policies/coder", name, data)
            for folder, wrong in (("", "../metrics.jsonl"), ("..", name), ("policies/../..", name)):
                with pytest.raises(FaultError, match="invalid"):
                    await asyncio.to_thread(remote.write_samples, folder, wrong, data)
            path = tmp_path / "policies" / "coder" / "samples" / name
            assert read_samples(path) == [{"step": 20}]
            await asyncio.to_thread(remote.close)
