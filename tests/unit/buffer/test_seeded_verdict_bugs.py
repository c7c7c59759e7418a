"""Bugs put into what becomes of verdicts, also in private functions: the test that is there must fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from areal_async.rpc.messages import Claim, NextBatch
from areal_async.rpc.verdicts import Abstain, Score
from replay_buffer.ledger import batching, scoring, transaction, verdicts
from replay_buffer.ledger import group_policy as policy
from replay_buffer.ledger.decide import DECIDES
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.records import EpisodeState
from tests.unit.buffer import test_group_scope as of_groups
from tests.unit.buffer import test_scoring as of_scoring
from tests.unit.buffer import test_verdict_policies as of_policies

PutIn = Callable[[pytest.MonkeyPatch], None]
Test = Callable[..., None]


def failure_becomes_0(patch):
    """An error, a timeout and an abstention are taken for a score of 0."""
    patch.setattr(
        verdicts, "checked", lambda verdict, _: verdict if isinstance(verdict, Score) else Score(0.0)
    )


def masked_one_becomes_0(patch):
    """A masked episode is trained, with the reward that it never got."""
    patch.setattr(transaction, "_masked", lambda episode: replace(episode, state=int(EpisodeState.VERDICT)))


def masked_bytes_are_kept(patch):
    real = transaction.Transaction.free

    def wrong(self, group_id, samples=None):
        if samples is None:
            real(self, group_id)

    patch.setattr(transaction.Transaction, "free", wrong)


def too_few_are_enough(patch):
    for module in (policy, verdicts):
        patch.setattr(module, "has_too_few", lambda *_, **__: False)


def tries_are_not_counted(patch):
    """What fails is tried again for ever."""
    real = verdicts._waiting
    patch.setattr(verdicts, "_waiting", lambda held, *, tries: real(held, tries=0))


def every_policy_drops(patch):
    """Whatever was asked for."""
    real = verdicts._action

    def wrong(rules, held, verdict):
        action = real(rules, held, verdict)
        return "drop" if action in ("mask", "fail") else action

    patch.setattr(verdicts, "_action", wrong)


def a_second_verdict_overwrites(patch):
    """Whoever had the claim may judge again."""
    real = verdicts._taken

    def wrong(tx, group, items):
        episodes = [
            replace(e, state=int(EpisodeState.CLAIMED)) if e.state == EpisodeState.VERDICT else e
            for e in group.episodes
        ]
        return real(tx, replace(group, episodes=tuple(episodes)), items)

    patch.setattr(verdicts, "_taken", wrong)


def a_lost_claim_may_judge(patch):
    """Verdicts are not fenced by claim."""
    real = verdicts._taken

    def wrong(tx, group, items):
        held = {f"{group.group_id}.{n}": e.claim_id for n, e in enumerate(group.episodes)}
        items = [replace(item, claim_id=held.get(item.episode_id) or item.claim_id) for item in items]
        return real(tx, group, items)

    patch.setattr(verdicts, "_taken", wrong)


def a_part_of_a_group_is_claimed(patch):
    """Groups that are scored as one are handed out as episodes are."""

    def wrong(index, group, room):
        return [n for n, e in enumerate(group.episodes) if e.state == EpisodeState.STORED][:room]

    patch.setattr(scoring, "_claimable", wrong)


def groups_are_claimed_before_they_are_whole(patch):
    real = Index._claimable

    def wrong(self, group, counts):
        known, self._scores_groups = self._scores_groups, False
        try:
            return real(self, group, counts)
        finally:
            self._scores_groups = known

    patch.setattr(Index, "_claimable", wrong)


def only_the_failed_one_is_tried_again(patch):
    """Of a group that is scored as one, what was scored in the same call stays."""
    patch.setattr(verdicts, "_held", lambda _: [])
    patch.setattr(verdicts, "_judge", judged_one_by_one(verdicts._judge))


def judged_one_by_one(real):
    def wrong(tx, group, taken):
        known, tx.index._scores_groups = tx.index._scores_groups, False
        try:
            real(tx, group, taken)
        finally:
            tx.index._scores_groups = known

    return wrong


def a_failed_job_is_trained_on(patch):
    real = batching.next_batch

    def wrong(index, message, now_ms):
        meta, index.meta = index.meta, replace(index.meta, failed="")
        try:
            return real(index, message, now_ms)
        finally:
            index.meta = meta

    patch.setitem(DECIDES, NextBatch, wrong)


def a_failed_job_is_scored_on(patch):
    real = scoring.claim

    def wrong(index, message, now_ms):
        meta, index.meta = index.meta, replace(index.meta, failed="")
        try:
            decision = real(index, message, now_ms)
        finally:
            index.meta = meta
        if decision.writes is not None:
            decision.writes.meta = replace(decision.writes.meta, failed=meta.failed)
        return decision

    patch.setitem(DECIDES, Claim, wrong)


BUGS: dict[str, tuple[PutIn, Test]] = {
    "a failure becomes 0": (failure_becomes_0, of_policies.test_nothing_becomes_0_by_itself),
    "a masked episode becomes 0": (masked_one_becomes_0, of_policies.test_nothing_becomes_0_by_itself),
    "bytes of masked episodes are kept": (
        masked_bytes_are_kept,
        partial(
            of_policies.test_a_masked_episode_is_given_up_and_its_group_goes_on,
            verdict=Abstain(),
            kind="abstain",
        ),
    ),
    "too few scores are enough": (
        too_few_are_enough,
        of_policies.test_a_group_with_too_few_scores_left_is_dropped_at_once,
    ),
    "tries are not counted": (
        tries_are_not_counted,
        partial(
            of_policies.test_an_episode_is_tried_again_as_often_as_the_policy_of_the_verdict_says, retries=1
        ),
    ),
    "every policy drops": (every_policy_drops, of_policies.test_each_kind_follows_its_own_policy),
    "a second verdict overwrites": (a_second_verdict_overwrites, of_policies.test_verdicts_are_final),
    "a lost claim may judge": (a_lost_claim_may_judge, of_scoring.test_verdicts_are_fenced_by_claim),
    "a part of a group is claimed": (
        a_part_of_a_group_is_claimed,
        of_groups.test_a_claim_takes_whole_groups_at_least_one_and_no_more_than_fit,
    ),
    "a group is claimed too early": (
        groups_are_claimed_before_they_are_whole,
        of_groups.test_a_group_is_claimed_once_it_is_generated_and_not_before,
    ),
    "a group is tried again in part": (
        only_the_failed_one_is_tried_again,
        of_groups.test_a_retry_scores_the_whole_group_again,
    ),
    "a failed job is trained on": (
        a_failed_job_is_trained_on,
        of_policies.test_fail_job_tells_the_trainer_which_episode_failed_and_how,
    ),
    "a failed job is scored on": (
        a_failed_job_is_scored_on,
        of_policies.test_a_job_that_failed_gets_no_more_scores_until_it_is_resumed,
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_verdicts_are_final_and_a_bug_in_that_is_caught(drive, monkeypatch, bug):
    put_in, test = BUGS[bug]
    test(drive)
    put_in(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        test(drive)
