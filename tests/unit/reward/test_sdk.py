import asyncio
import inspect
import re
import sys
import textwrap

import pytest

from areal_async.base.errors import ArealError
from areal_async.base.verdicts import Abstain, Score
from areal_async.config.registry import REWARDS
from areal_async.config.reward import RewardSection
from areal_async.config.rewardcheck import section_mistakes
from areal_async.trajectory import TrajectoryError
from reward_service.checking import describe
from reward_service.sdk import RewardInput, RewardLoadError, load_reward, reward
from tests.scoring import episode_blob


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])

    def write(text, name="my_reward.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def test_a_reward_file_may_import_its_neighbours_and_define_dataclasses(file):
    file("SCALE = 4.0\n", "scale_of_mine.py")
    path = file(
        """
        from __future__ import annotations
        from dataclasses import dataclass
        from scale_of_mine import SCALE
        from reward_service.sdk import reward

        @dataclass
        class Rule:
            scale: float = SCALE

        @reward
        def scaled(given):
            return Rule().scale
        """
    )
    assert load_reward(f"{path}:scaled")(RewardInput()) == 4.0


GOOD = """
from reward_service.sdk import reward
@reward
def good(given): return 1.0
def plain(given): return 1.0
"""
TWO = "from reward_service.sdk import reward\n@reward\ndef two(a, b): return 1.0\n"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (GOOD, "exact_mach", "there is no reward 'exact_mach'.*arithmetic, environment, .*exact_match"),
        (GOOD, "{path}", "there is no reward"),
        (GOOD, "{path}.txt:f", "there is no reward"),
        (GOOD, "{path}x/other.py:f", "there is no file"),
        (GOOD, "{path}:other", "defines no 'other'. It has: good."),
        (GOOD, "{path}:plain", "'plain' .* is not marked.*@reward.*from areal_async import reward"),
        ("import no_such_module_at_all\n", "{path}:f", "at line 1: ModuleNotFoundError"),
        ("x = 1\nraise SystemExit(4)\n", "{path}:f", "at line 2: SystemExit: 4"),
        ("def broken(:\n", "{path}:f", "at line 1: SyntaxError"),
        (TWO, "{path}:two", "at line 2: TypeError: the reward 'two' must take one argument"),
    ],
)
def test_what_cannot_be_loaded_says_what_is_missing_or_fails(file, text, name, message):
    with pytest.raises(RewardLoadError, match=message) as caught:
        load_reward(name.format(path=file(text)))
    assert isinstance(caught.value, ArealError)


VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": float(solution_str == ground_truth), "acc": data_source == "sums", "pred": "x"}
def old(solution_str, ground_truth, method="strict", format_score=0.0):
    return format_score if method == "loose" else float(solution_str == ground_truth)
async def later(data_source, solution_str, ground_truth, extra_info):
    return extra_info["bonus"]
def pair(solution_str, ground_truth):
    return (0.25, "why")
"""
TRL = """
from reward_service.sdk import reward
def length(completions, **kwargs):
    return [float(len(text)) for text in completions]
def solved(prompts, completions, answer, **kwargs):
    return [float(said == right) + len(asked) for asked, said, right in zip(prompts, completions, answer)]
def chatty(completions, level):
    return [len(said[0]["content"]) * by for said, by in zip(completions, level)]
def unsure(completions, weight, power=1, **columns):
    return [None for _ in completions]
def best(completions):
    return [float(len(one) == max(map(len, completions))) for one in completions]
def enough(completions, words):
    return [float(len(said) >= least) for said, least in zip(completions, words)]
@reward
def ours(completions):
    return float(completions.response == "4")
