"""Ranks as processes of a benchmark's or a test's own, which meet as those that the supervisor starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_async.base.topology import ServicePlace
from areal_async.launch.local_launcher import RankLines
from areal_async.launch.one_host import LOOPBACK
from areal_async.launch.plan import MODULES, rank_name


def as_program(
    command: Sequence[str], environment: Mapping[str, str], given: Mapping[str, int], **options: Any
) -> subprocess.Popen[str]:
    """`given` are descriptors that the process is to have, by the variables that name them."""
    env = {**environment, **{name: str(fd) for name, fd in given.items()}}
    return subprocess.Popen(command, text=True, env=env, pass_fds=[*given.values()], **options)


def start_ranks(
    commands: Sequence[Sequence[str]], *, start: Callable[..., Any] = as_program, **options: Any
) -> list[Any]:
    """Start the ranks' `commands` by `start`, rank 0's first; `options` are further ones of `Popen`.

    In each process `Meeting.from_environment` says where they meet. Nobody listens for their pulses."""
    environment = options.pop("env", os.environ)
    started, lines = [], RankLines(LOOPBACK, several=len(commands) > 1)
    for rank, command in enumerate(commands):
        place = ServicePlace(rank_name(rank), "trainer", rank, MODULES["trainer"], metrics_port=0)
        variables, given, line_fd = lines.prepare(place)
        started.append(start(command, {**environment, **variables}, given, **options))
        for fd in (*given.values(), line_fd):
            if fd is not None:
                os.close(fd)
    return started
