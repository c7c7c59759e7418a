"""A checkpoint counts once it is in the store, and a trainer on another host goes on from there."""

import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from areal_async.base.mistakes import ConfigError
from areal_async.base.retry import Tries
from areal_async.config.job import JobConfig
from areal_async.storage.remote import StorageAway
from areal_async.storage.transfer import HalfWritten, fetch
from tests.unit.trainer import saving
from tests.unit.trainer.forked_ranks import run_script
from tests.unit.trainer.saving import OF, save
from tests.unit.trainer.test_disk_full import ThreadRank, TwoThreads
from tests.waiting import LIMIT_S
from trainer_service import checkpoint as checkpoint_module
from trainer_service.checkpoint import CheckpointReader, Measured, TrainerState
from trainer_service.checkpoint_store import CheckpointStore, push_trained
from trainer_service.durable_files import write_hashed
from trainer_service.errors import CheckpointError, TrainerError
from trainer_service.tools.checkpoint_model import _chosen

KILLED = """
import sys
from pathlib import Path
from areal_async.base.events import arm
from tests.unit.trainer.saving import made, save
from trainer_service.checkpoint_store import CheckpointStore

checkpoints = made(Path(sys.argv[1]), store=CheckpointStore(sys.argv[2]))
save(checkpoints, 1)
arm("trainer.mid_store")
save(checkpoints, 2)
"""


def made(root, store, **options):
    return saving.made(root, **{"keep": 5, "store": store} | options)


def newest(root, store):
    return CheckpointReader(**OF).newest_of_all(root, store)


@pytest.fixture
def url(s3):
    return f"{s3.bucket()}/runs/job/checkpoints"


def test_a_checkpoint_is_in_the_store_before_it_counts(s3, url, tmp_path):
    there = []
    save(made(tmp_path, CheckpointStore(url)), 4, durable=lambda: there.extend(s3.names(url)))
    names = ("ledger.bin", "manifest.json", "policy.bin")
    assert there == [f"step-000004/{name}" for name in names]


def test_a_trainer_on_another_host_goes_on_from_the_newest_whole_one(url, tmp_path):
    store = CheckpointStore(url)
    assert newest(tmp_path / "there", store) is None
    checkpoints = made(tmp_path / "here", store)
    for step in (1, 2):
        save(checkpoints, step, content=bytes([step]))
    found = newest(tmp_path / "there", store)
    assert found.folder == tmp_path / "there" / "step-000002"
    assert found.ledger() == b"ledger"
    assert (found.folder / "policy.bin").read_bytes() == b"\2"


