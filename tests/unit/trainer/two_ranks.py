"""A trainer of two ranks that replays recorded batches, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.trainer import rank_process
from tests.unit.trainer.forked_ranks import fork_ranks


def two_ranks(*paths: Path, **environment: str) -> list[tuple[int, str]]:
    """Run `rank_process` on `paths` as two processes that meet; the status and the errors of each."""
    command = [sys.executable, rank_process.__file__]
    ranks = fork_ranks(
        [[*command, str(rank), "2", *map(str, paths)] for rank in range(2)],
        stderr=subprocess.PIPE,
        env=os.environ | environment,
    )
    try:
        errors = [process.communicate(timeout=600)[1] for process in ranks]
        return [(process.returncode, said) for process, said in zip(ranks, errors, strict=True)]
    finally:
        for process in ranks:
            process.kill()
