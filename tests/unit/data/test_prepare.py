"""`areal-async data prepare`: every style and place of data, and what holds of every result."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from areal_async.cli.main import app
from areal_async.data.convert import Style, extract
from areal_async.data.examples import read_examples
from areal_async.data.prepare import Recipe, prepare, write_rows
from areal_async.data.sources import DataError, Source, find_source, source_rows
from areal_async.data.tasks import read_tasks

GSM8K = [
    {"question": f"Tom has {n} apples, and buys one.", "answer": f"He has <<{n}+1>>.\n#### 1,{n:03}"}
    for n in range(40)
]
BOX = "It is $\\boxed{\\frac{%s}{7}}$."
MATH = [{"problem": f"What is {n}/7?", "solution": BOX % n, "level": f"Level {n}"} for n in range(20)]


def call(*arguments, status=0):
    done = CliRunner().invoke(app, ["data", "prepare", *map(str, arguments)])
    assert done.exit_code == status, done.output + done.stderr
    return done.output if status == 0 else done.stderr


def said(role, content):
    return {"role": role, "content": content}


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_gsm8k_becomes_tasks_with_a_held_out_file(write, tmp_path):
    source = write("gsm8k/train.jsonl", GSM8K)
    out = tmp_path / "train.jsonl"
    told = call(source, "--out", out, "--held-out", 0.2, "--instruction", "Think.")
    assert "gsm8k: 40 rows read, 40 taken" in told
    train, held_out = rows_of(out), rows_of(tmp_path / "held_out.jsonl")
    assert (len(train), len(held_out)) == (32, 8)
    assert {row["data_source"] for row in train} == {"gsm8k"}
    by_prompt = {row["prompt"]: row["reward_model"]["ground_truth"] for row in (*train, *held_out)}
    assert by_prompt["Tom has 7 apples, and buys one.\nThink."] == "1007"
    assert len(read_tasks(out)) == 32
    assert train[3]["extra_info"] == {"split": "train", "index": 3}


def test_math_gives_what_its_box_holds_and_rows_are_chosen_by_what_a_column_has(write, tmp_path):
    source, out, one = write("math.jsonl", MATH), tmp_path / "out.jsonl", tmp_path / "one.jsonl"
    call(source, "--out", out)
    (task,) = [task for task in read_tasks(out) if task.prompt == "What is 3/7?"]
    assert (task.ground_truth, task.data_source) == ("\\frac{3}{7}", "math")
    assert task.extra_info["level"] == "Level 3"
    told = call(source, "--out", one, "--where", "level=Level 3")
    assert {row["extra_info"]["level"] for row in rows_of(one)} == {"Level 3"}
    assert f"{len(MATH) - len(rows_of(one))} of other --where" in told
    assert "takes none of" in call(source, "--out", tmp_path / "x.jsonl", "--where", "level=9", status=2)


def test_a_chat_asks_all_but_its_last_reply(write, tmp_path):
    chats = [
        {
            "system": "Be short.",
            "conversations": [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}],
        },
        {"messages": [said("user", "2+2"), said("assistant", "4")]},
    ]
    out = tmp_path / "out.jsonl"
    call(write("chats.jsonl", chats), "--out", out)
    asked = {row["prompt"][-1]["content"]: row for row in rows_of(out)}
    assert asked["1+1"]["prompt"] == [said("system", "Be short."), said("user", "1+1")]
    assert asked["2+2"]["reward_model"]["ground_truth"] == "4"
    call(tmp_path / "chats.jsonl", "--out", tmp_path / "sft.jsonl", "--kind", "sft")
    form, examples = read_examples(tmp_path / "sft.jsonl", "sft")
    assert form == "chats"
    assert {example.answers[0].answer[-1]["content"] for example in examples} == {"2", "4"}


def test_an_observation_is_what_a_tool_said(write, tmp_path):
    said = [("human", "q"), ("function_call", "f()"), ("observation", "3"), ("gpt", "three")]
    chat = {"conversations": [{"from": who, "value": text} for who, text in said]}
    call(write("in.jsonl", [chat]), "--out", tmp_path / "out.jsonl", "--kind", "sft")
    roles = [message["role"] for message in rows_of(tmp_path / "out.jsonl")[0]["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]


def test_pairs_of_a_reward_model_keep_their_margin(write, tmp_path):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 2.0}
    call(write("in.jsonl", [pair]), "--out", tmp_path / "out.jsonl", "--kind", "reward_model")
    assert [one.value for one in read_examples(tmp_path / "out.jsonl", "reward_model")[1]] == [2.0]


def test_preferences_are_pairs_whose_prompt_is_on_one_side_of_the_split(write, tmp_path):
    pairs = [{"question": f"q{n // 2}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(40)]
    out = tmp_path / "pairs.jsonl"
    call(write("in.jsonl", pairs), "--out", out, "--held-out", 10, "--map", "prompt=question")
    files = [list(read_examples(path, "preference")[1]) for path in (out, tmp_path / "held_out.jsonl")]
    train, held_out = ({example.answers[0].prompt for example in each} for each in files)
    assert [len(each) for each in files] == [30, 10]
    assert not train & held_out


def test_tools_stay_with_their_rows(write, tmp_path):
    schema = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}]
    asked = said("assistant", None) | {"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    chat = [said("user", "1+2"), asked, said("tool", "3") | {"name": None}, said("assistant", "3")]
    other = [said("user", "hello"), said("assistant", "hi")]
    source = write("tools.jsonl", [{"messages": chat, "tools": json.dumps(schema)}, {"messages": other}])
    call(source, "--out", tmp_path / "rl.jsonl")
    (task,) = [row for row in rows_of(tmp_path / "rl.jsonl") if "tools" in row["extra_info"]]
    assert task["extra_info"]["tools"] == schema
    assert task["prompt"][2] == said("tool", "3")
    assert "arguments" in str(task["prompt"][1])
    call(source, "--out", tmp_path / "sft.jsonl", "--kind", "sft")
    examples = list(read_examples(tmp_path / "sft.jsonl", "sft")[1])
    assert sorted(len(example.answers[0].tools) for example in examples) == [0, 1]


def test_folders_of_the_hub_are_read_without_datasets(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(GSM8K)
    for split, part in (("train", table.slice(0, 30)), ("test", table.slice(30))):
        layout = tmp_path / "gsm8k" / "main"
        layout.mkdir(parents=True, exist_ok=True)
        pq.write_table(part, layout / f"{split}-00000-of-00001.parquet")
    train, test = GSM8K[:30], GSM8K[30:]
    expected = {"gsm8k train": train, "gsm8k test": test, "gsm8k/main/*.parquet train": test + train}
    for place, split in map(str.split, expected):
        found = find_source(str(tmp_path / place), split)
        assert [row for _, row in source_rows(found)] == expected[f"{place} {split}"], place
    assert find_source(str(tmp_path / "gsm8k" / "main" / "*.parquet"), "train").name == "gsm8k"
    with pytest.raises(DataError, match="has no split 'validation': choose with --split"):
        find_source(str(tmp_path / "gsm8k"), "validation")


def test_a_split_of_the_hub_has_its_whole_name(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for split in ("train_prefs", "train_gen", "test_prefs"):
        for shard, row in enumerate(GSM8K[:2]):
            name = f"{split}-{shard:05}-of-00002-1a2b3c.parquet"
            pq.write_table(pa.Table.from_pylist([row | {"split": split}]), tmp_path / name)
    rows = [row for _, row in source_rows(find_source(str(tmp_path), "train_gen"))]
    assert [row["split"] for row in rows] == ["train_gen"] * 2
    choice = "no split 'train': choose with --split test_prefs, train_gen, train_prefs"
    with pytest.raises(DataError, match=choice):
        find_source(str(tmp_path), "train")


def test_a_json_file_may_be_one_list_or_one_problem(tmp_path):
    (tmp_path / "all.json").write_text(json.dumps(MATH, indent=1))
    for n, problem in enumerate(MATH):
        (tmp_path / f"{n:02}.json").write_text(json.dumps(problem, indent=1))
    whole = [row for _, row in source_rows(find_source(str(tmp_path / "all.json"), "train"))]
    each = [row for _, row in source_rows(find_source(str(tmp_path / "[0-9]*.json"), "train"))]
    assert whole == each == MATH


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    data=st.data(),
    seed=st.integers(0, 3),
    held_out=st.sampled_from([0, 0.3, 2]),
)
def test_a_mixture_has_its_shares_and_a_split_shares_no_prompt(tmp_path_factory, sizes, data, seed, held_out):
    folder = tmp_path_factory.mktemp("mixture")
    sources = []
    for number, size in enumerate(sizes):
        path = folder / f"{number}.jsonl"
        path.write_text("".join(f'{{"prompt": "{number}/{n}", "answer": "1"}}\n' for n in range(size)))
        sources.append(Source(f"s{number}", (path,)))
    weights = data.draw(st.tuples(*[st.sampled_from([0.5, 1, 3])] * len(sizes)))
    recipe = Recipe(seed=seed, weights=weights, held_out=held_out)
    try:
        done = prepare(sources, Style(), recipe)
    except DataError:
        event("too few to hold out 2")
        assert held_out == 2
        return
    total = len(done.train) + len(done.held_out)
    for weight, counts in zip(weights, done.counts.values(), strict=True):
        assert abs(counts.rows["taken"] - total * weight / sum(weights)) < 1
    assert total > min(size * sum(weights) / weight for size, weight in zip(sizes, weights, strict=True)) - 1
    prompts = [row["prompt"] for row in (*done.train, *done.held_out)]
    assert len(set(prompts)) == total
    assert len(done.held_out) == (round(held_out * total) if held_out < 1 else held_out)
    again = prepare(sources, Style(), recipe)
    assert (again.train, again.held_out) == (done.train, done.held_out)


def test_duplicates_go(write):
    source = find_source(str(write("twice.jsonl", [*GSM8K, *GSM8K])), "train")
    done, other = (prepare([source], Style(), Recipe(seed=seed, held_out=0.25)) for seed in (0, 1))
    assert {row["prompt"] for row in done.held_out} != {row["prompt"] for row in other.held_out}
    assert done.counts["twice"].rows["duplicates"] == 40
    assert len(done.train) + len(done.held_out) == 40


def test_prompts_are_counted_as_the_template_makes_them(write, tmp_path, chat_model):
    source = write("words.jsonl", [{"prompt": "a" * n, "answer": "b"} for n in range(1, 21)])
    common = (source, "--model", chat_model, "--max-prompt-tokens", 10, "--overwrite")
    out = tmp_path / "out.jsonl"
    told = call(*common, "--out", out)
    assert sorted(len(row["prompt"][0]["content"]) for row in rows_of(out)) == list(range(1, 8))  # u…|a
    assert "13 too long, 7 taken" in told
    assert "prompts in tokens: p50 7, p95 10, max 10" in told


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ({"prompt": "1+1", "answer": "2", "image": "x.png"}, (), "has the column image"),
        ({"prompt": "<image> what?", "answer": "2"}, (), "line 2: column `prompt` has <image>"),
        (
            {"prompt": "1+1", "solution": "no box"},
            ("--answer", "boxed", "--map", "answer=solution"),
            "line 2: column 'solution' has no \\boxed",
        ),
        ({"text": "1+1"}, (), "line 2 has no prompt among its columns (text). Say which"),
        ({"prompt": "1+1", "answer": ""}, (), "line 2 has no answer: column 'answer' is empty"),
        ({"prompt": "1+1"}, (), "line 2 has no answer: none of prompt is its answer"),
        (
            {"prompt": "1+1", "answer": "2"},
            ("--map", "answer=result"),
            "line 1 has no column 'result' for answer",
        ),
        ({"chosen": "a"}, ("--kind", "preference"), "no rejected"),
        ({"messages": "hello"}, (), "line 2: column 'messages' must be a list of messages"),
        (
            {"prompt": "What comes after A?", "choices": ["C", "B", "A"], "answer": "A"},
            (),
            "line 2 has the column 'choices', without which its question may have no answer",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_its_line(write, tmp_path, row, options, words):
    good = {"prompt": "0+0", "answer": "0", "solution": "\\boxed{0}", "chosen": "a", "rejected": "b"}
    source = write("rows.jsonl", [good, row])
    told = call(source, "--out", tmp_path / "out.jsonl", "--kind", "rl", *options, status=2)
    assert words in told
    assert not (tmp_path / "out.jsonl").exists()


def test_bad_rows_may_be_left_out_and_are_counted(write, tmp_path):
    source = write("math.jsonl", [*MATH, {"problem": "none", "solution": "no box"}])
    told = call(source, "--out", tmp_path / "out.jsonl", "--answer", "boxed", "--skip-bad")
    assert "21 rows read, 1 bad, 20 taken" in told
    assert "line 21" in told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--weights", "1,2"), "--weights has 2 numbers for 1 sources"),
        (("--weights", "a"), "is no list of numbers"),
        (("--answer", "last"), "--answer is 'last'"),
        (("--kind", "dpo"), "--kind is 'dpo'"),
        (("--map", "promt=question"), "--map promt"),
        (("--max-prompt-tokens", "9"), "Add --model"),
        (("--held-out", "40"), "leaves none of the 40 rows"),
        (("--model", "nowhere"), "the folder nowhere does not exist"),
        (("--form", "text"), "--form was removed: prompts become messages"),
        (("--held-out-file=x.jsonl",), "--held-out-file was removed: the file is"),
    ],
)
def test_wrong_options_are_named(write, tmp_path, options, words):
    source = write("gsm8k.jsonl", GSM8K)
    assert words in call(source, "--out", tmp_path / "out.jsonl", *options, status=2)
    assert not (tmp_path / "out.jsonl").exists()


HALF = "cut \ud83d here"
ASKS = {"question": "2+2?", "answer": "#### 4"}
METAL = {"question": "Which is a metal?", "answer": 1}
WOOD_IRON = "Which is a metal?\nA. wood\nB. iron"


def made(tmp_path, write, rows, *options):
    """The rows that `data prepare` makes, in the order of their prompts, and what it says."""
    out = tmp_path / "out.jsonl"
    told = call(write("in.jsonl", rows), "--out", out, *options)
    return sorted(rows_of(out), key=str), told


@pytest.mark.parametrize(
    ("row", "asked", "truth"),
    [
        ({"instruction": "Translate", "input": "Danke", "output": "Thanks"}, "Translate\n\nDanke", "Thanks"),
        ({"instruction": "Sing", "input": "", "output": "La"}, "Sing", "La"),
        ({"instruction": "Write in 8 bits", "input": "8", "output": "1000"}, "Write in 8 bits\n\n8", "1000"),
        ({"prompt": "Solve: 1+2", "question": "1+2", "answer": "3"}, "Solve: 1+2", "3"),
    ],
)
def test_what_belongs_to_a_question_is_in_its_prompt(write, tmp_path, row, asked, truth):
    (task,), _ = made(tmp_path, write, [row])
    assert (task["prompt"], task["reward_model"]["ground_truth"]) == (asked, truth)


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ({"question": "How old?", "history": [["a", "b"]], "answer": "3"}, (), "column 'history'"),
        ({"question": "Same?", "premise": "a", "hypothesis": "b", "answer": "no"}, (), "column 'premise'"),
        ({"question": "How old?", "context": {"title": ["a"]}, "answer": "3"}, (), "column 'context'"),
        ({"passage": "P", "query": "Q", "answer": "a"}, (), "--map prompt=passage+query"),
        ({"instruction": "Add.", "problem": "1 and 2", "answer": "3"}, (), "prompt=problem+instruction"),
        ({"prompt": "1+1", "question": "2+2", "answer": "4"}, (), "--map prompt=prompt+question"),
        (METAL | {"choices": ["wood", "iron"], "answer": 2}, (), "column 'choices'"),
        (METAL | {"options": {"A": "wood", "B": "iron"}, "answer": "B"}, (), "column 'options'"),
        (METAL | {"A": "wood", "B": "iron", "answer": "A"}, (), "column 'A'"),
        (METAL | {"option_a": "wood", "option_b": "iron", "answer": "B"}, (), "column 'option_a'"),
        ({"problem": "2", "question": "What is 2+3?", "answer": "5"}, (), "'question' and 'problem'"),
        (
            METAL | {"choices": ["wood"]},
            ("--map", "prompt=question+choices"),
            "`choices` has a message whose",
        ),
        ({"question": "How old?", "sentence1": "a", "output": "b"}, ("--kind", "sft"), "column 'sentence1'"),
    ],
)
def test_a_column_that_may_belong_to_a_question_is_refused_by_name(write, tmp_path, row, options, words):
    told = call(write("in.jsonl", [row]), "--out", tmp_path / "out.jsonl", *options, status=2)
    assert words in told


def test_columns_are_joined_or_left_out_as_the_user_says(write, tmp_path):
    row = {"question": "Same?", "premise": "a", "hypothesis": "b", "answer": "no", "level": 3}
    (task,), _ = made(tmp_path, write, [row], "--map", "prompt=premise+hypothesis+question")
    assert task["prompt"] == "a\n\nb\n\nSame?"
    assert task["extra_info"] == {"level": 3, "split": "train", "index": 0}
    (task,), _ = made(tmp_path, write, [row], "--map", "prompt=question", "--overwrite")
    assert (task["prompt"], task["extra_info"]["premise"]) == ("Same?", "a")


@pytest.mark.parametrize("kind", ["rl", "sft", "preference"])
def test_a_system_column_becomes_the_system_message(write, tmp_path, kind):
    row = {"system": "Be kind.", "question": "q", "answer": "a", "chosen": "c", "rejected": "r"}
    (task,), _ = made(tmp_path, write, [row], "--kind", kind)
    asked = task["messages"][:-1] if kind == "sft" else task["prompt"]
    assert asked == [said("system", "Be kind."), said("user", "q")]
    if kind == "preference":
        assert task["chosen"] == [said("assistant", "c")]
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    chat = {"system": "Be kind.", "conversations": turns}
    (task,), _ = made(tmp_path, write, [chat], "--kind", "sft", "--overwrite")
    assert task["messages"][0] == said("system", "Be kind.")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"problem": "p", "solution": "A proof without any box."}, "'solution' has neither #### nor"),
        ({"problem": "p", "solution": "See page 3"}, "'solution' has neither #### nor"),
        ({"question": "q", "answer": "He has 2. He buys 3. So he has 5."}, "'answer' has neither"),
        ({"messages": [said("user", "q"), said("assistant", "Hm. It is 5.")]}, "'messages' has neither"),
        ({"question": "q", "answer": "so ####"}, "'answer' has no answer"),
        ({"question": "q", "answer": "#### Steps\nFirst we add. Then we stop."}, "'answer' has neither"),
        (
            {"messages": [said("user", "q"), said("assistant", "5") | {"train": False}]},
            "last reply has weight",
        ),
    ],
)
def test_a_solution_is_no_ground_truth(write, tmp_path, row, words):
    (good,), told = made(tmp_path, write, [ASKS, row], "--skip-bad")
    assert (good["prompt"], "1 bad" in told) == ("2+2?", True)
    assert words in told
    if "neither" in words:
        tasks, _ = made(tmp_path, write, [row], "--answer", "whole", "--overwrite")
        assert tasks[0]["reward_model"]["ground_truth"] == list(row.values())[-1] or "messages" in row


def test_a_whole_text_among_marked_answers_is_refused(write, tmp_path):
    work = {"question": "3+3?", "answer": "Add 3 and 3 to get 6"}
    marked = {"question": "2+2?", "answer": "It is four. #### 4"}
    words = "line 1: column 'answer' has neither #### nor \\boxed{…} in 'Add 3 and 3 to get 6'"
    assert words in call(write("in.jsonl", [work, marked]), "--out", tmp_path / "x.jsonl", status=2)
    (task,), told = made(tmp_path, write, [work, marked], "--skip-bad")
    assert task["prompt"] == "2+2?"
    assert words in told


def test_two_answers_to_one_question_are_told_of(write, tmp_path):
    rows = [ASKS, ASKS | {"answer": "#### 5"}, ASKS, {"question": "3+3?", "answer": "6"}]
    tasks, told = made(tmp_path, write, rows)
    assert [task["reward_model"]["ground_truth"] for task in tasks] == ["4", "6"]
    assert "2 duplicates" in told
    assert "1 duplicates have another answer" in told
    assert "line 2 has the answer '5', and the row that was kept '4'" in told


def test_a_question_with_other_tools_is_another_question(write, tmp_path):
    tasks, told = made(tmp_path, write, [ASKS, ASKS | {"tools": [{"name": "add"}]}])
    assert (len(tasks), "duplicates" in told) == (2, False)


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"question": HALF, "answer": "1"}, ()),
        ({"question": "q", "answer": HALF}, ("--kind", "sft")),
        ({"question": "q", "answer": "1", "note": {"a": [HALF]}}, ()),
        ({"messages": [said("user", "q"), said("assistant", HALF)]}, ("--kind", "sft")),
        ({"chosen": HALF, "rejected": "no", "prompt": "q"}, ("--kind", "preference")),
        ({"question": "q", "answer": 1 << 70}, ()),
    ],
)
def test_a_row_that_cannot_be_written_is_named_or_left_out(write, tmp_path, row, options):
    good = {"prompt": "q", "chosen": "a", "rejected": "b"} if "chosen" in row else ASKS
    source, out = write("in.jsonl", [good, row]), tmp_path / "out.jsonl"
    told = call(source, "--out", out, *options, status=2)
    assert "line 2: column `" in told
    assert "half of a surrogate pair" in told or "over 64 bits" in told
    assert "1 bad, 1 taken" in call(source, "--out", out, *options, "--skip-bad")


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ({"question": "q", "answer": float("nan")}, (), "its ground truth is nan"),
        ({"prompt": "q", "reward_model": {"ground_truth": float("inf")}}, (), "its ground truth is inf"),
        ({"chosen": " \n", "rejected": "no", "prompt": "q"}, ("--kind", "preference"), "has no chosen"),
    ],
)
def test_an_answer_that_is_missing_is_named(write, tmp_path, row, options, words):
    assert words in call(write("in.jsonl", [row]), "--out", tmp_path / "out.jsonl", *options, status=2)


def test_lines_that_are_no_json_may_be_left_out(write, tmp_path):
    source = write("in.jsonl", [ASKS])
    source.write_text("{broken\n" + source.read_text())
    assert "line 1 is not JSON" in call(source, "--out", tmp_path / "x.jsonl", status=2)
    assert "2 rows read, 1 bad, 1 taken" in call(source, "--out", tmp_path / "x.jsonl", "--skip-bad")


def test_nulls_in_arguments_and_schemas_are_kept(write, tmp_path):
    chat = [said("user", "q"), {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": None}]}]
    source, out = write("in.jsonl", [{"messages": chat, "tools": [NULL_SCHEMA]}]), tmp_path / "out.jsonl"
    call(source, "--out", out, "--kind", "sft")
    (row,) = rows_of(out)
    assert (row["messages"][1]["tool_calls"], row["tools"]) == ([CALL], [NULL_SCHEMA])


CALL = {"function": {"name": "f", "arguments": {"x": None, "y": [{"z": None}]}}}
NULL_SCHEMA = {"name": "f", "parameters": {"x": {"default": None, "enum": ["a", None]}}}


def test_nothing_is_overwritten_unless_asked(write, tmp_path):
    source, out = write("gsm8k.jsonl", GSM8K), tmp_path / "out.jsonl"
    call(source, "--out", out)
    before = out.read_bytes()
    assert "exists" in call(source, "--out", out, "--seed", 1, status=2)
    assert out.read_bytes() == before
    with pytest.raises(DataError, match=re.escape("does not end in .jsonl")):
        write_rows({tmp_path / "a.jsonl": [], tmp_path / "out.csv": []}, overwrite=True)
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "how", "answer"),
    [
        ("so\n#### 1,234\n", "auto", "1234"),
        ("#### a, b", "hash", "a, b"),
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "auto", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2", "boxed", "1"),
        ("it is 3 or -4.5", "number", "-4.5"),
        ("as it is", "auto", "as it is"),
        ("as it is", "hash", None),
        ("#### 5", "whole", "#### 5"),
        ("\\boxed{\\{1\\}}", "boxed", "\\{1\\}"),
        ("We add 1 and 2. #### 3\nThe answer is: 3", "auto", "3"),
        ("So it is. The final answer is 1,200.\n", "auto", "1200"),
        ("The answer is: \\frac{1}{2}", "auto", "\\frac{1}{2}"),
        ("The answer is 3. No, it is 4.", "auto", "The answer is 3. No, it is 4."),
    ],
)
def test_answers_are_found_where_they_stand(text, how, answer):
    assert extract(text, how) == answer
