"""Where a job's Redis is and how to log in there.

A `RedisAddress` is what the job file says; a `RedisServer` is one server of it, with the secrets to log in.
Neither shows a secret: `str()` of both is for logs and errors, and passwords are left out of `repr()`.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from areal_async.config.job import BufferSection, RedisLoginSection, RedisTlsSection
from areal_async.config.redis_url import RedisUrl, host_port, parse_redis_url
from areal_async.errors import ArealError


def tls_context(tls: RedisTlsSection) -> ssl.SSLContext:
    """Raises `StoreUnusable` for files that hold no certificate or key."""
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
        context.check_hostname = tls.check_hostname
        if tls.cert_file is not None:
            # Without a password OpenSSL would ask for a passphrase at the terminal.
            context.load_cert_chain(tls.cert_file, tls.key_file, password=lambda: "")
    except (OSError, ValueError) as error:
        raise StoreUnusable(
            f"the certificates of buffer.redis_tls cannot be used: {error}. Give PEM files, the key without "
            "a passphrase and belonging to the certificate"
        ) from error
    return context


@dataclass(frozen=True)
class RedisServer:
    """One server, by host and port or by socket path."""

    host: str = ""
    port: int = 0
    path: str = ""
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: RedisTlsSection | None = None
    hint: str = ""
    """Where to change what is wrong with logging in."""

    def __str__(self) -> str:
        return self.path or host_port(self.host, self.port)

    @property
    def user(self) -> str:
        """Who it logs in as, in Redis's own words."""
        return self.username or "default"


@dataclass(frozen=True)
class RedisAddress:
    """A URL with the places of its secrets. `str()` is the URL without a password."""

    url: RedisUrl
    login: RedisLoginSection = field(default_factory=RedisLoginSection)
    tls: RedisTlsSection = field(default_factory=RedisTlsSection)

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """The address of a bare URL. Raises `StoreUnusable`."""
        try:
            return cls(parse_redis_url(url))
        except ValueError as error:
            raise StoreUnusable(f"{error}: look at buffer.redis") from None

    @classmethod
    def of(cls, section: BufferSection) -> RedisAddress:
        """The address that a job file gives; `section.redis` must not be `embedded`."""
        return replace(cls.parse(section.redis), login=section.redis_login, tls=section.redis_tls)

    def __str__(self) -> str:
        return str(self.url)

    @property
    def has_sentinels(self) -> bool:
        return bool(self.url.service)

    def place(self, at: tuple[str, int] | None = None) -> RedisServer:
        """The server itself, or with `at` the master that the Sentinels named. Secrets are read now: a file
        may have changed. Raises `StoreUnusable` when one is missing."""
        url = self.url
        if self.has_sentinels and at is None:
            raise StoreUnusable(f"{self}: only its Sentinels know where the server is")
        host, port = at or (url.hosts[0] if url.hosts else ("", 0))
        password = url.password or _secret(self.login, "")
        hint = "buffer.redis_login.password_env or password_file, and the user in buffer.redis"
        return RedisServer(host, port, url.path, url.db, url.username, password, self._tls, hint)

    def sentinels(self) -> list[RedisServer]:
        """The Sentinels, with their own login."""
        password = _secret(self.login, "sentinel_")
        hint = "buffer.redis_login.sentinel_…"
        return [
            RedisServer(
                host,
                port,
                username=self.login.sentinel_username,
                password=password,
                tls=self._tls,
                hint=hint,
            )
            for host, port in self.url.hosts
        ]

    @property
    def _tls(self) -> RedisTlsSection | None:
        return self.tls if self.url.tls else None


def _secret(login: RedisLoginSection, prefix: str) -> str:
    name: str = getattr(login, f"{prefix}password_env")
    path: Path | None = getattr(login, f"{prefix}password_file")
    if name:
        if secret := os.environ.get(name):
            return secret
        raise StoreUnusable(f"the environment variable {name} (buffer.redis_login) is not set, or is empty")
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


# --- what can go wrong between the buffer and Redis ---


Trouble = Literal["gone", "disk", "memory", "replica", "refused"]
"""Why Redis takes no writes: it does not answer, cannot write to its disk, is at its memory limit, is not the
master, or says something else."""


class StoreError(ArealError):
    """Base of the errors of the store."""


class StoreUnavailable(StoreError):
    """Redis does not answer, or refused a write. What was not acknowledged may or may not be written; after
    a rebuild of the index the same message can be asked again."""

    restart_helps = True

    def __init__(self, message: str, trouble: Trouble = "refused") -> None:
        super().__init__(message)
        self.trouble: Trouble = trouble


class StoreFenced(StoreError):
    """Another front has taken over the job. This one must end."""


class StoreUnusable(StoreError):
    """This Redis cannot hold the ledger as configured, or what it holds is not this job's."""


REFUSALS: tuple[tuple[str, Trouble, str], ...] = (
    ("MISCONF", "disk", "Redis cannot write to its disk; free room there, and writing goes on by itself"),
    ("OOM ", "memory", "Redis is at its maxmemory; raise it, or free memory, and writing goes on by itself"),
    ("READONLY", "replica", "it is a replica now; the buffer looks for the master"),
    ("MASTERDOWN", "replica", "it is a replica now; the buffer looks for the master"),
    ("NOREPLICAS", "replica", "the master has fewer replicas than its min-replicas-to-write"),
    ("NOPERM", "refused", "give the user the rights in docs/redis.md"),
    ("MOVED", "refused", "this node of the cluster does not serve the job's keys: name the one that does"),
    ("CLUSTERDOWN", "gone", "the cluster is not whole; it serves again when it is"),
)


def refusal(answer: str) -> StoreUnavailable:
    """What an error answer of Redis, of a command or out of a script, means for whoever waits, and what to do
    about it."""
    for code, trouble, fix in REFUSALS:
        if code in answer:
            said = answer[answer.index(code) :]  # without what a script's traceback puts in front
            return StoreUnavailable(f"Redis refused: {said} ({fix})", trouble)
    return StoreUnavailable(f"Redis refused: {answer}")
