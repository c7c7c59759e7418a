"""Parser of the Redis URLs in `buffer.redis`.

redis://[user@]host[:port][/db]        rediss:// the same with TLS
unix://[user@]/path[?db=N]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

FORMS = "`embedded`, redis://HOST:PORT/DB, rediss://… (TLS) or unix:///PATH"


@dataclass(frozen=True)
class RedisUrl:
    """The parts of a URL: a host and port, or the path of a socket. `str()` omits the password."""

    scheme: str
    host: str = ""
    port: int = 6379
    path: str = ""
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)

    @property
    def tls(self) -> bool:
        return self.scheme == "rediss"

    def __str__(self) -> str:
        user = f"{self.username}@" if self.username else ""
        if self.path:
            return f"unix://{user}{self.path}" + (f"?db={self.db}" if self.db else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{user}{host}:{self.port}" + (f"/{self.db}" if self.db else "")


def parse_redis_url(url: str) -> RedisUrl:
    """Return the parts of a URL. Raises ValueError; its text never contains the password."""
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in ("redis", "rediss", "unix"):
        raise ValueError("this is not a Redis address")
    try:
        parts = urlsplit(url)
        port = 6379 if parts.port is None else parts.port
    except ValueError:
        raise ValueError("the address has no valid port") from None
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    username = options.pop("username", unquote(parts.username or ""))
    password = options.pop("password", unquote(parts.password or ""))
    db = options.pop("db", "")
    if options:
        raise ValueError(f"a Redis address has no parameter {', '.join(sorted(options))}")
    if scheme == "unix":
        if parts.hostname:
            raise ValueError("a unix:// address has three slashes before its path, and no host")
        if not parts.path:
            raise ValueError("the address names no socket")
        return RedisUrl(scheme, path=unquote(parts.path), db=_db(db), username=username, password=password)
    if "," in parts.netloc.rpartition("@")[2]:
        raise ValueError("the address names several hosts, and a job is in one Redis")
    if not parts.hostname or port == 0:
        raise ValueError("the address names no host or port")
    number = _db(db or parts.path[1:])
    return RedisUrl(scheme, parts.hostname, port, db=number, username=username, password=password)


def _db(text: str) -> int:
    if text and not text.isdecimal():
        raise ValueError("the database of the address is not a number")
    return int(text or 0)
