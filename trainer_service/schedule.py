"""The learning rate as a function of the number of optimizer updates made."""

from __future__ import annotations

import math

from areal_async.config.trainer import OptimizerSection


def learning_rate(section: OptimizerSection, update: int, total_updates: int) -> float:
    """Rate of optimizer update `update` (from 0) of `total_updates`.

    A linear warm-up over `warmup_steps`, then what `schedule` says: `constant`; `linear` or `cosine` down
    to `final_lr_share` of the peak at the last update.
    """
    if update < section.warmup_steps:
        return section.lr * (update + 1) / section.warmup_steps
    if section.schedule == "constant":
        return section.lr
    decaying = max(1, total_updates - 1 - section.warmup_steps)
    done = min(1.0, (update - section.warmup_steps) / decaying)
    remaining = 1 - done if section.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return section.lr * (section.final_lr_share + (1 - section.final_lr_share) * remaining)
