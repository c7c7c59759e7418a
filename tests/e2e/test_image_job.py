"""A whole job on images of tasks and of a tool: its roles are killed, and images are lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from transformers import AutoTokenizer

from areal_async.config.load import load_job
from areal_async.trajectory import SegmentKind, unpack
from areal_async.trajectory.codec import MAGIC
from replay_buffer.attachments import MEDIA
from tests.chaos.history import check
from tests.chaos.job import promise_of
from tests.e2e.conftest import FinishedRun, RunningJob
from tests.e2e.kinds import TOUGH
from tests.e2e.versions import spans_of
from tests.events import read_events
from tests.jobs import Workspace, make_workspace
from tests.vision import picture, write_vision_model
from trainer_service.data.recording import Recording

pytestmark = pytest.mark.slow

TASKS = 300
GROUPS, SAMPLES = 4, 2
WORKFLOW = """
import random
from PIL import Image
from rollout_service.workflows import tool


@tool
def look(place):
    "A picture of a place."
    return Image.frombytes("RGB", (16, 16), random.Random(place).randbytes(768))


async def looking(ctx, task):
    reply = await ctx.generate(task.prompt)
    seen = await ctx.tool(look, reply.text, parent=reply.segment)
    reply = await ctx.generate(parent=seen.segment)
    seen = await ctx.tool(look, reply.text, parent=reply.segment)
    await ctx.generate(parent=seen.segment)
"""
REWARD = """
from areal_async.data.images import decode_image, digest_of
from reward_service.sdk import RewardInput, reward


@reward
def seeing(given: RewardInput) -> float:
    assert [decode_image(each.data).size[0] for each in given.media] == [16, 16, 16]
    assert all(digest_of(each.data) == each.digest for each in given.media)
    return given.response.count("1") / max(1, len(given.response))
"""
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("images")
    for kind in ("qwen3_vl", "qwen2_5_vl"):
        write_vision_model(folder / kind, kind)
    (folder / "model").symlink_to("qwen3_vl")
    made = make_workspace(folder)
    (folder / "looking.py").write_text(WORKFLOW)
    (folder / "seeing.py").write_text(REWARD)
    rows = []
    for number in range(TASKS):
        picture(16, 16 + 8 * (number % 2), number).save(folder / f"{number}.png")
        truth = {"style": "rule", "ground_truth": "1"}
        rows.append({"prompt": f"{number}+<image>=", "images": [f"{number}.png"], "reward_model": truth})
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return made


def image_job(workspace: Workspace, name: str, steps: int, model: str = "model") -> Path:
    return workspace.job(
        name,
        model=model,
        reward={"name": "seeing.py:seeing"},
        rollout__group_size=SAMPLES,
        rollout__max_model_len=128,
        rollout__workflow="looking.py:looking",
        buffer__batch_groups=GROUPS,
        trainer__steps=steps,
        observe={"metrics_port": 0, "event_log": True, "stall_s": 5},
        supervisor=TOUGH,
    )


def redis_of(job: RunningJob | FinishedRun) -> bytes:
    """All that Redis has written down."""
    return b"".join(path.read_bytes() for path in (job.folder / "buffer").glob("appendonlydir/*"))


def media_groups(folder: Path) -> set[str]:
    """Groups that have files of images."""
    found = (folder / "buffer" / "episodes").glob(f"{MEDIA}*")
    return {unquote(path.name.removeprefix(MEDIA).split(",")[0]) for path in found}


def held_groups(run: FinishedRun) -> set[str]:
    """Groups that the last ledger still has."""
    held: set[str] = set()
    for event in read_events(run.folder):
        if event["event"] == "loaded":
            held = {*event["groups"]}
        elif event["event"] == "decided":
            for group_id, (_, becomes, _) in event.get("moved", {}).items():
                (held.add if becomes else held.discard)(group_id)
    return held


def assert_promises(run: FinishedRun, job_file: Path, steps: int) -> None:
    assert check(read_events(run.folder), promise_of(load_job(job_file))).violations == []
    assert run.summary["steps"] == steps
    assert run.summary["episodes_trained"] == steps * GROUPS * SAMPLES


@pytest.mark.parametrize(
    "roles",
    [
        ("buffer", "trainer"),
        pytest.param(("rollout-0", "reward", "redis", "trainer", "buffer"), marks=pytest.mark.nightly),
    ],
    ids=["two", "all"],
)
def test_an_image_job_outlives_the_death_of_its_roles_with_true_versions_and_no_pixel_in_redis(
    workspace: Workspace, running: Any, roles: tuple[str, ...]
) -> None:
    steps = 3 * len(roles) + 2
    job_file = image_job(workspace, f"images-{len(roles)}", steps)
    with running("run", job_file) as job:
        job.wait_for_steps(1)
        redis_has = redis_of(job)
        for name in roles:
            job.service(name).kill()
            job.wait_for_steps(2)
            redis_has += redis_of(job)
        run = job.end()
    assert_promises(run, job_file, steps)
    assert {one["service"] for one in run.records("restart")} == {*roles} - {"redis"}
    redis_has += redis_of(run)
    assert MAGIC in redis_has
    assert PNG not in redis_has
    recording = Recording(run.folder)
    pad = AutoTokenizer.from_pretrained(workspace.folder / "model").convert_tokens_to_ids("<|image_pad|>")
    for step in range(steps):
        recorded = recording.read(step)
        assert not any(data[60:92] in redis_has for data in recorded.media.values())
        for episode in map(unpack, recorded.blobs.values()):
            kinds = [SegmentKind(episode.segments.kind[each.segment]) for each in episode.header.media]
            assert kinds == [SegmentKind.PROMPT, SegmentKind.TOOL, SegmentKind.TOOL]
            assert sum(each.n_units for each in episode.header.media) == (episode.units.token_id == pad).sum()
    assert media_groups(run.folder) <= held_groups(run)
    spans = spans_of(run, steps, most=4)
    assert spans.worst < 1e-4
    assert spans.within > 0, "weights were meant to arrive in the middle of an answer"
    assert spans.wrong > 1e-3, "the versions must differ enough for a wrong stamp to show"


def test_a_job_goes_on_without_the_groups_whose_images_were_lost(workspace: Workspace, running: Any) -> None:
    job_file = image_job(workspace, "lost", 8, model="qwen2_5_vl")
    with running("run", job_file) as job:

        def lost() -> bool:
            for path in (job.folder / "buffer" / "episodes").glob(f"{MEDIA}*"):
                path.unlink(missing_ok=True)
            return any("dropped:bytes_lost" in each.get("counts", {}) for each in job.events("decided"))

        job.wait_for_steps(1)
        job.wait_for(lost, "a group whose images were lost")
        run = job.end()
    assert_promises(run, job_file, steps=8)
    assert run.records("restart") == []
