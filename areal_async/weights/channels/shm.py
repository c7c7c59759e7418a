"""Channel `shm`: receivers of the trainer's host read where the trainer wrote, in shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from areal_async.config.errors import Mistake
from areal_async.config.job import JobConfig
from areal_async.weights.channels import Channel, no_directory, one_host


class Shm(Channel):
    @staticmethod
    def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        yield from no_directory(job)
        yield from one_host(job)
