"""A trainer of two ranks that replays recorded batches, in processes of their own."""

from __future__ import annotations

from pathlib import Path

from tests.unit.trainer import rank_process
from tests.unit.trainer.forked_ranks import run_ranks


def two_ranks(*paths: Path, **environment: str) -> list[tuple[int, str]]:
    """Run `rank_process` on `paths` as two processes that meet; the status and the errors of each."""
    given = [(rank, 2, *paths) for rank in range(2)]
    ended = run_ranks(rank_process.__file__, *given, **environment)
    return [(status, errors) for status, _, errors in ended]
