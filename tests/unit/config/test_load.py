import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from areal_async.config.errors import ConfigError
from areal_async.config.files import READ_WHOLE_BYTES
from areal_async.config.load import dump_job, load_job
from areal_async.config.yamlfile import parse_yaml


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
    job = load_job(
        folder / "job.yaml",
        [
            "buffer.max_staleness=0",
            "trainer.optimizer.lr=1e-5",
            "trainer.objective={correction: none, prox: reuse}",
            "rollout.sampling.stop=['\\n', END]",
            "tasks.evaluation=null",
            "tasks.shuffle=false",
        ],
    )
    assert job.buffer.max_staleness == 0
    assert job.trainer.optimizer.lr == 1e-5
    assert (job.trainer.objective.correction, job.trainer.objective.prox) == ("none", "reuse")
    assert job.rollout.sampling.stop == ("\\n", "END")
    assert job.tasks.evaluation is None
    assert job.tasks.shuffle is False


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

    monkeypatch.setattr("areal_async.tasks.open_regular", refuse)
    with pytest.raises(ConfigError, match=r"tasks\.train.*Permission denied"):
        load_job(folder / "job.yaml")
