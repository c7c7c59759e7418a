"""Ranks as processes of a benchmark's or a test's own, which meet as those that the supervisor starts."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from areal_async.launch.group import RankGroup
from areal_async.launch.plan import MODULES, rank_name
from areal_async.runtime.context import ServicePlace


def start_ranks(commands: Sequence[Sequence[str]], **options: Any) -> list[subprocess.Popen[str]]:
    """Start the ranks' `commands`, rank 0's first; `options` are further ones of `Popen`.

    In each process `Meeting.from_environment` says where they meet. Nobody listens for their pulses."""
    environment = options.pop("env", os.environ)
    started = []
    with closing(RankGroup(len(commands), hang_s=math.inf)) as group:
        for rank, command in enumerate(commands):
            place = ServicePlace(rank_name(rank), "trainer", rank, MODULES["trainer"], metrics_port=0)
            with group.starting(place) as (variables, given):
                env = {**environment, **variables, **{name: str(fd) for name, fd in given.items()}}
                fds = list(given.values())
                started.append(subprocess.Popen(command, text=True, env=env, pass_fds=fds, **options))
    return started
