"""What is wrong with the arguments of verifiers is said where the job file is read."""

from __future__ import annotations

import re
from typing import Any

import pytest

from areal_async.config.reward import RewardSection
from areal_async.config.rewardcheck import section_mistakes


def mistakes(name: str, args: dict[str, Any]) -> list[str]:
    return [str(mistake) for mistake in section_mistakes(RewardSection(name=name, args=args))]


GOOD = [
    ("math", {"where": "boxed", "tolerance": 0}),
    ("json_schema", {"schema": {"type": "object"}}),
    ("weighted", {"parts": [{"name": "math"}, {"name": "overlong", "args": {"limit": 10, "buffer": 5}}]}),
]


@pytest.mark.parametrize(("name", "args"), GOOD)
def test_arguments_that_are_right_are_accepted(name, args):
    assert mistakes(name, args) == []


BAD = [
    ("math", {"were": "boxed"}, r"reward\.args\.were.*math has no argument 'were'.*where, tolerance"),
    ("json_schema", {"scheme": {}}, "has no argument 'scheme'.*It takes schema, where"),
    ("json_schema", {"schema": {"type": "nothing"}}, "not a valid JSON schema"),
    ("overlong", {"limit": 10}, r"reward\.args\.buffer.*overlong needs 'buffer'"),
    ("regex", {"pattern": "("}, "no regular expression"),
    (
        "weighted",
        {"parts": [{"name": "math", "args": {"tolerance": -1}}]},
        r"reward\.args\.parts\.0\.args\.tolerance",
    ),
    ("weighted", {"parts": [{"name": "maths"}]}, r"reward\.args\.parts\.0\.name.*no reward 'maths'"),
    ("weighted", {"parts": [{"name": "math"}, {"name": "math"}]}, "two parts are called 'math'.*label"),
]


@pytest.mark.parametrize(("name", "args", "message"), BAD)
def test_a_mistake_names_the_argument_and_what_is_taken(name, args, message):
    found = mistakes(name, args)
    assert len(found) == 1
    assert re.search(message, found[0].replace("\n", " ")), found[0]
