"""Rows of data files that no job can use."""

import pytest

from areal_async.data.examples import read_examples
from areal_async.data.tasks import TaskFileError, read_tasks


def task(prompt, truth="1", **more):
    return {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth}, **more}


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("rl", task("cut \ud83d here")),
        ("rl", task("q", "cut \udc00")),
        ("rl", task("q", extra_info={"a": ["\ud83d"]})),
        ("sft", {"messages": [{"role": "user", "content": "\ud83d"}, {"role": "assistant", "content": "a"}]}),
        ("preference", {"prompt": "q", "chosen": "a", "rejected": "\ud83d"}),
    ],
)
def test_half_a_character_is_named_by_its_row(write, kind, row):
    path = write("tasks.jsonl", [row, row])
    with pytest.raises(TaskFileError, match=r"line 1: column `.*half of a surrogate pair"):
        list(read_tasks(path) if kind == "rl" else read_examples(path, kind)[1])
