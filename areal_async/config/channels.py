"""Rules of `weights.addresses`. What a channel asks of the job, it says itself: see `weights/channels`."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from areal_async.config.errors import Mistake
from areal_async.config.job import JobConfig


def hosts_can_be_reached(job: JobConfig) -> Iterator[Mistake]:
    """Each address can be listened on, and one beyond loopback only with keys."""
    for node, address in job.weights.addresses.items():
        try:
            loopback = ipaddress.ip_address(address).is_loopback
            usable = not ipaddress.ip_address(address).is_unspecified
        except ValueError:
            loopback, usable = False, False
        if not usable:
            problem = f"{address!r} (of {node}) is no address at which others could reach that host"
            yield Mistake("weights.addresses", problem, "Give the IP address of one of its interfaces")
        elif not loopback and job.weights.key_file is None:
            problem = f"{address} (of {node}) is reachable from other machines, and no keys are given"
            fix = "Make some with `python -m areal_async.weights.keys FILE`, and name the file"
            yield Mistake("weights.key_file", problem, fix, ("weights.addresses",))
