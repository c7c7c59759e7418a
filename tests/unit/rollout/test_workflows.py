from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from areal_async.base.records import Task
from areal_async.config.registry import WORKFLOWS
from areal_async.models.prompts import prompt_ids, prompt_text, text_ids
from areal_async.trajectory import EpisodeBuilder, Sampling, SegmentKind, training_rows
from replay_buffer.server import read_arrival
from rollout_service.engines.base import RequestError
from rollout_service.workflows import (
    Context,
    EpisodeAborted,
    PolicyEngine,
    Renderer,
    WorkflowError,
    load_workflow,
)
from rollout_service.workflows.context import call_seed
from tests.unit.gateway.agents import Logged
from tests.unit.gateway.fakes import assert_recorded_is_what_the_engine_said
from tests.unit.rollout.fakes import eventually


@pytest.mark.parametrize(
    ("name", "source", "says"),
    [
        ("no_such", None, "no workflow 'no_such'.*single_turn"),
        ("flow.py:", None, "path.py:name"),
        ("flow.py:go", None, "there is no file"),
        ("flow.py:go", "async def other(ctx, task): ...", "defines no 'go'. It defines other"),
        ("flow.py:go", "x = 1", "It defines x"),
        ("flow.py:go", "def go(ctx, task): ...", "not an `async def`"),
        ("flow.py:go", "async def go(ctx): ...", "called as go\\(ctx, task"),
        ("flow.py:go", "import nowhere_to_be_found", "ModuleNotFoundError"),
        ("flow.py:go", "def broken(:", "SyntaxError"),
        ("flow.py:go", "raise SystemExit(3)", "SystemExit"),
    ],
)
def test_a_workflow_that_cannot_be_loaded_says_why(name, source, says, tmp_path):
    if source is not None:
        (tmp_path / "flow.py").write_text(source)
    if name.startswith("flow.py"):
        name = f"{tmp_path}/{name}"
    with pytest.raises(WorkflowError, match=says):
        load_workflow(name)


CLASS = """
from areal_async.config.base import Section
from neighbour_of_flow import ANSWER
class Debate:
    class Arguments(Section):
        rounds: int = 2
    def __init__(self, arguments, resources):
        self.rounds = arguments.rounds
    async def __call__(self, ctx, task):
        ctx.said = [task.prompt, ANSWER] * self.rounds
"""


async def test_a_workflow_may_be_a_class_with_arguments_and_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_flow.py").write_text("ANSWER = 42")
    (tmp_path / "flow.py").write_text(CLASS)
    ctx: Any = SimpleNamespace()
    await load_workflow(f"{tmp_path}/flow.py:Debate", {"rounds": 3})(ctx, Task("t", "x"))
    assert ctx.said == ["x", 42] * 3
    with pytest.raises(WorkflowError, match=r"workflow_args of .*no argument 'round'"):
        load_workflow(f"{tmp_path}/flow.py:Debate", {"round": 3})


@pytest.fixture
def tokenizer(tiny: Any) -> Any:
    # Not AutoTokenizer: for a Qwen2 model that splits text in Qwen's way, whatever tokenizer.json says.
    return PreTrainedTokenizerFast.from_pretrained(tiny.directory)


CHAT = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]


@pytest.mark.parametrize(("prompt", "text"), [("1+2=", "1+2="), (CHAT, "1+2=\n3")])
def test_text_is_tokenised_as_it_is_and_messages_without_a_template_are_lines(
    tokenizer, prompt, text
) -> None:
    assert prompt_text(tokenizer, prompt) == text
    ids = prompt_ids(tokenizer, prompt)
    assert (tokenizer.decode(ids), ids[:4]) == (text, [3, 12, 4, 14])


def test_text_becomes_the_ids_that_its_tokenizer_gives_whatever_that_was_set_to(tokenizer: Any) -> None:
    text = "12+34=46"
    for _ in range(2):
        assert len(text_ids(tokenizer, text)) >= 5
        for special in (True, False):
            want = tokenizer(text, add_special_tokens=special)["input_ids"]
            tokenizer(text, truncation=True, max_length=2)  # leaves its back end cutting
            assert text_ids(tokenizer, text, special=special) == want


