from pathlib import Path

import pytest

from areal_async.config.reward import RewardSection
from reward_service.sdk import RewardInput

FILE = Path(__file__).with_name("misbehaving.py")


@pytest.fixture
def section():
    def build(function="behave", **settings):
        return RewardSection(**{"name": f"{FILE}:{function}", "timeout_s": 20.0, **settings})

    return build


@pytest.fixture
def call():
    def build(behaviour, **extra):
        return RewardInput(prompt="p", response=behaviour, ground_truth="1", extra_info=extra)

    return build
