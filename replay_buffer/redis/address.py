"""Address and login of a job's Redis, and the errors between the buffer and Redis."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field, replace
from typing import Literal

from areal_async.base.errors import ArealError
from areal_async.config.job import BufferSection, RedisLoginSection, RedisTlsSection
from areal_async.config.redis_url import RedisUrl, parse_redis_url


@dataclass(frozen=True)
class RedisAddress:
    """A Redis URL, and the sources of its user name and password. `str()` and `repr()` never show a
    secret."""

    url: RedisUrl
    login: RedisLoginSection = field(default_factory=RedisLoginSection)
    tls: RedisTlsSection = field(default_factory=RedisTlsSection)

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Return the address for a URL without further settings. Raises `StoreUnusable`."""
        try:
            return cls(parse_redis_url(url))
        except ValueError as error:
            raise StoreUnusable(f"{error}: look at buffer.redis") from None

    @classmethod
    def of(cls, section: BufferSection) -> RedisAddress:
        """Return the address that a job file gives. `section.redis` must not be `embedded`."""
        return replace(cls.parse(section.redis), login=section.redis_login, tls=section.redis_tls)

    def __str__(self) -> str:
        return str(self.url)

    @property
    def user(self) -> str:
        """Name of the Redis user for the login."""
        return self.url.username or "default"

    def password(self) -> str:
        """Password, read on each access, because a file may have changed. Raises `StoreUnusable` if it is
        missing."""
        name, path = self.login.password_env, self.login.password_file
        if self.url.password:
            return self.url.password
        if name:
            if secret := os.environ.get(name):
                return secret
            raise StoreUnusable(
                f"the environment variable {name} (buffer.redis_login) is not set, or is empty"
            )
        if path is None:
            return ""
        try:
            secret = path.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, ValueError) as error:
            raise StoreUnusable(
                f"the password file {path} (buffer.redis_login) cannot be read: {error}"
            ) from None
        if not secret:
            raise StoreUnusable(f"the password file {path} (buffer.redis_login) is empty")
        return secret

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context, or None without TLS. Raises `StoreUnusable` for files without a certificate
        or key."""
        if not self.url.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls.ca_file)
            context.check_hostname = self.tls.check_hostname
            if self.tls.cert_file is not None:
                # Without a password, OpenSSL would ask for a passphrase on the terminal.
                context.load_cert_chain(self.tls.cert_file, self.tls.key_file, password=lambda: "")
        except (OSError, ValueError) as error:
            raise StoreUnusable(
                f"the certificates of buffer.redis_tls cannot be used: {error}. Give PEM files, the key "
                "without a passphrase and belonging to the certificate"
            ) from error
        return context


# --- errors between the buffer and Redis ---


Trouble = Literal["gone", "disk", "memory", "replica", "refused"]
"""Reasons why Redis accepts no writes: it does not answer (`gone`), cannot write to its disk, is at its
memory limit, or is not the master (`replica`). `refused` is any other reason."""


class StoreError(ArealError):
    """Base of the store's errors."""


class StoreUnavailable(StoreError):
    """Redis does not answer, or has refused a write. It is unknown whether an unacknowledged write was
    stored. Once the index is rebuilt, the client can send the same message again."""

    restart_helps = True

    def __init__(self, message: str, trouble: Trouble = "refused") -> None:
        super().__init__(message)
        self.trouble: Trouble = trouble


class StoreFenced(StoreError):
    """Another front has taken over the job. This front must end."""


class StoreUnusable(StoreError):
    """This Redis cannot hold the ledger as configured, or its content does not belong to this job."""


REFUSALS: tuple[tuple[str, Trouble, str], ...] = (
    ("MISCONF", "disk", "Redis cannot write to its disk; free room there, and writing goes on by itself"),
    ("OOM ", "memory", "Redis is at its maxmemory; raise it, or free memory, and writing goes on by itself"),
    ("READONLY", "replica", "it is a replica now; the buffer waits until it is the master again"),
    ("MASTERDOWN", "replica", "it is a replica now; the buffer waits until it is the master again"),
    ("NOREPLICAS", "replica", "the master has fewer replicas than its min-replicas-to-write"),
    ("NOPERM", "refused", "give the user the rights in docs/buffer.md#use-your-own-redis"),
    ("MOVED", "refused", "this node of the cluster does not serve the job's keys: name the one that does"),
    ("CLUSTERDOWN", "gone", "the cluster is not whole; it serves again when it is"),
)


def refusal(answer: str) -> StoreUnavailable:
    """Return the exception for an error reply of Redis, from a command or a script. Its message says what to
    do."""
    for code, trouble, fix in REFUSALS:
        if code in answer:
            said = answer[answer.index(code) :]  # without a script's traceback in front
            return StoreUnavailable(f"Redis refused: {said} ({fix})", trouble)
    return StoreUnavailable(f"Redis refused: {answer}")
