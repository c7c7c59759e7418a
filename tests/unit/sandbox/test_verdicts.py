"""A verdict cannot be forged: whose names, whose files and whose answers the tests of a task believe."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from code_matrix import code_matrix
from forge import ARGS, forged_ones, judged, right_ones

from areal_async.base.verdicts import Failure, Score
from reward_service.sdk import RewardInput
from reward_service.verifiers.code_rewards import code_tests

SAYS = '{"passed": true, "asked": true, "live": false, "why": ""}\\n'
EVERYWHERE = f"""
import os
for fd in range(64):
    try: os.write(fd, b'{SAYS}' * 4)
    except OSError: pass
"""


def value(program: str, truth: Any, **arguments: Any) -> float:
    given = RewardInput(response=f"````python\n{program}\n````", ground_truth=truth)
    verdict = code_tests(given, **arguments)
    assert isinstance(verdict, Score)
    return verdict.value


@pytest.mark.slow
def test_no_program_that_computes_nothing_right_passes_and_right_ones_do():
    """The quick form of `benchmarks/forge.py`: 200 programs over all tasks."""
    forged, right = list(forged_ones(110)), list(right_ones())
    assert len(forged) >= 200
    assert len({what.partition(":")[0] for what, *_ in forged}) == 10
    verdicts = asyncio.run(judged([one[-1] for one in forged], 2, ARGS))
    pairs = zip(forged, verdicts, strict=True)
    assert [one[:2] for one, verdict in pairs if isinstance(verdict, Score) and verdict.value > 0] == []
    assert [verdict for verdict in verdicts if isinstance(verdict, Failure)] == []
    patient = {"cpu_s": 20.0, "wall_s": 24.0, "budget_s": 25.0}
    verdicts = asyncio.run(judged([one[-1] for one in right], 2, patient))
    assert [(one[0], two) for one, two in zip(right, verdicts, strict=True) if two.value != 1] == []


@pytest.mark.parametrize("module", ["copy", "numpy", "unittest", "datetime"])
def test_no_file_of_the_program_is_imported_by_its_tests(module):
    """The file says that the tests passed, and stands in for whatever they use."""
    stand_in = f"{EVERYWHERE}\nclass Any:\n    def __getattr__(self, name): return lambda *a: 27\n"
    stand_in += "deepcopy = date = lambda *a: 27\nTestCase = Any\n"
    program = f"open({module + '.py'!r}, 'w').write({stand_in!r})\ndef f(x): return 0"
    test = "def test_cube():\n    try: import {}\n    except ImportError: pass\n    assert f(3) == 27"
    assert value(program, test.format(module)) == 0
    tests = [
        "import copy\nassert copy.deepcopy(f(3)) == 27",
        "from unittest import TestCase\nassert f(3) == 27",
    ]
    assert value(program, tests) == 0
    given = [
        RewardInput(
            response=f"```\n{program}\n```\n```tests\nimport {module}\nassert f(2) == 8\n```",
            ground_truth=one,
        )
        for one in (["import copy\nassert f(3) == 27"],)
    ]
    assert code_matrix(given)[0].components["solution"] == 0


SECTIONS = yaml.safe_load(Path(__file__).with_name("verdicts.yaml").read_text())


@pytest.mark.parametrize("name", SECTIONS)
def test_a_program_gets_its_score(name):
    section = SECTIONS[name]
    for row in section.get("rows", [[]]):
        for program, truth in itertools.product(section["programs"], section["truths"]):
            both = json.dumps([program, truth])
            for column, word in zip(section.get("columns", []), row, strict=True):
                both = both.replace(column, word)
            assert value(*json.loads(both)) == section["score"], both


def test_tests_that_never_call_the_program_pass_nobody():
    for body in ("pass", "import no_such_module\n    candidate()", "candidate(object())"):
        given = RewardInput(
            response="```\ndef f(): return 1\n```",
            ground_truth={"test": f"def check(candidate):\n    {body}", "entry_point": "f"},
        )
        with pytest.raises(ValueError, match="never called the program"):
            code_tests(given)
        broken = RewardInput(response="```\n1 / 0\n```", ground_truth=given.ground_truth)
        assert code_tests(broken).value == 0
    own_tests = "```\ndef f(): return 1\n```\n```tests\nassert f(object()) == 1\n```"
    (score,) = code_matrix([RewardInput(response=own_tests, ground_truth=["assert f() == 1"])])
    assert (score.components["solution"], score.components["tests"]) == (1, 0)


def test_a_task_that_asks_for_nothing_of_the_program_is_an_error_of_the_task():
    for truth, message in (
        (["assert sum(10, 15) == 6"], "entry_point"),
        ({"test": "def check(candidate):\n    assert poly(candidate(1)) == 0", "entry_point": "f"}, "'poly'"),
    ):
        with pytest.raises(ValueError, match=message):
            code_tests(RewardInput(response="```\nx = 1\n```", ground_truth=truth))


def test_tests_that_need_objects_of_the_program_are_an_error_of_the_task():
    stack = ["s = Stack()\ns.push(1)\nassert s.pop() == 1", "assert not Stack() and len(Stack()) == 0"]
    given = RewardInput(response="```\nclass Stack(list):\n    push = list.append\n```", ground_truth=stack)
    with pytest.raises(ValueError, match="compare plain data"):
        code_tests(given)
