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
    try:
        parts = urlsplit(url)
        port = 6379 if parts.port is None else parts.port
    except ValueError:
        raise ValueError("the address has no valid port") from None
    options, is_socket, host = dict(parse_qsl(parts.query)), parts.scheme == "unix", parts.hostname or ""
    db = options.pop("db", "" if is_socket else parts.path[1:])
    username = options.pop("username", unquote(parts.username or ""))
    password = options.pop("password", unquote(parts.password or ""))
    for problem, is_wrong in (
        ("this is not a Redis address", "://" not in url or parts.scheme not in ("redis", "rediss", "unix")),
        (f"a Redis address has no parameter {', '.join(sorted(options))}", options),
        ("a unix:// address has three slashes before its path, and no host", is_socket and host),
        ("the address names no socket", is_socket and not parts.path),
        (
            "the address names several hosts, and a job is in one Redis",
            "," in parts.netloc.rpartition("@")[2],
        ),
        ("the address names no host or port", not is_socket and not (host and port)),
        ("the database of the address is not a number", db and not db.isdecimal()),
    ):
        if is_wrong:
            raise ValueError(problem)
    path = unquote(parts.path) if is_socket else ""
    return RedisUrl(parts.scheme, host, port, path, int(db or 0), username, password)
