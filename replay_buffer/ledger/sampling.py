"""Choice of scored groups for a step: in the order `buffer.sampling`, except that groups near the age limit
come first.

A group of version `w` can be trained up to step `w + η`. After the batch of step `v` is made, the steps `v +
1 … w + η` remain. They can take `(w + η − v)·B` groups of version `w` or older. If there are more such
groups, step `v` must take the excess, oldest versions first. All other groups are taken in the chosen order.
Admission grants no more groups than these steps have places. Under any order, a group whose units have the
version of its lease is therefore never dropped.

The functions are pure. They use only the ready groups.
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
    """Return the sort key of a scored group for a policy. `version` is the policy's oldest version in the
    group. The smallest key comes first. Equal ranks are ordered by the older version, then by the older
    group."""
    seq = group.seq
    if rules.sampling == "fifo":
        return (version, seq)
    if version == NO_VERSION:
        # A group without a sampled unit never becomes due, so behind other groups it could wait forever.
        return (-math.inf, version, seq)
    if rules.sampling == "freshest":
        return (-version, version, seq)
    return (-priority(rules, group), version, seq)


def priority(rules: Rules, group: GroupRecord) -> float:
    """Return a measure of what can be learned from a group with rewards r_i and mean m. By default it is the
    variance, mean (r_i − m)². Under `advantage` it is mean |r_i − m|, the mean size of the advantages before
    any division by the standard deviation."""
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
    """Choose up to `room` of the ordered groups with these `versions`. Return the ascending indices of the
    chosen groups, and the indices of groups taken early because of their age.

    `unfinished` has the versions of groups that will compete for the next steps."""
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
    """Return how many unfinished groups would become too old if `step` took none of them. Groups of version
    `step − η` or older do not count here, because `on_overtaken` decides about them.
    """
    held = Counter(version for version in unfinished if version > step - eta)
    return max((n for _, n in _must_go(held, step=step, eta=eta, batch_groups=batch_groups)), default=0)


def _must_go(held: Counter[int], *, step: int, eta: int, batch_groups: int) -> Iterable[tuple[int, int]]:
    """Yield each version in ascending order, with the number of groups of this or an older version that get
    no place after `step`."""
    so_far = 0
    for version in sorted(held):
        so_far += held[version]
        yield version, max(0, so_far - (version + eta - step) * batch_groups)
