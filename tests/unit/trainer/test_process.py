"""The trainer as a service: the real wire to a stand-in buffer, the real weights plane, whole jobs."""

import gc
import json
import os
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_async.base.device_turns import DeviceTurns
from areal_async.base.errors import FaultError
from areal_async.config.job import JobConfig, PlacementSection
from areal_async.data.tasks import TaskFileError
from areal_async.rpc.server import Server
from areal_async.service.main import restart_may_help
from areal_async.service.rank_group import Note
from areal_async.service.record import read_run_log
from tests.contexts import context_for_test
from tests.unit.trainer import rank_process
from trainer_service import main as trainer_main
from trainer_service.checkpoint import CheckpointReader
from trainer_service.data.recording import read_step, write_step
from trainer_service.errors import RankError
from trainer_service.main import main
from trainer_service.publishing.publisher import Publisher
from trainer_service.ranks import GIVE_UP_S, Ranks


@asynccontextmanager
async def serving(ctx, recorded):
    """A buffer on the real wire whose answers are those of a `RecordedBuffer`."""

    async def handle(peer, request, attachments):
        return recorded.exchange(request, attachments=attachments)

    server = Server(ctx.buffer.endpoint, service="buffer", job="job", handler=handle, access=ctx.keys)
    await server.start()
    try:
        yield
    finally:
        await server.stop()


async def test_a_whole_rl_job(tmp_path, model_dir, make_batch):
    for step in range(3):
        batch, blobs = make_batch(step, max_staleness=1, groups=3)
        write_step(tmp_path / "given", batch, blobs)
    job = rank_process.job_of(model_dir, tmp_path, steps=3, record_batches=True)
    ctx = context_for_test(job, tmp_path, "trainer", "trainer")
    recorded = rank_process.RecordedBuffer(tmp_path / "given")
    async with serving(ctx, recorded):
        await main(ctx)
    assert recorded.calls[0] == ("open", 0, b"")
    assert recorded.calls.index(("export", 3)) < recorded.calls.index(("checkpointed", 3))
    written = read_run_log(ctx.run_dir / "metrics.jsonl")
    assert [r["version"] for r in written if r["kind"] == "step"] == [1, 2, 3]
    checkpoint = CheckpointReader(job="job", policy="policy").open(
        ctx.run_dir / "checkpoints" / "step-000003"
    )
    assert checkpoint.ledger() == b"ledger of 3"
    assert read_step(ctx.run_dir / "batches", 2).blobs == read_step(tmp_path / "given", 2).blobs
    AutoModelForCausalLM.from_pretrained(ctx.run_dir / "model")


async def test_a_refusal_of_the_buffer_ends_the_job(tmp_path, model_dir):
    class Fenced(rank_process.RecordedBuffer):
        def next_batch(self, epoch, step):
            raise FaultError("fenced", "epoch 2 has replaced epoch 1")

    ctx = context_for_test(rank_process.job_of(model_dir, tmp_path), tmp_path, "trainer", "trainer")
    with pytest.raises(FaultError, match="epoch 2 has replaced epoch 1"):
        async with serving(ctx, Fenced(tmp_path)):
            await main(ctx)


async def test_a_trainer_that_runs_out_of_memory_says_so(tmp_path, model_dir, monkeypatch):
    def too_large(job, ranks):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    told = []
    monkeypatch.setattr(trainer_main, "load_backend", too_large)
    monkeypatch.setattr(trainer_main, "tell", told.append)
    ctx = context_for_test(rank_process.job_of(model_dir, tmp_path), tmp_path, "trainer", "trainer")
    with pytest.raises(torch.OutOfMemoryError):
        await main(ctx)
    assert told == [Note("ran out of memory (CUDA out of memory. Tried to allocate 9 GiB)")]


async def test_a_trainer_keeps_its_turn_on_a_shared_device_until_its_process_ends(
    tmp_path, model_dir, monkeypatch
):
    """Its memory on the device is not free before that, even if the training has failed."""

    def too_large(job, ranks):
        raise torch.OutOfMemoryError

    opened, open_locks = [], DeviceTurns.open
    monkeypatch.setattr(DeviceTurns, "open", lambda folder: opened.append(open_locks(folder)) or opened[-1])
    monkeypatch.setattr(trainer_main, "load_backend", too_large)
    job = rank_process.job_of(model_dir, tmp_path)
    job = job.model_copy(update={"placement": PlacementSection(share="time")})
    ctx = context_for_test(job, tmp_path, "trainer", "trainer")
    engine = open_locks(ctx.socket_dir)
    with pytest.raises(torch.OutOfMemoryError):
        await main(ctx)
    gc.collect()
    assert not engine.try_wake()
    for locks in (*opened, engine):
        os.close(locks.turn_fd)
        os.close(locks.wish_fd)


