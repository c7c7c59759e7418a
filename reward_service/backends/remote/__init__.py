"""The reward `remote`: a reward in other processes, over HTTP and JSON.
docs/reward-service.md#serve-a-reward-over-http is the page about it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from areal_async.config.base import Section
from reward_service.backends import BackendReward, check_url

ANSWER_GRACE_S = 1.0  # Beyond the deadline of an input, for the answer to arrive


Url = Annotated[str, AfterValidator(partial(check_url, instead="token_env or token_file"))]


class RemoteArguments(Section):
    """A reward in another process (docs/reward-service.md#serve-a-reward-over-http). Each address is a server
    of the same reward."""

    model_config = ConfigDict(hide_input_in_errors=True)

    urls: tuple[Url, ...] = Field(min_length=1)
    """Its servers: `http://host:port` or `https://host`. The least loaded one that answers gets the next
    request."""
    reward: str = ""
    """The reward's name at the server; may be left out where it offers one only."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reward there, by name."""
    version: str = ""
    """If given, a server whose reward has another version is not used."""
    batch: int = Field(default=32, ge=1, le=65_536)
    """Most inputs in one request."""
    max_in_flight: int = Field(default=4, ge=1, le=65_536)
    """Most unanswered requests at one server."""
    retries: int = Field(default=3, ge=0, le=1000)
    """Repetitions of a call that a server lost, by dying or by failing inside, before its verdict is `error`.
    A call that a server refuses for being busy is sent again without being counted."""
    connect_s: float = Field(default=60.0, gt=0)
    """Seconds for which the start waits for a first server to answer."""
    outage_s: float = Field(default=120.0, gt=0)
    """Seconds for which calls wait while no server answers; then their verdict is the error `unreachable`."""
    token_env: str = ""
    """Environment variable that holds the token."""
    token_file: Path | None = None
    """File that holds the token; an absolute path."""
    ca_file: Path | None = None
    """Certificates that a server's is checked against, for https with an authority of your own."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.token_env and self.token_file is not None:
            raise ValueError("token_env and token_file are both given: keep one of them")
        for name in ("token_file", "ca_file"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_absolute():
                raise ValueError(f"{name}: {path} is not an absolute path")
        return self

    def token(self) -> str:
        """Return the token, empty if none is needed. Raises ValueError with the field's name if it is
        missing."""
        if self.token_env:
            found = os.environ.get(self.token_env, "")
            if not found:
                raise ValueError(f"token_env: the environment variable {self.token_env} is not set")
            return found
        return read_token(self.token_file) if self.token_file is not None else ""


def read_token(path: Path) -> str:
    """Return the token in the file at `path`, without the white space around it. Raises ValueError."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"token_file: {path} cannot be read: {error}") from error
    if not token:
        raise ValueError(f"token_file: {path} is empty")
    if not token.isascii() or any(letter.isspace() for letter in token):
        raise ValueError(f"token_file: {path} holds more than one word of ASCII letters")
    return token


class RemoteReward(BackendReward):
    """The part `remote`."""

    Arguments = RemoteArguments
    scopes = ("episode", "group")
    implementation = "reward_service.backends.remote.client:RemoteBackend"

    @classmethod
    def patience_s(cls, arguments: Mapping[str, Any], timeout_s: float) -> float:
        """Return the seconds for which a call may wait for servers that come back, and be sent again."""
        try:
            given = RemoteArguments.model_validate(arguments)
        except ValidationError:
            return 0.0  # the reward cannot be loaded with these, and says so itself
        return given.outage_s + (given.retries + 1) * (timeout_s + ANSWER_GRACE_S)
