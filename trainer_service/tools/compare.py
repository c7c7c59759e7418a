"""What a step was recorded to come to, what it came to when replayed, and where the two differ. Pure."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import msgspec


class Figures(msgspec.Struct, frozen=True):
    """What training a step came to. `losses` and `grad_norms` are of its minibatches."""

    losses: list[float]
    grad_norms: list[float]
    weights_hash: str = ""
    """Of the weights after the step; empty where it is not known."""


class Outcome(msgspec.Struct, frozen=True):
    """A replayed step. `difference` is empty when it came out bit by bit as recorded."""

    step: int
    episodes: int
    recorded: Figures
    replayed: Figures
    difference: str = ""


def difference(recorded: Figures, replayed: Figures) -> str:
    """The first field that differs, in words; empty when all that is known of both is the same."""
    for field in ("losses", "grad_norms"):
        before: Sequence[float] = getattr(recorded, field)
        now: Sequence[float] = getattr(replayed, field)
        if len(before) != len(now):
            return f"{field}: {len(before)} minibatches are recorded, {len(now)} were trained"
        for number, (old, new) in enumerate(zip(before, now, strict=True)):
            if not _same(old, new):
                return f"{field}[{number}]: {old!r} is recorded, {new!r} came out"
    if recorded.weights_hash and recorded.weights_hash != replayed.weights_hash:
        return (
            f"weights: {_short(recorded.weights_hash)} is recorded, {_short(replayed.weights_hash)} came out"
        )
    return ""


HEAD = (
    f"{'step':>6}  {'episodes':>8}  {'loss':>13} {'recorded':>13}  {'grad norm':>11} {'recorded':>11}  "
    f"{'weights':<10} recorded"
)


def line(outcome: Outcome) -> str:
    """One step as a line below `HEAD`; `=` where the replay has the very bits of the recording."""
    old, new = outcome.recorded, outcome.replayed
    loss, norm = (
        _pair(_mean(old.losses), _mean(new.losses), 8),
        _pair(max(old.grad_norms), max(new.grad_norms), 6),
    )
    hashes = _short(new.weights_hash), _short(old.weights_hash) or "unknown"
    weights = f"{hashes[0]:<10} {'=' if hashes[0] == hashes[1] else hashes[1]}"
    return (
        f"{outcome.step:>6}  {outcome.episodes:>8}  {loss[0]:>13} {loss[1]:>13}  "
        f"{norm[0]:>11} {norm[1]:>11}  {weights}"
    )


def _pair(old: float, new: float, digits: int) -> tuple[str, str]:
    return f"{new:.{digits}f}", "=" if _same(old, new) else f"{old:.{digits}f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _same(old: float, new: float) -> bool:
    """Bit by bit, so that NaN equals NaN."""
    return struct.pack("<d", old) == struct.pack("<d", new)


def _short(weights_hash: str) -> str:
    return weights_hash.partition(":")[2][:10]
