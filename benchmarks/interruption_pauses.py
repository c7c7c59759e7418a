"""When the machine itself stood still: a process that only sleeps notes how late it wakes.

A virtual machine may be stopped for seconds without being told. Such a pause has nothing to do with what is
measured, and at one in a minute it costs more than what is measured.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

SLEEP_S, LATE_S = 0.02, 0.1


class Pauses:
    """Watches while it is open. More processes than cores delay a sleeper as well, but by milliseconds."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> Pauses:
        self._process = subprocess.Popen([sys.executable, __file__, str(self._file)])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def between(self, begin_s: float, end_s: float) -> float:
        """Seconds of `time.monotonic` in which it stood still."""
        total = 0.0
        for line in self._file.read_text().splitlines():
            from_s, to_s = map(float, line.split())
            total += max(0.0, min(end_s, to_s) - max(begin_s, from_s))
        return total


def watch(file: Path) -> None:
    with file.open("w") as out:
        before_s = time.monotonic()
        while True:
            time.sleep(SLEEP_S)
            now_s = time.monotonic()
            if now_s - before_s > SLEEP_S + LATE_S:
                print(before_s + SLEEP_S, now_s, file=out, flush=True)
            before_s = now_s


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
