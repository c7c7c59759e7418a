"""The protocol of every inference engine.

Promises of an engine:

- `generate` returns ids exactly as sampled. Each id comes with its log-prob and with the version and trainer
  epoch of the weights that sampled it, as the engine itself knows them. The id that ended the answer
  (`areal_async.models.answers.end_ids`) is among the ids. `text` is decoded separately. It includes special
  tokens, except end tokens and padding, and no stop string.
- `pause`, `load`, `resume` exchange the weights. A request in flight survives the exchange without loss or
  truncation. Work that can be done before the pause (reading, verifying) is not part of the three calls.
- A request that cannot be served raises `RequestError` and affects no other request. An engine that died
  raises `EngineLost` in every running call. The requests of these calls may be sent again, to another engine
  or after a restart.

Log-probs are in nats, of the distribution that `GenerateResult.logprobs_of` names:

    sampled      the distribution that was sampled from: after temperature, top-k and top-p
    temperature  softmax(logits / temperature), before any truncation
    raw          softmax(logits)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from areal_async.base.errors import ArealError
from areal_async.base.versions import VersionTag
from areal_async.trajectory import Sampling
from areal_async.trajectory.layout import FinishReason, LogprobsOf
from areal_async.trajectory.routes import Routes

if TYPE_CHECKING:
    import torch


class EngineError(ArealError):
    """The engine cannot do its work, because of an unusable model, weights that do not fit, or a failed
    step."""


class EngineLost(EngineError):
    """The engine, or the server behind it, is lost with all running requests. A request may be sent again, to
    another engine or after a restart."""


class DeadlinePassed(EngineError):
    """A request ended because it passed its `deadline_s`."""


class RequestError(ArealError):
    """A request that the engine cannot serve. Sending it again changes nothing."""


UpdateMode = Literal["recompute", "keep", "session"]


class Weights(Protocol):
    """The part of a verified snapshot that an engine needs (`areal_async.weights.snapshot.Snapshot`)."""

    @property
    def tag(self) -> VersionTag: ...

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def path(self) -> Path:
        """Complete, verified directory that transformers can load (config, tokenizer, safetensors). It stays
        unchanged until the update has been acknowledged."""
        ...


class RequestImage(NamedTuple):
    """An image in a prompt. Its placeholder tokens are tokens [first, first + count) of the prompt."""

    digest: str
    """`blake3:<hex>` of `data`"""
    data: bytes
    """The file of the image, in a format that `areal_async.data.images` reads."""
    first: int
    count: int  # type: ignore[assignment]  # a tuple has a method of this name


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Continuation of `prompt_ids` (at least one id). `request_id` is unique among the requests in flight."""

    request_id: str
    prompt_ids: Sequence[int] | npt.NDArray[np.int32]
    sampling: Sampling
    session: str = ""
    """Name of requests that share prefixes, usually an episode. One session stays on one replica."""
    began: tuple[int, int] | None = None
    """Epoch and version that sampled the session's first unit. In mode `session`, the session's KV is cached
    under this epoch and version. None (before the first unit) means the served version."""
    priority: int = 0
    """Smaller values go first in the queue."""
    routes_from: int | None = None
    """First token of the prompt whose routes are requested. None: no routes."""
    deadline_s: float | None = None
    """Time on `time.monotonic`'s clock after which the request ends with `DeadlinePassed`. `ReplicaSet`
    enforces it by cancelling the call, so an engine need not."""
    media: tuple[RequestImage, ...] = ()
    """Images in the order of their tokens. All placeholder tokens of the prompt belong to one of them."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """Sampled units: four arrays of one length, which is 0 only after an abort."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    epochs: npt.NDArray[np.int32]
    finish_reason: FinishReason
    text: str
    logprobs_of: LogprobsOf = "sampled"
    cached_tokens: int | None = None
    """Number of prompt tokens found in a prefix cache. None: the engine does not report it."""
    routes: Routes | None = None
    """u8 or u16 [n, width], as in `trajectory/routes.py`. The rows are for the tokens from `routes_from` on
    that the model has read, which excludes the last sampled token. The value is None if they are not
    requested or not known. If a token was read several times, because its KV was recomputed under other
    weights, the routes are from one of these passes."""


Ids = npt.NDArray[np.int32]
Piece = Ids
"""A part of a streamed answer: the ids sampled since the last piece."""
Tell = Callable[[Piece], None]


def nothing_sampled() -> GenerateResult:
    """Return the result of a request that was aborted before it started."""
    none = np.empty(0, np.int32)
    return GenerateResult(none, np.empty(0, np.float32), none, none, "abort", "")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of the engine's load. Counters never decrease."""

    running: int
    """Requests that are being computed."""
    waiting: int
    """Requests in the queue."""
    capacity: int
    """Largest number of requests computed at once."""
    kv_used: float
    """Used share of the KV cache, 0 to 1."""
    tokens_total: int
    """Number of sampled units."""
    requests_total: int
    """Number of finished requests, with any outcome."""
    busy_s: float
    """Seconds with at least one request being computed."""
    passes: tuple[float, ...] = ()
    """Sums over the engine's passes, from which the cost of a pass is estimated (`with_pass` of the local
    engine). The value is empty if the engine does not measure passes."""
    decoded: int = 0
    """Count that also increases with units of unfinished answers, which `tokens_total` does not contain yet.
    Only the change of this count has a meaning, not its value."""


