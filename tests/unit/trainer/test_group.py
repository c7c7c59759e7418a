"""Ranks that wait: for something outside without a collective's limit, for each other with it."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file
from torch.distributed import HashStore

from areal_async.config.job import TrainerSection
from tests.unit.trainer import group_process
from tests.unit.trainer.forked_ranks import run_ranks
from trainer_service import checkpoint, ranks
from trainer_service.errors import BatchError, RankError
from trainer_service.ranks import _await_all, join_ranks, lost_peer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("written")


@pytest.fixture(scope="module")
def seen(folder):
    """What each of two ranks saw."""
    ended = run_ranks(group_process.__file__, *((rank, folder) for rank in range(2)))
    return [json.loads(printed) for _, printed, _ in ended]


def test_a_rank_may_wait_for_something_outside_longer_than_a_collective_waits(seen):
    assert [rank["slow"] for rank in seen] == ["late", "early"]
    assert [rank["first"] for rank in seen] == ["of rank 0", None]


def test_the_trained_model_may_take_longer_to_write_than_a_collective_waits(seen, folder):
    assert sorted(path.name for path in folder.iterdir()) == ["merged", "model"]
    written = load_file(folder / "model" / "model.safetensors")
    assert written["w"].tolist() == [[0.0] * 3, [1.0] * 3]


def test_an_error_of_one_rank_is_raised_on_all_and_names_it(seen):
    assert seen[1]["failing"] == "BatchError: a torn episode"
    assert seen[0]["failing"] == "RankError: rank 1 of the trainer failed: BatchError: a torn episode"
    assert seen[0]["soon"], "it did not wait for its own work to end"


def test_a_rank_that_does_not_come_is_known_to_those_that_wait(seen):
    assert seen[0]["lost"] is True
    assert seen[0]["missing"] == [1]


def test_a_job_gives_a_collective_more_time_than_ranks_take_between_two_rounds_of_a_wait():
    """With less, any wait for the buffer or a disk would end the group."""
    least_s = 2 * max(ranks.ROUND_S, checkpoint.ROUND_S)
    with pytest.raises(ValidationError, match="collective_s"):
        TrainerSection(collective_s=least_s)
    assert TrainerSection(collective_s=least_s + 1).collective_s == least_s + 1


def test_ranks_that_do_not_start_are_known_to_one_that_waits_for_them():
    with pytest.raises(RankError, match="number 1, 2 did not start") as told:
        _await_all(HashStore(), 0, 3, 0.1)
    assert told.value.late == (1, 2)


def test_gloo_talks_over_the_interface_that_has_the_meetings_address(seen):
    assert [rank["interface"] for rank in seen] == ["lo", "lo"]


def test_one_rank_works_in_its_own_thread_and_keeps_its_errors():
    alone = join_ranks(0, 1)
    assert alone.together(lambda: 3) == alone.on_first(lambda: 3) == 3

    def torn():
        raise BatchError("torn")

    with pytest.raises(BatchError):
        alone.together(torn)


def test_only_errors_of_collectives_are_taken_for_another_ranks_fault():
    assert lost_peer(RuntimeError("[.../gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert lost_peer(RankError("rank 1 of the trainer failed"))
    assert not lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost_peer(BatchError("connection closed"))
