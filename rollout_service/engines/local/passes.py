"""What the engine's passes cost, as sums that are added at each of them.

A pass that samples n tokens and computes p tokens of prompts takes about a + b·n + c·[p > 0] + d·p seconds
of its thread's CPU time. Kept are the sums of least squares for a, b, c and d: of the products of (1, n, [p
> 0], p) with one another, and with the seconds. Two readings differ by the sums of the passes between them.
"""

from __future__ import annotations

TERMS = 4


class PassSums:
    """`sums`: the products of terms i ≤ j in the order (0, 0), (0, 1), … (3, 3); then each term by the
    seconds."""

    def __init__(self) -> None:
        self.sums = (0.0,) * (TERMS * (TERMS + 1) // 2 + TERMS)

    def add(self, sampled: int, prompt_tokens: int, seconds: float) -> None:
        """Count a pass."""
        x = (1.0, float(sampled), float(prompt_tokens > 0), float(prompt_tokens))
        products = [x[i] * x[j] for i in range(TERMS) for j in range(i, TERMS)]
        added = (*products, *(term * seconds for term in x))
        self.sums = tuple(a + b for a, b in zip(self.sums, added, strict=True))