class Engine(Protocol):
    """One replica of the policy. Used from one event loop."""

    @property
    def version(self) -> VersionTag:
        """Version of the weights that sample now."""
        ...

    def alive(self) -> bool:
        """Return whether the engine is expected to serve. False after it was lost."""
        ...

    async def start(self, snapshot: Weights) -> None:
        """Start the engine with `snapshot`. Raises `EngineError`."""
        ...

    async def generate(self, request: GenerateRequest, tell: Tell | None = None) -> GenerateResult:
        """Sample until a stop, the maximum length or an abort. Cancelling the call aborts the request.

        `tell` gets sampled ids before the end, if the engine has them. The pieces together are a prefix of
        the result's ids. Each id is passed once and never withdrawn. Callers must use the result as the
        answer."""
        ...

    async def pause(self) -> None:
        """Return when no unit will be sampled until `resume`. Requests in flight wait."""
        ...

    async def load(self, snapshot: Weights) -> None:
        """Exchange the weights of a paused engine. After an `EngineError`, the old weights are in place."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Release the memory of a paused engine on its device. Requests in flight keep their units. Only
        `wake`, `device_bytes` and `stop` may follow. Needed only for `placement.share: time`."""
        ...

    async def wake(self) -> None:
        """Restore the weights after `sleep`. The engine stays paused, so `load` may follow. `resume`
        recomputes the KV of the requests in flight."""
        ...

    async def device_bytes(self) -> int | None:
        """Return the memory that the engine uses on its device, or None if this is not known."""
        ...

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests now. Their calls return the units so far, with finish reason `abort`."""
        ...

    def stats(self) -> EngineStats: ...

    async def stop(self) -> None:
        """Stop the engine. Requests in flight raise `EngineError`."""
        ...


def checked_request(request: GenerateRequest, *, vocab_size: int, max_model_len: int) -> tuple[Ids, int]:
    """Return the prompt, i32[T], and the maximum number of units in its answer. Raises `RequestError` for a
    request that no engine can serve."""
    check_sampling(request.sampling)
    ids = checked_ids(request.prompt_ids, vocab_size=vocab_size, max_model_len=max_model_len)
    return ids, min(request.sampling.max_new_tokens, max_model_len - ids.size)


def checked_ids(prompt_ids: Sequence[int] | npt.NDArray[Any], *, vocab_size: int, max_model_len: int) -> Ids:
    """Return a prompt as a read-only i32[T]. The result is the argument itself if that has this form, else a
    copy.

    Raises `RequestError`."""
    ids = np.asarray(prompt_ids)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise RequestError("a prompt must be a list of at least one token id")
    if ids.size >= max_model_len:
        raise RequestError(
            f"a prompt of {ids.size} tokens leaves no room for an answer: "
            f"rollout.max_model_len is {max_model_len}"
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        raise RequestError(f"token id {int(outside[0])} is not in the model's vocabulary of {vocab_size} ids")
    return ids.astype(np.int32, copy=ids.flags.writeable)


def check_images(ids: Ids, media: Sequence[RequestImage], placeholder: int) -> None:
    """Raise `RequestError` unless the placeholder tokens of a prompt are those of its images, in order."""
    found, end = 0, 0
    for number, image in enumerate(media):
        span = ids[image.first : image.first + image.count]
        inside = image.first >= end and len(span) == image.count > 0
        if not inside or span[0] != placeholder or span[-1] != placeholder:
            raise RequestError(
                f"image {number} has tokens {image.first} to {image.first + image.count}, which are no "
                f"placeholder tokens (id {placeholder}) of its own"
            )
        end = image.first + image.count
        found += int((span == placeholder).sum())
    if (count := int((ids == placeholder).sum())) != found:
        raise RequestError(f"a prompt has {count} placeholder tokens, and its images have {found}")


def check_sampling(sampling: Sampling) -> None:
    """Raise `RequestError` for parameters with which no engine can sample."""
    checks: Sequence[tuple[str, Any, bool, str]] = (
        ("temperature", sampling.temperature, sampling.temperature >= 0, "at least 0"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "at least 0 (0 means no limit)"),
        ("max_new_tokens", sampling.max_new_tokens, sampling.max_new_tokens >= 1, "at least 1"),
        ("stop", sampling.stop, all(sampling.stop), "a list of non-empty strings"),
    )
    for name, value, good, rule in checks:
        if not good:
            raise RequestError(f"sampling.{name} is {value!r}; it must be {rule}")


# --- search for stop strings -----------------------------------------------------------------------------

EXTRA_TOKENS = 8
"""Number of tokens added to the shortest run that can contain a stop string. Some tokens decode to no text,
or to part of a character."""


def stop_window(stop: Sequence[str]) -> int:
    """Return how many of the newest tokens to decode, to find every stop string that ends in the newest
    token. Every token that decodes to any text adds at least one byte, which bounds this number."""
    return max(len(s.encode()) for s in stop) + EXTRA_TOKENS


def trim(text: str, stop: Sequence[str]) -> str:
    """Return `text` up to its first stop string."""
    ends = [at for s in stop if (at := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text
