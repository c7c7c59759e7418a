"""Plan for ranks that share a model's attention over parts of each row. The module is pure and does not
import torch.

There are two methods, and both are exact:

- By *heads* (DeepSpeed-Ulysses, arXiv:2309.14509): an all-to-all gives each rank some heads of all tokens.
  The rank computes their attention, and a second all-to-all returns the results.
- In a *ring* (Ring Attention, arXiv:2310.01889): each rank keeps its queries, and keys and values circulate.

The first method sends less and leaves attention unchanged, so it is used by as many ranks as divide the query
heads evenly. Several such groups form a ring (both together: USP, arXiv:2405.07719).

Examples with 4 ranks:

- 28 heads are divided among all 4 ranks.
- 6 heads are divided among 2 ranks, and two such pairs form a ring of 2.
- 5 heads are not divided, so there is a ring of 4.

If a model has too few key/value heads, each is sent several times, so that every rank has those of its own
query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True)
class HeadSharing:
    """Layout of `by_heads` x `ring` ranks. Rank i is number i mod `by_heads` among the ranks that share
    heads, and number i div `by_heads` in the ring."""

    by_heads: int
    """Number of ranks that share the heads of their common tokens."""
    ring: int
    """Number of such groups of ranks, among which keys and values circulate."""

    def repeats(self, kv_heads: int) -> int:
        """Return how many times each key/value head is sent, so that every rank gets the same number."""
        return self.by_heads // gcd(kv_heads, self.by_heads)

    def describe(self, kv_heads: int) -> str:
        """Return a description for a log."""
        found = [f"all-to-all over the heads among {self.by_heads} ranks"] if self.by_heads > 1 else []
        if self.by_heads > 1 and (times := self.repeats(kv_heads)) > 1:
            found[0] += f", of {kv_heads} key/value heads each {times} times"
        if self.ring > 1:
            found.append(f"ring of {self.ring}")
        return ", ".join(found)


def share_heads(heads: int, ranks: int) -> HeadSharing:
    """Return the layout in which `ranks` share attention with `heads` query heads. As many ranks as divide
    `heads` share the heads."""
    by_heads = gcd(heads, ranks)
    return HeadSharing(by_heads, ranks // by_heads)
