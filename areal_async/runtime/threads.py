"""The threads that torch computes with, as the run's supervisor has last told this process."""

from __future__ import annotations

import torch

from areal_async.runtime.status import board


def follow_threads() -> None:
    """Use as many as was told, from here on; for the thread that computes, between two steps: torch's count
    is a thread's own."""
    if board.threads and torch.get_num_threads() != board.threads:
        torch.set_num_threads(board.threads)
