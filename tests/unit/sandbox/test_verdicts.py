"""A verdict cannot be forged: whose names, whose files and whose answers the tests of a task believe."""

import asyncio
from typing import Any

import pytest
from code_matrix import code_matrix
from forge import ARGS, forged_ones, judged, right_ones

from areal_async.rpc.verdicts import Failure, Score
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


REPLACED = [
    ("set", "assert set(f((3, 4), (4, 5))) == set((4,))", "0"), ("len", "assert len(f(4)) == 4", "4"),
    ("all", "assert all(f(x) == x * x for x in (2, 3))", "True"), ("str", "assert str(f(2)) == '4'", "'4'"),
    ("type", "assert type(f(3)) == int", "int"), ("isinstance", "assert isinstance(f(3), str)", "True"),
    ("map", "assert list(map(f, [1, 2])) == [1, 4]", "[1, 4]"),
    ("Counter", "assert Counter(f('aab')) == Counter({'a': 2, 'b': 1})", "0"),
    ("math", "assert math.isclose(f(1), 2.5)", "0"), ("isclose", "assert isclose(f(1), 2.5)", "True"),
    ("range", "def check(candidate):\n    for i in range(9):\n        assert candidate(i) == i * i", "()"),
    ("zip", "def check(candidate):\n    for a, b in zip([2], [4]):\n        assert candidate(a) == b", "()"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "test", "answer"), REPLACED, ids=[one[0] for one in REPLACED])
def test_a_name_that_tests_use_is_never_the_programs(name, test, answer):
    members = f"class Stand:\n    def __call__(self, *a, **k): return {answer}\n"
    members += "    isclose = Counter = lambda self, *a: Two()\n"
    members += "class Two:\n    __getitem__ = lambda *a: 2\n    __bool__ = lambda *a: True\n"
    function = f"{name} = Stand()\ndef f(*a): return None"
    truth = {"test": test, "entry_point": "f"} if test.startswith("def check") else [test]
    assert value(f"{members}{function}", truth) == 0
    assert value(f"def {name}(*a, **k): return {answer}\ndef f(*a): return None", truth) == 0


ANSWERING = """
class Yes{}:
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __contains__ = isupper = __lt__
    def __len__(self): return 3
    def __bool__(self): return True
    def __hash__(self): return 0
def f(*a): return Yes()
"""
QUESTIONS = [
    ["assert len(f('abc')) == 3"],
    ["assert 5 < f(1) < 10", "assert f(2) > 100"],
    ["assert 5 in f(1)", "assert 6 in f(1)", "assert 7 in f(1)"],
    ["assert f(1)"],
    ["assert f(1) != 0 and f(1) != '' and f(1) != []"],
    ["assert not (f(1) == 0 or f(1) == '' or f(1) == [])"],
]


@pytest.mark.parametrize("tests", QUESTIONS, ids=lambda tests: tests[0])
def test_an_object_does_not_answer_for_itself(tests):
    for base in ("", "(str)"):
        assert value(ANSWERING.format(base), tests) == 0


@pytest.mark.parametrize("name", ["StopIteration", "GeneratorExit", "StopAsyncIteration", "SystemExit"])
def test_no_exception_ends_a_loop_of_the_tests_early(name):
    tests = [
        "assert all(map(lambda x: f(x) == x * x, [2, 3]))",
        "for x, y in zip(map(f, [2, 3]), [4, 9]):\n    assert x == y",
        "assert list(map(f, [])) == [] and not [y for y in map(f, [3]) if y != 9]",
    ]
    for test in tests:
        assert value(f"def f(x): raise {name}", [test]) == 0
        assert value("def f(x): return x * x", [test]) == 1


def test_a_program_that_ends_passes_nothing_that_catches():
    test = "try:\n    f(-1)\n    ok = False\nexcept:\n    ok = True\nassert ok and f(2) == 4"
    swallowing = (
        "def test_f():\n    try:\n        f(-1)\n        raise KeyError\n    except BaseException: pass"
    )
    for program in (
        "import os\ndef f(x): os._exit(0)",
        "import os\ndef f(x): os.close(3)",
        "raise ValueError",
    ):
        assert value(program, [test]) == 0
        assert value(program, swallowing) == 0
    raising = "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x * x"
    assert value(raising, [test]) == 1


