"""Local paths of URLs.

A URL is `protocol://place` for any file system of fsspec: `s3://bucket/models/tiny`, `gs://…`, `file:///…`.
Each URL has one path below the cache folder, such as `<cache>/s3/bucket/models/tiny`, and each such path has
one URL. Therefore a job contains only local paths, and every such path can be shown as its URL. Outputs and
messages have URLs, and each host derives its own paths from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer
from pydantic_core import PydanticCustomError

from areal_async.base.cache import cache_root

FORM = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)", re.DOTALL)
ROOT = "@root"  # Stands in a local path for the slash at the start of a `file:///…` place
EXTRAS = {"s3": "s3", "s3a": "s3"}
"""Extras of this project that install the package of a protocol."""


def is_url(value: object) -> bool:
    """Return whether the value is a text of the form `protocol://…`."""
    return isinstance(value, str) and FORM.fullmatch(value) is not None


def joined(url: str, *names: str) -> str:
    return "/".join((url.rstrip("/"), *names))


def url_problem(url: str) -> tuple[str, str] | None:
    """Return (problem, fix) for a malformed URL, or None if the URL is correct."""
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
    """Return (problem, fix) if this host cannot use URLs of this protocol, or None if it can."""
    protocol = url.partition(":")[0]
    import fsspec  # Imported here because most jobs have no URL
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
    """Return the local path for `url`. Raises ValueError if it is not a URL."""
    found = FORM.fullmatch(url)
    if found is None:
        raise ValueError(f"{url} is no URL")
    protocol, place = found.groups()
    root = (ROOT,) if place.startswith("/") else ()
    return cache_root().joinpath(protocol, *root, *place.strip("/").split("/"))


def url_of(path: Path) -> str | None:
    """Return the URL of the local path `path`, or None for other paths."""
    try:
        protocol, *parts = path.relative_to(cache_root()).parts
    except ValueError:
        return None
    if not parts or parts == [ROOT]:
        return None
    place = "/".join(["", *parts[1:]] if parts[0] == ROOT else parts)
    return f"{protocol}://{place}"


def shown(path: Path) -> str:
    """Return the path for messages. If it has a URL, return the URL."""
    return url_of(path) or str(path)


def _as_path(value: Any) -> Any:
    """Return the local path of a URL. Return other values unchanged."""
    return str(local_path(_checked(value))) if is_url(value) else value


def _checked(url: str) -> str:
    if (problem := url_problem(url)) is not None:
        raise PydanticCustomError("url", "{problem}. {fix}", {"problem": problem[0], "fix": problem[1]})
    return url.rstrip("/")


def _as_written(path: Path | None) -> str | None:
    return None if path is None else shown(path)


FETCHED = (BeforeValidator(_as_path), PlainSerializer(_as_written, when_used="json"))
"""Annotations of a path field that also accepts a URL. The field holds the local path; its JSON form is the
URL."""
StoreUrl = Annotated[str, AfterValidator(_checked)]
