"""Adapters on a host: merged once for all of its receivers, given out as announced, and not kept for ever."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_async.base.errors import SnapshotError
from areal_async.rpc.client import Client
from areal_async.rpc.weights_messages import SnapshotNotice
from areal_async.weights import adapter as adapters
from areal_async.weights.adapter import BaseWeights, Merger, adapter_config
from areal_async.weights.channels.host_cache import KEPT
from areal_async.weights.manifest import ADAPTER_CONFIG, MANIFEST_FILE, hash_of
from areal_async.weights.receiver import Receiver
from areal_async.weights.snapshot import MODEL_FILE, Companions, open_snapshot
from tests.snapshots import write_snapshot
from tests.unit.trainer.conftest import write_model
from tests.unit.weights.world import SECRET, tag
from trainer_service.publishing.publisher import Publisher

RANK, ALPHA = 4, 6.0
TARGET = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def files(base):
    config = adapter_config(rank=RANK, alpha=ALPHA, targets=[TARGET], base=base)
    return {ADAPTER_CONFIG: config, "config.json": (base / "config.json").read_bytes()}


def tensors(version, inputs=32):
    torch.manual_seed(version)
    return {
        f"base_model.model.{TARGET}.lora_A.weight": torch.randn(RANK, inputs),
        f"base_model.model.{TARGET}.lora_B.weight": torch.randn(32, RANK),
    }


def expected(base, version):
    return dict(BaseWeights(base, torch.float32).merged(tensors(version), ALPHA / RANK))


def same(got, want):
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def merger(base, root, **options):
    return Merger(base, torch.float32, root, **{"tensors": False, **options})


def snapshot(root, version, files):
    info = write_snapshot(root, tag(version), tensors(version), files=files)
    return open_snapshot(info.path), info.manifest_hash


async def test_two_receivers_of_a_host_are_given_one_directory_that_is_made_once(
    tmp_path, base, files, monkeypatch
):
    made, write = [], adapters.write_merged
    monkeypatch.setattr(adapters, "write_merged", lambda *given: (made.append(given[-1]), write(*given)))
    opened = snapshot(tmp_path / "adapters", 3, files)
    both = [merger(base, tmp_path / "merged") for _ in range(2)]
    first, second = await asyncio.gather(*(each.merged(*opened) for each in both))
    assert first.path == second.path
    assert made == [first.path]
    assert same(load_file(first.path / MODEL_FILE), expected(base, 3))
    for each in both:
        each.close()


async def test_nothing_is_unbounded_merged_directories_go_once_their_followers_are_served(
    tmp_path, base, files
):
    root = tmp_path / "merged"
    one, slow = merger(base, root), merger(base, root)
    for version in range(5):
        opened = snapshot(tmp_path / "adapters", version, files)
        if version == 0:
            await slow.merged(*opened)
        await one.merged(*opened)
        one.served(tag(version))
    there = {path.name for path in root.iterdir() if path.is_dir()}
    newest = {tag(version).label for version in range(5 - KEPT, 5)}
    assert there == newest | {tag(0).label}, "what another receiver still reads has to stay"
    one.close()
    slow.close()


async def test_an_engine_that_takes_tensors_has_no_directory_made(tmp_path, base, files):
    one = merger(base, tmp_path / "merged", tensors=True)
    merged = await one.merged(*snapshot(tmp_path / "adapters", 1, files))
    assert same(merged.tensors, expected(base, 1))
    assert not (tmp_path / "merged").exists()
    one.close()


@pytest.mark.parametrize("takes_tensors", [False, True])
async def test_versions_are_true_what_is_published_as_an_adapter_is_opened_merged_or_refused(
    place, base, files, takes_tensors
):
    publisher = Publisher(
        place / "shm", f"ipc://{place}/s", job="j", companions=Companions(files), access=SECRET
    )
    publisher.start()
    made = merger(base, place / "merged", tensors=takes_tensors)
    client = Client(publisher.endpoint, job="j", role="r", name="r", access=SECRET)
    r = Receiver(client, "r", tensors=takes_tensors, merger=made)
    await r.connect(10)
    serving = None
    for version, inputs in ((0, 32), (1, 16), (2, 32)):
        publisher.publish(tag(version), tensors(version, inputs))
        notice = await r.next(serving)
        assert isinstance(notice, SnapshotNotice)
        if inputs != 32:
            with pytest.raises(SnapshotError, match="does not fit the base model"):
                await r.open(notice)
            await r.ack(notice.tag, error="it does not fit")
            assert not (place / "merged" / notice.tag.label).exists()
            continue
        merged = await r.open(notice)
        assert merged.tag == notice.tag
        got = merged.tensors if takes_tensors else load_file(merged.path / MODEL_FILE)
        assert same(got, expected(base, version))
        assert hash_of((merged.path / MANIFEST_FILE).read_bytes()) == notice.manifest_hash
        await r.ack(notice.tag)
        serving = notice.tag
    await r.close()
    publisher.close()


KILLED = """
import asyncio, sys, time
from pathlib import Path
import torch
from areal_async.weights.adapter import BaseWeights, Merger
from areal_async.weights.snapshot import open_snapshot
from areal_async.weights.manifest import MANIFEST_FILE, hash_of
base, root, adapter = map(Path, sys.argv[1:])
merged = BaseWeights.merged
def slow(*given):
    for one in merged(*given):
        yield one
        print("merging", flush=True)
        time.sleep(600)
BaseWeights.merged = slow
one = Merger(base, torch.float32, root, tensors=False)
asyncio.run(one.merged(open_snapshot(adapter), hash_of((adapter / MANIFEST_FILE).read_bytes())))
"""


async def test_what_a_receiver_leaves_that_is_killed_while_it_merges_goes_with_the_next_version(
    tmp_path, base, files
):
    root = tmp_path / "merged"
    opened, _ = snapshot(tmp_path / "adapters", 1, files)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, base, root, opened.path],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path.cwd(),
    ) as process:
        assert process.stdout.readline() == "merging\n"
        process.kill()
    assert len(list(root.rglob(MODEL_FILE))) == 1, "it was under way"
    one = merger(base, root)
    merged = await one.merged(*snapshot(tmp_path / "adapters", 2, files))
    assert list(root.rglob(MODEL_FILE)) == [merged.path / MODEL_FILE]
    one.close()


@pytest.mark.parametrize("takes_tensors", [False, True])
async def test_versions_are_true_an_adapter_of_another_model_is_refused_with_the_folder(
    tmp_path, base, files, takes_tensors
):
    other = write_model(tmp_path / "other", seed=1)
    one = merger(other, tmp_path / "merged", tensors=takes_tensors)
    for version in (0, 1):
        with pytest.raises(SnapshotError, match=f"{other} on this host is not the model"):
            await one.merged(*snapshot(tmp_path / "adapters", version, files))
    one.close()
