"""The protocol of all backends that score calls: the pool of processes, remote servers, models.

A call consists of one `RewardInput`. If the reward has the scope `group`, a call has the list of inputs of
one group.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar
from urllib.parse import urlsplit

import msgspec
from pydantic import ValidationError

from areal_async.base.verdicts import Verdict
from areal_async.config.base import Section, refuse_password
from reward_service.sdk import RewardInput, RewardLoadError

if TYPE_CHECKING:
    from areal_async.config.reward import RewardSection
    from areal_async.config.reward_routing import RewardSpec

PLACEHOLDER = re.compile(r"\{(prompt|response|ground_truth|data_source|ability|extra_info\.[^{}]+)\}")

S = TypeVar("S", bound=Section)
Call = RewardInput | list[RewardInput]
OnVerdicts = Callable[[int, list[Verdict], float], None]
"""Function that is called with the index of a call among the submitted calls, its verdicts, and its duration
in milliseconds.

A call has one verdict for each of its episodes.
"""


def inputs_of(call: Call) -> list[RewardInput]:
    return call if isinstance(call, list) else [call]


class ScoringBackend(Protocol):
    """A scorer of the calls of one reward (only the pool scores several rewards). All methods belong to one
    event loop.

    Promises: every submitted call gets its verdicts exactly once. They come at most one second after the call
    has taken its reward's `timeout_s`. Calls beyond `capacity` wait for their turn.
    """

    broken: asyncio.Future[RewardLoadError]
    """Future that is done when no more call can succeed. The error gives the reason and the fix."""

    @property
    def capacity(self) -> int:
        """Return the number of calls that run at once."""

    @property
    def alive(self) -> int:
        """Return the part of `capacity` that is ready now. 0 means that no call can be scored at present."""

    @property
    def call_seconds(self) -> float:
        """Return the recent mean duration of a call, in seconds."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def submit(self, calls: Sequence[Call], on_verdicts: OnVerdicts) -> None:
        """Queue calls. Waits while the queue is full. `on_verdicts` must not raise."""


class BackendReward:
    """A reward that is not computed in the pool: its declaration, with its arguments and its scorer.

    Job files name subclasses in `reward.name`. The implementation is imported only in processes that score
    episodes.
    """

    Arguments: ClassVar[type[Section]]
    scopes: ClassVar[tuple[str, ...]] = ("episode",)
    implementation: ClassVar[str]
    """`module:Class` of the `ScoringBackend`. It is created with `(spec, section)`."""
    texts_only: ClassVar[bool] = False
    """Whether tasks with images are refused, because the reward is a model that cannot see them."""
    worker_class: ClassVar[str] = ""
    """`module:Class` of the object that scores in a worker process, if the backend is a pool. See
    `LoadReward`."""

    @classmethod
    def patience_s(cls, arguments: Mapping[str, Any], timeout_s: float) -> float:
        """Return the seconds that a call may additionally take because its scorer is unavailable."""
        return 0.0

    @classmethod
    def make(cls, spec: RewardSpec, section: RewardSection) -> ScoringBackend:
        """Return the backend of the reward `spec` of a job's section. Raises `RewardLoadError`."""
        module, _, name = cls.implementation.partition(":")
        backend: ScoringBackend = getattr(importlib.import_module(module), name)(spec, section)
        return backend


async def set_within(event: asyncio.Event, limit_s: float | None) -> bool:
    """Wait for an event, at most `limit_s` (None: without a limit), and return whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
    return event.is_set()


def arguments_of(spec: RewardSpec, kind: type[S]) -> S:
    """Return the arguments of a reward as `kind`. Raises `RewardLoadError`."""
    try:
        return kind.model_validate(spec.args)
    except ValidationError as error:
        raise RewardLoadError(f"the reward {spec.name!r} cannot take these arguments: {error}") from error


def check_url(url: str, instead: str) -> str:
    """Return `url` without a slash at its end.

    Raises `ValueError` with the right form of an address. If the address contains a password, the error says
    to use the field `instead`.
    """
    refuse_password(url, instead)
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        whole = False
    if not whole:
        raise ValueError(f"{url!r} is not an address: write http://host:port or https://host")
    if parts.query or parts.fragment:
        raise ValueError(f"{url!r} must end with its path")
    return url.rstrip("/")


def check_template(template: str) -> str:
    """Return `template` unchanged. Raises `ValueError` if it does not contain the response."""
    if "{response}" not in template:
        raise ValueError("the template has no {response}, so every response would score the same")
    return template


class MissingText(ValueError):
    """The template uses a value that the task does not have."""


def fill(template: str, given: RewardInput) -> str:
    """Return `template` with its placeholders replaced, in one pass.

    Text that is filled in is never treated as a placeholder, and other braces stay unchanged. Raises
    `MissingText`.
    """

    def text(match: re.Match[str]) -> str:
        name = match.group(1)
        if name.startswith("extra_info."):
            key = name.removeprefix("extra_info.")
            if key not in given.extra_info:
                raise MissingText(f"the template names {{{name}}}, and the task's extra_info has no {key!r}")
            return as_text(given.extra_info[key])
        value = getattr(given, name)
        if value is None:
            raise MissingText(f"the template names {{{name}}}, and the task has none")
        return as_text(value)

    return PLACEHOLDER.sub(text, template)


def as_text(value: Any) -> str:
    """Return a text unchanged and any other value as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
