"""`validate` finds what would only fail, or be trained as something else, once the job runs."""

import datetime
import json
import os
import socket

import pytest
from typer.testing import CliRunner

from areal_async.base.records import Task
from areal_async.cli.main import app
from areal_async.cli.quickstart.model import make_tokenizer
from areal_async.config.load import load_job
from areal_async.launch.prompt_trial import _prompt_key, tokenizer_mistakes

FREE_PORTS = "observe.metrics_port=0"


@pytest.fixture
def folder(job_file):
    with job_file.open("a") as file:
        file.write("rollout: {max_model_len: 64, sampling: {max_new_tokens: 8}}\n")
        file.write("evaluation: {sampling: {temperature: 0.0, max_new_tokens: 8}}\n")
    return job_file.parent


def write_tasks(folder, prompts, **columns):
    row = {"reward_model": {"style": "rule", "ground_truth": "2"}, **columns}
    lines = (json.dumps({"prompt": prompt} | row) + "\n" for prompt in prompts)
    (folder / "train.jsonl").write_text("".join(lines))


def validate(folder, *overrides):
    return CliRunner().invoke(app, ["validate", str(folder / "job.yaml"), *overrides])


def refused(folder, *overrides):
    result = validate(folder, *overrides)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


UNMARKED = "def close(given):\n    return 1.0\n"
MARKED = f"from reward_service.sdk import reward\n\n@reward\n{UNMARKED}\n"


def test_a_job_whose_files_work_is_valid_whatever_its_reward_prints(folder):
    leaves = "print('hello')\nimport threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    (folder / "mine.py").write_text(leaves + MARKED)
    result = validate(folder, "reward.name=mine.py:close")
    assert result.exit_code == 0, result.output


def lose_a_shard(folder):
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (folder / "model" / "model.safetensors").rename(folder / "model" / "model-00001-of-00002.safetensors")


def cut_the_weights(folder):
    weights = folder / "model" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)


def configure(folder, **changes):
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def have_template(folder, template):
    (folder / "model" / "chat_template.jinja").write_text(template)


