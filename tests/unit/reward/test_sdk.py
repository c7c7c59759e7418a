import sys
import textwrap

import pytest

from areal_async.config.reward import RewardSection
from areal_async.config.rewardcheck import section_mistakes
from areal_async.errors import ArealError
from areal_async.registry import REWARDS
from areal_async.rpc.verdicts import Score
from areal_async.trajectory import TrajectoryError
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
