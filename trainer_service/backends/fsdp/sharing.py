"""Sharing of a model's attention by ranks that have a part of each row. Pure, without torch.

There are two exact methods. By *heads* (DeepSpeed-Ulysses, arXiv:2309.14509): an all-to-all gives each rank
all tokens of some heads, it attends as one rank does, and a second one brings the results back. In a *ring*
(Ring Attention, arXiv:2310.01889): each rank keeps its queries, and keys and values go round. The first sends
less and leaves attention unchanged, so it is used as far as the query heads can be divided evenly; the
remaining factor of ranks is a ring (both together: USP, arXiv:2405.07719).

Of 4 ranks: 28 heads are dealt to 4; 6 heads to 2, two such pairs being a ring of 2; 5 heads to none, which
leaves a ring of 4. A model with fewer key/value heads than its heads are dealt to sends each as often as it
takes for every rank to have those of its own query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True)
class HeadSharing:
    """The layout of `by_heads` x `ring` ranks. Rank i has place i mod `by_heads` among the ranks that share
    heads, and i div `by_heads` in the ring."""

    by_heads: int
    """Ranks to which the heads of the tokens that they have together are dealt."""
    ring: int
    """Such groups of ranks, among which keys and values go round."""

    def repeats(self, kv_heads: int) -> int:
        """Return how often each key/value head is sent, so that every rank has equally many."""
        return self.by_heads // gcd(kv_heads, self.by_heads)

    def describe(self, kv_heads: int) -> str:
        """Words for a log."""
        found = [f"all-to-all over the heads among {self.by_heads} ranks"] if self.by_heads > 1 else []
        if self.by_heads > 1 and (times := self.repeats(kv_heads)) > 1:
            found[0] += f", of {kv_heads} key/value heads each {times} times"
        if self.ring > 1:
            found.append(f"ring of {self.ring}")
        return ", ".join(found)


def share_heads(heads: int, ranks: int) -> HeadSharing:
    """Let `ranks` share attention with so many query heads: as many as divide the heads share these."""
    by_heads = gcd(heads, ranks)
    return HeadSharing(by_heads, ranks // by_heads)
