import json
from pathlib import Path

import pytest
import yaml

from areal_async.base.mistakes import ConfigError
from areal_async.base.yaml_file import parse_yaml
from areal_async.config.advice import advise, running_groups
from areal_async.config.files import READ_WHOLE_BYTES
from areal_async.config.load import dump_job, load_job
from areal_async.config.redis_url import RedisUrl, parse_redis_url
from trainer_service.algorithms.objective import Objective


def test_relative_paths_are_relative_to_the_job_file(folder, monkeypatch):
    monkeypatch.chdir("/")
    (folder / "deep").mkdir()
    job = load_job(folder / "job.yaml", ["run_dir=deep/../out", "reward.routes=[{name: 'own.py:many'}]"])
    assert job.model == folder / "model"
    assert job.tasks.train == folder / "train.jsonl"
    assert job.run_dir == folder / "out"
    assert job.reward.routes[0].name == f"{folder}/own.py:many"
    assert load_job(folder / "job.yaml").run_dir == folder / "runs"
    monkeypatch.setenv("HOME", str(folder))
    assert load_job(folder / "job.yaml", ["model=~/model"]).model == folder / "model"


def test_overrides_are_yaml_and_make_sections(folder):
    given = {
        "buffer.max_staleness=0": lambda job: job.buffer.max_staleness == 0,
        "trainer.optimizer.lr=1e-5": lambda job: job.trainer.optimizer.lr == 1e-5,
        "trainer.objective={correction: none}": lambda job: job.trainer.objective.correction == "none",
        "rollout.sampling.stop=['\\n', END]": lambda job: job.rollout.sampling.stop == ("\\n", "END"),
        "tasks.evaluation=null": lambda job: job.tasks.evaluation is None,
        "tasks.shuffle=false": lambda job: job.tasks.shuffle is False,
    }
    job = load_job(folder / "job.yaml", [*given])
    assert [override for override, holds in given.items() if not holds(job)] == []


def test_the_resolved_file_loads_as_the_same_job(folder):
    job = load_job(folder / "job.yaml", ["trainer.optimizer.lr=3e-7", "rollout.sampling.stop=['é', ': ']"])
    other = folder / "elsewhere"
    other.mkdir()
    (other / "resolved.yaml").write_text(dump_job(job), encoding="utf-8")
    assert load_job(other / "resolved.yaml") == job
    assert yaml.safe_load(dump_job(job)) == job.model_dump(mode="json"), "with every field"


def test_exponents_need_no_dot():
    assert parse_yaml("[1e-5, 2E6, -3e+2, 1_0e3, 1e, e5]") == [1e-5, 2e6, -300.0, 1e4, "1e", "e5"]