def test_messages_go_through_the_chat_template_once(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'abc'[loop.index] }}={{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}a={% endif %}"
    )
    rendered = Renderer(tokenizer)(CHAT)
    assert rendered.text == "b=1+2= c=3 a="
    assert tokenizer.decode(rendered.ids.tolist()) == rendered.text


class CountingTokenizer:
    chat_template = None
    calls = 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        self.calls += 1
        return {"input_ids": [len(text)]}


def test_a_groups_prompt_is_rendered_once_and_memory_is_bounded() -> None:
    counting: Any = CountingTokenizer()
    render = Renderer(counting, remember=3)
    for _ in range(5):
        render("same")
        render([{"role": "user", "content": "same"}])
    assert counting.calls == 2
    for number in range(10):
        render(str(number))
    for number in range(10):
        render(str(number))
    assert counting.calls == 2 + 10 + 10, "the first of them are forgotten again"


def context(engine: Any, tokenizer: Any, **how: Any) -> Context:
    builder = EpisodeBuilder("job", "t", "t#0", 0)
    lead = PolicyEngine(engine, Renderer(tokenizer), how.pop("sampling", Sampling(max_new_tokens=6)))
    return Context({"policy": lead}, builder, **({"episode_id": "t#0.0", "seed": 5} | how))


async def test_a_path_is_exactly_what_the_engine_saw(endless: Any, tokenizer: Any) -> None:
    engine = endless.engine()
    await engine.start(endless.weights(4, epoch=2))
    logged = Logged(engine)
    ctx = context(logged, tokenizer)
    first = await ctx.generate("1+2=")
    tool = ctx.observe(SegmentKind.TOOL, "=7", parent=first.segment)
    await ctx.generate(parent=tool, temperature=0.0, turn=1)
    await ctx.generate("+1", parent=first.segment, max_new_tokens=3, turn=1)
    await engine.stop()
    episode, said = ctx.builder.build(), logged.log
    assert len(said) == 3
    assert_recorded_is_what_the_engine_said(episode, said)
    assert [request.began for request, _ in said] == [None, (2, 4), (2, 4)]
    reasons = [result.finish_reason for _, result in said]
    assert [call.finish_reason for call in episode.header.calls] == reasons
    assert [c.logprobs_of for c in episode.header.calls] == ["sampled", "raw", "sampled"]
    assert [c.sampling.max_new_tokens for c in episode.header.calls] == [6, 6, 3]
    assert len({c.sampling.seed for c in episode.header.calls}) == 3
    assert episode.header.epochs == [(4, 2)]
    assert episode.n_sampled == 15
    assert (episode.min_version, episode.max_version) == (4, 4)
    assert episode.header.prompt_text == "1+2="
    assert episode.header.response_text == said[-1][1].text
    rows = training_rows(episode)
    assert len(rows) == 2
    trained = sorted(float(p) for row in rows for p in row.logprobs[row.mask == 1])
    assert trained == sorted(float(p) for _, result in said for p in result.logprobs)


@pytest.mark.parametrize(
    "sampling", [{"top_p": 0.5}, {"top_k": 3}, {"temperature": 0.0}, {"temperature": 0.0, "top_k": 2}]
)
async def test_what_is_sampled_otherwise_than_trained_is_context_or_refused(endless, tokenizer, sampling):
    """The buffer takes no episode in which such units would be trained, and says what to do."""

    async def episode(train: bool | None) -> Any:
        engine = endless.engine()
        await engine.start(endless.weights(4, epoch=2))
        ctx = context(engine, tokenizer)
        first = await ctx.generate("1+2=")
        how = sampling if train is None else {**sampling, "train": train}
        await ctx.generate("=7", parent=first.segment, **how)
        await engine.stop()
        return ctx.builder.build()

    for train in (None, True):
        problem = read_arrival("job", "t#0", 0, await episode(train), 1).problem
        assert problem.startswith("segment 3 of episode t#0.0 was sampled ")
        assert "ctx.generate(…, train=False)" in problem
    kept = await episode(False)
    assert read_arrival("job", "t#0", 0, kept, 1).problem == ""
    assert kept.n_sampled == 6
    (row,) = training_rows(kept)
    assert np.repeat(row.path, row.lengths)[row.mask == 1].tolist() == [1] * 6


