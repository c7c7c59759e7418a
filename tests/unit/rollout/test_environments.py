"""Rules of the example worlds, as properties over seeds."""

from __future__ import annotations

import re
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.base.records import Task
from rollout_service.environments import EnvironmentFailure, group_seed, level_seed, load_environment

WORLDS = Path(__file__).parents[3] / "examples" / "environments"
GYMNASIUM, REASONING = f"{WORLDS}/of_gymnasium.py:Gymnasium", f"{WORLDS}/of_reasoning_gym.py:ReasoningGym"
LAKE, SOKOBAN = f"{WORLDS}/frozenlake.py:FrozenLake", f"{WORLDS}/sokoban.py:Sokoban"
COUNTDOWN = f"{WORLDS}/countdown.py:Countdown"
SEEDS = st.integers(0, 2**63 - 1)
MOVES = st.text("LRUD", min_size=1, max_size=30)


def task(**extra: Any) -> Task:
    return Task("hash:3:0", "?", extra_info=extra)


def told(name: str, options: dict[str, Any], seed: int, actions: str, /, **extra: Any) -> list[Any]:
    """Everything a new environment says to these actions, up to its end, while another is played too."""
    world, other = (load_environment(name, options)() for _ in range(2))
    said: list[Any] = [world.reset(seed, task(**extra))]
    other.reset(seed + 1, task(**extra))
    over = False
    for action in actions:
        over = over or other.step("L").done
        step = world.step(action)
        said.append(tuple(step))
        if step.done:
            break
    return said


# --- all of them -----------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(seed=SEEDS, actions=MOVES, name=st.sampled_from([COUNTDOWN, LAKE, SOKOBAN]))
def test_a_world_is_a_function_of_seed_and_actions(seed: int, actions: str, name: str) -> None:
    options = {"slippery": True} if name == LAKE else {}
    first = told(name, options, seed, actions)
    assert told(name, options, seed, actions) == first


def test_the_tasks_own_seed_decides_the_level_and_the_groups_the_luck() -> None:
    slippery = {"slippery": True, "later": "position", "holes": 0.0, "size": 8}
    ways = [told(LAKE, slippery, seed, "RDRDRDRD", seed=5) for seed in range(6)]
    assert len({way[0] for way in ways}) == 1
    assert len(set(map(str, ways))) == 6
    assert level_seed(9, task(seed=5)) == 5
    assert level_seed(9, task()) == 9
    assert level_seed(9, task(seed=True)) == 9
    assert group_seed(1, "hash:3:0") == group_seed(1, "hash:3:7") != group_seed(1, "hash:4:0")


@pytest.mark.parametrize(("name", "shown"), [(LAKE, "Reach G"), (SOKOBAN, "Push every box")])
def test_an_example_is_won_by_a_way_that_a_search_finds(name: str, shown: str) -> None:
    """The rules of both worlds: breadth-first search over moves ends in the one reward of 1."""
    make, seen, ways = load_environment(name, {"max_moves": 1000}), set(), deque([""])
    while ways:
        way, world = ways.popleft(), make()
        assert shown in world.reset(7, task())
        steps = [world.step(move) for move in way]
        if steps and steps[-1].done:
            if steps[-1].reward == 1:
                assert [step.reward for step in steps[:-1]] == [0] * (len(steps) - 1)
                return
        elif (state := world.state()) not in seen:
            seen.add(state)
            ways.extend(way + move for move in "LRUD")
    raise AssertionError("there is no way")


@settings(max_examples=60)
@given(seed=SEEDS, numbers=st.integers(2, 5))
def test_countdown_can_be_solved_and_takes_no_number_twice(seed: int, numbers: int) -> None:
    world: Any = load_environment(COUNTDOWN, {"numbers": numbers})()
    shown, way = world.reset(seed, task()), world.solution
    assert f"Target: {world.target}." in shown
    assert 1 <= world.target <= 200
    assert sorted(map(int, re.findall(r"\d+", way))) == sorted(world.numbers)
    assert world.step(f"I think\n<answer>{way} = {world.target}</answer>").reward == 1
    assert world.step(f"so {world.target}\n{way}").reward == 1
    assert world.step(f"{way}+{world.numbers[0]}-{world.numbers[0]}").reward == 0


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("(3+4)*5", 1.0), ("5*(4+3)=35", 1.0), ("35", 0.0), ("3+4+5", 0.25), ("4*(5+3)", 0.25), ("7*5", 0.0),
        ("", 0.0), ("3+", 0.0), ("__import__('os')", 0.0), ("3/(4-4)", 0.0), ("9" * 300, 0.0),
    ],
)  # fmt: skip
def test_countdown_judges(answer: str, reward: float) -> None:
    world = load_environment(COUNTDOWN, {"wrong": 0.25})()
    world.reset(0, task(nums=[3, 4, 5], target=35))
    step = world.step(answer)
    assert (step.reward, step.done) == (reward, True)


