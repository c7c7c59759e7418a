"""Profiles of hypothesis: `ci` draws fewer examples, the same in every run; `nightly` draws all, at random.

`AREAL_ASYNC_TEST_PROFILE` chooses. `make test-nightly` sets it, and then runs the tests of properties too. No
example has a deadline.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

VARIABLE = "AREAL_ASYNC_TEST_PROFILE"
PROFILE = os.environ.get(VARIABLE, "ci")
SHARE, FEWEST = 0.25, 10
"""Part of the examples that `ci` draws, and the smallest number that is worth the name."""


def examples(number: int, profile: str = PROFILE) -> int:
    """Return how many examples a test draws that draws `number` at night."""
    return number if profile == "nightly" else min(number, max(FEWEST, round(SHARE * number)))


settings.register_profile("nightly", deadline=None)
settings.register_profile(
    "ci", deadline=None, max_examples=examples(100, "ci"), derandomize=True, database=None, print_blob=True
)
settings.load_profile(PROFILE)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `-m nightly` choose the tests of properties where they draw more examples than in every run."""
    if PROFILE == "nightly":
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker(pytest.mark.nightly)
