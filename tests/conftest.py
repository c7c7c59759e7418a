"""Rules for all tests: a coroutine function is a test too, and a run ends with the reasons of skipped tests.
The plugins of `tests/harness` schedule test files, set deadlines and run a failed test again."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# What is imported and collected stays; to look through it again and again takes a good part of the time.
gc.disable()

# Processes that tests start find `tests` as these do.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
)

if TYPE_CHECKING:
    from tests.stores import S3Server

pytest_plugins = [
    f"tests.harness.{name}" for name in ("deadlines", "slot", "profiles", "lanes", "rerun", "breakdown")
]


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[S3Server]:
    from tests.stores import s3_server  # most tests have no use for it

    with s3_server() as server:
        yield server


@pytest.fixture
def s3(_s3_server: S3Server) -> Iterator[S3Server]:
    """The S3 server of this test process, running when the test begins."""
    _s3_server.start()
    yield _s3_server
    _s3_server.start()


FREE_SHARE = 0.1  # Of the disk of temporary files; tests that keep state in memory have it there


def pytest_configure() -> None:
    place = Path(tempfile.gettempdir())
    usage = shutil.disk_usage(place)
    if usage.free < FREE_SHARE * usage.total:
        share = f"{usage.free / usage.total:.0%} of the disk of {place} is free"
        pytest.exit(f"{share}, and the tests need {FREE_SHARE:.0%}. Make room, or set TMPDIR.", 4)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Remove sockets and shared memory of runs that this process claimed and did not release."""
    from areal_async.launch.folders import OWNER, Owner

    for root in (Path("/tmp"), Path("/dev/shm")):
        for owner in root.glob(f"areal-{os.getuid()}-*/{OWNER}"):
            if (held := Owner.read(owner)) is not None and held.pid == os.getpid():
                shutil.rmtree(owner.parent)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a reason, with how many tests it kept from running and in which folder."""
    skipped: Counter[tuple[str, str]] = Counter()
    for report in terminalreporter.getreports("skipped"):
        path, _, reason = report.longrepr
        folder = report.nodeid.rpartition("/")[0]
        skipped[reason.removeprefix("Skipped: "), folder or path] += 1
    if not skipped:
        return
    terminalreporter.section(f"{sum(skipped.values())} skipped, and why")
    for (reason, folder), times in skipped.most_common():
        terminalreporter.write_line(f"{times:4}  {reason} ({folder})")
