"""The check of a job with images: their tokens count, and the model must read images."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_async.config.job import JobConfig
from areal_async.launch.prompt_trial import has_images, tokenizer_mistakes
from tests.vision import picture, write_spelling_model, write_vision_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(tmp_path, model):
    def made(max_model_len, *, of=model, evaluation=None):
        truth = {"style": "rule", "ground_truth": "1"}
        for name, seed in {"train": 0, "held": evaluation}.items():
            picture(32, 16, seed or 0).save(tmp_path / f"{name}.png")
            row = {"prompt": "1+1=", "images": [f"{name}.png"] * 2, "reward_model": truth}
            (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        tasks = {"train": str(tmp_path / "train.jsonl")}
        if evaluation is not None:
            tasks["evaluation"] = str(tmp_path / "held.jsonl")
        rollout = {"max_model_len": max_model_len, "sampling": {"max_new_tokens": 4}}
        content = {"job": "j", "model": str(of), "run_dir": str(tmp_path), "tasks": tasks, "rollout": rollout}
        return JobConfig.model_validate(content)

    return made


def test_tokens_of_images_count_in_the_length_of_a_prompt(job):
    """Each of the two images is 4 x 2 tokens between two marks, and the text is 4 tokens."""
    (note,) = tokenizer_mistakes(job(25))
    assert "the largest 32 x 16 pixels, take 8 tokens each" in str(note)
    mistake, _ = tokenizer_mistakes(job(24))
    assert "1 of 1 prompts" in str(mistake)
    assert "(the longest 24 in line 1, 16 of them for images)" in str(mistake)


def test_marks_in_the_text_of_a_prompt_are_no_images(tmp_path, tmp_path_factory, job):
    """Each character of the mark is a token, as in the prompts of the workers."""
    model = write_spelling_model(tmp_path_factory.mktemp("spelling"))
    enough, too_short = job(38, of=model), job(37, of=model)
    row = json.loads((tmp_path / "train.jsonl").read_text()) | {"prompt": "1<|image_pad|>+1="}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    (note,) = tokenizer_mistakes(enough)
    assert "take 8 tokens each" in str(note)
    mistake, _ = tokenizer_mistakes(too_short)
    assert "(the longest 37 in line 1, 16 of them for images)" in str(mistake)


def test_images_after_many_rows_of_text_are_expected(tmp_path):
    row = {"prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}, "images": []}
    text = {name: row[name] for name in ("prompt", "reward_model")} | {"note": 'has "images" in a text'}
    path = tmp_path / "tasks.jsonl"
    for last, expected in ((text, False), (row, True)):
        path.write_text("".join(json.dumps(each) + "\n" for each in [text] * 1000 + [last]))
        assert has_images(path) is expected
    pq.write_table(pa.Table.from_pylist([row | {"images": ["a.png"]}]), tmp_path / "tasks.parquet")
    assert has_images(tmp_path / "tasks.parquet")
    assert not has_images(tmp_path / "gone.jsonl")


def test_a_model_that_reads_no_images_is_refused(job, chat_model):
    (mistake,) = (each for each in tokenizer_mistakes(job(25, of=chat_model)) if not each.warns)
    assert re.match(r"tasks.train: task file \S+, line 1 has images, and ", str(mistake))
    assert "of type qwen2, which reads no images. Give a model that reads images" in str(mistake)


def test_the_same_question_about_another_image_is_another_prompt(job):
    assert [each.field for each in tokenizer_mistakes(job(25, evaluation=1)) if each.fix] == []
    (warning,) = (each for each in tokenizer_mistakes(job(25, evaluation=0)) if each.fix)
    assert "1 of 1 held-out prompts are in train.jsonl too" in str(warning)