def test_exceptions_keep_their_class_and_words():
    tests = "def test_words():\n    try:\n        f(-1)\n    except ValueError as error:\n"
    tests += "        assert str(error) == 'negative' and error.args == ('negative',)\n"
    tests += "    else:\n        assert False"
    assert value("def f(x): raise ValueError('negative')", tests) == 1
    assert value("class Own(ValueError): pass\ndef f(x): raise Own('negative')", tests) == 1
    assert value("def f(x): raise KeyError('negative')", tests) == 0


def test_an_assertion_inside_a_function_of_the_tests_counts_though_the_program_catches_it():
    tests = "def test_each():\n    def small(x):\n        assert x < 3\n    f(small, [1, 2])\n"
    careless = "def f(g, xs):\n    for x in (*xs, 7):\n        try: g(x)\n        except BaseException: pass"
    assert value("def f(g, xs):\n    for x in xs: g(x)", tests) == 1
    assert value(careless, tests) == 0


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
    vacuous = {"test": "def f(x): return x\ndef check(candidate):\n    assert candidate(2) == f(2)"}
    assert value("def f(x): return 0", vacuous | {"entry_point": "f"}) == 0
    assert value("def f(x): return x", vacuous | {"entry_point": "f"}) == 1


def test_what_a_function_does_to_its_arguments_shows_where_it_is_called_for_that():
    tests = "def test_sorts():\n    a = [3, [1], {'k': [2]}]\n    inner = a[1]\n    f(a)\n"
    tests += "    assert a == [3, [1, 0], {'k': [2, 0]}] and inner == [1, 0]"
    assert value("def f(a):\n    a[1].append(0)\n    a[2]['k'].append(0)", tests) == 1
    assert value("def f(a): a.clear()", tests) == 0
    # Where the result is used, an argument that is emptied would make the tests' own answer wrong.
    for test in ("x = [1, 2]\nassert f(x) == sum(x)", "x = {1: 2}\ngot = f(x)\nassert got == sum(x)"):
        cases = f"def test_f():\n    {test.replace(chr(10), chr(10) + '    ')}"
        assert value("def f(x):\n    x.clear()\n    return 0", cases) == 0
        assert value("def f(x): return sum(x)", cases) == 1


DECLARED = "def sum(a, b): return sum_of_common(a, b)\ndef sum_of_common(a, b): return {}"


def test_a_declared_entry_point_may_have_the_name_of_a_builtin():
    truth = {"test_list": ["assert sum(10, 15) == 6"], "entry_point": "sum"}
    assert value(DECLARED.format(6), truth) == 1
    assert value(DECLARED.format(5), truth) == 0
    # Handed to `check`, it does not stand in for the builtin there.
    checks = {"test": "def check(candidate):\n    assert candidate([1]) == sum([1])", "entry_point": "sum"}
    assert value("def sum(x): return 0", checks) == 0
    assert value("def sum(x): return 1", checks) == 1


def test_a_task_that_asks_for_nothing_of_the_program_is_an_error_of_the_task():
    for truth, message in (
        (["assert sum(10, 15) == 6"], "entry_point"),
        ({"test": "def check(candidate):\n    assert poly(candidate(1)) == 0", "entry_point": "f"}, "'poly'"),
    ):
        with pytest.raises(ValueError, match=message):
            code_tests(RewardInput(response="```\nx = 1\n```", ground_truth=truth))


STACK = ["s = Stack()\ns.push(1)\nassert s.pop() == 1", "assert not Stack() and len(Stack()) == 0"]
RIGHT = "class Stack(list):\n    push = list.append"


def test_tests_that_need_objects_of_the_program_are_an_error_of_the_task():
    given = RewardInput(response=f"```\n{RIGHT}\n```", ground_truth=STACK)
    with pytest.raises(ValueError, match="compare plain data"):
        code_tests(given)


def test_finite_generators_cross_as_what_they_yield():
    assert value("def f(n):\n    yield from range(n)", ["assert list(f(3)) == [0, 1, 2]"]) == 1
    assert value("def f(n):\n    yield from range(n)", ["assert f(3) == [0, 1, 2]"]) == 0
