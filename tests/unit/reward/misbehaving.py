"""Rewards for the tests: each response names what the reward does."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from reward_service.sdk import Abstain, RewardInput, Score, reward

DESCRIPTORS = 4096  # More than a process of the tests has open; the link's number is its parent's


class Strange:
    def __str__(self):
        raise RuntimeError("no text")


class BadError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def raise_(error):
    raise error


def recurse(n=0):
    return recurse(n + 1) + 1


def recurse_in_c(n=0):
    return max([n], key=recurse_in_c)


def crash_the_stack():
    sys.setrecursionlimit(10**9)
    return recurse_in_c()


def spin():
    while True:
        pass


def deaf():
    for number in range(1, 64):
        if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
            signal.signal(number, signal.SIG_IGN)
    spin()


def start_children(given, then):
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    Path(given.extra_info["pids"]).write_text(" ".join(str(child.pid) for child in children))
    for child in children:
        child.returncode = 0  # else their objects warn that nobody waited for them
    return then()


def close_everything():
    os.closerange(3, DESCRIPTORS)
    return 1.0


def garble_every_descriptor():
    for fd in range(3, DESCRIPTORS):
        try:
            os.write(fd, b"\xff" * 64)
        except OSError:
            continue
    spin()


def count(given):
    with open(given.extra_info["log"], "a") as log:
        log.write(f"{os.getpid()}\n")
    return float(given.extra_info["value"])


BEHAVIOUR = {
    "raise": lambda g: raise_(ValueError("on purpose")), "raise unprintable": lambda g: raise_(BadError()),
    "raise huge": lambda g: raise_(ValueError("x" * 10_000_000)),
    "raise surrogate": lambda g: raise_(ValueError("\udcff")), "sys.exit": lambda g: sys.exit(3),
    "interrupt": lambda g: raise_(KeyboardInterrupt()), "memory error": lambda g: raise_(MemoryError()),
    "assert": lambda g: raise_(AssertionError()), "spin": lambda g: spin(),
    "sleep": lambda g: time.sleep(600), "deaf": lambda g: deaf(),
    "stop itself": lambda g: os.kill(os.getpid(), signal.SIGSTOP), "os._exit": lambda g: os._exit(3),
    "exit 0": lambda g: os._exit(0), "abort": lambda g: os.abort(), "segfault": lambda g: ctypes.string_at(0),
    "crash the stack": lambda g: crash_the_stack(), "deep recursion": lambda g: recurse(),
    "kill itself": lambda g: os.kill(os.getpid(), signal.SIGKILL),
    "close everything": lambda g: close_everything(), "garble": lambda g: garble_every_descriptor(),
    "children, hangs": lambda g: start_children(g, spin),
    "children, dies": lambda g: start_children(g, lambda: os._exit(5)),
    "children, returns": lambda g: start_children(g, lambda: 1.0), "nan": lambda g: float("nan"),
    "infinity": lambda g: float("-inf"), "too large": lambda g: 10**400, "none": lambda g: None,
    "text": lambda g: "1.0", "list": lambda g: [1.0], "strange": lambda g: Strange(), "complex": lambda g: 1j,
    "nan component": lambda g: Score(1.0, {"a": float("nan")}),
    "text component": lambda g: Score(1.0, {"a": "x"}), "text value": lambda g: Score("1.0"),
    "many components": lambda g: Score(1.0, {str(i): 1.0 for i in range(10_000)}),
    "print": lambda g: (print("hello\n" * 10), sys.stderr.write("\x00\xff\n"), 0.25)[-1],
    "print much": lambda g: (sys.stdout.write("x" * 50_000_000), 0.25)[-1],
    "print for ever": lambda g: [print("y" * 1000) for _ in iter(int, 1)],
    "score": lambda g: Score(0.5, {"format": 1, "answer": 0.0}), "abstain": lambda g: Abstain("too short"),
    "true": lambda g: True, "integer": lambda g: 3, "count": count, "value": lambda g: g.extra_info["value"],
    "nap": lambda g: (time.sleep(g.extra_info["seconds"]), 1.0)[-1],
    "version": lambda g: float(g.episode.min_version),
    "imports": lambda g: float(any(name in sys.modules for name in ("torch", "transformers", "numpy"))),
}  # fmt: skip


@reward
def behave(given: RewardInput):
    return BEHAVIOUR[given.response](given)


@reward
async def behave_async(given: RewardInput):
    await asyncio.sleep(0)
    result = BEHAVIOUR[given.response](given)
    await asyncio.sleep(0.001)
    return result


def not_marked(given):
    return 1.0
