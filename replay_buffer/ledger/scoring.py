"""Claims on stored episodes. A verdict (`verdicts.py`) or the end of the scorer ends a claim."""

from __future__ import annotations

import math
from array import array

from msgspec.structs import replace

from areal_async.base.verdicts import Failure, Parts, Score, Verdict, kind_of
from areal_async.config.reward import Scope
from areal_async.rpc.messages import Claim, ClaimedEpisode, Claims
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.records import ClaimRecord, EpisodeRecord, EpisodeState, GroupRecord, StoredParts
from replay_buffer.ledger.transaction import Decision, Transaction


def claim(index: Index, message: Claim, now_ms: int) -> Decision:
    """Hand out stored episodes, oldest versions first, with one claim id per group.

    A group that is scored as one is always handed out whole. If it is the first of the reply, it may exceed
    the requested number."""
    tx = Transaction(index, now_ms)
    renew(tx, message.scorer)
    if message.holds is not None:
        unknown = index.claims_of.get(message.scorer, set()).difference(message.holds)
        for claim_id in sorted(unknown):
            if not index.gave(claim_id):
                end_claim(tx, claim_id, "undelivered")
    items: list[ClaimedEpisode] = []
    # A job about to fail gets no more scores. The episode that fails it will be scored when the job resumes.
    for group_id in index.claimable if not index.meta.failed else ():
        room = message.max_episodes - len(items)
        group = tx.group(group_id)
        if room <= 0 or group is None:
            break
        samples = _claimable(index, group, room)
        if len(samples) > room and items:
            break
        items += _claim_group(tx, group, samples, message)
    return tx.decide(Claims(items))


def _claimable(index: Index, group: GroupRecord, room: int) -> list[int]:
    """Return the samples of a group that a claim would take."""
    if index.is_scored_as_one(group):
        # A score without the scores of the others is useless: all are judged again, in one call.
        return group.held
    stored = [i for i, episode in enumerate(group.episodes) if episode.state == EpisodeState.STORED]
    return stored[:room]


def _claim_group(
    tx: Transaction, group: GroupRecord, samples: list[int], message: Claim
) -> list[ClaimedEpisode]:
    rules = tx.rules
    claim_id = tx.new_id("C")
    episodes = max(len(samples), message.max_episodes)
    tx.set_claim(
        claim_id,
        ClaimRecord(
            claim_id=claim_id,
            group_id=group.group_id,
            scorer=message.scorer,
            deadline_ms=tx.now_ms + rules.claim_ms,
            # Limits a live scorer that hangs on this claim: one call after the other, each until its
            # deadline.
            last_ms=tx.now_ms + rules.claim_ms + rules.call_ms * episodes,
        ),
    )
    claimed = int(EpisodeState.CLAIMED)
    changed = {
        sample: replace(
            group.episodes[sample], state=claimed, claim_id=claim_id, reward=0.0, components=None, parts=None
        )
        for sample in samples
    }
    tx.set_episodes(group, changed)
    tx.count("claimed", len(samples))
    task = tx.index.tasks.task(group.row, group.pass_index)
    scope: Scope = "group" if tx.index.is_scored_as_one(group) else "episode"
    return [
        ClaimedEpisode(
            episode_id=f"{group.group_id}.{sample}",
            claim_id=claim_id,
            task=task,
            deadline_ms=rules.claim_ms,
            tries=episode.tries,
            scope=scope,
        )
        for sample, episode in changed.items()
    ]


def end_claim(tx: Transaction, claim_id: str, reason: str) -> None:
    """End a claim, so that its episodes can be claimed again."""
    claim = tx.index.claims[claim_id]
    tx.set_claim(claim_id, None)
    group = tx.group(claim.group_id)
    if group is None:
        return
    back = {
        sample: replace(episode, state=int(EpisodeState.STORED), claim_id="")
        for sample, episode in enumerate(group.episodes)
        if episode.claim_id == claim_id and episode.state == EpisodeState.CLAIMED
    }
    tx.count(reason, len(back))
    tx.set_episodes(group, back)


def renew(tx: Transaction, scorer: str) -> None:
    """Renew the claims of a scorer after a message from it, each up to its final deadline. A renewal is
    written only after half of the claim's time has passed, so that a busy scorer causes few writes."""
    deadline_ms = tx.now_ms + tx.rules.claim_ms
    for claim_id in tx.index.claims_of.get(scorer, ()):
        held = tx.index.claims[claim_id]
        moved_ms = min(held.last_ms, deadline_ms)
        if moved_ms - held.deadline_ms > tx.rules.claim_ms // 2:
            tx.set_claim(claim_id, replace(held, deadline_ms=moved_ms))


# --- scores in storage and in messages ---


MOST_NAMES = 256  # Most components in one score, and most agents
LARGEST_UNIT = 3.4028234e38  # The largest float32


def checked(verdict: Verdict, episode: EpisodeRecord) -> Verdict:
    """Return the score unchanged if its numbers are finite and its parts fit the episode. Otherwise return an
    error of the reward, never a score of 0."""
    if not isinstance(verdict, Score):
        return verdict
    if not math.isfinite(verdict.value):
        return Failure("not_finite", f"the reward returned {verdict.value}")
    if len(verdict.components) > MOST_NAMES:
        return Failure("return_type", f"{len(verdict.components)} components are more than {MOST_NAMES}")
    if not all(map(math.isfinite, verdict.components.values())):
        return Failure("not_finite", "a component is not a finite number")
    return verdict if verdict.parts is None else _problem(verdict.parts, episode) or verdict


def _problem(parts: Parts, episode: EpisodeRecord) -> Failure | None:
    """Return the problem with the rewards of parts, or None."""
    what = ""
    if len(parts.units) not in (0, episode.n_units):
        what = f"{len(parts.units)} rewards of units for an episode of {episode.n_units} units"
    elif len(parts.segments) > episode.n_units or any(segment < 0 for segment in parts.segments):
        what = f"rewards of segments {sorted(parts.segments)[:5]} in an episode of {episode.n_units} units"
    elif len(parts.agents) > MOST_NAMES:
        what = f"rewards of {len(parts.agents)} agents are more than {MOST_NAMES}"
    if what:
        return Failure("return_type", what)
    if not all(map(math.isfinite, (*parts.segments.values(), *parts.agents.values()))):
        return Failure("not_finite", "the reward of a segment or agent is not a finite number")
    if not all(abs(value) <= LARGEST_UNIT for value in parts.units):
        return Failure("not_finite", "the reward of a unit is not a finite number of single precision")
    return None


def stored_parts(parts: Parts | None) -> StoredParts | None:
    """Return `parts` in the ledger's form, with unit rewards in single precision."""
    if parts is None:
        return None
    return StoredParts(parts.segments, parts.agents, array("f", parts.units).tobytes())


def parts_of(episode: EpisodeRecord) -> Parts | None:
    """Return the rewards of an episode's parts in message form."""
    stored = episode.parts
    if stored is None:
        return None
    return Parts(stored.segments, stored.agents, array("f", stored.units).tolist())


def detailed_kind(verdict: Verdict) -> str:
    """Return `timeout`, `abstain`, or `error:` followed by the failure's kind."""
    return f"error:{verdict.kind[:40]}" if isinstance(verdict, Failure) else kind_of(verdict)
