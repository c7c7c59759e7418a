"""Claims on stored episodes. What ends them is a verdict (`verdicts.py`), or the end of their scorer."""

from __future__ import annotations

from msgspec.structs import replace

from areal_async.config.reward import Scope
from areal_async.rpc.messages import Claim as ClaimRequest
from areal_async.rpc.messages import ClaimedEpisode, Claims
from replay_buffer.ledger.draft import Decision, Draft
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.records import Claim, EpisodeState, Group


def claim(index: Index, message: ClaimRequest, now_ms: int) -> Decision:
    """Hand out stored episodes, those of the oldest versions first; one claim id per group.

    A group that is scored as one is handed out whole, and however large it is, if it is the first."""
    draft = Draft(index, now_ms)
    renew(draft, message.scorer)
    if message.holds is not None:
        unknown = index.claims_of.get(message.scorer, set()).difference(message.holds)
        for claim_id in sorted(unknown):
            if not index.gave(claim_id):
                end_claim(draft, claim_id, "undelivered")
    items: list[ClaimedEpisode] = []
    # A job that is to fail gets no more scores: the episode that fails it is to be scored when it is resumed.
    for group_id in index.claimable if not index.meta.failed else ():
        room = message.max_episodes - len(items)
        group = draft.group(group_id)
        if room <= 0 or group is None:
            break
        samples = _claimable(index, group, room)
        if len(samples) > room and items:
            break
        items += _claim_group(draft, group, samples, message)
    return draft.decide(Claims(items))


def _claimable(index: Index, group: Group, room: int) -> list[int]:
    """The samples of a group that one claim takes."""
    if index.is_scored_as_one(group):
        # A score that came without those of the others is no use: all are judged again, in one call.
        return [sample for sample, episode in enumerate(group.episodes) if episode.is_held]
    stored = [i for i, episode in enumerate(group.episodes) if episode.state == EpisodeState.STORED]
    return stored[:room]


def _claim_group(
    draft: Draft, group: Group, samples: list[int], message: ClaimRequest
) -> list[ClaimedEpisode]:
    rules = draft.rules
    claim_id = draft.new_id("C")
    episodes = max(len(samples), message.max_episodes)
    draft.set_claim(
        claim_id,
        Claim(
            claim_id=claim_id,
            group_id=group.group_id,
            scorer=message.scorer,
            deadline_ms=draft.now_ms + rules.claim_ms,
            # A scorer alive but stuck on this claim: one call after the other, each at its deadline.
            last_ms=draft.now_ms + rules.claim_ms + rules.call_ms * episodes,
        ),
    )
    claimed = int(EpisodeState.CLAIMED)
    changed = {
        sample: replace(
            group.episodes[sample], state=claimed, claim_id=claim_id, reward=0.0, components=None, parts=None
        )
        for sample in samples
    }
    draft.set_episodes(group, changed)
    draft.count("claimed", len(samples))
    task = draft.index.tasks.task(group.row, group.pass_index)
    scope: Scope = "group" if draft.index.is_scored_as_one(group) else "episode"
    return [
        ClaimedEpisode(
            episode_id=f"{group.group_id}.{sample}",
            claim_id=claim_id,
            task=task,
            deadline_ms=rules.claim_ms,
            tries=episode.tries,
            scope=scope,
            waited_ms=max(0, draft.now_ms - episode.waits_ms) if episode.waits_ms else 0,
        )
        for sample, episode in changed.items()
    ]


def end_claim(draft: Draft, claim_id: str, reason: str) -> None:
    """What it holds is to be claimed again."""
    claim = draft.index.claims[claim_id]
    draft.set_claim(claim_id, None)
    group = draft.group(claim.group_id)
    if group is None:
        return
    back = {
        sample: replace(episode, state=int(EpisodeState.STORED), claim_id="")
        for sample, episode in enumerate(group.episodes)
        if episode.claim_id == claim_id and episode.state == EpisodeState.CLAIMED
    }
    draft.count(reason, len(back))
    draft.set_episodes(group, back)


def renew(draft: Draft, scorer: str) -> None:
    """A message from a scorer is a sign of life: its claims live on, each up to its last deadline. Written
    only past half of the time, so that a busy scorer costs few writes."""
    deadline_ms = draft.now_ms + draft.rules.claim_ms
    for claim_id in draft.index.claims_of.get(scorer, ()):
        held = draft.index.claims[claim_id]
        moved_ms = min(held.last_ms, deadline_ms)
        if moved_ms - held.deadline_ms > draft.rules.claim_ms // 2:
            draft.set_claim(claim_id, replace(held, deadline_ms=moved_ms))