async def test_what_an_error_says_is_told_before_the_publisher_is_closed(tmp_path, model_dir, monkeypatch):
    """Its close may wait for a rank that is gone."""

    def too_large(trainer, **options):
        raise MemoryError

    done = []
    close = Publisher.close

    def closed(publisher, **options):
        done.append("closed")
        close(publisher, **options)

    monkeypatch.setattr(trainer_main.RlTrainer, "run", too_large)
    monkeypatch.setattr(Publisher, "close", closed)
    monkeypatch.setattr(trainer_main, "tell", lambda note: done.append("told"))
    ctx = context_for_test(rank_process.job_of(model_dir, tmp_path), tmp_path, "trainer", "trainer")
    with pytest.raises(MemoryError):
        async with serving(ctx, rank_process.RecordedBuffer(tmp_path)):
            await main(ctx)
    assert done == ["told", "closed"]


async def test_a_rank_names_those_that_do_not_start_and_does_not_end_before_they_are_killed(
    tmp_path, model_dir, monkeypatch
):
    def alone(*place, start_s, **options):
        raise RankError("number 2 did not start", [2])

    done = []
    monkeypatch.setattr(trainer_main, "join_ranks", alone)
    monkeypatch.setattr(trainer_main, "tell", done.append)
    monkeypatch.setattr(trainer_main, "time", SimpleNamespace(sleep=done.append))
    ctx = context_for_test(rank_process.job_of(model_dir, tmp_path), tmp_path, "trainer", "trainer")
    with pytest.raises(RankError):
        await main(ctx)
    assert done == [Note("did not come to the meeting within 150 s and was killed", (2,)), GIVE_UP_S]


async def test_a_rank_that_waits_in_vain_for_another_does_not_end_before_that_is_killed(
    tmp_path, model_dir, monkeypatch
):
    class Waiting(Ranks):
        def missing(self):
            return [1]

    def lost(job, ranks):
        raise RuntimeError("gloo: timed out waiting 10 ms for recv operation to complete")

    done = []
    monkeypatch.setattr(trainer_main, "join_ranks", lambda *place, **options: waiting)
    monkeypatch.setattr(trainer_main, "load_backend", lost)
    monkeypatch.setattr(trainer_main, "tell", done.append)
    monkeypatch.setattr(trainer_main, "time", SimpleNamespace(sleep=done.append))
    ctx = context_for_test(rank_process.job_of(model_dir, tmp_path), tmp_path, "trainer", "trainer")
    waiting = Waiting(0, 2, torch.device("cpu"), None)
    with pytest.raises(RankError, match="rank 1 of the trainer did not come to a collective within 600 s"):
        await main(ctx)
    assert done == [Note("did not come to a collective within 600 s and was killed", (1,)), GIVE_UP_S]


def sft_context(model_dir, tmp_path, answers):
    """A trainer of a job of kind `sft` whose tasks have these ground truths."""
    rows = [
        {"prompt": f"{a}+1=", "reward_model": {"ground_truth": answer}} for a, answer in enumerate(answers)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    content = {"job": "warm", "kind": "sft", "model": model_dir, "tasks": {"train": tmp_path / "t.jsonl"}}
    job = JobConfig.model_validate(content | {"trainer": {"steps": 2}, "sft": {"batch_size": 4}})
    return context_for_test(job, tmp_path, "trainer", "trainer")


async def test_a_task_that_makes_no_example_ends_a_supervised_job_before_it_serves(tmp_path, model_dir):
    """So it is not started again, to meet the same task."""
    ctx = sft_context(model_dir, tmp_path, [1, None])
    with pytest.raises(TaskFileError, match="line 2: its ground truth is null") as told:
        await main(ctx)
    assert not restart_may_help(told.value, served=ctx.has_served)


async def test_a_whole_sft_job(tmp_path, model_dir):
    ctx = sft_context(model_dir, tmp_path, range(1, 10))
    await main(ctx)
    assert ctx.has_served
    assert [record["step"] for record in read_run_log(ctx.run_dir / "metrics.jsonl")] == [1, 2]
    AutoModelForCausalLM.from_pretrained(ctx.run_dir / "model")
