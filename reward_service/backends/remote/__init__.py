"""Arguments of the reward `remote`: a reward in other processes, over HTTP and JSON.

docs/reward-service.md#serve-a-reward-over-http describes it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from areal_async.config.base import Section
from reward_service.backends import BackendReward, check_url

ANSWER_GRACE_S = 1.0  # seconds beyond an input's deadline for the answer to arrive


Url = Annotated[str, AfterValidator(partial(check_url, instead="token_env or token_file"))]


class RemoteArguments(Section):
    """A reward in another process (docs/reward-service.md#serve-a-reward-over-http). All addresses must serve
    the same reward."""

    model_config = ConfigDict(hide_input_in_errors=True)

    urls: tuple[Url, ...] = Field(min_length=1)
    """Addresses of its servers: `http://host:port` or `https://host`. The least loaded available server gets
    the next request."""
    reward: str = ""
    """The reward's name at the server. Optional if the server offers only one."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reward at the server, by name."""
    version: str = ""
    """Required version of the reward. A server with another version is not used. If it is empty, any version
    is accepted."""
    max_in_flight: int = Field(default=256, ge=1, le=65_536)
    """Largest number of requests in flight at one server, each with one episode or group. The server may set
    a lower limit."""
    retries: int = Field(default=3, ge=0, le=1000)
    """Retries of a call that a server lost by a crash or an internal error. If the last retry fails too, the
    verdict of the call is an error. Retries after the refusal `busy` do not count."""
    connect_s: float = Field(default=60.0, gt=0)
    """Seconds that the start waits for a first server to answer."""
    outage_s: float = Field(default=120.0, gt=0)
    """Seconds for which calls wait while no server answers. Then the verdict of these calls is an error of
    the kind `unreachable`."""
    token_env: str = ""
    """Environment variable with the token."""
    token_file: Path | None = None
    """Absolute path of a file with the token."""
    ca_file: Path | None = None
    """File with the certificates that verify a server's certificate, for https with a private certificate
    authority."""

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
        """Return the token, or an empty text if none is configured. Raises `ValueError` with the field if a
        field names a token that is missing."""
        if self.token_env:
            found = os.environ.get(self.token_env, "")
            if not found:
                raise ValueError(f"token_env: the environment variable {self.token_env} is not set")
            return found
        return read_token(self.token_file) if self.token_file is not None else ""


def read_token(path: Path) -> str:
    """Return the text of the file at `path` without surrounding white space. Raises `ValueError`."""
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
        """Return the seconds that a call may wait for unavailable servers and retries."""
        try:
            given = RemoteArguments.model_validate(arguments)
        except ValidationError:
            return 0.0  # loading the reward reports the wrong arguments
        return given.outage_s + (given.retries + 1) * (timeout_s + ANSWER_GRACE_S)
