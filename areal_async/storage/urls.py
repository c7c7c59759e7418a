"""Local paths of URLs.

A URL is `protocol://place` of anything that fsspec knows: `s3://bucket/models/tiny`, `gs://…`, `file:///…`.
Each URL has one path below the cache folder, `<cache>/s3/bucket/models/tiny`, and each such path has one URL.
A job therefore contains only local paths, is shown and passed on with URLs, and each host converts them to
its own paths. The cache folder is `~/.cache/areal-async`, or the value of the environment variable
`AREAL_ASYNC_CACHE`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer
from pydantic_core import PydanticCustomError

from areal_async.base.cache import cache_root

FORM = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)", re.DOTALL)
ROOT = "@root"  # Stands in a local path for the slash that `file:///…` begins its place with
EXTRAS = {"s3": "s3", "s3a": "s3"}
"""Extras of this project that bring the package of a protocol."""


def is_url(value: object) -> bool:
    """Return whether the value is a text of the form `protocol://…`."""
    return isinstance(value, str) and FORM.fullmatch(value) is not None


def joined(url: str, *names: str) -> str:
    return "/".join((url.rstrip("/"), *names))


def url_problem(url: str) -> tuple[str, str] | None:
    """Return the mistake in the form of a URL, and the fix; None for a good one."""
    found = FORM.fullmatch(url)
    if found is None:
        return f"{url!r} is no URL", "Write protocol://place, for example s3://bucket/folder"
    place = found[2]
    if "@" in place.split("/")[0]:
        return "the URL holds a password, and job files are copied and shown", "Leave it to the environment"
    if "::" in url or any(sign in place for sign in "?#*[]\\\n\0"):
        return (
            f"{url} holds a sign that no place here can have",
            "Leave out ::, ?, #, *, [, ] and backslashes",
        )
    parts = place.strip("/").split("/")
    if any(part in ("", ".", "..", ROOT) for part in parts):
        return f"{url} does not name one place", "Leave out `//`, `.` and `..`"
    return None


def protocol_problem(url: str) -> tuple[str, str] | None:
    """Return why this host cannot use URLs of this protocol, and the fix; None if it can."""
    protocol = url.partition(":")[0]
    import fsspec  # not at the top: most jobs have no URL
    from fsspec.registry import known_implementations, registry

    if protocol not in known_implementations and protocol not in registry:
        return (
            f"no file system is known by the name {protocol}",
            "Use s3://, gs://, file:// or another of fsspec's, or install the package that brings it",
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        fix = f"Install it with `pip install 'areal-async[{extra}]'`" if extra else "Install that package"
        return f"{protocol}:// needs a package that is not installed here ({error})", fix
    return None


def local_path(url: str) -> Path:
    """Return the local path for `url`. Raises ValueError if it is no URL."""
    found = FORM.fullmatch(url)
    if found is None:
        raise ValueError(f"{url} is no URL")
    protocol, place = found.groups()
    root = (ROOT,) if place.startswith("/") else ()
    return cache_root().joinpath(protocol, *root, *place.strip("/").split("/"))


def url_of(path: Path) -> str | None:
    """Return the URL that has the local path `path`; None for other paths."""
    try:
        protocol, *parts = path.relative_to(cache_root()).parts
    except ValueError:
        return None
    if not parts or parts == [ROOT]:
        return None
    place = "/".join(["", *parts[1:]] if parts[0] == ROOT else parts)
    return f"{protocol}://{place}"


def shown(path: Path) -> str:
    """Return the path for messages: as its URL if it has one."""
    return url_of(path) or str(path)


def _as_path(value: Any) -> Any:
    """Return the local path of a URL; other values unchanged."""
    return str(local_path(_checked(value))) if is_url(value) else value


def _checked(url: str) -> str:
    if (problem := url_problem(url)) is not None:
        raise PydanticCustomError("url", "{problem}. {fix}", {"problem": problem[0], "fix": problem[1]})
    return url.rstrip("/")


def _as_written(path: Path | None) -> str | None:
    return None if path is None else shown(path)


FETCHED = (BeforeValidator(_as_path), PlainSerializer(_as_written, when_used="json"))
"""Marks a path field that takes a URL too: it holds the local path, and is written as JSON with the URL."""
StoreUrl = Annotated[str, AfterValidator(_checked)]
