"""A failed test runs once more, alone in its worker, after the fixtures of its file are torn down.

A test that passes then is flaky. It counts as passed, is named at the end of the run with the text of its
first failure, and is written to the history at once. A test that fails twice has failed. `--no-rerun` turns
this off.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from _pytest.runner import runtestprotocol

from tests.harness import history

RERUN = "rerun"
"""Outcome of the first attempt, in place of `failed`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-rerun", action="store_true", help="do not run a failed test a second time")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if item.config.option.no_rerun or item.config.option.usepdb:
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    failed = [report for report in reports if report.failed]
    if failed:
        for report in failed:
            report.outcome = RERUN  # type: ignore[assignment]
            hook.pytest_runtest_logreport(report=report)
        start_afresh(item)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def start_afresh(item: pytest.Item) -> None:
    """Tear down the fixtures of the test's file and all that failed; give the test its whole time again."""
    file = item.getparent(pytest.File)
    fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    try:
        item.session._setupstate.teardown_exact(file and file.parent)
        for fixture in itertools.chain.from_iterable(fixtures.values()):
            if fixture.cached_result is not None and fixture.cached_result[2] is not None:
                fixture.finish(SimpleNamespace(node=item))  # otherwise it raises the same error again
    except Exception as error:
        print(f"Fixtures of {item.nodeid} could not be torn down: {error!r}")
    item._report_sections.clear()
    if item.config.pluginmanager.hasplugin("timeout"):
        from pytest_timeout import _get_item_settings

        settings = _get_item_settings(item)
        item.config.hook.pytest_timeout_cancel_timer(item=item)
        if settings.timeout and not settings.func_only:
            item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)


def pytest_report_teststatus(
    report: pytest.TestReport,
) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    if report.outcome == RERUN:
        return RERUN, "R", ("RERUN", {"yellow": True})
    return None


class Flaky:
    """Tests that failed once, and those that then passed, with the texts of their first failures."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._first: dict[str, str] = {}
        self.passed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        if report.outcome == RERUN:
            text = f"{report.when}:\n{report.longreprtext}"
            self._first[test] = "\n".join(filter(None, [self._first.get(test), text]))
        elif report.failed:
            self._first.pop(test, None)
        elif report.when == "teardown" and test in self._first:
            self.passed[test] = self._first.pop(test)
            history.append(self._config, kind="flaky", test=test, failure=self.passed[test][-4000:])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.passed:
            return
        terminalreporter.section(f"{len(self.passed)} flaky: failed once, then passed", yellow=True)
        for test, failure in self.passed.items():
            terminalreporter.write_line(f"FLAKY {test}", yellow=True)
            terminalreporter.write_line(failure)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Flaky(config), "flaky")
