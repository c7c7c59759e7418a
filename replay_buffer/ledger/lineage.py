"""Which snapshots are on the lineage of the trainer as it is now.

A trainer that comes back from a checkpoint at version `c` starts a new epoch. What its predecessor published
up to `c` is still true; of what it published after `c`, as much as the new epoch publishes again bit by bit.
The rest is abandoned, and units sampled under it must not be trained.

An episode is judged by its oldest epoch and its version range alone, which errs on the safe side for an
episode that spans a restart.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Epoch `epoch` published the versions `first` to `last`; `last` None: it is the running one."""

    epoch: int
    first: int
    last: int | None = None


Lineage = tuple[Span, ...]

START: Lineage = (Span(0, 0),)
"""Before any trainer: version 0 is the model that the job starts from."""


def accepts(lineage: Lineage, min_epoch: int, min_version: int, max_version: int) -> bool:
    """Whether every unit of an episode was sampled from weights on the lineage. An episode without sampled
    units (versions -1) always is."""
    if max_version < 0:
        return True
    for span in lineage:
        if span.epoch == min_epoch:
            return span.first <= min_version and (span.last is None or max_version <= span.last)
    return False


def reopened(lineage: Lineage, epoch: int, version: int) -> Lineage:
    """A trainer of a new epoch starts from the weights of `version`."""
    held = tuple(
        Span(span.epoch, span.first, version if span.last is None else min(span.last, version))
        for span in lineage
        if span.first <= version
    )
    return (*held, Span(epoch, version))


def continued(lineage: Lineage, step: int, same_as: Sequence[int]) -> Lineage:
    """The running epoch has published `step + 1`, which the epochs `same_as` had published alike. An epoch
    once left behind stays so."""
    return tuple(
        Span(span.epoch, span.first, step + 1) if span.last == step and span.epoch in same_as else span
        for span in lineage
    )


def undecided(lineage: Lineage, step: int, min_epoch: int, max_version: int) -> bool:
    """Whether an episode with units beyond version `step`, the newest of the running epoch, is of an earlier
    epoch that this one has equalled so far: the steps to come will tell."""
    return max_version > step and any(span.epoch == min_epoch and span.last == step for span in lineage)


def pruned(lineage: Lineage, oldest: int) -> Lineage:
    """Without the spans that no unit of version `oldest` or newer can belong to."""
    return tuple(span for span in lineage if span.last is None or span.last >= oldest)
