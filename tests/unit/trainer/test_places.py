"""A back end whose ranks share a model's layers and tensors, as pipelines do, behind the same learner."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
import torch

from areal_async.service.record import RunLog, read_run_log
from tests.unit.trainer import rank_process
from tests.waiting import deadline_s
from trainer_service.backends.base import RankPlace
from trainer_service.checks.logprobs import LogprobCheck
from trainer_service.data.microbatch import build_micro_batch
from trainer_service.loop.learner import Learner, load_backend
from trainer_service.ranks import Ranks, join_ranks

PLACES = (RankPlace(0, 1, reads=False, owns=False), RankPlace(0, 1, owns=False), RankPlace(0, 1))
"""A rank that shares tensors with one that reads, a first stage, a last stage: all of one share."""
DEADLINE_S = deadline_s(120)


@dataclass
class Meeting:
    """Where threads that stand for ranks add up their tensors."""

    barrier: threading.Barrier
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)

    def reduce(self, rank, tensor, how):
        self.tensors[rank] = tensor.clone()
        self.barrier.wait(DEADLINE_S)
        found = how(torch.stack([self.tensors[rank] for rank in sorted(self.tensors)]))
        self.barrier.wait(DEADLINE_S)
        tensor.copy_(found)


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    meeting: Meeting | None = None

    def sum(self, tensor):
        self.meeting.reduce(self.rank, tensor, lambda all_of: all_of.sum(0))

    def max(self, tensor):
        self.meeting.reduce(self.rank, tensor, lambda all_of: all_of.amax(0))

    def broadcast_bytes(self, data):
        value = torch.tensor([*data] if self.first else [0] * len(data))
        self.sum(value)
        return bytes(value.tolist())


class Stage:
    """One rank of a pipeline whose last stage computes everything: backwards through the micro-batches,
    and with a pass of its own that nobody hears of."""

    updates = 0
    side_by_side = False

    def __init__(self, place, ranks, inner, calls):
        self.place, self._ranks, self._inner, self._calls = place, ranks, inner, calls

    def _note(self, what, batches):
        n_rows = sum(batch.n_units > 0 for batch in batches)
        assert (n_rows > 0) == self.place.reads
        self._calls[what, len(batches)] += 1

    def evaluate(self, model, batches, fn, *, columns=("logp",)):
        self._note("evaluate", batches)
        if not self.place.owns:
            return []
        last = len(batches) - 1
        return self._inner.evaluate(model, batches[::-1], lambda i, c: fn(last - i, c), columns=columns)[::-1]

    def train(self, model, batches, loss_of, *, columns=("logp",)):
        self._note("train", batches)
        if not self.place.owns:
            return
        last = len(batches) - 1
        idle = [build_micro_batch([])]

        def loss_of_own(index, values):
            return loss_of(last - index, values) if index <= last else values["logp"].sum()

        self._inner.train(model, [*batches[::-1], *idle], loss_of_own, columns=columns)

    def optimizer_step(self):
        norm = torch.tensor(self._inner.optimizer_step() if self.place.owns else 0.0, dtype=torch.float64)
        self._ranks.sum(norm)
        return float(norm)


def _job(model, out):
    settings = {"self_check": {"action": "warn"}, "micro_batch_tokens": 24, "minibatches": 2}
    return rank_process.job_of(model, out, **settings)


def _train(job, ranks, backend, step, out):
    batch, blobs = step
    run_log = RunLog(out / "metrics.jsonl") if ranks.first else None
    check = LogprobCheck(job, ranks, backend, run_log=run_log)
    learner = Learner(job, ranks, backend, check=check)
    plan = learner.plan(batch, batch.step)
    given = {episode.episode_id for episode in learner.episodes_of(plan)}
    assert given == (set(blobs) if backend.place.reads else set())
    return learner.train(batch, plan, {name: memoryview(blobs[name]) for name in given}, epoch=0)


def _self_check(out):
    (record,) = [r for r in read_run_log(out / "metrics.jsonl") if r["kind"] == "self_check"]
    return record


def test_a_share_counts_once_however_many_ranks_read_it(tmp_path, model_dir, make_batch):
    """Losses, figures, counts and the self-check of three ranks of one share are those of one rank."""
    step = make_batch(2, groups=5, max_staleness=2, lengths=(1, 14))
    job, alone = _job(model_dir, tmp_path), join_ranks(0, 1)
    (tmp_path / "one").mkdir()
    (tmp_path / "three").mkdir()
    want = _train(job, alone, load_backend(job, alone), step, tmp_path / "one")

    meeting = Meeting(threading.Barrier(len(PLACES)))
    inner, calls = load_backend(job, alone), [Counter() for _ in PLACES]

    def rank_of(number):
        ranks = ThreadRanks(number, len(PLACES), alone.device, alone.mesh, meeting=meeting)
        stage = Stage(PLACES[number], ranks, inner, calls[number])
        try:
            return _train(job, ranks, stage, step, tmp_path / "three")
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(len(PLACES)) as pool:
        found = [future.result() for future in [pool.submit(rank_of, n) for n in range(len(PLACES))]]
    first, *others = (replace(result, seconds={}) for result in found)
    assert all(other == first for other in others)
    assert calls[0] == calls[1] == calls[2]
    assert found[0].losses == pytest.approx(want.losses, abs=1e-6)
    assert found[0].grad_norms == pytest.approx(want.grad_norms, rel=1e-5)
    assert found[0].packed_tokens == want.packed_tokens
    assert found[0].statistics["units"] == want.statistics["units"]
    assert found[0].statistics["ess"] == pytest.approx(want.statistics["ess"])
    one, three = _self_check(tmp_path / "one"), _self_check(tmp_path / "three")
    assert three["skipped"] == one["skipped"] != {}
    assert (three["n"], three["mean"]) == (one["n"], pytest.approx(one["mean"], rel=1e-5))


def test_who_owns_columns_reads_their_rows():
    with pytest.raises(ValueError, match="is given the rows"):
        replace(PLACES[2], reads=False)
