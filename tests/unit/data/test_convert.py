"""The script of the docs that converts a data set."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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


def test_the_script_of_the_docs_makes_both_files_of_a_job(hub, tmp_path):
    hub("main/train", [*GSM8K, GSM8K[0]])
    (script,) = (each.text for each in BLOCKS if "snapshot_download(" in each.text)
    exec(compile(script, "script", "exec"), {})
    prompts = [
        {task.prompt[0]["content"] for task in read_tasks(tmp_path / f"{name}.jsonl")}
        for name in ("train", "held_out")
    ]
    assert [len(each) for each in prompts] == [40, 200]
    assert not prompts[0] & prompts[1]
    truths = {task.prompt[0]["content"]: task.ground_truth for task in read_tasks(tmp_path / "train.jsonl")}
    assert all(truths.get(row["question"], truth := row["answer"][-5:]) == truth for row in GSM8K)
