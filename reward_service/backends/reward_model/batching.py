"""Which of the waiting texts a model computes next, and when. Pure."""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 8
"""Texts are compared with those of so many batches, the oldest; those behind wait their turn."""


def is_due(waiting: int, oldest_waits_s: float, *, idle: bool, max_batch: int, max_wait_s: float) -> bool:
    """Whether a batch is to be made now. A busy model takes only full ones ahead; an idle one also what has
    waited `max_wait_s`."""
    return waiting >= max_batch or (idle and waiting > 0 and oldest_waits_s >= max_wait_s)


def choose_batch(lengths: Sequence[int], max_batch: int) -> list[int]:
    """Indices, rising, of the texts to be computed together, of `lengths` in order of arrival.

    Always with the oldest, so that no length waits for ever; then the nearest to it in length, which need the
    least padding."""
    window = range(1, min(len(lengths), WINDOW * max_batch))
    nearest = sorted(window, key=lambda index: (abs(lengths[index] - lengths[0]), index))
    return sorted([0, *nearest[: max_batch - 1]])


def cut_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in parts whose size times the longest in them is at most `max_tokens`, short ones first; a
    longer one alone."""
    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if parts and (len(parts[-1]) + 1) * lengths[index] <= max_tokens:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts
