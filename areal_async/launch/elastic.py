"""Which workers join or leave a running job. Pure, but for the look at who holds a name.

The newest leave first. One that joins takes the lowest free number: names, and with them logs and metrics,
stay few however often a job is scaled.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_async.errors import FaultError
from areal_async.runtime.context import ServicePlace

MAX_WORKERS = 256
"""Of one run on one host: more is taken for a slip of the finger."""


def workers_to_change(
    staying: Sequence[ServicePlace], wanted: int, module: str, is_taken: Callable[[str], bool]
) -> tuple[list[ServicePlace], list[ServicePlace]]:
    """Who must join and who must leave for `wanted` of the workers to be there; `staying`, oldest first, are
    there and are not leaving. Raises `FaultError`."""
    if not 1 <= wanted <= MAX_WORKERS:
        raise FaultError("invalid", f"a run has 1 to {MAX_WORKERS} workers, not {wanted}")
    free = (number for number in itertools.count() if not is_taken(f"rollout-{number}"))
    joining = [
        # Port 0: the consecutive ones are those of the services that the job began with.
        ServicePlace(f"rollout-{number}", "rollout", number, module, 0)
        for number in itertools.islice(free, max(0, wanted - len(staying)))
    ]
    return joining, list(reversed(staying[wanted:]))


def worker_to_drain(staying: Sequence[ServicePlace], name: str) -> ServicePlace:
    """The worker called `name`. Raises `FaultError` where it is none, or the last."""
    place = next((place for place in staying if place.name == name), None)
    names = ", ".join(place.name for place in staying)
    if place is None:
        raise FaultError(
            "invalid",
            f"{name} is no worker of this run, or leaves already. Its workers are {names}; one that was "
            "started by hand is drained with --outside",
        )
    if len(staying) == 1:
        raise FaultError(
            "invalid", f"{name} is the only worker, and nothing would be generated. Scale to 2 first"
        )
    return place


def name_is_held(socket_dir: Path, name: str) -> bool:
    """Whether a process works by this name (see `rollout_service/service.py`)."""
    try:
        lock_fd = os.open(socket_dir / f"{name}.name", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock_fd)
    return False