"""


@pytest.mark.parametrize(
    ("text", "function", "given", "arguments", "right"),
    [
        (VERL, "compute_score", {}, {}, Score(1.0, {"acc": 1.0})),
        (VERL, "old", {}, {}, 1.0),
        (VERL, "old", {}, {"method": "loose", "format_score": 0.1}, 0.1),
        (VERL, "later", {"extra_info": {"bonus": 2.5}}, {}, 2.5),
        (VERL, "pair", {}, {}, 0.25),
        (TRL, "length", {"response": "four"}, {}, 4.0),
        (TRL, "solved", {"prompt": "2+2"}, {}, 4.0),
        (TRL, "solved", {"extra_info": {"answer": "5"}}, {}, 0.0),
        (TRL, "chatty", {"is_chat": True, "extra_info": {"level": 3}}, {}, 3),
        (TRL, "chatty", {"is_chat": True}, {"level": [2]}, 2),
        (TRL, "unsure", {}, {"weight": 2, "power": 3}, Abstain("the reward returned None")),
        (TRL, "ours", {}, {}, 1.0),
    ],
)
def test_functions_of_verl_and_trl_are_rewards_as_they_are(file, text, function, given, arguments, right):
    path = file(text)
    assert list(section_mistakes(RewardSection(name=f"{path}:{function}", args=arguments))) == []
    one = RewardInput(**{"response": "4", "ground_truth": "4", "data_source": "sums"} | given)
    loaded = load_reward(f"{path}:{function}")
    inspect.signature(loaded).bind(None, **arguments)
    result = loaded(one, **arguments)
    assert (asyncio.run(result) if inspect.isawaitable(result) else result) == right


def test_a_function_of_trl_may_judge_groups(file):
    loaded = load_reward(f"{file(TRL)}:best")
    assert loaded.scopes == ("episode", "group")
    assert loaded([RewardInput(response=text) for text in ("a", "bbb", "cc")]) == [0.0, 1.0, 0.0]
    given = [RewardInput(response="abc", extra_info={"words": words}) for words in (1, 3, 5)]
    assert load_reward(f"{file(TRL)}:enough")(given) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(completions, level): return [1.0]", "needs 'level', which is no column"),
        ("def f(completions): return [1.0, 2.0]", "'f' returned 2 scores for 1 completion"),
        ("def f(completions): return 0.5", "'f' returned 0.5, which is no list for 1 completion"),
        ("def bare(completions, **columns): return None\nf = bare", "'bare' returned None, which is no list"),
        ("import numpy\ndef f(completions): return numpy.float64(2)", "'f' returned .*2.0.*no list"),
        ("async def f(completions): return True", "'f' returned True, which is no list"),
        ("def f(solution_str): return {'acc': 1}", "a mapping without `score`"),
    ],
)
def test_a_function_of_another_framework_that_cannot_be_called_says_why(file, text, says):
    async def called():
        result = load_reward(f"{file(text)}:f")(RewardInput(response="4"))
        return await result if inspect.isawaitable(result) else result

    with pytest.raises(ValueError, match=says):
        asyncio.run(called())


def test_a_group_of_which_a_function_of_trl_judges_all_at_once_gets_no_bare_number(file):
    with pytest.raises(ValueError, match=r"'f' returned 0\.5, which is no list for 2 completions"):
        load_reward(f"{file('def f(completions): return 0.5')}:f")([RewardInput(), RewardInput()])


@pytest.mark.parametrize(
    "function",
    [
        "def two(response, ground_truth): return 1.0",
        "def two(response, *, ground_truth=''): return 1.0",
        "async def two(given, *, longest): return 1.0",
        "def two(text): return print(text)",
    ],
)
def test_a_function_that_is_not_marked_is_told_how(file, function):
    with pytest.raises(RewardLoadError, match="Put `@reward`"):
        load_reward(f"{file(function)}:two")


def test_a_function_may_be_marked_below_itself(file):
    path = file("from reward_service.sdk import reward\ndef two(given): return 1.0\nreward(two)")
    assert list(section_mistakes(RewardSection(name=f"{path}:two"))) == []
    assert load_reward(f"{path}:two")(RewardInput()) == 1.0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import json; return json.loads(response)", "JSONDecodeError: .* \\(line 2 of my_reward.py\\)"),
        ("import numpy; return numpy.zeros(2) @ numpy.zeros(3)", "\\(line 2 of my_reward.py\\)"),
        ("from areal_async import within\n    return within(3, 4, 5)", "\\(line 3 of my_reward.py\\)"),
        ("return [1.0, 2.0]", "returned 2 scores for 1 completion[^(]*$"),
        ("return 0.5", "as TRL wants it.$"),
    ],
)
def test_an_error_cites_the_line_of_the_users_file_and_never_one_of_a_library(file, body, says):
    path = file(f"def f(completions, response='no'):\n    {body}\n")
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it raises
        load_reward(f"{path}:f")(RewardInput(response="four"))
    assert re.search(says, describe(caught.value))


def test_what_a_function_of_verl_needs_beside_is_an_argument(file):
    path = file("def f(solution_str, ground_truth, *, method): return 1.0")
    with pytest.raises(TypeError, match="method"):
        inspect.signature(load_reward(f"{path}:f")).bind(None)


def test_only_functions_of_one_argument_can_be_marked():
    with pytest.raises(TypeError, match="one argument"):
        reward(lambda: 1.0)
    with pytest.raises(TypeError, match="not str"):
        reward("text")
    assert reward(lambda given, scale=2.0: scale)(None) == 2.0


def test_the_episode_is_decoded_when_asked_for_and_once_and_one_that_is_not_there_is_missed():
    given = RewardInput(blob=episode_blob())
    assert given.episode is given.episode
    assert given.episode.min_version == 3
    assert given.episode.header.response_text == "57"
    with pytest.raises(ValueError, match="no episode"):
        _ = RewardInput(response="57").episode
    with pytest.raises(TrajectoryError):
        _ = RewardInput(blob=b"not an episode").episode


class Point:
    value = "polite:politeness"

    def load(self):
        @reward
        def politeness(given, *, word="please"):
            return Score(float(word in given.response))

        return politeness


def test_a_reward_of_an_installed_package_is_found_checked_and_loaded(monkeypatch):
    monkeypatch.setitem(REWARDS.installed, "politeness", Point())
    good = RewardSection(name="politeness", args={"word": "thanks"})
    assert list(section_mistakes(good)) == []
    wrong = RewardSection(name="politeness", args={"wrod": "thanks"}, scope="group")
    assert [mistake.field for mistake in section_mistakes(wrong)] == ["reward.args.wrod", "reward.scope"]
    assert load_reward("politeness")(RewardInput(response="please")) == Score(1.0)
