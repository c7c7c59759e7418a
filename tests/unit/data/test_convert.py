"""The script of the docs that converts a data set, and the script of the recipes."""

import json
import runpy
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from areal_async.cli.main import app
from areal_async.data.tasks import read_tasks
from tests.docs.test_blocks import BLOCKS

ROOT = Path(__file__).parents[3]
GSM8K = [
    {"question": f"Tom has {n} apples, and buys one.", "answer": f"He has <<{n}+1>>.\n#### 1,{n:03}"}
    for n in range(240)
]
ASKED = [{"role": "user", "content": "q"}]
PAIR = {"prompt": "q", "chosen": [*ASKED, {"role": "assistant", "content": "a"}]}
BETTER = PAIR | {"rejected": [*ASKED, {"role": "assistant", "content": "b"}]}
TASK = {"prompt": ASKED, "reward_model": {"style": "rule", "ground_truth": "1"}}


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


@pytest.mark.parametrize(
    ("name", "rows", "kind", "kept"),
    [
        ("gsm8k", GSM8K[:3], "rl", 3),
        ("calculations", GSM8K[:3], "rl", 3),
        ("dapo", [TASK, TASK], "rl", 1),
        ("programs", [TASK | {"ability": "code"}, TASK | {"ability": "math"}], "rl", 1),
        ("pairs", [BETTER, PAIR | {"rejected": PAIR["chosen"]}], "preference", 1),
        ("prompts", [{"prompt": "q", "prompt_id": "1"}, {"prompt": "q" * 199, "prompt_id": "2"}], "rl", 1),
    ],
)
def test_the_script_of_the_recipes_makes_files_that_a_job_takes(hub, monkeypatch, name, rows, kind, kept):
    hub("data/train", rows)
    monkeypatch.syspath_prepend(ROOT / "recipes")
    monkeypatch.setattr(sys, "argv", ["hub_data.py", name, "data/*", "out/train.jsonl", "--longest", "200"])
    runpy.run_path(str(ROOT / "recipes" / "hub_data.py"), run_name="__main__")
    (file,) = check("out/train.jsonl")["files"]
    assert (file["kind"], file["rows"]) == (kind, kept)
