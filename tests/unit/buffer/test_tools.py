"""Looking into a buffer: of a run that is alive, of one that has ended, and never changing either."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rich.console import Console

from areal_async.base.errors import RunFolderError
from areal_async.base.processes import start_of
from areal_async.base.topology import Topology
from areal_async.base.verdicts import Score
from areal_async.base.versions import VersionTag
from areal_async.cli.tools import ExportRequest, PeekRequest
from areal_async.config.load import dump_job
from areal_async.data.images import digest_of
from areal_async.data.tasks import read_tasks
from areal_async.launch.folders import Owner, leftovers, write_keys
from areal_async.launch.one_host import short_socket_dir, topology_here
from areal_async.launch.plan import services_of
from areal_async.launch.run_handle import find_run
from areal_async.rpc.messages import (
    Claim,
    EpisodeVerdict,
    GroupSamples,
    Heartbeat,
    Lease,
    NextBatch,
    OpenTrainer,
    PutEpisodes,
    PutVerdicts,
)
from areal_async.trajectory import Call, EpisodeBuilder, pack, unpack
from replay_buffer.ledger.records import GroupState
from replay_buffer.tools import export as export_tool
from replay_buffer.tools.peek import (
    NotFound,
    chosen,
    find,
    found_by,
    groups_page,
    page_of,
    plain,
    state_of,
    texts_of,
)
from replay_buffer.tools.peek import (
    answer_of as group_answer_of,
)
from replay_buffer.tools.reader import open_reader
from replay_buffer.tools.stats import answer_of, draw, stats_ended, stats_live
from tests.callers import put
from tests.contexts import context_for_test
from tests.unit.buffer.conftest import SAMPLING, serving, sums_job


class Workplace:
    """A run folder as the supervisor makes it, with a buffer on files of its own."""

    def __init__(self, folder: Path, **buffer) -> None:
        self.folder = folder / "runs" / "sums"
        self.folder.mkdir(parents=True)
        self.job = sums_job(folder, "sums", **buffer)
        ctx = context_for_test(self.job, folder, "buffer", "buffer")
        host = msgspec.structs.replace(ctx.host, run_dir=str(self.folder))
        write_keys(ctx.keys, ctx.socket_dir)
        self.ctx = replace(ctx, host=host)
        (self.folder / "job.yaml").write_text(dump_job(self.job))
        self.topology = topology_here(
            "1234", host, services_of(self.job), self.job.model_dump(mode="json"), {}
        )
        self.publish(self.topology)
        self.is_alive(True)

    def publish(self, topology: Topology) -> None:
        (self.folder / "topology.json").write_bytes(msgspec.json.encode(topology))

    def is_alive(self, alive: bool) -> None:
        record = {"run_id": "1234", "pid": os.getpid(), "started": start_of(os.getpid())}
        (self.folder / "run.lock").write_text(json.dumps(record) if alive else "")

    def digest(self) -> dict[str, str]:
        """Hash of every file that Redis left."""
        return {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((self.folder / "buffer").rglob("*"))
            if path.is_file()
        }

    @asynccontextmanager
    async def serving(self):
        """The service, as long as the run is alive; the run has ended after it."""
        try:
            async with serving(replace(self.ctx, stop=asyncio.Event())) as client:
                yield client
        finally:
            self.is_alive(False)


@pytest.fixture
def workplace(tmp_path):
    return lambda **buffer: Workplace(tmp_path, **buffer)


async def fill(client, blob) -> dict[str, bytes]:
    """One group batched, one scored, one half stored; returns what was stored, by episode id."""
    epoch = (await client.call(OpenTrainer("policy", "trainer", 0))).epoch
    leased = (await client.call(Lease("rollout-0", 4, [VersionTag("policy", epoch, 0)]))).groups
    stored = {}
    for group in leased[:3]:
        samples = group.missing if group is not leased[2] else group.missing[:1]
        episodes = {sample: blob("sums", group.group_id, sample) for sample in samples}
        await put(client, group.lease_id, group.group_id, episodes)
        stored |= {f"{group.group_id}.{sample}": bytes(data) for sample, data in episodes.items()}
    claims, _ = await client.exchange(Claim("reward-0", 4))
    verdicts = [
        EpisodeVerdict(item.episode_id, item.claim_id, Score(0.25 * number, {"digits": float(number)}))
        for number, item in enumerate(claims.items)
    ]
    await client.call(PutVerdicts("reward-0", verdicts))
    return stored


def text_of(renderable) -> str:
    console = Console(width=140, file=io.StringIO())
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def figures(stats) -> dict:
    stats = msgspec.structs.asdict(stats)
    return {name: value for name, value in stats.items() if name not in ("redis_bytes", "queue_age_ms")}


async def test_a_run_says_the_same_of_itself_while_it_is_alive_and_after(workplace, blob):
    place = workplace()
    async with place.serving() as client:
        await fill(client, blob)
        live = await asyncio.to_thread(stats_live, find_run(place.folder))
        page = text_of(draw(find_run(place.folder), live, None))
    run = find_run(place.folder)
    ended, written_ms_ago = await stats_ended(run)
    assert figures(live) == figures(ended)
    assert live.groups["SCORED"] == 2
    assert live.leases == 2
    assert live.oldest_group
    assert "sums is alive" in page
    assert "4 of 4 groups" in page
    assert "4 groups are outstanding" in page, "why no lease would be granted"
    assert "verdict:score" in page
    told = msgspec.to_builtins(answer_of(run, ended, written_ms_ago), enc_hook=str)
    assert not told["alive"]
    assert told["stats"]["policies"]["policy"]["v_train"] == 0


@pytest.mark.parametrize("durability", ["everysec", "memory"])
async def test_looking_at_a_run_that_has_ended_leaves_its_files_as_they_are_and_nothing_beside_them(
    workplace, blob, tmp_path, monkeypatch, durability
):
    """Also files with a torn end, which are read up to it, and where the path of temporary files is too
    long for a socket."""
    place = workplace(durability=durability)
    temporary = tmp_path / ("t" * 100)
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    async with place.serving() as client:
        await fill(client, blob)
    if durability == "everysec":
        log = max((place.folder / "buffer").rglob("*.aof"), key=lambda path: path.stat().st_size)
        with log.open("ab") as file:
            file.write(b"*3\r\n$4\r\nHSET\r\n$9\r\nareal:")
    before = place.digest()
    async with open_reader(find_run(place.folder)) as reader:
        look = await reader.look()
        await reader.blobs(next(iter(look.index.groups.values())))
        (copied,) = temporary.iterdir()
        folders = {copied, short_socket_dir(copied)}
        assert len(folders) == 2
        assert not folders & set(leftovers([temporary, Path("/tmp")]))
        with monkeypatch.context() as killed:
            killed.setattr(Owner, "alive", False)
            assert folders <= set(leftovers([temporary, Path("/tmp")])), "`doctor --clean` removes them"
    assert look.index.group_counts[GroupState.SCORED] == 2
    assert place.digest() == before
    assert not list(temporary.iterdir())


async def test_looking_at_a_run_that_is_alive_takes_nothing_over(workplace, blob):
    place = workplace()
    async with place.serving() as client:
        await fill(client, blob)
        looks = []
        for _ in range(2):
            async with open_reader(find_run(place.folder)) as reader:
                looks.append(await reader.look())
        assert looks[0].index.groups == looks[1].index.groups
        group = next(g for g in looks[1].index.groups.values() if g.missing)
        leases = await client.call(Heartbeat("rollout-0", list(group.leases)))
        assert leases.lost == [], "the front still serves, and may write"


async def test_a_run_without_files_of_a_buffer_is_refused(workplace):
    place = workplace()
    place.is_alive(False)
    with pytest.raises(RunFolderError, match="holds nothing of a buffer"):
        await stats_ended(find_run(place.folder))


async def test_peek_lists_groups_and_opens_one_and_an_episode_of_it(workplace, blob):
    place = workplace()
    async with place.serving() as client:
        stored = await fill(client, blob)
    async with open_reader(find_run(place.folder)) as reader:
        look = await reader.look()
        listing = text_of(groups_page(look, chosen(look.index, None), 20))
        assert "0.125 (0 … 0.25)" in listing
        assert "1 missing, 1 stored" in listing
        assert len(chosen(look.index, state_of("scored"))) == 2
        assert "the buffer holds no group" in text_of(groups_page(look, [], 20))
        name = next(iter(stored))
        group, sample = find(look, name)
        assert "VERDICT" in text_of(page_of(group_answer_of(group)))
        texts = texts_of(look, group, unpack((await reader.blobs(group))[sample]))
        page = text_of(page_of(group_answer_of(group)["episodes"][sample] | texts))
        assert "VERDICT" in page
        assert "ground truth" in page
        _, shown = await found_by(PeekRequest(str(place.folder), name))
        assert "ground truth" in text_of(shown)
        with pytest.raises(NotFound, match="holds no group or episode"):
            find(look, group.group_id[:-1])
        with pytest.raises(NotFound, match="it has 2, from 0"):
            find(look, f"{group.group_id}.7")
    with pytest.raises(NotFound, match=r"no state 'scord'.*LEASED"):
        state_of("scord")


async def test_what_is_exported_comes_back_as_the_same_episodes(workplace, blob, tmp_path):
    place, out = workplace(), tmp_path / "all.parquet"
    request = ExportRequest(str(place.folder), str(out))
    async with place.serving() as client:
        stored = await fill(client, blob)
        await client.call(NextBatch("policy", 1, 0))
        assert await export_tool.export(request) == {"episodes": 5, "groups": 3, "left": 0}
    rows = pq.read_table(out).to_pylist()
    assert {row["episode_id"]: row["blob"] for row in rows} == stored
    assert sorted(row["reward"] for row in rows if row["reward"] is not None) == [0, 0.25, 0.5, 0.75]
    assert {row["data_source"] for row in rows} == {"sums"}
    assert [row["steps"] for row in rows if row["group_state"] == "BATCHED"] == [[0]] * 4
    leased = msgspec.structs.replace(request, state="leased", overwrite=True)
    assert await export_tool.export(leased) == {"episodes": 1, "groups": 1, "left": 0}


async def test_images_are_exported_in_a_form_that_a_task_file_may_have(workplace, tmp_path):
    place, out = workplace(), tmp_path / "seen.parquet"
    request = ExportRequest(str(place.folder), str(out), overwrite=True)
    files = [io.BytesIO(), io.BytesIO()]
    for file, color in zip(files, ("red", "blue"), strict=True):
        Image.new("RGB", (16, 8), color).save(file, "PNG")
    red, blue = (file.getvalue() for file in files)
    shown = [[red, blue, red], [blue]]
    async with place.serving() as client:
        epoch = (await client.call(OpenTrainer("policy", "trainer", 0))).epoch
        leased = (await client.call(Lease("rollout-0", 2, [VersionTag("policy", epoch, 0)]))).groups
        group = leased[0]
        blobs = [seeing(group.group_id, sample, *images) for sample, images in enumerate(shown)]
        names = [digest_of(red), digest_of(blue)]
        put = PutEpisodes([GroupSamples(group.lease_id, group.group_id, [0, 1], [], names)])
        (stored,) = (await client.call(put, attachments=[*blobs, red, blue])).groups
        assert stored.stored == [0, 1]
        await export_tool.export(request)
        live = pq.read_table(out, columns=["images"]).to_pylist()
    before = place.digest()
    await export_tool.export(request)
    assert place.digest() == before
    rows = pq.read_table(out).to_pylist()
    assert [{"images": row["images"]} for row in rows] == live
    wanted = [[{"bytes": data, "path": digest_of(data)} for data in images] for images in shown]
    assert [row["images"] for row in rows] == wanted
    told = [[image.digest for image in unpack(row["blob"]).header.media] for row in rows]
    assert told == [[image["path"] for image in row["images"]] for row in rows]
    truth = {"style": "rule", "ground_truth": "1"}
    tasks = [{"prompt": row["prompt_text"], "images": row["images"], "reward_model": truth} for row in rows]
    pq.write_table(pa.Table.from_pylist(tasks), tmp_path / "again.parquet")
    table = read_tasks(tmp_path / "again.parquet")
    assert [[image.data for image in table.images(row)] for row in range(2)] == shown


def seeing(group_id: str, sample: int, *images: bytes) -> bytes:
    """An episode whose prompt has these images."""
    builder = EpisodeBuilder("sums", group_id.rpartition("#")[0], group_id, sample)
    prompt = builder.prompt([*range(1, 1 + len(images)), 9])
    for place, data in enumerate(images):
        builder.media(prompt, digest_of(data), "image/png", len(data), place, 1)
    builder.sampled([1, 2], [-0.5] * 2, [0] * 2, parent=prompt, call=Call(sampling=SAMPLING), epoch=1)
    builder.text(prompt="<image>" * len(images), response="1")
    return pack(builder.build())


def test_text_of_a_model_cannot_steer_the_terminal():
    assert plain("a\x1b[2Jb\x07\nc") == "a\\x1b[2Jb\\x07\nc"
