"""Selection of scored groups for a step: the order (`buffer.sampling`), and its exceptions for old groups.

A group of version `w` can be trained up to step `w + η`. With the batch of step `v` made, it still finds a
place as long as no more than `(w + η − v)·B` groups of version `w` or older are left: the steps `v + 1 … w +
η` can take that many. Groups beyond that must be taken now, oldest versions first; the other places are
filled in the requested order. As admission lets no more groups in than there are places, no order costs a
group that arrives with the version it was leased at.

Pure, with the ready groups as the only input.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from replay_buffer.ledger.records import NO_VERSION, EpisodeState, GroupRecord
from replay_buffer.ledger.rules import Rules

Key = tuple[float, ...]


def rank(rules: Rules, group: GroupRecord, version: int) -> Key:
    """Return where a scored group stands for a policy whose oldest version in it is `version`: the smaller,
    the earlier. Ties go to the older version, then the older group."""
    seq = group.seq
    if rules.sampling == "fifo":
        return (version, seq)
    if version == NO_VERSION:
        # Without a sampled unit it never becomes due, so in any later place it could wait for ever.
        return (-math.inf, version, seq)
    if rules.sampling == "freshest":
        return (-version, version, seq)
    return (-priority(rules, group), version, seq)


def priority(rules: Rules, group: GroupRecord) -> float:
    """Return how much there is to learn from a group, by its rewards r_i with mean m: their variance,
    mean (r_i − m)², or `advantage`, mean |r_i − m|: its advantages before any division by a deviation."""
    rewards = [episode.reward for episode in group.episodes if episode.state == EpisodeState.VERDICT]
    if not rewards:
        return 0.0
    mean = math.fsum(reward / len(rewards) for reward in rewards)
    if rules.priority == "advantage":
        return math.fsum(abs(reward - mean) / len(rewards) for reward in rewards)
    return math.fsum((reward - mean) * ((reward - mean) / len(rewards)) for reward in rewards)


def choose(
    versions: Sequence[int], unfinished: Iterable[int], *, step: int, room: int, eta: int, batch_groups: int
) -> tuple[list[int], set[int]]:
    """Choose up to `room` of the groups whose `versions` are given in order. Returns their places, ascending,
    and which of them were taken before their turn, because of their age.

    `unfinished` are the versions of groups that will compete with them for the steps to come."""
    if len(versions) <= room:
        return list(range(len(versions))), set()
    held = Counter(version for version in (*versions, *unfinished) if version != NO_VERSION)
    waiting: dict[int, list[int]] = {}
    for place, version in enumerate(versions):
        waiting.setdefault(version, []).append(place)
    forced: set[int] = set()
    candidates: list[int] = []
    for version, must_go in _must_go(held, step=step, eta=eta, batch_groups=batch_groups):
        for place in waiting.get(version, ()):
            heapq.heappush(candidates, place)
        while candidates and len(forced) < min(must_go, room):
            forced.add(heapq.heappop(candidates))
    places = set(forced)
    for place in range(len(versions)):
        if len(places) >= room:
            break
        places.add(place)
    return sorted(places), forced.difference(range(room))


def overtaken_by_reuse(unfinished: Iterable[int], *, step: int, eta: int, batch_groups: int) -> int:
    """Return how many groups in flight would lose their place if `step` took none of them.

    Groups of version `step − η` or older are not counted, because `on_overtaken` decides whether a step waits
    for them.
    """
    held = Counter(version for version in unfinished if version > step - eta)
    return max((n for _, n in _must_go(held, step=step, eta=eta, batch_groups=batch_groups)), default=0)


def _must_go(held: Counter[int], *, step: int, eta: int, batch_groups: int) -> Iterable[tuple[int, int]]:
    """Return how many groups of each version or older, ascending, find no place after `step`."""
    so_far = 0
    for version in sorted(held):
        so_far += held[version]
        yield version, max(0, so_far - (version + eta - step) * batch_groups)
