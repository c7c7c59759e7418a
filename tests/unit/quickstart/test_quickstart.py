"""What the quickstart makes before it trains: tasks, tokenizer, model and two job files."""

import pytest

from areal_async.cli.quickstart.main import N_HELD_OUT, prepare
from areal_async.cli.quickstart.model import Sum, split_problems
from areal_async.config.advice import advise
from areal_async.config.load import load_job
from areal_async.data.tasks import read_tasks


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart") / "quickstart-files"
    prepare(folder, seed=7)
    return folder


def test_the_held_out_problems_are_at_least_500_and_in_no_training_row(files):
    held_out = {task.prompt for task in read_tasks(files / "held_out.jsonl")}
    train = {task.prompt for task in read_tasks(files / "train.jsonl")}
    assert len(held_out) == N_HELD_OUT >= 500
    assert not held_out & train


def test_every_ground_truth_is_the_answer(files):
    for task in read_tasks(files / "train.jsonl"):
        assert eval(task.prompt.removesuffix("=")) == int(task.ground_truth)  # our own two-digit sums


def test_the_tokenizer_gives_one_token_a_character_and_back(files):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(files / "base")
    text = Sum(12, 34).prompt + "-22"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_split_and_model_are_functions_of_the_seed_and_the_model_covers_the_vocabulary(files, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert split_problems(1, 100) == split_problems(1, 100) != split_problems(2, 100)
    prepare(tmp_path, seed=7)
    first, second = (AutoModelForCausalLM.from_pretrained(path / "base") for path in (files, tmp_path))
    assert all((a == b).all() for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.config.vocab_size == len(AutoTokenizer.from_pretrained(files / "base"))


def test_both_job_files_are_valid_as_written(files):
    warm = load_job(files / "warm_start.yaml")
    assert (warm.kind, warm.model) == ("sft", files / "base")
    # The second job starts from what the first one writes; here any model will do.
    job = load_job(files / "train.yaml", ["model=base"])
    assert (job.kind, job.buffer.max_staleness) == ("rl", 1)
    assert advise(job) == []
