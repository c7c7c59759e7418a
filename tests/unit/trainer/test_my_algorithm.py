"""The algorithm of the tutorial: the page holds the file of the example, and the file's parts train."""

import re
from pathlib import Path

from tests.unit.trainer import rank_process
from tests.unit.trainer.rank_process import train_batch

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "my_algorithm.py"


def test_the_blocks_of_the_page_are_the_file_in_order():
    page = (ROOT / "docs" / "my-algorithm.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert "\n\n".join(blocks) == EXAMPLE.read_text(encoding="utf-8")


def test_its_parts_train(model_dir, tmp_path, make_batch):
    objective = {
        "advantage": f"{EXAMPLE}:harder_first",
        "advantage_args": {"strength": 0.5},
        "loss": f"{EXAMPLE}:faded",
    }
    job = rank_process.job_of(model_dir, tmp_path, objective=objective)
    backend = rank_process.load_backend(job, rank_process.join_ranks(0, 1))
    learner = rank_process.Learner(job, rank_process.join_ranks(0, 1), backend)
    batch, blobs = make_batch(0)
    result = train_batch(learner, batch, blobs)
    assert len(result.grad_norms) == 2
    assert min(result.grad_norms) > 0
    assert 0 <= result.statistics["moved_share"] < 1