async def test_an_aborted_request_makes_no_episode(endless: Any, tokenizer: Any) -> None:
    engine = endless.engine()
    await engine.start(endless.weights(0))
    ctx = context(engine, tokenizer)
    call = asyncio.ensure_future(ctx.generate("1+2=", max_new_tokens=90))
    await eventually(lambda: engine.stats().tokens_total)
    await engine.abort(["t#0.0//0"])
    with pytest.raises(EpisodeAborted):
        await call
    with pytest.raises(RequestError, match="vocabulary"):
        await ctx.generate([3, 4_000])
    with pytest.raises(ValueError, match="prompt"):
        await ctx.generate()
    await engine.stop()


def test_seeds_of_calls_differ_in_every_part() -> None:
    seeds = {
        call_seed(group, sample, attempt, call)
        for group in (0, 1, 2**48 - 1)
        for sample in range(3)
        for attempt in range(3)
        for call in range(3)
    }
    assert len(seeds) == 81
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_every_argument_of_a_workflow_is_on_its_page() -> None:
    page = Path(__file__).parents[3] / "docs" / "agents.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    for name in WORKFLOWS.built_in:
        section = getattr(WORKFLOWS.find(name), "Arguments", None)
        for field, info in section.model_fields.items() if section else ():
            assert f"`{field}`" in rows[name]
            assert info.description, f"{name}.{field} says what it means"


@pytest.mark.parametrize("alike", [True, False], ids=["one tokenizer", "two"])
async def test_each_policy_answers_by_its_own_engine_tokenizer_and_parameters(endless, tokenizer, alike):
    engines = [Logged(endless.engine()) for _ in range(2)]
    for version, engine in enumerate(engines):
        await engine.start(endless.weights(version + 3, epoch=2 - version))
    render = Renderer(tokenizer)
    other = PolicyEngine(engines[1], render if alike else Renderer(tokenizer), Sampling(max_new_tokens=2))
    names = ("coder", "tester")
    builder = EpisodeBuilder("job", "t", "t#0", 0, policies=names, agents=[("coder", 0), ("tester", 1)])
    lead = PolicyEngine(engines[0], render, Sampling(max_new_tokens=4))
    ctx = Context({"coder": lead, "tester": other}, builder, episode_id="t#0.0", seed=5)
    said = await ctx.generate("1+2=")
    tested = await ctx.generate("=7", policy="tester")
    await ctx.generate("+1", parent=tested.segment, agent=1, max_new_tokens=3)
    if alike:
        await ctx.generate("+2", parent=said.segment, policy="tester")
    else:
        with pytest.raises(ValueError, match="tester cannot go on with a path of coder"):
            await ctx.generate("+2", parent=said.segment, policy="tester")
    second = ctx.agent("reviewer", "tester")
    await ctx.generate("+3", agent=second)
    for wrong in ({"policy": "judge"}, {"policy": "coder", "agent": 1}):
        with pytest.raises(ValueError, match=r"judge|agent 1 speaks for tester"):
            await ctx.generate("1", **wrong)
    for engine in engines:
        await engine.stop()
    episode = builder.build()
    asked = [[request.sampling.max_new_tokens for request, _ in engine.log] for engine in engines]
    assert asked == [[4], [2, 3, *[2] * alike, 2]]
    assert [request.began for request, _ in engines[1].log][:2] == [None, (1, 4)]
    assert {name: tuple(held) for name, held in episode.versions.items()} == {
        "coder": (3, 3, 2),
        "tester": (4, 4, 1),
    }
    spoken = [episode.segments.agent[call.segment] for call in episode.header.calls]
    assert spoken == [0, 1, 1, *[1] * alike, second]
