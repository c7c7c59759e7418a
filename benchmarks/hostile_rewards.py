"""A reward function that misbehaves when its input says so; for `hostile.py`."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any

from reward_service.sdk import RewardInput, reward


@reward
def mixed(given: RewardInput) -> Any:
    """The number of the input, or what `extra_info.hostile` names."""
    kind = given.extra_info.get("hostile")
    if kind is None:
        return sum(range(20_000)) % 97 + given.extra_info["number"]
    return HOSTILE[kind]()


def _segfault() -> None:
    ctypes.string_at(0)


def _loop() -> None:
    while True:
        pass


def _no_signals() -> None:
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(1000)


def _output() -> float:
    for _ in range(64):
        os.write(1, b"x" * (1 << 17))
    return 0.5


def _zombies() -> float:
    for _ in range(5):
        if os.fork() == 0:
            os._exit(0)
    return 0.5


def _children() -> float:
    for _ in range(3):
        subprocess.Popen(["/bin/sleep", "1000"])
    os._exit(7)


def _deep() -> float:
    def down(n: int) -> int:
        return down(n + 1) + 1

    sys.setrecursionlimit(10**9)
    return down(0)


def _clock() -> None:
    time.time = time.monotonic = time.perf_counter = lambda: 0.0
    while time.monotonic() < 1:
        pass


class Reducing(float):
    def __reduce__(self) -> Any:
        return os._exit, (9,)


def _stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


HOSTILE = {
    "segfault": _segfault,
    "infinite loop": _loop,
    "signals blocked": _no_signals,
    "much output": _output,
    "zombie children": _zombies,
    "children and os._exit": _children,
    "deep recursion": _deep,
    "clock trick": _clock,
    "stop itself": _stopped,
    "os._exit": lambda: os._exit(3),
    "__reduce__": lambda: Reducing(0.5),
    "object": object,
}