def have_long_tools(folder):
    have_template(
        folder, "{{ tools | tojson if tools }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    write_tasks(folder, [[{"role": "user", "content": "1+1="}]], extra_info={"tools": [{"1" * 40: "2" * 40}]})


def have_tasks(*prompts, **columns):
    return lambda folder: write_tasks(folder, prompts, **columns)


IMAGE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1+1="}]}]
OWN = "reward.name=mine.py:close"
ARGUMENT = "reward={name: 'mine.py:close', args: {digits: 2}}"
GROUPED = MARKED.replace("@reward", "@reward(scope='group')")
INSIDE = "reward={name: weighted, args: {parts: [{name: math}, {name: 'mine.py:close'}]}, timeout_s: 10}"
TOKENS = "abcdefghijklm0123456789+-="
SPOILT = [
    (lose_a_shard, "model:", "lacks model-00002-of-00002.safetensors of the 2 files"),
    (cut_the_weights, "model:", "model.safetensors is cut short", "copy the model again"),
    (have_long_tools, "tasks.train: 1 of 1 prompts", "have 64 tokens or more"),
    (
        have_tasks("1+1=", "1" * 64, "1" * 100),
        "tasks.train: 2 of 3 prompts",
        "tokens or more (the longest 100 in line 3)",
    ),
    (
        have_tasks("what is one and one", "1+1="),
        "characters of 2 prompts",
        "unknown to the model's tokenizer",
    ),
    (lambda folder: make_tokenizer(TOKENS).save_pretrained(folder / "model"), "and the model has 16"),
    (have_tasks("1+1=", images=["a.png"]), "column `images`: image 1: the file ", "a.png cannot be read"),
    (have_tasks("1+1=", videos=["a.mp4"]), "videos", "only texts and images are trained here"),
    (have_tasks("<image>1+1="), "the number of images is 0, and that of <image> in the prompt is 1"),
    (have_tasks(IMAGE), "the number of images is 0", "Write one <image> for each image in `images`"),
]
REWARDS = {
    2: (OWN, UNMARKED, "is not marked. Put `@reward`"),
    3: (OWN, f"import no_such_module\n{MARKED}", "No module named 'no_such_module'"),
    4: (OWN, f"{MARKED}raise SystemExit(0)\n", "SystemExit"),
    5: (OWN, f"{MARKED}import os\nos._exit(3)\n", "its process ended with 3"),
}
"""By number of spoilt files: a reward that cannot be loaded either."""


@pytest.mark.parametrize("number", range(len(SPOILT)), ids=[each[-1] for each in SPOILT])
def test_files_that_would_fail_a_run_are_found_together_with_rewards(folder, number):
    spoil, *words = SPOILT[number]
    spoil(folder)
    overrides = []
    if number in REWARDS:
        reward, source, said_of_it = REWARDS[number]
        (folder / "mine.py").write_text(source)
        overrides, words = [reward], [*words, "reward.name", said_of_it]
    said = refused(folder, *overrides)
    assert [text for text in words if text not in said] == []


@pytest.mark.parametrize(
    ("reward", "source", "words"),
    [
        (INSIDE, UNMARKED, "is not marked"),
        (ARGUMENT, MARKED, "has no argument 'digits'"),
        (OWN, GROUPED, "Set the scope (beside its name) to group"),
    ],
)
def test_a_reward_that_its_job_cannot_use_is_refused(folder, reward, source, words):
    (folder / "mine.py").write_text(source)
    said = refused(folder, reward)
    assert "reward.name" in said
    assert words in said


def test_held_out_prompts_of_the_training_file_are_warned_of(folder):
    write_tasks(folder, ["1+1=", "2+2="])
    (folder / "held.jsonl").write_bytes((folder / "train.jsonl").read_bytes())
    (warning,) = tokenizer_mistakes(load_job(folder / "job.yaml", ["tasks.evaluation=held.jsonl"]))
    assert str(warning).startswith("tasks.evaluation: 2 of 2 held-out prompts are in train.jsonl")
    assert warning.warns


def test_a_prompt_with_a_date_from_parquet_has_a_key():
    first, other = ([{"role": "user", "at": datetime.date(2026, 1, day)}] for day in (1, 2))
    keys = [_prompt_key(Task("", prompt)) for prompt in (first, [{**first[0]}], other)]
    assert keys[0] == keys[1] != keys[2]


def test_prompts_of_messages_need_a_chat_template(folder):
    write_tasks(folder, [[{"role": "user", "content": "1+1="}]])
    assert "has no chat template" in refused(folder)
    have_template(folder, "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert validate(folder).exit_code == 0


def test_chats_need_a_template_that_keeps_earlier_turns(folder):
    said = [{"role": role, "content": "1"} for role in ("user", "assistant", "user", "assistant")]
    (folder / "train.jsonl").write_text(json.dumps({"messages": said}))
    have_template(folder, "{% for m in messages %}{{ m.content if loop.last else '2' }}{% endfor %}")
    text = refused(folder, "kind=sft", "tasks.evaluation=null")
    assert "renders message 1 differently once others follow" in text
    assert "sft.train_on: last" in text
    have_template(folder, "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "never learn to stop" in refused(folder, "kind=sft", "tasks.evaluation=null")
    have_template(folder, "{% for m in messages %}{{ m.content }}<eos>{% endfor %}")
    result = validate(folder, "kind=sft", "tasks.evaluation=null")
    assert result.exit_code == 0, result.output


def have_ends(folder, generation, config, eos):
    """Let the files of the model name these ids, and its tokenizer this token, as ends."""
    configure(folder, eos_token_id=config)
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    path = folder / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": eos}))


ENDED, WRITTEN = ("{% for m in messages %}{{ m.content }}" + end + "{% endfor %}" for end in ("<eos>", "##"))


@pytest.mark.parametrize(
    ("ends", "template", "overrides", "told"),
    [
        ((1, 1, "<eos>"), ENDED, [], []),
        ((None, None, "<eos>"), ENDED, [], []),
        (([0, 1], 1, None), ENDED, [], []),
        ((5, 1, "<eos>"), None, [], ["the tokenizer's eos_token ends an answer with '<eos>'"]),
        (([5, 6], 1, None), ENDED, [], ["the chat template ends an answer with '<eos>'", "Add [1] there"]),
        ((None, None, None), None, [], ["nothing names a token", "or rollout.sampling.stop"]),
        ((None, None, None), None, ["rollout.sampling.stop=['=']"], []),
        ((1, 1, "<eos>"), WRITTEN, [], ["ends a turn with '##', which is no token of its own"]),
        ((1, 1, "<eos>"), WRITTEN, ["rollout.sampling.stop=['##']"], []),
    ],
)  # fmt: skip
def test_it_warns_where_the_parts_of_a_model_end_answers_differently(folder, ends, template, overrides, told):
    have_ends(folder, *ends)
    if template is not None:
        have_template(folder, template)
    found = [str(each) for each in tokenizer_mistakes(load_job(folder / "job.yaml", overrides))]
    assert [text for text in told if text not in " ".join(found)] == []
    assert len(found) == bool(told)
    assert all(each.startswith("model: ") for each in found)


def test_a_warning_about_the_model_is_printed_each_time_and_nothing_fails(folder):
    have_ends(folder, 5, 1, "<eos>")
    for _ in range(2):  # the second time from what is kept of the first
        result = validate(folder)
        assert result.exit_code == 0, result.output
        assert "warning: model: the tokenizer's eos_token ends an answer" in " ".join(result.output.split())


def test_a_model_with_code_of_its_own_is_refused_with_the_reason(folder):
    configure(folder, model_type="mine", auto_map={"AutoConfig": "configuration_mine.MineConfig"})
    mark = folder / "was-run"
    (folder / "model" / "configuration_mine.py").write_text(f"open({str(mark)!r}, 'w')\n")
    for overrides in ((), ("rollout.trust_remote_code=true",)):
        assert "code that comes with a model is never run" in refused(folder, *overrides)
        assert not mark.exists()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engine_without_its_environment_is_found_and_leaves_nothing_behind(folder, engine, monkeypatch):
    monkeypatch.setenv("AREAL_ASYNC_ENGINES", str(folder / "nowhere"))
    said = refused(folder, f"rollout.engine={engine}")
    assert f"has no Python environment with {engine}" in said
    assert "make engines" in said
    arguments = ["run", str(folder / "job.yaml"), f"rollout.engine={engine}", FREE_PORTS, "--plain"]
    assert CliRunner().invoke(app, arguments).exit_code == 2
    assert not (folder / "runs").exists()


def test_a_server_that_does_not_listen_is_found(folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = f"http://127.0.0.1:{server.getsockname()[1]}"
        with socket.create_server(("127.0.0.1", 0)) as other:
            gone = f"http://127.0.0.1:{other.getsockname()[1]}"
        urls = ["rollout.engine=vllm", "rollout.workers=2", f"rollout.server.urls=[{here},{gone}]"]
        said = refused(folder, *urls, FREE_PORTS)
    assert f"rollout.server.urls.1: {gone} does not answer within 3 s (Connection refused)" in said
    assert here not in said


def test_a_gpu_that_is_not_there_is_found(folder):
    import torch

    gpu = f"cuda:{torch.cuda.device_count()}"
    assert "trainer.device" in refused(folder, f"trainer.device={gpu}")


def test_a_name_in_the_hub_gets_a_hint_how_to_fetch_it(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refused(folder, "model=Qwen/Qwen3-0.6B", "tasks.train=openai/gsm8k")
    assert "`hf download Qwen/Qwen3-0.6B`" in said
    assert "`hf download openai/gsm8k --repo-type dataset`" in said


def test_the_number_types_that_auto_stands_for_are_shown(folder):
    shown = validate(folder, "rollout.dtype=bfloat16")
    assert shown.exit_code == 0, shown.output
    assert [line.strip() for line in shown.output.splitlines() if "dtype:" in line] == [
        "dtype: bfloat16",
        "dtype: float32",
    ]
    told = json.loads(validate(folder, "--json").output)
    assert (told["trainer"]["dtype"], told["rollout"]["dtype"]) == ("float32", "float32")
