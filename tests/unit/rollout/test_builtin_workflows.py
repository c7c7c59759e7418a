from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import expressions
import pytest

from areal_async.base.records import Task
from areal_async.base.verdicts import Abstain, Score
from areal_async.trajectory import SegmentKind, training_rows
from reward_service.sdk import RewardInput, load_reward
from rollout_service.environments import EnvironmentFailure
from rollout_service.workflows import Context, load_workflow, tool
from tests.unit.rollout.scripted import EOS, assert_rows_are_exact, play, texts

CALC = f"{expressions.__file__}:calc"


def score(episode: Any) -> Any:
    from areal_async.trajectory import pack

    return load_reward("environment")(RewardInput(blob=pack(episode)))


# --- tool_use ----------------------------------------------------------------------------------------------


def calculator(path: str) -> str:
    """A model that computes with the tool, two numbers at a time."""
    if path.endswith("(3+4)"):
        return ") and more"
    question, *answers = re.split(r"=|\n", path)[0], *re.findall(r"\)=([0-9]+)\n", path)
    if not answers:
        return f"calc({question}) and more"
    return f"calc({answers[-1]}+1) and more" if len(answers) < 3 else f"So it is {answers[-1]}"


def test_tool_use_runs_the_calls_and_shows_their_answers() -> None:
    flow = load_workflow("tool_use", {"tools": [CALC], "max_calls": 3})
    episode, engine = play(flow, calculator, Task("h:0:0", "2*(3+4)="))
    assert texts(episode, SegmentKind.TOOL) == ["=14\n", "=15\n", "=16\n"]
    # The first bracket that closes is not the end of the first call: the reply goes on behind it.
    said = texts(episode, SegmentKind.SAMPLED)
    assert said[:2] == ["calc(2*(3+4)", ")"]
    assert said[-1] == "So it is 16" + EOS
    assert episode.header.response_text == "So it is 16"
    assert episode.header.metadata == {"tool_calls": 3, "tool_errors": 0, "turns": 4}
    assert_rows_are_exact(episode, engine)
    assert len(training_rows(episode)) == 1


def test_an_error_of_a_tool_is_what_the_model_reads_and_is_counted() -> None:
    def clumsy(path: str) -> str:
        return ["calc(1/0)", "oven(3)", "calc(one)", "enough"][path.count("\n")]

    episode, _ = play(
        load_workflow("tool_use", {"tools": [CALC], "max_calls": 9}), clumsy, Task("h:0:0", "?")
    )
    answers = texts(episode, SegmentKind.TOOL)
    assert [answer.startswith("=error: ") for answer in answers] == [True] * 3
    assert "division by zero" in answers[0]
    assert "no tool 'oven'. There are: calc" in answers[1]
    assert episode.header.metadata["tool_errors"] == 3


def test_calls_beyond_the_limit_are_not_run_and_a_full_path_ends_the_episode() -> None:
    episode, engine = play(
        load_workflow("tool_use", {"tools": [CALC], "max_calls": 2}), lambda path: "calc(1+1)"
    )
    assert len(texts(episode, SegmentKind.TOOL)) == 2
    assert len(engine.said) == 3
    assert episode.header.response_text == "calc(1+1)"

    flow = load_workflow("tool_use", {"tools": [CALC], "max_calls": 50}, max_model_len=20)
    episode, engine = play(flow, lambda path: "calc(1+1)")
    assert len(engine.said) == 2  # 2 + 9 + 3 + 9 ≥ 20
    assert_rows_are_exact(episode, engine)


def test_the_environment_of_tool_use_asks_and_judges() -> None:
    world = f"{WORLD.parent}/countdown.py:Countdown"
    arguments = {"environment": world, "environment_args": {"terse": True}, "tools": [CALC]}
    flow = load_workflow("tool_use", arguments)
    task = Task("h:3:0", "Compute ", extra_info={"nums": [12, 3, 4], "target": 40})

    def model(path: str) -> str:
        return "12*3+4" if ")=40\n" in path else "calc(12*3+4)"

    episode, _ = play(flow, model, task)
    assert texts(episode)[0] == "Compute 12 3 4>40:"
    assert score(episode) == Score(1.0)
    assert score(play(flow, lambda path: "41", task)[0]) == Score(0.0)


