"""Checkpoints of tests: one file of the policy's, and the ledger's copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer_service.checkpoint import Checkpoints, Retention, TrainerState, named_checkpoints, step_of
from trainer_service.durable_files import write_hashed
from trainer_service.ranks import join_ranks

OF = {"job": "job", "policy": "alice"}


def made(root: Path, **options: Any) -> Checkpoints:
    kept = {name: options.pop(name) for name in ("best", "measured", "pending") if name in options}
    keep = Retention(options.pop("keep", 2), **kept)
    return Checkpoints(root, **OF, **{"keep": keep, "ranks": join_ranks(0, 1)} | options)


def save(checkpoints: Checkpoints, *steps: int, content: bytes = b"weights", **options: Any) -> Checkpoints:
    def write(folder: Path) -> Any:
        assert folder.name.startswith("."), "what is being written has no name"
        return lambda: {"policy.bin": write_hashed(folder / "policy.bin", [content])}

    for step in steps:
        given = {"epoch": 3, "updates": {"policy": 2 * step}, "save": write, "ledger": lambda: b"ledger"}
        checkpoints.begin(TrainerState(step, **given | options))
        checkpoints.wait()
    return checkpoints


def steps_in(root: Path) -> list[int]:
    return [step_of(folder) for folder in named_checkpoints(root)]
