"""From examples in files to tokens that are learned: forms, templates, and what is refused."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import Unigram, WordLevel
from tokenizers.pre_tokenizers import Metaspace, Split
from transformers import PreTrainedTokenizerFast

from areal_async.config.job import JobConfig
from areal_async.data.chats import ChatError, answer_ids, whole_ids
from areal_async.data.examples import Continuation, read_examples, split_prompt
from areal_async.data.tasks import TaskFileError, read_tasks
from trainer_service.data.lessons import read_lessons
from trainer_service.errors import BatchError

PLAIN = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}<eos> {% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role[0] }}>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>{% endgeneration %}"
    "{% else %}{{ m.content }}<eos>{% endif %} {% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<{{ m.role[0] }}>"
    "{% if m.role == 'assistant' and not loop.last %}~{% else %}{{ m.content }}{% endif %}<eos> {% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
WITH_TOOLS = "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}" + PLAIN
CHAT = [
    {"role": "system", "content": "s0"},
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "x1"},
    {"role": "tool", "content": "t2"},
    {"role": "assistant", "content": "x2"},
    {"role": "user", "content": "q3"},
    {"role": "assistant", "content": "x3"},
    {"role": "user", "content": "left out"},
]


@pytest.fixture
def tokenizer():
    """A token for each character and for each tag."""
    symbols = ["<pad>", "<eos>", "<s>", "<u>", "<a>", "<t>", *map(chr, range(32, 127))]
    made = Tokenizer(WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<pad>"))
    made.pre_tokenizer = Split("", "isolated")
    made.add_special_tokens(symbols[:6])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def learned(tokenizer, continuation, **options):
    """The whole text, and the pieces of it that are learned."""
    ids, mask = answer_ids(tokenizer, continuation, **options)
    assert len(ids) == len(mask)
    text, pieces = "", [""]
    for token, one in zip(tokenizer.convert_ids_to_tokens(ids), mask, strict=True):
        text += token
        pieces[-1] += token if one else ""
        if not one and pieces[-1]:
            pieces.append("")
    return text, [piece for piece in pieces if piece]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_all_that_the_assistant_says_is_learned_with_its_end(tokenizer, template):
    tokenizer.chat_template = template
    text, pieces = learned(tokenizer, Continuation([], CHAT))
    assert pieces == ["x1<eos>", "x2<eos>", "x3<eos>"]
    assert text == "<s>s0<eos> <u>q1<eos> <a>x1<eos> <t>t2<eos> <a>x2<eos> <u>q3<eos> <a>x3<eos>"


@pytest.mark.parametrize("template", [PLAIN, MARKED, FORGETFUL])
def test_the_last_turn_alone_is_learned_where_asked(tokenizer, template):
    tokenizer.chat_template = template
    assert learned(tokenizer, Continuation([], CHAT), train_on="last")[1] == ["x3<eos>"]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_turns_of_the_prompt_are_not_learned(tokenizer, template):
    tokenizer.chat_template = template
    assert learned(tokenizer, Continuation(CHAT[:4], CHAT[4:]))[1] == ["x2<eos>", "x3<eos>"]


def test_a_template_that_changes_earlier_turns_is_refused_with_what_to_do(tokenizer):
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(ChatError, match=r"message 2 differently.*train_on: last.*generation"):
        answer_ids(tokenizer, Continuation([], CHAT))


def test_marks_that_are_not_one_for_each_turn_are_refused(tokenizer):
    behind = ("{{ m.content }}<eos>{% endgeneration %}", "{{ m.content }}{% endgeneration %}<eos>")
    tokenizer.chat_template = MARKED.replace(*behind, 1)
    assert learned(tokenizer, Continuation([], CHAT))[1] == ["x1<eos>", "x2<eos>", "x3<eos>"]
    tokenizer.chat_template = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    with pytest.raises(ChatError, match=r"marks 1 turns.*assistant has 2"):
        answer_ids(tokenizer, Continuation([], CHAT[:5]))


GEMMA = PLAIN.replace("<eos> ", "<t> ")
HEADERS = PLAIN.replace("<eos> ", "")
WRITTEN = PLAIN.replace("<eos>", "##")
OUTSIDE = MARKED.replace("<eos>{% endgeneration %}", "{% endgeneration %}<eos>")
PADDED = MARKED.replace("<eos>{% endgeneration %}", "<eos>  {% endgeneration %}")


@pytest.mark.parametrize(
    ("template", "ends", "pieces"),
    [
        (GEMMA, None, ["x1<t>", "x2<t>", "x3<t>"]),
        (GEMMA.replace("<t> ", "<t>    "), None, ["x1<t>", "x2<t>", "x3<t>"]),
        (OUTSIDE, None, ["x1<eos>", "x2<eos>", "x3<eos>"]),
        (PADDED.replace("<eos>", "<t> <eos>"), ["<eos>", "<t>"], ["x1<t>", "x2<t>", "x3<t>"]),
        (PADDED, None, ["x1<eos>", "x2<eos>", "x3<eos>"]),
        (HEADERS, ["<eos>", "<u>", "<t>"], ["x1<t>", "x2<u>", "x3<eos>"]),
        (HEADERS, ["<eos>", "<u>"], None),
        (HEADERS, None, None),
        (WRITTEN, None, None),
        (WRITTEN.replace("## ", "##"), None, None),
        (OUTSIDE.replace("{% endgeneration %}<eos>", "{% endgeneration %}"), None, None),
        (PLAIN, ["<t>"], None),
    ],
)
def test_a_turn_is_learned_up_to_a_token_that_ends_it_or_refused(tokenizer, template, ends, pieces):
    tokenizer.chat_template = template
    named = None if ends is None else tokenizer.convert_tokens_to_ids(ends)
    if pieces is None:
        with pytest.raises(ChatError, match=r"never learn to stop.*eos_token_id in generation_config"):
            learned(tokenizer, Continuation([], CHAT), ends=named)
    else:
        assert learned(tokenizer, Continuation([], CHAT), ends=named)[1] == pieces


def test_the_ends_of_the_models_files_are_learned(tokenizer, tmp_path):
    tokenizer.chat_template = HEADERS
    tokenizer.save_pretrained(tmp_path / "model")
    rows = written(tmp_path / "f.jsonl", [{"messages": [Q, A, Q, B]}])
    job = JobConfig.model_validate(
        {"job": "t", "kind": "sft", "model": tmp_path / "model", "tasks": {"train": rows}}
    )
    with pytest.raises(BatchError, match=r"line 1: .*never learn to stop"):
        read_lessons(job, rows, tokenizer)
    ids = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<u>")]
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    (lesson,) = read_lessons(job, rows, tokenizer)[1]
    assert tokenizer.decode(lesson.rows[0].token_ids).replace(" ", "") == "<u>q<a>a<u>q<a>b<eos>"


def test_tools_are_shown_to_the_template(tokenizer):
    tokenizer.chat_template = WITH_TOOLS
    text, pieces = learned(tokenizer, Continuation([], CHAT[1:3], ({"name": "add"},)))
    assert (text, pieces) == ("[add]<u>q1<eos> <a>x1<eos>", ["x1<eos>"])


def test_a_text_answer_ends_with_the_end_of_sequence_token(tokenizer):
    assert learned(tokenizer, Continuation("1+1=", "2")) == ("1+1=2<eos>", ["2<eos>"])


def test_a_reward_model_reads_what_the_reward_reads(tokenizer):
    tokenizer.chat_template = PLAIN
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]
    reward_reads = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert whole_ids(tokenizer, Continuation(chat[:1], chat[1:])) == reward_reads
    assert whole_ids(tokenizer, Continuation("1+1=", "2")) == tokenizer("1+1=2").input_ids


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        ([{"role": "user", "content": "q"}], "no turn of the assistant"),
        (
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}],
            "leaves nothing to learn",
        ),
        ([{"role": "assistant", "content": "a"}], "begins with the assistant"),
    ],
)
def test_a_chat_without_anything_to_learn_is_refused(tokenizer, chat, says):
    tokenizer.chat_template = PLAIN.replace("<eos> ", "")
    with pytest.raises(ChatError, match=says):
        answer_ids(tokenizer, Continuation([], chat))


def test_a_chat_needs_a_template(tokenizer):
    with pytest.raises(ChatError, match=r"no chat template.*chat_template\.jinja"):
        answer_ids(tokenizer, Continuation([], CHAT))


# --- files ---


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def message(role, content):
    return {"role": role, "content": content}


Q, A, B = message("user", "q"), message("assistant", "a"), message("assistant", "b")


@pytest.mark.parametrize(
    ("kind", "row", "form", "answers", "value"),
    [
        ("sft", {"messages": [Q, A]}, "chats", [([], [Q, A])], 0),
        ("sft", {"prompt": "q", "completion": "a"}, "completions", [("q", "a")], 0),
        ("sft", {"prompt": [Q], "completion": [A]}, "completions", [([Q], [A])], 0),
        ("sft", {"prompt": "q", "reward_model": {"ground_truth": 7}}, "tasks", [("q", "7")], 0),
        ("preference", {"prompt": "q", "chosen": "a", "rejected": "b"}, "pairs", [("q", "a"), ("q", "b")], 0),
        ("preference", {"chosen": "say a", "rejected": "say b"}, "pairs", [("say", " a"), ("say", " b")], 0),
        ("preference", {"chosen": [Q, A], "rejected": [Q, B]}, "pairs", [([Q], [A]), ([Q], [B])], 0),
        ("preference", {"prompt": "q", "completion": "a", "label": True}, "labelled", [("q", "a")], 1),
        (
            "reward_model",
            {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 2},
            "pairs",
            [("q", "a"), ("q", "b")],
            2,
        ),
        ("reward_model", {"prompt": "q", "completion": "a", "score": -0.5}, "scored", [("q", "a")], -0.5),
    ],
)
def test_each_form_is_told_by_its_columns(tmp_path, kind, row, form, answers, value):
    found, examples = read_examples(written(tmp_path / "f.jsonl", [row]), kind)
    (example,) = examples
    assert found == form
    assert [(one.prompt, one.answer) for one in example.answers] == answers
    assert example.value == value


def test_parquet_files_hold_chats_whose_absent_fields_are_nulls(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [Q, {"role": "assistant", "tool_calls": [call]}, A]
    table = pa.Table.from_pylist([{"messages": chat, "tools": json.dumps([{"name": "add"}])}])
    pq.write_table(table, tmp_path / "f.parquet")
    (example,) = read_examples(tmp_path / "f.parquet", "sft")[1]
    assert example.answers[0].answer == [Q, {"content": ""} | chat[1], A]
    assert example.answers[0].tools == ({"name": "add"},)


@pytest.mark.parametrize(
    ("kind", "row", "says"),
    [
        ("sft", {"text": "a"}, "no columns that a job of kind sft learns from .found: none that count"),
        ("preference", {"messages": [Q]}, "found: messages.*`chosen`, `rejected`; or `prompt`, `completion`"),
        ("preference", {"prompt": "q", "chosen": "a", "rejected": "a"}, "the same"),
        ("preference", {"prompt": "q", "chosen": "a", "rejected": [B]}, "one is a text and the other"),
        ("preference", {"chosen": "a", "rejected": "b"}, "the prompt is empty"),
        ("preference", {"prompt": "q", "chosen": "a", "rejected": ""}, "an answer is empty"),
        ("preference", {"prompt": "q", "completion": "a", "label": "good"}, "true or false"),
        ("reward_model", {"prompt": "q", "completion": "a", "score": True}, "finite number"),
        ("sft", {"messages": "q"}, "holds a text"),
        ("sft", {"messages": [{"content": "q"}]}, "`role` and `content`"),
        ("sft", {"messages": [message("user", [{"type": "image"}])]}, "no text"),
        ("sft", {"messages": [Q, A, message("asistant", "b")]}, "line 1: .*role 'asistant'.*'assistant'"),
        ("preference", {"chosen": [Q, A], "rejected": [message("User", "q"), B]}, "`rejected`.*mean 'user'"),
        ("sft", {"messages": [Q, message("assistant", None), Q, A]}, "role 'assistant' whose `content` is"),
        (
            "sft",
            {"messages": [Q, {"role": "assistant", "tool_calls": []}, A]},
            "`content` is null or missing",
        ),
        ("sft", {"messages": [Q, A], "tools": "{"}, "not JSON"),
        ("sft", {"messages": [Q, A], "tools": [1]}, "list of schemas"),
    ],
)
def test_a_row_that_is_no_example_is_named(tmp_path, kind, row, says):
    with pytest.raises(TaskFileError, match=says):
        list(read_examples(written(tmp_path / "f.jsonl", [row]), kind)[1])


CALL = {"function": {"name": "f", "arguments": {"x": None, "y": [{"z": None}]}}}


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [CALL | {"id": None}]}, {"tool_calls": [CALL]}),
        ({"role": "assistant", "content": "a", "tool_calls": None, "name": None}, {}),
        (
            {"role": "assistant", "content": "a", "function_call": CALL["function"]},
            {"function_call": CALL["function"]},
        ),
        (
            {"role": "assistant", "content": "a", "tool_calls": [{"name": "f", "arguments": {"x": None}}]},
            None,
        ),
    ],
)
def test_null_fields_are_absent_and_null_arguments_are_kept(tmp_path, row, kept):
    kept = {"tool_calls": row["tool_calls"]} if kept is None else kept
    schema = {"name": "f", "parameters": {"x": {"default": None}}}
    written(tmp_path / "f.jsonl", [{"messages": [Q, row, Q, A], "tools": [schema]}])
    (example,) = read_examples(tmp_path / "f.jsonl", "sft")[1]
    said = row["content"] or ""
    assert example.answers[0].answer == [Q, {"role": "assistant", "content": said} | kept, Q, A]
    assert example.answers[0].tools == (schema,)
    written(tmp_path / "t.jsonl", [{"prompt": [Q, row, Q], "reward_model": {"ground_truth": "1"}}])
    (task,) = read_tasks(tmp_path / "t.jsonl")
    assert task.prompt == [Q, {"role": "assistant", "content": said} | kept, Q]


def test_tasks_and_chats_in_parquet_have_no_fields_of_other_rows(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    call = {"name": "f", "arguments": {"x": 1}}
    chats = [[Q], [Q, {"role": "assistant", "content": "", "tool_calls": [call]}, Q | {"name": "n"}]]
    tools = [[{"name": "f"}], [{"name": "g", "parameters": {"x": {"type": "int"}}}]]
    rows = [
        {
            "prompt": chat,
            "reward_model": {"ground_truth": "1"},
            "extra_info": {"tools": schemas, "index": None},
        }
        for chat, schemas in zip(chats, tools, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    table = read_tasks(tmp_path / "t.parquet")
    assert [task.prompt for task in table] == chats
    assert [task.extra_info for task in table] == [{"tools": each, "index": None} for each in tools]
    examples = read_examples(tmp_path / "t.parquet", "sft")[1]
    assert [example.answers[0].prompt for example in examples] == chats


@pytest.mark.parametrize(
    ("fields", "pieces"),
    [
        ([{"weight": 0}, {"weight": 1}, {}], ["x2<eos>", "x3<eos>"]),
        ([{}, {"trainable": False}, {"weight": 1.0}], ["x1<eos>", "x3<eos>"]),
        ([{"loss_mask": 0}, {"train": False}, {"loss": True}], ["x3<eos>"]),
        ([{}, {}, {"training": 0}], ["x1<eos>", "x2<eos>"]),
        ([{"learn": None}, {"weight": None}, {}], ["x1<eos>", "x2<eos>", "x3<eos>"]),
    ],
)
@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_turn_of_weight_0_is_not_learned(tokenizer, tmp_path, template, fields, pieces):
    tokenizer.chat_template = template
    given = iter(fields)
    chat = [each | (next(given) if each["role"] == "assistant" else {}) for each in CHAT[:7]]
    (example,) = read_examples(written(tmp_path / "f.jsonl", [{"messages": chat}]), "sft")[1]
    assert learned(tokenizer, example.answers[0])[1] == pieces
    assert learned(tokenizer, example.answers[0], train_on="last")[1] == pieces[-1:]


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"weight": 0.5}, "weight 0.5. A turn is learned"),
        ({"loss_mask": [0, 1]}, "loss_mask .0, 1.. A turn"),
        ({"train": "no"}, "train 'no'"),
        ({"weight": 0}, "no turn of the assistant to learn from: all have weight 0"),
    ],
)
def test_a_weight_that_cannot_be_kept_is_refused(tokenizer, tmp_path, field, says):
    tokenizer.chat_template = PLAIN
    written(tmp_path / "f.jsonl", [{"messages": [Q, A | field]}])
    with pytest.raises((TaskFileError, ChatError), match=says):
        answer_ids(tokenizer, next(read_examples(tmp_path / "f.jsonl", "sft")[1]).answers[0])


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("sft", {"prompt": "q", "completion": "cut \ud83d"}),
        ("sft", {"messages": [Q, A | {"tool_calls": [{"name": "f", "arguments": {"\ud83d": 1}}]}]}),
        ("sft", {"messages": [Q, A], "tools": [{"name": "\udc00"}]}),
        ("preference", {"prompt": "\ud83d", "chosen": "a", "rejected": "b"}),
    ],
)
def test_half_a_character_is_named_by_its_row_and_column(tmp_path, kind, row):
    with pytest.raises(TaskFileError, match=r"line 1: column `[a-z]+[^`]*` has half of a surrogate pair"):
        list(read_examples(written(tmp_path / "f.jsonl", [row]), kind)[1])


def test_roles_that_are_no_usual_ones_misspelt_are_those_of_a_template(tmp_path):
    chat = [message(role, "q") for role in ("environment", "assistant1", "critic", "developer", "tool")]
    (example,) = read_examples(written(tmp_path / "f.jsonl", [{"messages": [*chat, A]}]), "sft")[1]
    assert example.answers[0].answer == [*chat, A]


def test_an_answer_in_characters_that_the_tokenizer_does_not_know_is_refused(tokenizer):
    tokenizer.chat_template = PLAIN
    chat = Continuation([Q], [A, Q, message("assistant", "日")])
    for answer in (Continuation("q", "日本"), chat):
        with pytest.raises(ChatError, match="finds nothing that it knows in its answer"):
            answer_ids(tokenizer, answer, train_on="last")
    assert 1 in answer_ids(tokenizer, chat)[1]  # it knows the other turn


def test_a_blank_before_an_unknown_word_is_nothing_known():
    pieces = ["<unk>", "<eos>", "▁", *"abc"]
    made = Tokenizer(Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    made.pre_tokenizer, made.decoder = Metaspace(), MetaspaceDecoder()
    sentencepiece = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", unk_token="<unk>")
    with pytest.raises(ChatError, match="finds nothing that it knows in its answer"):
        answer_ids(sentencepiece, Continuation("abc", "日本 日"))
    assert 1 in answer_ids(sentencepiece, Continuation("abc", "日 a"))[1]


def test_a_row_is_named_by_its_line_or_in_parquet_by_its_number_from_1(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"messages": [Q, A]}, {"messages": [Q, message("usr", "a")]}]
    path = tmp_path / "f.jsonl"
    path.write_text("\n".join(map(json.dumps, [rows[0], rows[0]])).replace("\n", "\n\n") + "\n")
    assert [example.where for example in read_examples(path, "sft")[1]] == [
        f"task file {path}, line {line}" for line in (1, 3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "f.parquet")
    with pytest.raises(TaskFileError, match=r"f\.parquet, row 2: column `messages`.*'user'"):
        list(read_examples(tmp_path / "f.parquet", "sft")[1])


def test_a_later_row_of_another_form_is_named(tmp_path):
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "completion": "a", "label": 1}]
    with pytest.raises(TaskFileError, match="line 2: column `chosen` is empty"):
        list(read_examples(written(tmp_path / "f.jsonl", rows), "preference")[1])


def test_the_prompt_of_a_pair_is_what_both_begin_with():
    assert split_prompt("the a", "the b") == ("the", " a", " b")
    assert split_prompt("ab", "abc") == ("ab", "", "c")
    assert split_prompt([Q, A], [Q, B]) == ([Q], [A], [B])
