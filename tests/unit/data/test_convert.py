"""The script of the docs that converts a data set."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from areal_async.cli.main import app
from areal_async.data.tasks import read_tasks
from tests.docs.test_blocks import BLOCKS

GSM8K = [
    {"question": f"Tom has {n} apples, and buys one.", "answer": f"He has <<{n}+1>>.\n#### 1,{n:03}"}
    for n in range(240)
]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Makes the hub give a folder with these rows, in two shards."""

    def given(name: str, rows: list[dict]) -> None:
        for shard, part in enumerate((rows[:-1], rows[-1:])):
            path = tmp_path / "hub" / f"{name}-{shard:05}-of-00002.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(part), path)
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: tmp_path / "hub")
        monkeypatch.chdir(tmp_path)

    return given


def check(*arguments):
    done = CliRunner().invoke(app, ["data", "check", *map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_script_of_the_docs_makes_both_files_of_a_job(hub, tmp_path):
    hub("main/train", [*GSM8K, GSM8K[0]])
    (script,) = (each.text for each in BLOCKS if "snapshot_download(" in each.text)
    exec(compile(script, "script", "exec"), {})
    report = check("train.jsonl", "--held-out", "held_out.jsonl")
    assert [(file["rows"], file["duplicates"]) for file in report["files"]] == [(40, 0), (200, 0)]
    truths = {task.prompt[0]["content"]: task.ground_truth for task in read_tasks(tmp_path / "train.jsonl")}
    assert all(truths.get(row["question"], truth := row["answer"][-5:]) == truth for row in GSM8K)
