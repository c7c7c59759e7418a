"""What a reward model's process and its owner say to each other: msgpack frames over a socket pair."""

from __future__ import annotations

import msgspec

from areal_async.rpc.verdicts import Verdict


class Load(msgspec.Struct, array_like=True, tag="load"):
    """The first message to the process: `RewardModelArguments` as JSON."""

    arguments: bytes


class Texts(msgspec.Struct, array_like=True, tag="texts"):
    """Texts to score together. Each is a pair: prompt and response for a chat template, else all and nothing.
    Batches are answered in order."""

    batch: int
    texts: list[tuple[str, str]]


class Loaded(msgspec.Struct, array_like=True, tag="loaded"):
    """The model is ready."""

    device: str
    dtype: str
    max_tokens: int


class LoadFailed(msgspec.Struct, array_like=True, tag="load_failed"):
    """It cannot be loaded; the process ends."""

    message: str


class Scored(msgspec.Struct, array_like=True, tag="scored"):
    """One verdict for each text of a batch."""

    batch: int
    verdicts: list[Verdict]


Order = Load | Texts
Report = Loaded | LoadFailed | Scored

MAX_FRAME_BYTES = 256 << 20
"""Of either direction; far more than a batch of texts."""