CHATML = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\x03\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""`\\x03` ends a turn, as `<|im_end|>` does."""


def test_json_calls_of_a_chat_come_back_as_the_templates_tool_messages() -> None:
    def model(path: str) -> str:
        if path.endswith("<user>1+2?\x03\n<assistant>"):
            one, two = (json.dumps({"name": "calc", "arguments": {"expression": e}}) for e in ("1+2", "3*3"))
            return f"<tool_call>{one}</tool_call><tool_call>{two}</tool_call><tool_call>no</tool_call>"
        return "3"

    flow = load_workflow("tool_use", {"tools": [CALC], "format": "json"})
    task = Task("h:0:0", [{"role": "user", "content": "1+2?"}])
    episode, engine = play(flow, model, task, template=CHATML, max_new_tokens=400)
    segments = texts(episode)
    assert segments[0] == "[calc]<user>1+2?\x03\n<assistant>"
    # The reply said the end of its turn itself: what follows begins behind it.
    assert segments[1].endswith("</tool_call>" + EOS)
    assert segments[2].startswith("\n<tool>3\x03\n<tool>9\x03\n<tool>error: the call is not JSON")
    assert segments[2].endswith("<assistant>")
    assert segments[3] == "3" + EOS
    assert_rows_are_exact(episode, engine)


OPENS = CHATML.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}")
NESTED = "error: the call is not JSON: nested"
CALLED = '<tool_call>{"name": "calc", "arguments": {"expression": "%s"}}</tool_call>'


@pytest.mark.parametrize(
    ("template", "said", "answers"),
    [
        (CHATML, f"<think>{CALLED % '1+1'}</think>{CALLED % '2+2'}", ["4"]),
        (CHATML, f"<think>{CALLED % '1+1'}", []),
        (OPENS, f"{CALLED % '1+1'}</think>{CALLED % '2+2'}{CALLED % '3+3'}", ["4", "6"]),
        (OPENS, CALLED % "1+1", []),
        (
            CHATML,
            f"{CALLED % '1+1'}<tool_call>{'[' * 3000}</tool_call>",
            ["2", NESTED],
        ),
        (CHATML, "<tool_call>" * 9000, []),
    ],
    ids=["thought", "never closed", "opened by the prompt", "opened and never closed", "nested", "flood"],
)
def test_calls_are_made_of_what_was_said_alone(template: str, said: str, answers: list[str]) -> None:
    flow = load_workflow("tool_use", {"tools": [CALC], "format": "json", "max_calls": 3})
    task = Task("h:0:0", [{"role": "user", "content": "?"}])
    how: Any = {"template": template, "max_new_tokens": 200_000}
    episode, _ = play(flow, lambda path: said if "<tool>" not in path else "done", task, **how)
    assert re.findall(rf"<tool>({NESTED}|[^\x03]*)", "".join(texts(episode))) == answers


def test_a_plain_call_in_a_thought_is_none() -> None:
    flow = load_workflow("tool_use", {"tools": [CALC], "max_calls": 3})
    replies = iter(["<think>calc(1+1)", " and so</think>calc(2+2)", "4"])
    episode, _ = play(flow, lambda path: next(replies), Task("h:0:0", "2+2? "))
    assert texts(episode, SegmentKind.TOOL) == ["=4\n"]
    assert episode.header.response_text == "4"


# --- multi_turn --------------------------------------------------------------------------------------------

WORLD = Path(__file__).parents[3] / "examples/environments/frozenlake.py"
LAKE = {"environment": f"{WORLD}:FrozenLake", "environment_args": {"terse": True, "later": "position"}}
MAP = Task("h:0:0", "?", extra_info={"map": "SFF/HHF/HHG"})


def test_an_environment_is_given_what_was_said_and_not_what_was_thought() -> None:
    flow = load_workflow("multi_turn", LAKE | {"max_turns": 1})
    episode, _ = play(flow, lambda path: "<think>L? D? U?</think>R", MAP)
    plain, _ = play(flow, lambda path: "R", MAP)
    assert episode.header.metadata["info"] == plain.header.metadata["info"] == {}


def walker(way: str) -> Any:
    return lambda path: way[len(re.findall(r"[LRUD]", path.split(":", 1)[1]))]


def test_multi_turn_plays_an_environment_to_its_end() -> None:
    episode, engine = play(load_workflow("multi_turn", LAKE), walker("RRDD"), MAP, max_new_tokens=1)
    assert texts(episode) == ["?AFFHHFHHG:00", "R", "01", "R", "02", "D", "12", "D"]
    assert episode.segments.turn.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert score(episode) == Score(1.0)
    assert episode.header.metadata["turns"] == 4
    assert episode.header.metadata["info"] == {"ended_on": "G"}
    assert episode.header.prompt_text == "?AFFHHFHHG:00"
    assert_rows_are_exact(episode, engine)
    # Equal states have equal anchors, whatever came before.
    other, _ = play(load_workflow("multi_turn", LAKE), walker("LRRDD"), MAP, max_new_tokens=1)
    assert other.segments.anchor[1] == episode.segments.anchor[1] == other.segments.anchor[3]
    assert other.segments.anchor[5] == episode.segments.anchor[3] != episode.segments.anchor[1]


@pytest.mark.parametrize(("rule", "total"), [("sum", 6.0), ("final", 3.0)])
def test_the_reward_of_an_episode_is_the_sum_of_its_turns_or_the_last(rule, total, tmp_path):
    (tmp_path / "count.py").write_text(
        "class Count:\n"
        "    def __init__(self, limit): self.limit, self.at = limit, 0\n"
        "    def reset(self, seed, task): return 'go '\n"
        "    def step(self, action):\n"
        "        self.at += 1\n"
        "        return f'{self.at} ', self.at, self.at == self.limit, {}\n"
    )
    world = {"environment": f"{tmp_path}/count.py:Count", "environment_args": {"limit": 3}}
    arguments = world | {"reward": rule}
    episode, _ = play(load_workflow("multi_turn", arguments), lambda path: "x")
    assert texts(episode, SegmentKind.ENVIRONMENT) == ["1 ", "2 "]
    assert score(episode) == Score(total)
    rewards = episode.segments.reward.tolist()
    assert [rewards[i] for i in (1, 3, 5)] == [1, 2, 3]


def test_turns_and_room_end_an_episode_without_a_goal() -> None:
    episode, _ = play(load_workflow("multi_turn", LAKE | {"max_turns": 3}), walker("LLLLLL"), MAP)
    assert episode.header.metadata["turns"] == 3
    assert score(episode) == Score(0.0)
    assert texts(episode)[-1].startswith("L")  # nothing is shown that nobody answers
    flow = load_workflow("multi_turn", LAKE, max_model_len=18)
    episode, _ = play(flow, walker("LLLLLL"), MAP, max_new_tokens=1)
    assert episode.header.metadata["turns"] == 2
    assert len(texts(episode, SegmentKind.SAMPLED)) == 2


def test_a_chat_is_asked_turn_by_turn_in_its_template() -> None:
    prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    task = Task("h:0:0", prompt, extra_info=MAP.extra_info)
    flow = load_workflow("multi_turn", LAKE)
    episode, engine = play(flow, lambda path: "R" if path.count("R") < 2 else "D", task, template=CHATML)
    assert texts(episode)[:4] == [
        "<system>S\x03\n<user>U\n\nAFFHHFHHG:00\x03\n<assistant>",
        "R" + EOS,
        "\n<user>01\x03\n<assistant>",
        "R" + EOS,
    ]
    assert_rows_are_exact(episode, engine)


def test_an_environment_that_hangs_fails_its_episode_in_time(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(
        "import threading\n"
        "class Stuck:\n"
        "    def reset(self, seed, task): return 'go'\n"
        "    def step(self, action): threading.Event().wait(5)\n"
        "class Wrong:\n"
        "    def reset(self, seed, task): return 'go'\n"
        "    def step(self, action): return 'no tuple'\n"
    )
    for kind, says in (
        ("Stuck", "step: not back within 0.5 s"),
        ("Wrong", "not \\(text, reward, done, info\\)"),
    ):
        arguments = {"environment": f"{tmp_path}/stuck.py:{kind}", "timeout_s": 0.5}
        with pytest.raises(EnvironmentFailure, match=says):
            play(load_workflow("multi_turn", arguments), lambda path: "x")


# --- self_correction ---------------------------------------------------------------------------------------


CORRECTION = f"{Path(__file__).parents[3]}/examples/workflows/self_correction.py:self_correction"


def test_self_correction_asks_again_until_the_verifier_is_content() -> None:
    arguments = {"verifier": "exact_match", "attempts": 3, "retry": "!", "discount": 0.5}
    flow = load_workflow(CORRECTION, arguments)
    task = Task("h:0:0", "Q", ground_truth="2")
    episode, engine = play(flow, lambda path: str(path.count("!")), task)
    assert texts(episode) == ["Q", "0\x03", "!", "1\x03", "!", "2\x03"]
    assert episode.header.response_text == "2"
    assert episode.header.metadata == {"retries": 2, "first_try": False}
    assert score(episode) == Score(0.25)
    assert_rows_are_exact(episode, engine)
    at_once, _ = play(flow, lambda path: "2", task)
    assert score(at_once) == Score(1.0)
    never, engine = play(flow, lambda path: "7", task)
    assert len(engine.said) == 3
    assert score(never) == Score(0.0)
    for case, value in ((False, 1.0), (True, 0.0)):
        arguments = {"verifier": "exact_match", "attempts": 1, "verifier_args": {"case": case}}
        shouted = Task("h:0:0", "Q", ground_truth="yes")
        episode, _ = play(load_workflow(CORRECTION, arguments), lambda path: "YES", shouted)
        assert score(episode) == Score(value)


# --- forks, tools and rewards of a workflow of one's own ----------------------------------------------


async def tree(ctx: Context, task: Task) -> None:
    first = await ctx.generate(task.prompt)

    async def leaf(number: int) -> None:
        reply = await ctx.generate(parent=first.segment, turn=1, seed=number)
        ctx.reward(number, segment=reply.segment)
        for twig in range(2):
            ctx.anchor("here")
            await ctx.generate("+", parent=reply.segment, turn=2, seed=10 * number + twig)

    await asyncio.gather(*map(leaf, range(3)))


def test_branches_share_a_prefix_and_each_sampled_unit_is_in_one_row() -> None:
    said = iter("abcdefghijklmnop")
    episode, engine = play(tree, lambda path: next(said))
    assert len(engine.said) == 1 + 3 + 6
    rows = training_rows(episode)
    assert len(rows) == 6
    assert sum(int(row.mask.sum()) for row in rows) == episode.n_sampled == 20
    assert_rows_are_exact(episode, engine)
    assert score(episode) == Score(3.0)
    anchored = episode.segments.anchor[episode.segments.anchor != 0]
    assert len(anchored) == 6
    assert len(set(anchored.tolist())) == 1


def test_a_tool_of_ones_own_is_called_by_itself_and_recorded() -> None:
    @tool
    def shout(text: str, times: int = 1) -> str:
        """Say it louder."""
        return text.upper() * times

    async def flow(ctx: Context, task: Task) -> None:
        reply = await ctx.generate(task.prompt)
        heard = await ctx.tool(shout, "hi", parent=reply.segment, turn=1)
        more = await ctx.tool(shout, {"text": "ho", "times": 2}, parent=heard.segment, turn=1)
        bad = await ctx.tool(shout, {"loud": 1}, parent=more.segment)
        await ctx.generate(parent=bad.segment, turn=2)
        ctx.reward(0.5)
        ctx.reward(1, name="format")

    episode, engine = play(flow, lambda path: "ok")
    assert texts(episode, SegmentKind.TOOL)[:2] == ["HI", "HOHO"]
    assert texts(episode, SegmentKind.TOOL)[2].startswith("error: TypeError")
    assert score(episode) == Score(0.5, {"format": 1.0})
    assert shout("a", times=3) == "AAA"
    assert shout.schema["function"]["parameters"] == {
        "type": "object",
        "properties": {"text": {"type": "string"}, "times": {"type": "integer"}},
        "required": ["text"],
    }
    assert_rows_are_exact(episode, engine)


def test_an_episode_without_a_reward_is_abstained_from_and_never_scored_zero() -> None:
    async def silent(ctx: Context, task: Task) -> None:
        await ctx.generate(task.prompt)

    async def named(ctx: Context, task: Task) -> None:
        await ctx.generate(task.prompt)
        ctx.reward(1, name="format")

    async def wrong(ctx: Context, task: Task) -> None:
        ctx.reward(float("nan"))

    assert isinstance(score(play(silent, lambda path: "x")[0]), Abstain)
    with pytest.raises(ValueError, match="finite"):
        play(wrong, lambda path: "x")
    assert "format" in score(play(named, lambda path: "x")[0]).reason
