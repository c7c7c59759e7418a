"""The Redis client of tests, which look past the product at what is in a Redis."""

from __future__ import annotations

from pathlib import Path

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff


def connect(url: str) -> Redis:
    """A client of the server at `url`; it repeats nothing by itself."""
    return Redis.from_url(url, socket_timeout=20, retry=Retry(NoBackoff(), 0), protocol=2)


def documented_rights(job: str, role: str = "front") -> list[str]:
    """The rules of `ACL SETUSER` that docs/buffer.md gives the `front` or a `reader` of a job."""
    page = (Path(__file__).parents[1] / "docs" / "buffer.md").read_text().replace("\\\n", " ")
    (line,) = [line for line in page.splitlines() if line.startswith(f"ACL SETUSER areal-{role} ")]
    return line.replace("{JOB}", f"{{{job}}}").split()[5:]
