"""A collective that does not end: who is missing and what waits is said before the limit ends the process."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from tests.unit.trainer import watch_process
from tests.unit.trainer.forked_ranks import run_ranks
from trainer_service.collectives import CollectiveWatch, unfinished

SECOND = 1_000_000_000


def test_a_rank_that_never_comes_is_named_with_the_operation_before_the_limit_ends_the_others():
    ended = run_ranks(watch_process.__file__, *((rank, 3) for rank in range(3)))
    seen = [json.loads(printed) for _, printed, _ in ended]
    assert seen[2]["told"] == []
    for rank in seen[:2]:
        assert rank["error"], "the collective ended"
        (note,) = rank["told"]
        assert note["ranks"] == [2]
        assert note["cause"].startswith("did not come to a collective within 8 s and was killed (")
        assert "gloo:all_reduce number 2 of [3, 5] in group default_pg" in note["cause"]


def entry(number, *, retired, at_s, group="default_pg", name="nccl:_all_gather_base"):
    return {
        "record_id": number, "process_group": ["0", group], "profiling_name": name, "is_p2p": False,
        "collective_seq_id": number + 1, "retired": retired, "time_created_ns": at_s * SECOND,
        "input_sizes": [[7]], "state": "scheduled",
    }  # fmt: skip


class Recorder:
    """What NCCL's flight recorder would say."""

    def __init__(self, *entries):
        self.entries = [*entries]

    def __call__(self):
        return json.dumps({"version": "2.10", "entries": self.entries}).encode()


@pytest.fixture
def group():
    """Three ranks that share a store, whose collectives may take 100 s, with a clock and what they tell."""
    store, clock, told = HashStore(), SimpleNamespace(s=0), []
    recorders = [Recorder(entry(0, retired=True, at_s=0)) for _ in range(3)]
    watches = [
        CollectiveWatch(
            SimpleNamespace(rank=rank, world=3, timeout_s=100.0), store, [recorder],
            lambda note, rank=rank: told.append((rank, note)), lambda: int(clock.s * SECOND),
        )
        for rank, recorder in enumerate(recorders)
    ]  # fmt: skip

    def until(now_s):
        """Let all ranks look every 2.5 s until a time. Return what they told."""
        while clock.s < now_s:
            clock.s += 2.5
            for watch in watches:
                watch.look()
        return told

    return SimpleNamespace(until=until, recorders=recorders)


def test_a_rank_that_came_late_itself_is_not_taken_for_the_missing_one(group):
    group.recorders[0].entries.append(entry(1, retired=False, at_s=0))
    assert group.until(60) == []
    group.recorders[1].entries.append(entry(1, retired=False, at_s=65))
    assert group.until(75) == []
    ((teller, note),) = group.until(91)
    assert (teller, note.ranks) == (0, (2,))
    assert "nccl:_all_gather_base number 2 of [7] in group default_pg" in note.cause
    assert len(group.until(95)) == 1, "it was told twice"


def test_a_rank_that_comes_after_the_alarm_ends_it(group):
    for recorder in group.recorders[:2]:
        recorder.entries.append(entry(1, retired=False, at_s=0))
    assert group.until(85) == []
    for recorder in group.recorders:
        recorder.entries[1:] = [entry(1, retired=True, at_s=0)]
    assert group.until(88) == []
    group.recorders[1].entries.append(entry(2, retired=False, at_s=90))
    assert group.until(120) == []
    ((teller, note),) = group.until(185)
    assert (teller, note.ranks) == (1, (0, 2)), "what a rank said before the alarm ended counted still"


def test_ranks_that_wait_for_different_operations_blame_nobody(group):
    for rank, recorder in enumerate(group.recorders):
        recorder.entries.append(entry(1, retired=False, at_s=0, name=f"nccl:{rank}"))
    assert group.until(95) == []


def test_only_the_last_operation_of_a_group_waits_and_the_oldest_of_them_is_named():
    forgotten = entry(0, retired=False, at_s=0)
    gloo = Recorder(entry(5, retired=False, at_s=9, group="side"), forgotten, entry(1, retired=True, at_s=1))
    nccl = Recorder(entry(3, retired=False, at_s=4))
    assert unfinished([gloo]).time_created_ns == 9 * SECOND
    assert unfinished([gloo, nccl]).record_id == 3
    assert unfinished([Recorder()]) is None
