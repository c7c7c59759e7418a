"""Rewards of a job that are as they should be; what is wrong with others is in `mistakes.txt`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_async.config.load import load_job


@pytest.mark.parametrize(
    "reward",
    [
        {
            "name": "arithmetic",
            "routes": [{"name": "exact_match", "data_source": "text*"}],
            "on_error": {"then": "mask"},
        },
        {"name": "own.py:close", "args": {"digits": 2}},
        {"name": "own.py:tournament", "scope": "group", "args": {"rounds": 1}},
        {"name": "own.py:hidden", "scope": "group", "args": {"whatever": 1}},
    ],
)
def test_a_good_reward_has_no_mistakes(folder: Path, reward: dict[str, Any]) -> None:
    load_job(folder / "job.yaml", [f"reward={json.dumps(reward)}"])


def test_code_in_routes_is_found_from_the_folder_of_the_job_file(folder: Path) -> None:
    job = load_job(folder / "job.yaml", ["reward.routes=[{name: 'own.py:many'}]"])
    assert job.reward.routes[0].name == f"{folder}/own.py:many"