def test_a_trainer_that_was_killed_while_it_stored_one_leaves_the_one_before(url, tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    run_script(tmp_path / "killed.py", tmp_path / "here", url, status=-signal.SIGKILL)
    store = CheckpointStore(url)
    assert store.whole() == [1]
    assert newest(tmp_path / "there", store).manifest.step == 1
    with pytest.raises(CheckpointError):
        store.bring(2, tmp_path / "torn" / "step-000002")
    again = newest(tmp_path / "here", store)
    assert again.manifest.step == 2, "it has its name on this host"
    assert store.whole() == [1, 2], "and is stored before anything goes on from it"
    made(tmp_path / "here", store).went_on_from(again)


def test_what_was_begun_and_what_is_later_than_the_restored_one_is_taken_out(s3, url, tmp_path):
    store = CheckpointStore(url)
    first = made(tmp_path / "here", store)
    save(first, 1, 2, 3)
    s3.files.pipe_file(f"{url}/step-000009/policy.bin", b"half")
    s3.files.pipe_file(f"{url}/step-000003/policy.bin", b"damaged")
    restored = newest(tmp_path / "there", store)
    assert restored.manifest.step == 2, "3 is damaged"
    again = made(tmp_path / "there", store, keep=2)
    again.went_on_from(restored)
    assert store.whole() == [1, 2]
    assert not any(name.startswith("step-000009") for name in s3.names(url))
    save(again, 3)
    assert store.whole() == [2, 3], "those of the trainer before are pruned in turn"


def test_all_damaged_in_the_store_and_none_here_is_an_error(s3, url, tmp_path):
    store = CheckpointStore(url)
    save(made(tmp_path / "here", store), 1)
    s3.files.pipe_file(f"{url}/step-000001/policy.bin", b"damaged")
    with pytest.raises(CheckpointError, match=r"policy\.bin is damaged"):
        newest(tmp_path / "there", store)


def test_the_best_and_the_newest_are_kept_in_the_store_too(url, tmp_path):
    store = CheckpointStore(url)
    checkpoints = made(tmp_path, store, keep=1, best=1, measured=lambda: [Measured(3, 1, 0.9)])
    save(checkpoints, 1, 2, 3)
    assert store.whole() == [1, 3]


def test_a_store_that_is_away_delays_what_counts_and_loses_nothing(s3, url, tmp_path):
    away, back, counted = threading.Event(), threading.Event(), threading.Event()

    def wait(pause_s):
        assert back.wait(LIMIT_S)

    store = CheckpointStore(url, tries=Tries(1e6, lambda error: away.set(), sleep=wait))
    checkpoints = made(tmp_path, store)
    s3.stop()
    writing = threading.Thread(target=save, args=(checkpoints, 1), kwargs={"durable": counted.set})
    writing.start()
    assert away.wait(LIMIT_S)
    assert checkpoints.is_writing
    assert not counted.is_set()
    s3.start()
    back.set()
    writing.join(LIMIT_S)
    assert counted.is_set()
    assert store.whole() == [1]


def test_a_store_that_stays_away_ends_the_trainer_and_leaves_what_is_here(s3, url, tmp_path):
    soon = Tries(0.5, rng=random.Random(0))
    checkpoints = made(tmp_path, CheckpointStore(url))
    save(checkpoints, 1)
    s3.stop()
    late = made(tmp_path, CheckpointStore(url, tries=soon))
    with pytest.raises(StorageAway, match="could not be written"):
        save(late, 2)
    assert CheckpointReader(**OF).newest(tmp_path).manifest.step == 1


def test_what_cannot_be_removed_now_is_removed_later(s3, url, tmp_path, monkeypatch):
    store = CheckpointStore(url, removing=Tries(0))
    checkpoints = made(tmp_path, store, keep=1)
    save(checkpoints, 1)
    s3.stop()
    assert not store.remove(1)
    s3.start()
    monkeypatch.setattr(store, "remove", lambda step: False)
    save(checkpoints, 2)
    assert store.whole() == [1, 2]
    monkeypatch.undo()
    checkpoints.prune()
    assert store.whole() == [2]


def test_the_trained_model_is_put_there_whole(s3, tmp_path):
    job = JobConfig.model_validate(
        {
            "job": "trained",
            "model": tmp_path / "base",
            "tasks": {"train": tmp_path / "t.jsonl"},
            "checkpoint": {"store": s3.bucket()},
        }
    )
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "model.safetensors").write_bytes(b"weights")
    push_trained(tmp_path / "run", job)
    url = f"{job.checkpoint.store}/trained/model"
    fetch(url, tmp_path / "came")
    assert (tmp_path / "came" / "model.safetensors").read_bytes() == b"weights"
    s3.files.rm(f"{url}/model.safetensors")
    with pytest.raises(HalfWritten):
        fetch(url, tmp_path / "again")


@pytest.mark.parametrize("fails", [False, True], ids=["both can", "one cannot"])
def test_each_rank_stores_what_it_wrote_and_the_manifest_comes_when_all_have(
    s3, url, tmp_path, monkeypatch, fails
):
    monkeypatch.setattr(checkpoint_module, "ROUND_S", 0.01)
    both, put = TwoThreads(), {0: [], 1: []}

    def run(rank):
        store = CheckpointStore(url)
        really = store.put

        def watched(step, folder, names):
            put[rank] += sorted(names)
            if fails and rank:
                raise StorageAway("the store of rank 1 is away.")
            really(step, folder, names)

        monkeypatch.setattr(store, "put", watched)
        checkpoints = made(tmp_path / "here", store, keep=1, ranks=ThreadRank(rank, both))

        def write(folder):
            name = f"policy-{rank}.bin"
            return lambda: {name: write_hashed(folder / name, [bytes([rank])])}

        checkpoints.begin(TrainerState(1, 3, {"policy": 1}, write, lambda: b"ledger"))
        try:
            checkpoints.wait()
        except (StorageAway, TrainerError) as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(run, range(2)))
    if fails:
        assert said == ["rank 1: the store of rank 1 is away.", "the store of rank 1 is away."]
        assert CheckpointStore(url).whole() == []
        return
    assert said == ["", ""]
    assert put == {0: ["policy-0.bin", "ledger.bin"], 1: ["policy-1.bin"]}
    names = ("ledger.bin", "manifest.json", "policy-0.bin", "policy-1.bin")
    assert s3.names(url) == [f"step-000001/{name}" for name in names]
    assert newest(tmp_path / "there", CheckpointStore(url)).manifest.ranks == 2


def test_the_model_of_a_checkpoint_is_exported_from_the_store(s3, url, tmp_path):
    store = CheckpointStore(url)
    save(made(tmp_path / "here", store), 1)
    run = SimpleNamespace(folder=tmp_path / "there", job=SimpleNamespace(policy="alice"))
    (tmp_path / "there").mkdir()
    assert _chosen(run, "newest", store) == 1
    assert _chosen(run, "1", store) == 1
    with pytest.raises(ConfigError, match="Name one of: 1"):
        _chosen(run, "2", store)
