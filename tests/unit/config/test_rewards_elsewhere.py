"""Rewards that are servers or models: what is wrong with them is named before anything is asked."""

import json

import pytest

from areal_async.base.mistakes import ConfigError
from areal_async.config.load import load_job
from reward_service.backends.remote import RemoteArguments

URL = "http://127.0.0.1:8700"


def load(tmp_path, reward):
    content = {"job": "demo", "model": "m", "tasks": {"train": "t.jsonl"}, "reward": reward}
    return load_job(content, source="job.yaml", base=tmp_path, files=False)


def test_paths_of_files_are_relative_to_the_job_file(tmp_path):
    args = {"urls": [URL], "token_file": "secret/token", "ca_file": "/etc/ca.pem"}
    route = {"data_source": "x", "name": "remote", "args": {"urls": [URL], "token_file": "other"}}
    job = load(tmp_path, {"name": "remote", "args": args, "routes": [route]})
    assert job.reward.args["token_file"] == str(tmp_path / "secret" / "token")
    assert job.reward.args["ca_file"] == "/etc/ca.pem"
    assert job.reward.routes[0].args["token_file"] == str(tmp_path / "other")


@pytest.mark.parametrize("url", ["127.0.0.1:8700", "http://", "tcp://127.0.0.1:5555", "ftp://host:1"])
def test_what_is_no_address_is_named(url, tmp_path):
    with pytest.raises(ConfigError, match=r"reward\.args\.urls\.0: .*write http://host:port"):
        load(tmp_path, {"name": "remote", "args": {"urls": [url]}})


def test_a_token_comes_from_the_variable_or_the_file_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "from-the-variable")
    assert RemoteArguments(urls=(URL,), token_env="REWARD_TOKEN").token() == "from-the-variable"
    (tmp_path / "token").write_text(" from-the-file\n")
    assert RemoteArguments(urls=(URL,), token_file=tmp_path / "token").token() == "from-the-file"
    assert RemoteArguments(urls=(URL,)).token() == ""


@pytest.mark.parametrize("content", [None, "", "two words", "ünicode"])
def test_a_token_that_is_none_is_named(content, tmp_path):
    if content is not None:
        (tmp_path / "token").write_text(content)
    with pytest.raises(ValueError, match="token_file"):
        RemoteArguments(urls=(URL,), token_file=tmp_path / "token").token()
    with pytest.raises(ValueError, match="NO_SUCH_TOKEN"):
        RemoteArguments(urls=(URL,), token_env="NO_SUCH_TOKEN").token()


@pytest.mark.parametrize(
    "urls", [["http://me:secret@host:1"], [URL, "https://me:secret@host"], ["http://me:secret@[::1"]]
)
def test_an_address_with_a_password_is_refused_and_not_shown(urls, tmp_path):
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, {"timeout_s": 30, "name": "remote", "args": {"urls": urls}})
    assert "the address holds a password; use token_env or token_file" in str(raised.value)
    assert "secret" not in str(raised.value)
    with pytest.raises(ValueError, match="holds a password") as raised:
        RemoteArguments(urls=urls)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url", [URL, "https://host/u@h/reward", "http://[::1]:5555"])
def test_addresses_of_every_form_are_taken(url):
    assert RemoteArguments(urls=(url,)).urls == (url,)


@pytest.fixture
def grader(folder):
    model = folder / "grader"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForSequenceClassification"]}))
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "tokenizer.json").write_text("{}")
    return model


def test_files_are_beside_the_job_file_and_other_names_are_of_the_hub(grader, folder):
    routes = "routes: [{name: reward_model, args: {model: someone/some-reward-model}}]"
    reward = f"reward={{name: reward_model, args: {{model: grader}}, {routes}}}"
    job = load_job(folder / "job.yaml", [reward])
    assert job.reward.args["model"] == str(grader)
    assert job.reward.routes[0].args["model"] == "someone/some-reward-model"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", None, "no config.json"),
        ("model.safetensors", None, "pickled .bin files are never loaded"),
        ("tokenizer.json", None, "has no tokenizer"),
        ("config.json", '{"architectures": ["Qwen2ForCausalLM"]}', "is no reward model"),
    ],
)
def test_a_folder_that_is_no_reward_model_is_said(grader, folder, file, content, says):
    (grader / file).unlink() if content is None else (grader / file).write_text(content)
    with pytest.raises(ConfigError, match=r"reward\.args\.model: ") as found:
        load_job(folder / "job.yaml", ["reward={name: reward_model, args: {model: ./grader}}"])
    assert says in str(found.value)
