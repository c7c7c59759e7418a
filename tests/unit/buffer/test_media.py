"""Images of tasks and of tools on a real Redis: once for a group, checked, counted, and never in Redis."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from areal_async.base.errors import FaultError
from areal_async.base.records import ImageFile
from areal_async.data.images import digest_of, inspect_image
from areal_async.data.media import MediaFetch, fetch_media
from areal_async.rpc.messages import (
    Checkpointed,
    Commit,
    Fetch,
    FetchedMedia,
    FetchMedia,
    GroupSamples,
    Lease,
    NextBatch,
    PutEpisodes,
    Stats,
)
from areal_async.trajectory import Call, EpisodeBuilder, episode, pack
from replay_buffer import media
from replay_buffer.attachments import MEDIA, AttachmentFiles, media_key
from replay_buffer.ledger.decide import BytesLost
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.rules import Rules
from replay_buffer.media import GroupMedia
from tests.unit.buffer import dying_front
from tests.unit.buffer.conftest import SAMPLING, CountedTasks, Driver, lease, serving
from tests.unit.buffer.test_attachments import in_redis
from tests.unit.buffer.test_server import opened, score
from tests.vision import picture
from tests.waiting import LIMIT_S, until


def image(seed: int = 0, side: int = 32) -> bytes:
    out = io.BytesIO()
    picture(side, side, seed).save(out, "PNG")
    return out.getvalue()


def blob_with(job: str, group_id: str, sample: int, *images: bytes, **claimed: Any) -> bytes:
    """An episode whose prompt has these images."""
    builder = EpisodeBuilder(job, group_id.rpartition("#")[0], group_id, sample)
    prompt = builder.prompt([5, 6, 7])
    for data in images:
        size = claimed.get("size", len(data))
        builder.media(prompt, claimed.get("digest", digest_of(data)), "image/png", size, 1, 1)
    builder.sampled([1, 2], [-0.5] * 2, [0] * 2, parent=prompt, call=Call(sampling=SAMPLING), epoch=1)
    return pack(builder.build())


def media_files(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith(MEDIA))


@pytest.fixture
def picture_job(context: Any, tmp_path: Path) -> Any:
    """`picture_job(group_size)`: a job whose task i has the image i in a file beside the task file."""

    def make(group_size: int = 2) -> Any:
        ctx = context()
        rows = []
        for number in range(4):
            (tmp_path / f"{number}.png").write_bytes(image(number))
            truth = {"style": "rule", "ground_truth": number}
            rows.append({"prompt": "see", "images": [f"{number}.png"], "reward_model": truth})
        (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
        rollout = ctx.job.rollout.model_copy(update={"group_size": group_size})
        return replace(ctx, job=ctx.job.model_copy(update={"rollout": rollout}))

    return make


async def test_an_image_of_a_task_is_kept_once_for_its_group_and_a_later_change_of_the_file_does_not_matter(
    picture_job: Any, job_name: str, redis: Any, tmp_path: Path
) -> None:
    ctx = picture_job(8)
    folder = ctx.run_dir / "buffer" / "episodes"
    async with serving(ctx) as client:
        tag, groups = await opened(client, 2)
        wanted = {}
        for number, group in enumerate(groups):
            (named,) = group.task.images
            assert named == ImageFile(inspect_image(image(number)))
            assert group.task.prompt == [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "see"}]}
            ]
            wanted[group.group_id] = [named.facts.digest]
        found = (await fetch_media(client, wanted)).found
        assert [bytes(data) for data in found.values()] == [image(0), image(1)]
        for number in range(2):
            (tmp_path / f"{number}.png").write_bytes(b"changed")
        size = 0
        for number, group in enumerate(groups):
            blobs = [blob_with(job_name, group.group_id, sample, image(number)) for sample in range(8)]
            for part in (slice(0, 3), slice(3, 8)):
                samples = [*range(8)[part]]
                put = PutEpisodes([GroupSamples(group.lease_id, group.group_id, samples)])
                assert (await client.call(put, attachments=blobs[part])).groups[0].stored == samples
            size += sum(map(len, blobs)) + len(image(number))
        assert len(media_files(folder)) == 2
        assert (await client.call(Stats())).payload_bytes == size
        for number in range(2):
            assert image(number)[60:120] not in in_redis(redis, job_name)
    # Another front has them too.
    async with serving(picture_job(8)) as client:
        for number in range(2):
            (tmp_path / f"{number}.png").write_bytes(image(number))
        assert (await client.call(Stats())).payload_bytes == size
        await score(client)
        batch = await client.call(NextBatch("policy", tag.epoch, 0, wait_ms=5000))
        ids = [episode.episode_id for group in batch.groups for episode in group.episodes]
        reply, blobs = await client.exchange(Fetch(ids))
        assert (reply.media, len(blobs)) == (ids, 16)
        found = (await fetch_media(client, wanted)).found
        assert [bytes(data) for data in found.values()] == [image(0), image(1)]
        await client.call(Commit("policy", tag.epoch, 0))
        assert len(media_files(folder)) == 2
        await client.call(Checkpointed("policy", tag.epoch, 1))
        await until(lambda: not media_files(folder))
        assert (await client.call(Stats())).payload_bytes == 0
        assert (await fetch_media(client, wanted)).lost == {digest_of(image(0)), digest_of(image(1))}


async def test_images_of_tools_come_once_and_wrong_or_missing_bytes_are_refused_by_name(
    context: Any, job_name: str
) -> None:
    ctx = context()
    async with serving(ctx) as client:
        _, (group,) = await opened(client, 1)
        tool, other = image(7), image(8)

        async def put(sample: int, *given: bytes, named: bytes = tool, **claimed: Any) -> Any:
            samples = GroupSamples(
                group.lease_id, group.group_id, [sample], [], [digest_of(named)] * len(given)
            )
            attachments = [blob_with(job_name, group.group_id, sample, named, **claimed), *given]
            return (await client.call(PutEpisodes([samples]), attachments=attachments)).groups[0]

        refusals = {
            f"no bytes of its medium {digest_of(tool)}": await put(0),
            f"the bytes that came as {digest_of(tool)} are {digest_of(other)}": await put(0, other),
            f"{digest_of(tool)} has {len(tool)} bytes, and the episode says 3": await put(0, tool, size=3),
        }
        for said, answer in refusals.items():
            assert answer.stored == []
            assert answer.refused[0].reason == f"invalid: {said}" or said in answer.refused[0].reason
        folder = ctx.run_dir / "buffer" / "episodes"
        assert media_files(folder) == []
        assert (await put(0, tool)).stored == [0]
        (kept,) = media_files(folder)
        assert (await put(1)).stored == [1]
        assert media_files(folder) == [kept]
        found = await fetch_media(client, {group.group_id: [digest_of(tool), digest_of(other)]})
        assert (bytes(found.found[digest_of(tool)]), found.lost) == (tool, {digest_of(other)})
        names = [digest_of(tool), digest_of(other)]
        request = PutEpisodes([GroupSamples(group.lease_id, group.group_id, [0], [], names)])
        with pytest.raises(FaultError, match="2 media, came with 2"):
            await client.call(request, attachments=[b"x", tool])


async def test_hostile_media_are_refused_by_name_and_nothing_is_written(
    context: Any, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = context()
    async with serving(ctx) as client:
        _, (group,) = await opened(client, 1)

        async def put(named: list[str], given: list[bytes], lease: str = group.lease_id, **sent: Any) -> str:
            builder = EpisodeBuilder(job_name, group.group_id.rpartition("#")[0], group.group_id, 0)
            prompt = builder.prompt([5, 6, 7])
            for name, data in zip(named, given, strict=True):
                builder.media(prompt, name, "image/png", len(data), 1, 1)
            call = Call(sampling=SAMPLING)
            builder.sampled([1, 2], [-0.5] * 2, [0] * 2, parent=prompt, call=call, epoch=1)
            with monkeypatch.context() as forger:
                forger.setattr(episode, "_DIGEST", re.compile(""))
                blob = pack(builder.build())
            samples = GroupSamples(lease, group.group_id, [0], [], sent.get("names", named))
            reply = await client.call(PutEpisodes([samples]), attachments=[blob, *given])
            return str(reply.groups[0].refused[0].reason)

        many = [number.to_bytes(4, "little") for number in range(10_000)]
        large, tool = bytes(21 << 20), image(7)
        of_large, of_tool = digest_of(large), digest_of(tool)
        said = await put([*map(digest_of, many)], many)
        assert said == "invalid: it has 10000 media, and at most 1024 are stored"
        assert await put([of_large], [large]) == f"invalid: {of_large} has more than {20 << 20} bytes"
        assert await put([of_tool], [tool], "another lease") == "lease_lost"
        for trick in ("../../../tmp/x", "blake3:../x", "/tmp/x", "blake3:0/../x", "\0", ""):
            said = await put([trick], [tool])
            assert said == f"invalid: media {trick!r}: a digest is <hash>:<hex>, a size >= 0"
            said = await put([of_tool], [tool], names=[trick])
            assert said == f"invalid: no bytes of its medium {of_tool} have come"
            fetch = await fetch_media(client, {group.group_id: [trick], "../x": [trick]})
            assert (fetch.found, fetch.lost) == ({}, {trick})
        assert media_files(ctx.run_dir / "buffer" / "episodes") == []


async def test_each_size_that_an_episode_says_is_compared(context: Any, job_name: str) -> None:
    """A wrong size of one sample is not hidden by the right one of another, nor within an episode."""
    ctx = context()
    folder = ctx.run_dir / "buffer" / "episodes"
    tool = image(7)
    name, right = digest_of(tool), len(tool)
    async with serving(ctx) as client:
        _, (group,) = await opened(client, 1)

        def blob(sample: int, *sizes: int) -> bytes:
            builder = EpisodeBuilder(job_name, group.group_id.rpartition("#")[0], group.group_id, sample)
            prompt = builder.prompt([5, 6, 7])
            for place, size in enumerate(sizes):
                builder.media(prompt, name, "image/png", size, place, 1)
            call = Call(sampling=SAMPLING)
            builder.sampled([1, 2], [-0.5] * 2, [0] * 2, parent=prompt, call=call, epoch=1)
            return pack(builder.build())

        async def put(*samples: tuple[int, ...]) -> Any:
            names = [*range(len(samples))]
            blobs = [blob(sample, *sizes) for sample, sizes in enumerate(samples)]
            request = PutEpisodes([GroupSamples(group.lease_id, group.group_id, names, [], [name])])
            (reply,) = (await client.call(request, attachments=[*blobs, tool])).groups
            return reply.stored, {int(one.item.rpartition(".")[2]): one.reason for one in reply.refused}

        wrong = f"invalid: {name} has {right} bytes, and the episode says 3"
        twice = f"invalid: it says that {name} has {right} bytes, and 3 bytes"
        assert await put((3,), (right, 3)) == ([], {0: wrong, 1: twice})
        assert media_files(folder) == []
        assert await put((3,), (right,)) == ([1], {0: wrong})
        assert len(media_files(folder)) == 1


async def test_media_that_no_episode_names_are_not_kept(context: Any, job_name: str) -> None:
    ctx = context()
    async with serving(ctx) as client:
        _, (group,) = await opened(client, 1)
        request = PutEpisodes([GroupSamples(group.lease_id, group.group_id, [0], [], [digest_of(image(7))])])
        parts = [blob_with(job_name, group.group_id, 0), image(7)]
        assert (await client.call(request, attachments=parts)).groups[0].stored == [0]
        assert media_files(ctx.run_dir / "buffer" / "episodes") == []


async def test_a_dropped_group_and_a_kill_between_file_and_ledger_leave_nothing(
    a_front: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "episodes"
    rules = Rules.alone(group_size=2, batch_groups=1, max_staleness=1, durability="memory")

    class PictureTasks(CountedTasks):
        def task(self, row: int, pass_index: int) -> Any:
            images = (ImageFile(inspect_image(image(row))),)
            return msgspec.structs.replace(super().task(row, pass_index), images=images)

        def images(self, row: int) -> list[ImageFile]:
            return [ImageFile(inspect_image(image(row)), image(row))]

    files_of = []

    def front() -> Any:
        files_of.append(AttachmentFiles(folder, grace_s=0.0))
        return a_front(rules, attachments=files_of[-1], tasks=PictureTasks())

    async with front() as first:
        await first.execute(OpenedWith("policy", "t", 0, None))
        (group,) = await lease(first)
        files = AttachmentFiles(folder, grace_s=0.0)
        # As if the front had died between these files and the ledger, and in the middle of another file.
        await files.write(group.group_id, {media_key(digest_of(image(9))): image(9)})
        await files.write("nobody", {media_key(digest_of(image(9))): image(9)})
        (name,) = [each for each in media_files(folder) if "nobody" not in each]
        (folder / f"{name}.part").write_bytes(b"x")
    async with front() as second:
        assert media_files(folder) == [name]
        media = GroupMedia(second, files_of[-1])
        assert media.size(group.group_id, digest_of(image(9))) == len(image(9))
        await media.keep_task_images(group.group_id)
        await media.keep_task_images(group.group_id)
        assert len(media_files(folder)) == 2
        await second.execute(BytesLost(((group.group_id, 0),)))
        assert group.group_id not in second.index.groups
        await until(lambda: not media_files(folder))
        await media.keep_task_images(group.group_id)
        assert media_files(folder) == []


async def test_a_front_that_is_killed_between_the_file_and_the_ledger_leaves_no_second_file(
    redis_url: str, job_name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "episodes"
    given = (redis_url, job_name, str(folder))
    command = (sys.executable, "-m", "tests.unit.buffer.dying_front", *given)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    told, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == -signal.SIGKILL
    group_id, lease_id = told.decode().split()
    assert len(media_files(folder)) == 1
    async with dying_front.front(*given) as front:
        assert front.index.groups[group_id].held == []
        group = SimpleNamespace(group_id=group_id, lease_id=lease_id)
        for samples in ((0,), (0, 1)):  # the worker repeats its put, twice
            assert (await dying_front.put(front, group, samples)).stored == [*samples]
            await until(lambda: len(media_files(folder)) == 1)
        found = await front.attachments([(group_id, media_key(digest_of(dying_front.IMAGE)))])
        assert found == [dying_front.IMAGE]
        await front.execute(BytesLost(((group_id, 0),)))
        await until(lambda: not media_files(folder))


async def test_an_image_file_that_was_lost_or_altered_is_read_from_the_task_file_again(
    picture_job: Any,
) -> None:
    ctx = picture_job()
    async with serving(ctx) as client:
        _, (group,) = await opened(client, 1)
        wanted = {group.group_id: [digest_of(image(0)), digest_of(image(5))]}
        for change in (Path.unlink, lambda path: path.write_bytes(bytes(path.stat().st_size))):
            await fetch_media(client, wanted)
            for name in media_files(folder := ctx.run_dir / "buffer" / "episodes"):
                change(folder / name)
            found = await fetch_media(client, wanted)
            assert (bytes(found.found[digest_of(image(0))]), found.lost) == (image(0), {digest_of(image(5))})


async def test_a_group_whose_image_is_lost_is_dropped_by_name_and_its_batch_is_filled_up(
    picture_job: Any, job_name: str, tmp_path: Path
) -> None:
    ctx = picture_job()
    folder = ctx.run_dir / "buffer" / "episodes"
    async with serving(ctx) as client:
        tag, groups = await opened(client, 4)
        for number, group in enumerate(groups):
            blobs = [blob_with(job_name, group.group_id, sample, image(number)) for sample in range(2)]
            put = PutEpisodes([GroupSamples(group.lease_id, group.group_id, [0, 1])])
            assert (await client.call(put, attachments=blobs)).groups[0].stored == [0, 1]
        await score(client)
        first, second = (await client.call(NextBatch("policy", tag.epoch, 0, wait_ms=5000))).groups
        # Nobody drops a group by asking for what none of its episodes has.
        await fetch_media(client, {first.group_id: [digest_of(image(9))]})
        (tmp_path / "0.png").write_bytes(b"changed")
        for name in media_files(folder):
            (folder / name).unlink()
        fetch = await fetch_media(
            client, {first.group_id: [digest_of(image(0))], second.group_id: [digest_of(image(1))]}
        )
        assert ([*fetch.found], fetch.lost) == ([digest_of(image(1))], {digest_of(image(0))})
        assert (await client.call(Stats())).reasons["dropped:bytes_lost"] == 1
        again = await client.call(NextBatch("policy", tag.epoch, 0, wait_ms=5000))
        assert [group.group_id for group in again.groups] == [second.group_id, groups[2].group_id]


async def test_a_changed_task_file_is_named_to_the_worker(picture_job: Any, tmp_path: Path) -> None:
    async with serving(picture_job()) as client:
        _, (group,) = await opened(client, 1)
        (tmp_path / "0.png").write_bytes(image(3))
        with pytest.raises(FaultError, match=r"line 1: its images have changed since the job began") as error:
            await client.call(FetchMedia({group.group_id: [digest_of(image(0))]}))
        assert error.value.kind == "invalid"


async def test_large_media_come_in_several_replies(picture_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "REPLY_BYTES", 1)
    async with serving(picture_job()) as client:
        _, groups = await opened(client, 2)
        wanted = {group.group_id: [digest_of(image(number))] for number, group in enumerate(groups)}
        reply = await client.call(FetchMedia(wanted))
        assert reply == FetchedMedia([digest_of(image(0))])
        assert len((await fetch_media(client, wanted)).found) == 2


def test_altered_media_count_as_lost() -> None:
    fetch = MediaFetch({"g": [digest_of(b"a"), digest_of(b"b")]})
    assert fetch.request() == FetchMedia({"g": [digest_of(b"a"), digest_of(b"b")]})
    fetch.take(FetchedMedia([digest_of(b"a"), digest_of(b"b")]), [memoryview(b"a"), memoryview(b"x")])
    assert ([*fetch.found], fetch.lost, fetch.request()) == ([digest_of(b"a")], {digest_of(b"b")}, None)


def test_media_count_in_the_limit_of_bytes() -> None:
    class PictureTasks(CountedTasks):
        def task(self, row: int, pass_index: int) -> Any:
            return msgspec.structs.replace(super().task(row, pass_index), images=named)

    named = (ImageFile(inspect_image(image())._replace(size_bytes=600)),)
    rules = {"max_bytes": 1000, "max_staleness": 8, "pacing": "full"}
    driver = Driver(PictureTasks(), **rules)
    driver.open()
    assert len(driver.lease(8)) == 2  # the second begins while 400 are left
    driver.index.media_bytes = 999
    assert len(driver.lease(8)) == 1
    driver.index.media_bytes = 1000
    assert "buffer.max_bytes (1000)" in driver.why_not()
    driver.send(Lease("rollout-0", 1, [driver.tag()]))
    assert driver.send(Stats()).payload_bytes == 1000
