"""Verdicts: results of scoring, and their effect on an episode and its group.

A score is final. After any other verdict, scoring is tried again as often as the policy of its kind says
(`reward.on_timeout`, `on_error`, `on_abstain`). After that, the group is dropped, the episode is MASKED and
the group continues without it, or the job ends. A verdict without a score is never a reward of 0. An answer
that is itself the reason why it cannot be judged gets the score `reward.on_fault.score`. In a group that is
scored as one, all episodes are scored again together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from areal_async.base.verdicts import Score, Verdict, kind_of, message_of
from areal_async.rpc.messages import EpisodeVerdict, PutVerdicts, Refusal, VerdictAck
from replay_buffer.ledger.group_policy import finish, has_too_few
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.records import EpisodeRecord, EpisodeState, GroupRecord
from replay_buffer.ledger.rules import Rules
from replay_buffer.ledger.scoring import checked, detailed_kind, renew, stored_parts
from replay_buffer.ledger.transaction import MOST_MESSAGE, Decision, Transaction, try_failed, try_succeeded

Action = Literal["score", "again", "mask", "drop", "fail"]
ACTIONS: dict[str, Action] = {"drop_group": "drop", "mask": "mask", "fail_job": "fail"}

Judged = dict[int, tuple[Verdict, EpisodeVerdict]]
"""Sample → the verdict that counts, and the verdict as received."""


def verdicts(index: Index, message: PutVerdicts, now_ms: int) -> Decision:
    """Accept each verdict whose claim is still held. A verdict that was accepted before is acknowledged
    again."""
    tx = Transaction(index, now_ms)
    renew(tx, message.scorer)
    refused: list[Refusal] = []
    by_group: defaultdict[str, list[EpisodeVerdict]] = defaultdict(list)
    for item in message.verdicts:
        by_group[item.episode_id.rpartition(".")[0]].append(item)
    for group_id, items in by_group.items():
        group = index.groups.get(group_id)
        if group is None:
            refused += _refuse(tx, items, "group_ended")
            continue
        taken, lost = _taken(tx, group, items)
        refused += lost
        if taken:
            _judge(tx, group, taken)
    return tx.decide(VerdictAck(refused))


def _taken(
    tx: Transaction, group: GroupRecord, items: Sequence[EpisodeVerdict]
) -> tuple[Judged, list[Refusal]]:
    """Return the verdicts that count, and refusals for verdicts whose claim has ended."""
    refused: list[Refusal] = []
    taken: Judged = {}
    for item in items:
        sample = _sample(item.episode_id, group)
        held = None if sample is None else group.episodes[sample]
        if sample is None or held is None or held.claim_id != item.claim_id:
            refused += _refuse(tx, [item], "claim_lost")
        elif held.state == EpisodeState.CLAIMED and sample not in taken:
            verdict = checked(item.verdict, held)
            taken[sample] = verdict, item
            tx.count(f"verdict:{kind_of(verdict)}")
            if isinstance(verdict, Score):
                _note_score(tx, group, verdict, item.episode_id)
                continue
            kind, message = detailed_kind(verdict), message_of(verdict)
            tx.note_no_score(kind, message, item.episode_id)
            if kind_of(verdict) == "error":
                try_failed(tx, "scoring", group, f"{kind}: {message} (episode {item.episode_id})")
    return taken, refused


def _note_score(tx: Transaction, group: GroupRecord, score: Score, episode_id: str) -> None:
    """Record a score, which may end a streak of failures. The score of an answer at fault does not show that
    the reward works, because the reward did not judge the answer."""
    if not score.at_fault:
        try_succeeded(tx, "scoring")
        try_succeeded(tx, "answering")
        return
    kind, _, message = score.at_fault.partition(": ")
    tx.count("at_fault")
    tx.note_no_score(f"fault:{kind[:40]}", message, episode_id)
    try_failed(tx, "answering", group, f"{score.at_fault} (episode {episode_id})")


def _judge(tx: Transaction, group: GroupRecord, taken: Judged) -> None:
    """Apply the verdicts to each episode and to the group."""
    together = tx.index.is_scored_as_one(group)
    todo = {sample: _action(tx.rules, group.episodes[sample], taken[sample][0]) for sample in taken}
    for sample, action in todo.items():
        if action == "again":
            tx.count(f"tried_again:{kind_of(taken[sample][0])}")
    if together and "again" in todo.values():
        todo = dict.fromkeys(group.held, "again")
    elif (failing := _first(todo, "fail")) is not None:
        _fail_job(tx, *taken[failing])
        todo = {sample: "fail" if action == "drop" else action for sample, action in todo.items()}
        todo = dict.fromkeys(group.held, "fail") if together else todo
    elif (dropping := _first(todo, "drop")) is not None:
        tx.drop(group, f"verdict_{kind_of(taken[dropping][0])}")
        return
    changed: dict[int, EpisodeRecord] = {}
    masked: dict[int, EpisodeRecord] = {}
    for sample, action in todo.items():
        held, verdict = group.episodes[sample], taken[sample][0] if sample in taken else None
        if isinstance(verdict, Score) and action == "score":
            changed[sample] = _scored(held, verdict)
            continue
        if verdict is not None and not isinstance(verdict, Score):
            held = replace(held, no_score=detailed_kind(verdict))
        if action == "mask":
            masked[sample] = replace(held, tries=held.tries + 1)
        else:
            # A resumed job counts its tries from zero.
            changed[sample] = _waiting(held, tries=held.tries + 1 if action == "again" else 0)
    claims = {group.episodes[sample].claim_id for sample in todo}
    group = tx.set_episodes(group, changed) if changed else group
    group = tx.mask(group, masked) if masked else group
    _end_claims(tx, group, claims)
    if masked and has_too_few(tx.rules, group):
        tx.drop(group, f"verdict_{kind_of(taken[max(masked)][0])}")
    else:
        finish(tx, group)


def _action(rules: Rules, held: EpisodeRecord, verdict: Verdict) -> Action:
    """Return the action for a verdict under the policy of its kind."""
    kind = kind_of(verdict)
    if kind == "score":
        return "score"
    policy = rules.on(kind)
    return "again" if held.tries < policy.retries else ACTIONS[policy.then]


def _first(todo: dict[int, Action], action: Action) -> int | None:
    return next((sample for sample, wanted in todo.items() if wanted == action), None)


def _scored(held: EpisodeRecord, score: Score) -> EpisodeRecord:
    return replace(
        held,
        state=int(EpisodeState.VERDICT),
        reward=score.value,
        components=score.components or None,
        parts=stored_parts(score.parts),
    )


def _waiting(held: EpisodeRecord, *, tries: int) -> EpisodeRecord:
    """Return the episode, ready to be claimed again."""
    return replace(
        held,
        state=int(EpisodeState.STORED),
        tries=tries,
        claim_id="",
        reward=0.0,
        components=None,
        parts=None,
    )


def _fail_job(tx: Transaction, verdict: Verdict, item: EpisodeVerdict) -> None:
    """Set the reason to end the job, unless there is one already. The trainer gets it with its next
    request."""
    tx.count(f"job_failed:{kind_of(verdict)}")
    if not tx.meta.failed:
        tx.set_meta(
            failed=f"episode {item.episode_id} got no score, but {detailed_kind(verdict)}: "
            f"{message_of(verdict)[:MOST_MESSAGE]} (reward.on_{kind_of(verdict)}.then is fail_job)"
        )


def _end_claims(tx: Transaction, group: GroupRecord, claim_ids: set[str]) -> None:
    """Delete the claims that have no episodes left."""
    open_ids = {e.claim_id for e in group.episodes if e.state == EpisodeState.CLAIMED}
    for claim_id in claim_ids.intersection(tx.index.claims) - open_ids:
        tx.set_claim(claim_id, None)


def _sample(episode_id: str, group: GroupRecord) -> int | None:
    text = episode_id.rpartition(".")[2]
    return int(text) if text.isdecimal() and int(text) < len(group.episodes) else None


def _refuse(tx: Transaction, items: Sequence[EpisodeVerdict], reason: str) -> list[Refusal]:
    tx.count(f"refused:{reason}", len(items))
    return [Refusal(item.episode_id, reason) for item in items]
