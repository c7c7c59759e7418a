"""Calibration at the start of a run, and the deadline of each test with its fixtures (pytest-timeout)."""

from __future__ import annotations

import os

import pytest

from tests.harness.calibration import deadline_s

TEST_FACTOR = 900.0


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Measure before the first worker starts. An option, `PYTEST_TIMEOUT` or a mark sets another deadline."""
    limit_s = deadline_s(TEST_FACTOR)
    if getattr(config.option, "timeout", 0) is None and "PYTEST_TIMEOUT" not in os.environ:
        config.option.timeout = limit_s