def test_a_large_task_file_is_checked_by_its_columns(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    def write(name, **row):
        row["notes"] = "x" * (READ_WHOLE_BYTES + 1)
        if name.endswith(".parquet"):
            table = pa.table({column: [value] for column, value in row.items()})
            pq.write_table(table, folder / name, compression="none", use_dictionary=False)
        else:
            (folder / name).write_text(json.dumps(row) + "\nonly the first row is read")

    good = {"prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}}
    for name in ("good.parquet", "good.jsonl"):
        write(name, **good)
        load_job(folder / "job.yaml", [f"tasks.train={name}"])
    write("bad.parquet", prompt="1+1=")
    write("bad.jsonl", reward_model={})
    for name, missing in (("bad.parquet", "reward_model"), ("bad.jsonl", "prompt")):
        with pytest.raises(ConfigError, match=f"column `{missing}`"):
            load_job(folder / "job.yaml", [f"tasks.train={name}"])


def test_a_file_that_cannot_be_read_is_a_mistake(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("areal_async.data.tasks.open_regular", refuse)
    with pytest.raises(ConfigError, match=r"tasks\.train.*Permission denied"):
        load_job(folder / "job.yaml")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("redis://host", RedisUrl("redis", "host")),
        ("redis://u@host:1/3", RedisUrl("redis", "host", 1, db=3, username="u")),
        ("rediss://[::1]:7", RedisUrl("rediss", "::1", 7)),
        ("unix:///a/b?db=2", RedisUrl("unix", path="/a/b", db=2)),
        ("unix://u@/a", RedisUrl("unix", path="/a", username="u")),
    ],
)
def test_every_form_is_read_and_shown_again(text, parts):
    assert parse_redis_url(text) == parts
    assert parse_redis_url(str(parts)) == parts


def test_a_password_is_refused_without_being_shown(folder):
    for url in ("redis://u:hunter2@a", "redis://a?password=hunter2", "redis://u:hunter2@a:b"):
        with pytest.raises(ConfigError) as caught:
            load_job(folder / "job.yaml", [f"buffer.redis={url}"])
        assert "hunter2" not in str(caught.value)


def test_the_recorded_job_names_secrets_and_certificates_and_holds_none(folder):
    (folder / "secret").write_text("hunter2")
    login = ["buffer.redis_login.password_file=secret", "buffer.redis_tls.ca_file=train.jsonl"]
    job = load_job(folder / "job.yaml", ["buffer.redis=rediss://u@a", *login])
    recorded = dump_job(job)
    assert "hunter2" not in recorded
    assert str(folder / "secret") in recorded, "relative to the job file"
    (folder / "run.yaml").write_text(recorded)
    assert load_job(folder / "run.yaml") == job


def table(name):
    """Return the rows of a table beside this file, as parameters that are called by their first cell."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()[2:]
    return [pytest.param(*line.split(" | "), id=line.partition(" | ")[0]) for line in lines]


@pytest.mark.parametrize(("overrides", "words"), table("advice.txt"))
def test_a_warning_names_the_field_and_nothing_else_is_warned_of(folder, overrides, words):
    given = [] if overrides == "defaults" else overrides.split("; ")
    found = [str(warning) for warning in advise(load_job(folder / "job.yaml", given))]
    assert len(found) == (words != "none"), found
    assert words == "none" or words in found[0]


@pytest.mark.parametrize(("overrides", "prox"), table("proximal.txt"))
def test_auto_takes_a_pass_only_where_one_is_needed(folder, overrides, prox):
    job = load_job(folder / "job.yaml", ["trainer.minibatches=1", *overrides.split("; ")])
    assert advise(job) == []
    objective = Objective(job.trainer.objective, job, minibatches=job.trainer.minibatches)
    assert objective.prox == prox


def overrides(eta, batch, workers, concurrent):
    return [
        f"buffer={{max_staleness: {eta}, batch_groups: {batch}}}",
        f"rollout={{workers: {workers}, max_concurrent: {concurrent}, group_size: 8}}",
    ]


SHORT, LONG = "rollout.sampling.max_new_tokens=16", "rollout.sampling.max_new_tokens=17"
OWN = (SHORT, "rollout.workflow=flows.py:talk")


@pytest.mark.parametrize(
    ("eta", "most", "more"),
    [(4, 16, ()), (2, 8, ()), (1, 4, ()), (8, 32, ()), (2, 32, (SHORT,)), (2, 8, (LONG,)), (2, 8, OWN)],
)
def test_more_groups_at_once_than_the_bound_leaves_time_for_are_warned_of(folder, eta, most, more):
    """Short answers take alike, so a whole batch of them per step of the bound is no warning."""
    for running in (most, most + 1):
        job = load_job(folder / "job.yaml", [*overrides(eta, 16, 1, 8 * running), *more])
        assert running_groups(job) == running
        assert bool(advise(job)) == (running > most)


def test_the_warning_names_the_fields_and_fixes_that_help(folder):
    (warning,) = advise(load_job(folder / "job.yaml", overrides(2, 16, 2, 64)))
    fields = ("max_staleness", "rollout.workers", "max_concurrent", "group_size", "buffer.batch_groups")
    fixes = ("16 groups running at once", "rollout.max_concurrent to 32", "max_staleness to 4")
    assert [words for words in fields + fixes if words not in str(warning)] == []
    for fixed in (overrides(2, 16, 2, 32), overrides(4, 16, 2, 64), overrides(2, 32, 2, 64)):
        assert advise(load_job(folder / "job.yaml", fixed)) == []
    (warning,) = advise(load_job(folder / "job.yaml", overrides(1, 4, 2, 16)))
    assert "max_concurrent to" not in str(warning), "a limit below one group"
    assert "Raise max_staleness to 4" in str(warning)
