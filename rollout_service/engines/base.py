"""The protocol of every inference engine.

Promises of an engine:

- `generate` returns ids exactly as sampled, and for each the log-prob and the version (and trainer epoch)
  of the weights that sampled it, as the engine itself knows them. The id that ended it
  (`areal_async.models.answers.end_ids`) is among the ids; `text` is not cut from the ids but decoded beside
  them, with special tokens but for ends and padding, and without a stop string.
- `pause`, `load`, `resume` exchange the weights. A request in flight survives them: it is neither lost nor
  cut short. Work that can be done before (reading, verifying) is not part of the three.
- A request that cannot be served raises `RequestError` and touches no other one. An engine that died raises
  `EngineLost` in every call under way: the request may be sent again, elsewhere or after a restart.

Log-probs are of what `GenerateResult.logprobs_of` says, in nats:

    sampled      the distribution that was drawn from: after temperature, top-k and top-p
    temperature  softmax(logits / temperature), before any truncation
    raw          softmax(logits)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

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
    """The engine cannot do its work: an unusable model, weights that do not fit, a failed step."""


class EngineLost(EngineError):
    """The engine, or the server behind it, is gone, together with the requests that it computed. A request
    may be sent again, elsewhere or after a restart."""


class DeadlinePassed(EngineError):
    """A request was ended because its `deadline_s` passed."""


class RequestError(ArealError):
    """One request cannot be served as it is. Sending it again changes nothing."""


UpdateMode = Literal["recompute", "keep", "session"]


class Weights(Protocol):
    """The part of a verified snapshot that an engine needs (`areal_async.weights.snapshot.Snapshot`)."""

    @property
    def tag(self) -> VersionTag: ...

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def path(self) -> Path:
        """Return a complete, verified directory that transformers can load (config, tokenizer, safetensors).
        It stays unchanged until the update has been acknowledged."""
        ...


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Continue `prompt_ids` (at least one id). `request_id` is unique among the requests in flight."""

    request_id: str
    prompt_ids: Sequence[int] | npt.NDArray[np.int32]
    sampling: Sampling
    session: str = ""
    """The episode, or whatever else shares prefixes: one session stays on one replica."""
    began: tuple[int, int] | None = None
    """Epoch and version that sampled the session's first unit. In mode `session` its KV is cached under them.
    None, before the first unit, stands for the served version."""
    priority: int = 0
    """Smaller goes first where requests wait."""
    routes_from: int | None = None
    """First token of the prompt whose routes are requested too; None if no routes are requested."""
    deadline_s: float | None = None
    """The time on `time.monotonic`'s clock past which the request ends with `DeadlinePassed`: `ReplicaSet`
    sees to that and cancels the call, so an engine need not."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """The sampled units: four arrays of one length (0 only after an abort)."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    epochs: npt.NDArray[np.int32]
    finish_reason: FinishReason
    text: str
    logprobs_of: LogprobsOf = "sampled"
    cached_tokens: int | None = None
    """Tokens of the prompt whose KV was found in a prefix cache; None if the engine does not report it."""
    routes: Routes | None = None
    """u8 or u16 [n, width], in the form of `trajectory/routes.py`: routes of the tokens from `routes_from` on
    that were fed to the model, so not of the last sampled one. None if they are not requested or unknown. If
    a token was fed several times, because its KV was computed again under other weights, its routes are those
    of one pass."""


Ids = npt.NDArray[np.int32]
Piece = Ids
"""Ids sampled since the last piece."""
Tell = Callable[[Piece], None]


def nothing_sampled() -> GenerateResult:
    """Return the result of a request that was aborted before it had begun."""
    none = np.empty(0, np.int32)
    return GenerateResult(none, np.empty(0, np.float32), none, none, "abort", "")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of the engine's load. Counters never fall."""

    running: int
    """Requests being computed."""
    waiting: int
    """Requests accepted and not yet begun."""
    capacity: int
    """Most requests computed at once."""
    kv_used: float
    """Share of the KV room in use, 0 to 1."""
    tokens_total: int
    """Units sampled."""
    requests_total: int
    """Requests finished, in whatever way."""
    busy_s: float
    """Seconds with at least one request being computed."""
    passes: tuple[float, ...] = ()
    """Sums over the engine's passes from which the cost of a pass is computed (`with_pass` of the local
    engine). Empty if the engine does not measure its passes."""
    decoded: int = 0
    """A count that increases when units are sampled that are not yet in `tokens_total`, because their answer
    is in flight. Only changes of it are meaningful."""


class Engine(Protocol):
    """One replica of the policy. Used from one event loop."""

    @property
    def version(self) -> VersionTag:
        """Version of the weights that sample now."""
        ...

    def alive(self) -> bool:
        """Return whether it can be expected to serve; False after it was lost."""
        ...

    async def start(self, snapshot: Weights) -> None:
        """Be ready to generate with `snapshot`. Raises `EngineError`."""
        ...

    async def generate(self, request: GenerateRequest, tell: Tell | None = None) -> GenerateResult:
        """Sample until a stop, the length or an abort. Cancelling the call aborts the request.

        `tell` is called with the ids on the way, as far as the engine knows them: its pieces are a beginning
        of the result's ids, each id told once and none taken back. The result alone counts."""
        ...

    async def pause(self) -> None:
        """Returns when no unit will be sampled until `resume`. Requests are held."""
        ...

    async def load(self, snapshot: Weights) -> None:
        """Exchange the weights of a paused engine. On an `EngineError` the old ones are in place."""
        ...

    async def resume(self) -> None: ...

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests now. They return their units so far, with finish reason `abort`."""
        ...

    def stats(self) -> EngineStats: ...

    async def stop(self) -> None:
        """Stop the engine. Requests in flight raise `EngineError`."""
        ...


def checked_request(request: GenerateRequest, *, vocab_size: int, max_model_len: int) -> tuple[Ids, int]:
    """Return the prompt, i32[T], and the most units that its answer may have. Raises `RequestError` for a
    request that no engine can serve."""
    check_sampling(request.sampling)
    ids = checked_ids(request.prompt_ids, vocab_size=vocab_size, max_model_len=max_model_len)
    return ids, min(request.sampling.max_new_tokens, max_model_len - ids.size)


def checked_ids(prompt_ids: Sequence[int] | npt.NDArray[Any], *, vocab_size: int, max_model_len: int) -> Ids:
    """Return a prompt as i32[T] that nobody writes to: itself if it is one, else a copy.

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


def check_sampling(sampling: Sampling) -> None:
    """Raises `RequestError` for parameters that no engine can sample with."""
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


# --- where a stop string begins ----------------------------------------------------------------------

EXTRA_TOKENS = 8
"""Tokens looked at before the shortest run that can hold a stop string: some decode to no text, or to part
of a character."""


def stop_window(stop: Sequence[str]) -> int:
    """Return the number of newest tokens to decode to see every stop string that the newest one ended.
    A token that decodes to text decodes to at least one byte of it."""
    return max(len(s.encode()) for s in stop) + EXTRA_TOKENS


def trim(text: str, stop: Sequence[str]) -> str:
    """Return `text` up to its first stop string."""
    ends = [at for s in stop if (at := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text
