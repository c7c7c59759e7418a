"""The tests of the harness write a history of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.history import VARIABLE


@pytest.fixture(scope="package", autouse=True)
def _own_history() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)
        yield
