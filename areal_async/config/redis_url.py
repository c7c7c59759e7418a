"""The URLs of a Redis: what `buffer.redis` may hold.

    redis://[user@]host[:port][/db]                        rediss:// the same with TLS
    unix://[user@]/path[?db=N]
    sentinel://[user@]host[:port],host[:port]/service[/db]  sentinels:// the same with TLS

Pure: nothing is looked up, nothing is connected to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

SCHEMES = ("redis", "rediss", "unix", "sentinel", "sentinels")
FORMS = "`embedded`, redis://HOST:PORT/DB, rediss://… (TLS), unix:///PATH or sentinel://HOST:PORT,HOST:PORT/SERVICE"
REDIS_PORT = 6379
SENTINEL_PORT = 26379


@dataclass(frozen=True)
class RedisUrl:
    """The parts of a URL. `hosts` are Sentinels when `service` is set, else the server; none with `path`."""

    scheme: str
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)

    @property
    def tls(self) -> bool:
        return self.scheme in ("rediss", "sentinels")

    def __str__(self) -> str:
        """The URL without its password: for logs and errors."""
        user = f"{self.username}@" if self.username else ""
        if self.path:
            return f"unix://{user}{self.path}" + (f"?db={self.db}" if self.db else "")
        hosts = ",".join(host_port(host, port) for host, port in self.hosts)
        service = f"/{self.service}" if self.service else ""
        return f"{self.scheme}://{user}{hosts}{service}" + (f"/{self.db}" if self.db else "")


def parse_redis_url(url: str) -> RedisUrl:
    """Raises ValueError with what is wrong, in words that never hold the password."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        raise ValueError("this is not a Redis address")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    login, _, places = authority.rpartition("@")
    username, _, password = (unquote(part) for part in login.partition(":"))
    options = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
    username, password = options.pop("username", username), options.pop("password", password)
    given_db = options.pop("db", "")
    if options:
        raise ValueError(f"a Redis address has no parameter {', '.join(sorted(options))}")
    if scheme == "unix":
        if places:
            raise ValueError("a unix:// address has three slashes before its path, and no host")
        if not path:
            raise ValueError("the address names no socket")
        return RedisUrl(
            scheme, path="/" + unquote(path), db=_db(given_db), username=username, password=password
        )
    service = ""
    if scheme.startswith("sentinel"):
        service, _, path = path.partition("/")
        if not service:
            raise ValueError("the address does not name the service that the Sentinels watch")
    elif "," in places:
        raise ValueError("several hosts need sentinel://HOST:PORT,HOST:PORT/SERVICE")
    default = SENTINEL_PORT if service else REDIS_PORT
    hosts = tuple(_place(place, default) for place in places.split(","))
    return RedisUrl(
        scheme,
        hosts,
        service=unquote(service),
        db=_db(given_db or path),
        username=username,
        password=password,
    )


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _place(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        port = default_port if parts.port is None else parts.port
    except ValueError:
        raise ValueError("the address has no valid port") from None
    if not parts.hostname or port == 0:
        raise ValueError("the address names no host or port")
    return parts.hostname, port


def _db(text: str) -> int:
    if text and not text.isdecimal():
        raise ValueError("the database of the address is not a number")
    return int(text or 0)
