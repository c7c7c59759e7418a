"""reasoning-gym's scorers behind a strict 0 or 1."""

import importlib
import inspect
import json
import os

import pytest
from of_reasoning_gym import EVALUATES, PARSES, harmless, reasoning_gym

from areal_async.base.verdicts import Abstain
from reward_service.sdk import RewardInput

library = pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: the extra `environments`")
DATASETS = importlib.import_module("reasoning_gym.factory").DATASETS


def entry_of(name, **settings):
    return library.create_dataset(name, seed=7, size=1, **settings)[0]


def judged(response, entry, **args):
    return reasoning_gym(RewardInput(response=response, extra_info={"entry": entry}), **args)


@pytest.mark.parametrize(
    "name", ["chain_sum", "leg_counting", "number_sorting", "countdown", "n_queens", "string_insertion"]
)
def test_the_librarys_own_answer_is_right_and_another_is_not(name):
    entry = entry_of(name)
    right = entry["metadata"]["expression"] if name == "countdown" else str(entry["answer"])
    assert judged(f"<answer>{right}</answer>", entry).value == 1
    assert judged("<answer>none</answer>", entry).value == 0


def test_parts_of_a_point_are_not_given():
    entry = entry_of("chain_sum")
    near = judged(f"it is {entry['answer']}", entry)
    assert near.value == 0
    assert 0 < near.components["library"] < 1


def test_a_task_may_hold_the_entry_as_text_or_tell_how_to_make_it_again():
    entry = entry_of("chain_sum")
    text = RewardInput(response=str(entry["answer"]), ground_truth=json.dumps(entry))
    assert reasoning_gym(text).value == 1
    again = RewardInput(
        response=str(entry["answer"]),
        ground_truth=str(entry["answer"]),
        extra_info={"dataset": "chain_sum", "seed": 7, "index": 0},
    )
    assert reasoning_gym(again).value == 1


def test_a_task_that_names_nothing_is_an_error_and_one_without_entry_is_not_judged():
    with pytest.raises(ValueError, match="no data set is named"):
        reasoning_gym(RewardInput(response="1"))
    with pytest.raises(ValueError, match="cannot make 'no_such_set'"):
        reasoning_gym(RewardInput(response="1", extra_info={"seed": 1, "index": 0}), dataset="no_such_set")
    assert isinstance(reasoning_gym(RewardInput(response="1"), dataset="chain_sum"), Abstain)


def test_no_scorer_that_runs_its_answer_is_kept_from_the_right_one():
    sources = {name: inspect.getsource(kind.score_answer) for name, (kind, _) in DATASETS.items()}
    running = [name for name, text in sources.items() if EVALUATES.search(text) or PARSES.search(text)]
    assert len(running) >= 8
    for name in running:
        entry = entry_of(name)
        answer = entry["metadata"]["expression"] if name == "countdown" else str(entry["answer"])
        if name != "puzzle24":  # its answer is a sentence
            assert harmless(answer, name), (name, answer)


@pytest.mark.parametrize(
    "name", ["string_insertion", "spiral_matrix", "n_queens", "binary_matrix", "countdown", "puzzle24"]
)
def test_no_answer_is_run_as_a_program(name, tmp_path):
    entry, mark = entry_of(name), tmp_path / "mark"
    for program in (
        f"__import__('os').mkdir({str(mark)!r})",
        f"[open({str(mark)!r}, 'w')]",
        f"(lambda: __import__('os').mkdir({str(mark)!r}))()",
        f"[c for c in [open({str(mark)!r}, 'w')]]",
    ):
        verdict = judged(f"<answer>{program}</answer>", entry)
        assert verdict.value == 0
        assert verdict.components["refused"] == 1
    assert not os.path.exists(mark)


@pytest.mark.parametrize(
    ("name", "answer", "may"),
    [
        ("string_insertion", "['A', 'B']", True), ("string_insertion", "ABCD", True),
        ("string_insertion", "A.B", False), ("string_insertion", "A[0]", False),
        ("string_insertion", "A + B", False), ("string_insertion", "A B C D", True),
        ("n_queens", "Q _\n_ Q", True), ("countdown", "(1 + 2) * 8", True),
        ("countdown", "(1).__class__", False), ("countdown", "9**9**9**9", False),
        ("countdown", "quit()", False), ("simple_integration", "x**2/2 + sin(x) + C", True),
        ("chain_sum", "__import__('os')", True),
    ],
)  # fmt: skip
def test_what_a_scorer_would_run_must_be_a_literal_or_plain_maths(name, answer, may):
    assert harmless(answer, name) is may