def test_countdown_that_cannot_be_drawn_says_so() -> None:
    hard = {"numbers": 6, "operators": "*", "highest": 1000, "highest_target": 4}
    with pytest.raises(ValueError, match="highest_target"):
        load_environment(COUNTDOWN, hard)().reset(0, task())


# --- adapters --------------------------------------------------------------------------------------------


def test_gymnasium_frozen_lake_plays_as_text() -> None:
    world: Any = load_environment(GYMNASIUM, {"id": "FrozenLake-v1", "make_args": {"is_slippery": False}})()
    first = world.reset(1, task())
    assert "[S]FFF" in first
    assert "left, down, right, up" in first
    assert "\x1b" not in first
    steps = [world.step(action) for action in ("down", "I go Down!", "r", "2", "d", "right")]
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 1]
    assert steps[-1].done
    assert world.step("jump").info == {"problem": "no action"}
    world.close()


def test_reasoning_gym_asks_and_scores() -> None:
    world: Any = load_environment(REASONING, {"dataset": "chain_sum", "dataset_args": {"max_terms": 2}})()
    question = world.reset(7, task())
    assert question == world.reset(7, task())
    assert question != world.reset(8, task())
    world.reset(7, task())
    numbers = re.search(r"(-?\d+(?: [-+] \d+)+)", question)
    assert numbers is not None
    right = eval(numbers[1])
    assert world.step(f"<answer>{right}</answer>") == ("", 1.0, True, {})
    assert world.step(str(right)).reward == 1.0
    assert world.step(str(right + 1)).reward < 1.0
    assert world.reset(7, task(seed=1, index=4)) == world.reset(99, task(seed=1, index=4))


@pytest.mark.parametrize(("name", "library"), [(GYMNASIUM, "gymnasium"), (REASONING, "reasoning_gym")])
def test_a_missing_library_names_the_extra(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(EnvironmentFailure, match=r"pip install areal-async\[environments\]"):
        load_environment(name, {"id": "Taxi-v4"} if name == GYMNASIUM else {"dataset": "chain_sum"})


# --- one's own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source", "options", "says"),
    [
        ("no_such", None, {}, "no environment 'no_such'.*Use `path.py:name`"),
        ("{}/w.py:World", "class Other: ...", {}, "defines no 'World'. It defines Other"),
        ("{}/w.py:World", "class World:\n    def reset(self, seed, task): ...", {}, "has no 'step'"),
        ("{}/w.py:World", "class World: ...", {"size": 3}, "cannot be made with .*{'size': 3}"),
        ("{}/w.py:World", "import nowhere_at_all", {}, "ModuleNotFoundError"),
        (LAKE, None, {"size": 1}, "size"),
        (GYMNASIUM, None, {"id": "NoSuch-v0"}, "cannot make"),
        (GYMNASIUM, None, {"id": "FrozenLake-v1", "actions": ["a"]}, "4 actions, but 1"),
        (GYMNASIUM, None, {"id": "FrozenLake-v1", "make_args": {"no": 1}}, "cannot make"),
        (REASONING, None, {"dataset": "no_such"}, "cannot make 'no_such'"),
        (COUNTDOWN, None, {"numbers": 12}, "numbers"),
    ],
)
def test_an_environment_that_cannot_be_loaded_says_why(name, source, options, says, tmp_path):
    if source is not None:
        (tmp_path / "w.py").write_text(source)
    with pytest.raises(EnvironmentFailure, match=says):
        load_environment(name.format(tmp_path), options)
