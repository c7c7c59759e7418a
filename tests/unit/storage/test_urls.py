"""A URL has one local path on a host, and a job is written with its URLs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.base.mistakes import ConfigError
from areal_async.config.content import run_url, store_url
from areal_async.config.job import JobConfig
from areal_async.config.load import dump_job, load_job
from areal_async.storage.remote import Remote, StorageError
from areal_async.storage.urls import is_url, local_path, shown, url_of

PART = st.text("abcXYZ019-_. =+", min_size=1, max_size=12).filter(lambda part: part not in (".", ".."))


@given(st.sampled_from(["s3", "gs", "memory"]), st.lists(PART, min_size=1, max_size=5), st.booleans())
def test_a_url_and_its_local_path_tell_each_other(protocol, parts, from_root):
    url = f"{protocol}://{'/' if from_root else ''}{'/'.join(parts)}"
    assert url_of(local_path(url)) == url


def test_a_path_of_the_users_own_is_no_url(tmp_path):
    assert url_of(tmp_path / "runs") is None
    assert shown(tmp_path / "runs") == str(tmp_path / "runs")
    assert [is_url(each) for each in ("runs/s3", tmp_path, "C:/x", "s3://b/x")] == [False, False, False, True]


def _job(tmp_path, **changes):
    return {
        "job": "stored",
        "model": "s3://bucket/models/tiny/",
        "tasks": {"train": "s3://bucket/train.jsonl", "evaluation": "held_out.jsonl"},
        "run_dir": "s3://bucket/runs",
        **changes,
    }


def test_a_job_holds_local_paths_and_is_written_with_urls(tmp_path, cache):
    job = load_job(_job(tmp_path), source="job", base=tmp_path, files=False)
    assert job.model == cache / "s3/bucket/models/tiny"
    assert job.tasks.evaluation == tmp_path / "held_out.jsonl"
    assert run_url(job) == store_url(job) == "s3://bucket/runs/stored"
    text = dump_job(job)
    assert "model: s3://bucket/models/tiny\n" in text
    assert "run_dir: s3://bucket/runs\n" in text


def test_each_host_makes_local_paths_of_its_own(tmp_path, cache, monkeypatch):
    text = json.dumps(
        load_job(_job(tmp_path), source="job", base=tmp_path, files=False).model_dump(mode="json")
    )
    monkeypatch.setenv("AREAL_ASYNC_CACHE", str(tmp_path / "elsewhere"))
    there = JobConfig.model_validate_json(text)
    assert there.model == tmp_path / "elsewhere/s3/bucket/models/tiny"
    assert there.tasks.train == tmp_path / "elsewhere/s3/bucket/train.jsonl"


def test_a_store_of_its_own_holds_the_checkpoints_of_each_job_in_a_folder(tmp_path):
    content = _job(tmp_path, run_dir="runs", checkpoint={"store": "s3://bucket/checkpoints/"})
    job = load_job(content, source="job", base=tmp_path, files=False)
    assert run_url(job) is None
    assert store_url(job) == "s3://bucket/checkpoints/stored"


@pytest.mark.parametrize(
    ("field", "url", "said"),
    [
        ("model", "s3://key:secret@bucket/m", "holds a password"),
        ("model", "s3://bucket//m", "does not name one place"),
        ("model", "s3://bucket/../m", "does not name one place"),
        ("run_dir", "s3://bucket/a?versionId=3", "holds a sign"),
        ("checkpoint.store", "checkpoints", "is no URL"),
    ],
)
def test_a_url_of_no_good_form_is_refused_with_its_field(tmp_path, field, url, said):
    with pytest.raises(ConfigError, match=said) as refused:
        load_job(_job(tmp_path), [f"{field}={url}"], source="job", base=tmp_path, files=False)
    assert {mistake.field for mistake in refused.value.mistakes} == {field}
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [("nope://x/y", "no file system is known by the name nope"), ("dropbox://x/y", "needs a package")],
)
def test_a_protocol_that_cannot_be_used_here_is_named(tmp_path, url, said):
    with pytest.raises(StorageError, match=said):
        Remote(url)
    content = _job(tmp_path, model=url, run_dir="runs", tasks={"train": "file:///nowhere/train.jsonl"})
    with pytest.raises(ConfigError) as refused:
        load_job(content, source="job", base=tmp_path)
    told = {mistake.field: str(mistake) for mistake in refused.value.mistakes}
    assert said in told["model"]
    assert "there is nothing there" in told["tasks.train"]


def test_what_is_wrong_with_content_is_said_of_its_url(s3, tmp_path, cache):
    url = s3.bucket()
    s3.files.pipe_file(f"{url}/model/config.json", b"{}")
    s3.files.pipe_file(f"{url}/train.jsonl", b'{"prompt": ""}\n')
    content = _job(tmp_path, model=f"{url}/model", tasks={"train": f"{url}/train.jsonl"}, run_dir="runs")
    with pytest.raises(ConfigError) as refused:
        load_job(content, source="job", base=tmp_path)
    said = str(refused.value)
    assert f"model: {url}/model has no .safetensors weights" in said
    assert f"{url}/train.jsonl" in said
    assert str(cache) not in said
