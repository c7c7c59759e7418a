"""Claims on stored episodes. What ends them is a verdict (`verdicts.py`), or the end of their scorer."""

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

    A group that is scored as one is handed out whole, and as the first group even if it is larger than the
    limit.
    """
    tx = Transaction(index, now_ms)
    renew(tx, message.scorer)
    if message.holds is not None:
        unknown = index.claims_of.get(message.scorer, set()).difference(message.holds)
        for claim_id in sorted(unknown):
            if not index.gave(claim_id):
                end_claim(tx, claim_id, "undelivered")
    items: list[ClaimedEpisode] = []
    # A job that is to fail gets no more scores: the episode that fails it is to be scored when it is resumed.
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
    """Return the samples of a group that one claim takes."""
    if index.is_scored_as_one(group):
        # A score that came without those of the others is no use: all are judged again, in one call.
        return [sample for sample, episode in enumerate(group.episodes) if episode.is_held]
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
            # A scorer alive but stuck on this claim: one call after the other, each at its deadline.
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
    """End a claim, so that others can claim its episodes."""
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
    """Renew the claims of a scorer, each up to its last deadline. Every message of the scorer does so, but a
    write happens only after half of the time, so that a busy scorer costs few writes."""
    deadline_ms = tx.now_ms + tx.rules.claim_ms
    for claim_id in tx.index.claims_of.get(scorer, ()):
        held = tx.index.claims[claim_id]
        moved_ms = min(held.last_ms, deadline_ms)
        if moved_ms - held.deadline_ms > tx.rules.claim_ms // 2:
            tx.set_claim(claim_id, replace(held, deadline_ms=moved_ms))


# --- scores as they are stored and travel ---


MOST_NAMES = 256  # Components of one score, and agents that it names
LARGEST_UNIT = 3.4028234e38  # The largest float32


def checked(verdict: Verdict, episode: EpisodeRecord) -> Verdict:
    """Return the score if all its numbers are finite and it has no more parts than the episode. Otherwise
    return an error of the reward, never a score of 0."""
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
    """Return the problem with the rewards of parts; None if there is none."""
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
    """`parts` as the ledger keeps them: rewards of units in single precision."""
    if parts is None:
        return None
    return StoredParts(parts.segments, parts.agents, array("f", parts.units).tobytes())


def parts_of(episode: EpisodeRecord) -> Parts | None:
    """Return the rewards of an episode's parts in the form in which they are sent."""
    stored = episode.parts
    if stored is None:
        return None
    return Parts(stored.segments, stored.agents, array("f", stored.units).tolist())


def detailed_kind(verdict: Verdict) -> str:
    """`timeout`, `abstain`, or `error:` and the failure's own kind."""
    return f"error:{verdict.kind[:40]}" if isinstance(verdict, Failure) else kind_of(verdict)
