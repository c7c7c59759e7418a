"""What every run of the tests ends with: which tests were skipped, and what they would have needed."""

from __future__ import annotations

from collections import Counter

import pytest


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
