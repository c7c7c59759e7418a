"""A reward of another installed package is used like a built-in one."""

from areal_async.config.reward import RewardSection
from areal_async.config.rewardcheck import section_mistakes
from areal_async.registry import REWARDS
from areal_async.rpc.verdicts import Score
from reward_service.sdk import RewardInput, load_reward, reward


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
