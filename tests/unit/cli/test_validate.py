"""`validate` finds what would only fail, or be trained as something else, once the job runs."""

import json
import os
import socket

import pytest
from typer.testing import CliRunner

from areal_async.cli.main import app
from areal_async.quickstart.model import make_tokenizer

pytestmark = pytest.mark.slow
FREE_PORTS = "observe.metrics_port=0"


@pytest.fixture
def folder(job_file):
    with job_file.open("a") as file:
        file.write("rollout: {max_model_len: 64, sampling: {max_new_tokens: 8}}\n")
        file.write("evaluation: {sampling: {temperature: 0.0, max_new_tokens: 8}}\n")
    return job_file.parent


def write_tasks(folder, prompts, **columns):
    rows = (
        {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "2"}, **columns}
        for prompt in prompts
    )
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def validate(folder, *overrides):
    return CliRunner().invoke(app, ["validate", str(folder / "job.yaml"), *overrides])


def refused(folder, *overrides):
    result = validate(folder, *overrides)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


UNMARKED = "def close(given):\n    return 1.0\n"
MARKED = f"from reward_service.sdk import reward\n\n@reward\n{UNMARKED}\n"


def test_a_job_whose_files_work_is_valid_whatever_its_reward_prints_and_drawing_by_priority_is_warned_of(
    folder,
):
    leaves = "print('hello')\nimport threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    (folder / "mine.py").write_text(leaves + MARKED)
    result = validate(folder, "reward.name=mine.py:close", "buffer.sampling=priority")
    assert result.exit_code == 0, result.output
    warning = "warning: buffer.sampling: `priority` learned more slowly"
    assert warning in result.output.replace("\n", " ")


def lose_a_shard(folder):
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (folder / "model" / "model.safetensors").rename(folder / "model" / "model-00001-of-00002.safetensors")


def give_more_tokens(folder):
    make_tokenizer("abcdefghijklm0123456789+-=").save_pretrained(folder / "model")


def cut_the_weights(folder):
    weights = folder / "model" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)


def widen_the_config(folder):
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": 4096}))


def have_long_tools(folder):
    template = "{{ tools | tojson if tools }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "model" / "chat_template.jinja").write_text(template)
    chat, tools = [{"role": "user", "content": "1+1="}], [{"1" * 40: "2" * 40}]
    write_tasks(folder, [chat], extra_info={"tools": tools})


IMAGE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1+1="}]}]
ONLY_TEXT = "only text is trained here"
SPOILT = {
    "a shard": (lose_a_shard, ["model:", "lacks model-00002-of-00002.safetensors of the 2 files"]),
    "the end of a file": (
        cut_the_weights,
        ["model:", "model.safetensors is cut short", "copy the model again"],
    ),
    "another width": (
        widen_the_config,
        ["numbers for each token, and config.json says 4096", "of one model"],
    ),
    "long tools": (have_long_tools, ["tasks.train: 1 of 1 prompts", "have 64 tokens or more"]),
    "long prompts": (
        lambda folder: write_tasks(folder, ["1+1=", "1" * 64, "1" * 100]),
        ["tasks.train: 2 of 3 prompts", "have 64 tokens or more (the longest 100)"],
    ),
    "characters": (
        lambda folder: write_tasks(folder, ["what is one and one", "1+1="]),
        ["of the characters of the prompts", "are unknown to the model's tokenizer"],
    ),
    "tokens": (give_more_tokens, ["and the model has 16"]),
    "images": (lambda folder: write_tasks(folder, ["1+1="], images=["a.png"]), ["images", ONLY_TEXT]),
    "videos": (lambda folder: write_tasks(folder, ["1+1="], videos=["a.mp4"]), ["videos", ONLY_TEXT]),
    "<image>": (lambda folder: write_tasks(folder, ["<image>1+1="]), ["<image>", ONLY_TEXT]),
    "no text": (lambda folder: write_tasks(folder, [IMAGE]), ["no text", ONLY_TEXT]),
}


OWN = "reward.name=mine.py:close"
INSIDE = "reward={name: weighted, args: {parts: [{name: math}, {name: 'mine.py:close'}]}, timeout_s: 10}"
REWARDS = {
    "another width": (OWN, UNMARKED, "is not marked. Put `@reward`"),
    "long tools": (OWN, f"import no_such_module\n{MARKED}", "No module named 'no_such_module'"),
    "long prompts": (OWN, f"{MARKED}raise SystemExit(0)\n", "SystemExit"),
    "characters": (OWN, f"{MARKED}import os\nos._exit(3)\n", "its process ended with 3"),
    "tokens": (INSIDE, UNMARKED, "is not marked"),
}
"""By kind of spoilt files: a reward that cannot be loaded either."""
STOPS = {
    "rollout.sampling.stop=['XYZ']": "rollout.sampling.stop.0: the model's tokenizer knows nothing of 'XYZ'",
    "evaluation.sampling.stop=['=', '?!']": (
        "evaluation.sampling.stop.1: the model's tokenizer knows nothing of '?!'"
    ),
}
"""Stop texts that the model cannot write, and what is said of them."""


@pytest.mark.parametrize("kind", SPOILT)
def test_files_that_would_fail_a_run_are_found_together_with_rewards_and_stop_texts(folder, kind):
    spoil, words = SPOILT[kind]
    spoil(folder)
    overrides = []
    if kind in REWARDS:
        reward, source, said_of_it = REWARDS[kind]
        (folder / "mine.py").write_text(source)
        overrides, words = [reward], [*words, "reward.name", said_of_it]
    if kind == "tokens":
        overrides, words = [*overrides, *STOPS], [*words, *STOPS.values()]
    said = refused(folder, *overrides)
    assert [text for text in words if text not in said] == []


def test_prompts_of_messages_need_a_chat_template(folder):
    write_tasks(folder, [[{"role": "user", "content": "1+1="}]])
    assert "has no chat template" in refused(folder)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "model" / "chat_template.jinja").write_text(template)
    assert validate(folder).exit_code == 0


def test_chats_need_a_template_that_keeps_earlier_turns(folder):
    said = [{"role": role, "content": "1"} for role in ("user", "assistant", "user", "assistant")]
    (folder / "train.jsonl").write_text(json.dumps({"messages": said}))
    template = "{% for m in messages %}{{ m.content if loop.last else '2' }}{% endfor %}"
    (folder / "model" / "chat_template.jinja").write_text(template)
    text = refused(folder, "kind=sft", "tasks.evaluation=null")
    assert "renders message 1 differently once others follow" in text
    assert "sft.train_on: last" in text
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "model" / "chat_template.jinja").write_text(template)
    result = validate(folder, "kind=sft", "tasks.evaluation=null")
    assert result.exit_code == 0, result.output


def test_a_model_with_code_of_its_own_is_refused_with_the_reason(folder):
    config = json.loads((folder / "model" / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    mark = folder / "was-run"
    (folder / "model" / "configuration_mine.py").write_text(f"open({str(mark)!r}, 'w')\n")
    assert "code that comes with a model is never run" in refused(folder)
    assert not mark.exists()
    assert "code that comes with a model is never run" in refused(folder, "rollout.trust_remote_code=true")


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
