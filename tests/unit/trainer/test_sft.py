"""Supervised training: what an example is, what accuracy means, when it stops."""

import json
import threading
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_async.base.mistakes import ConfigError
from areal_async.config.job import JobConfig
from areal_async.config.load import dump_job
from areal_async.data.tasks import TaskFileError
from areal_async.launch.folders import LOCK
from areal_async.service.record import RunLog, read_run_log
from tests.unit.trainer.conftest import write_model as write_tiny_model
from trainer_service.checkpoint import CheckpointReader
from trainer_service.data.lessons import load_tokenizer, read_lessons
from trainer_service.errors import BatchError
from trainer_service.loop.from_files import FAR_FACTOR, FileTrainer
from trainer_service.loop.learner import load_backend
from trainer_service.ranks import join_ranks
from trainer_service.saved_states import TrainingRun
from trainer_service.tools.checkpoint_model import write_checkpoint_model


def _tasks(path, pairs):
    rows = [
        {"prompt": prompt, "data_source": "t", "reward_model": {"style": "rule", "ground_truth": answer}}
        for prompt, answer in pairs
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SUMS = [(f"{a}+{b}=", a + b) for a in range(5) for b in range(5)]


def _job(tmp_path, model, *, held_out=SUMS, seed=0, passes=None, steps=60, checkpoint=None, lora=None, **sft):
    tasks = {"train": str(_tasks(tmp_path / "train.jsonl", SUMS))}
    tasks |= {"evaluation": str(_tasks(tmp_path / "held.jsonl", held_out))} if held_out else {}
    tasks |= {"passes": passes} if passes else {}
    content = {"job": "warm", "kind": "sft", "model": str(model), "seed": seed, "tasks": tasks}
    content["trainer"] = {"steps": steps, "optimizer": {"lr": 3e-3}, "lora": lora or {}}
    content["sft"] = {"batch_size": 25, "evaluate_every": 5} | sft
    content["checkpoint"] = {"every_steps": 4, "keep": 9} | (checkpoint or {})
    return JobConfig.model_validate(content)


def _trainer(tmp_path, model, *, stopping=None, **options):
    job, ranks = _job(tmp_path, model, **options), join_ranks(0, 1)
    parts = {"run_dir": tmp_path, "run_log": RunLog(tmp_path / "metrics.jsonl")}
    parts["stopping"] = stopping or threading.Event()
    return FileTrainer(TrainingRun(job, ranks, load_backend(job, ranks), **parts))


def test_an_example_is_prompt_answer_and_end_with_the_loss_after_the_prompt(tmp_path, model_dir):
    tokenizer = load_tokenizer(model_dir)
    chat = [{"role": "user", "content": "1+1="}]
    path = _tasks(tmp_path / "t.jsonl", [("12+3=", 15), (chat, "2")])
    lessons = read_lessons(_job(tmp_path, model_dir), path, tokenizer)[1]
    (first,), (second,) = (lesson.rows for lesson in lessons)
    assert tokenizer.convert_ids_to_tokens(first.token_ids) == [*"12+3=15", "<eos>"]
    assert first.position.tolist() == [5, 6, 7]
    assert tokenizer.convert_ids_to_tokens(second.token_ids) == [*"1+1=2", "<eos>"]


def test_a_task_without_an_answer_is_named(tmp_path, model_dir):
    path = _tasks(tmp_path / "t.jsonl", [("1+1=", "2"), ("1+2=", None)])
    with pytest.raises(TaskFileError, match=r"t\.jsonl, line 2: its ground truth is null"):
        read_lessons(_job(tmp_path, model_dir), path, load_tokenizer(model_dir))


def test_an_answer_of_unknown_characters_is_named(tmp_path, model_dir):
    path = _tasks(tmp_path / "t.jsonl", [("1+1=", "2"), ("1+2=", "日")])
    with pytest.raises(BatchError, match=r"t\.jsonl, line 2: .* nothing that it knows in its answer"):
        read_lessons(_job(tmp_path, model_dir), path, load_tokenizer(model_dir))


def test_training_raises_accuracy_and_stops_where_asked(tmp_path):
    model = write_tiny_model(tmp_path / "start", hidden=64)
    assert _trainer(tmp_path, model, stop_between=[0.5, 1.0]).run()
    records = read_run_log(tmp_path / "metrics.jsonl")
    measured = [(record["step"], record["accuracy"]) for record in records if "accuracy" in record]
    assert measured[0][0] == 0
    assert measured[0][1] < 0.3
    assert measured[-1][1] >= 0.5
    assert all(accuracy < 0.5 for _, accuracy in measured[:-1])
    assert measured[-1][0] % 5 == 0
    assert records[-1]["step"] == measured[-1][0] < 60
    assert records[-1]["loss"] < records[1]["loss"]

    # The measure is greedy decoding: generate with transformers and compare whole answers.
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    right = 0
    for prompt, answer in SUMS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        out = trained.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4)
        right += tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == str(answer)
    assert right / len(SUMS) == pytest.approx(measured[-1][1])


def test_a_measurement_above_the_wanted_accuracy_does_not_stop_it(tmp_path):
    model = write_tiny_model(tmp_path / "start", hidden=64)
    assert _trainer(tmp_path, model, stop_between=[0.999, 0.9995]).run()
    records = read_run_log(tmp_path / "metrics.jsonl")
    assert records[-1]["step"] == 60
    assert max(record.get("accuracy") or 0 for record in records) > 0.5


def test_accuracy_is_measured_rarely_while_it_is_far_from_the_one_asked_for(tmp_path):
    model = write_tiny_model(tmp_path / "start", hidden=64)
    assert _trainer(tmp_path, model, stop_between=[0.8, 1.0], evaluate_every=1).run()
    records = [r for r in read_run_log(tmp_path / "metrics.jsonl") if "accuracy" in r]
    measured = [(record["step"], record["accuracy"]) for record in records]
    gaps = {(step - before, far < 0.4) for (before, far), (step, _) in pairwise(measured)}
    assert gaps <= {(1, False), *((gap, True) for gap in range(1, FAR_FACTOR + 1))}
    assert (FAR_FACTOR, True) in gaps
    assert measured[-1][1] >= 0.8
    assert all(accuracy < 0.8 for _, accuracy in measured[:-1])


def test_it_ends_with_its_steps_or_its_passes_and_measures_last(tmp_path, model_dir):
    assert _trainer(tmp_path, model_dir, steps=3, batch_size=10).run()
    records = read_run_log(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2, 3, 3]
    assert "accuracy" in records[-1]
    (tmp_path / "metrics.jsonl").unlink()
    assert _trainer(tmp_path, model_dir, held_out=None, passes=2, batch_size=10).run()
    records = read_run_log(tmp_path / "metrics.jsonl")
    assert max(record["step"] for record in records) == 6  # 25 examples: 10, 10, 5, twice
    assert not any("accuracy" in record for record in records)


def test_the_same_seed_gives_the_same_losses(tmp_path, model_dir):
    losses = []
    for seed in (1, 1, 2):
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        _trainer(tmp_path, model_dir, held_out=None, seed=seed, steps=4, batch_size=8).run()
        losses.append([r["loss"] for r in read_run_log(tmp_path / "metrics.jsonl") if "loss" in r])
    assert losses[0] == losses[1] != losses[2]


def test_a_stop_ends_it_without_a_model(tmp_path, model_dir):
    stopping = threading.Event()
    stopping.set()
    assert _trainer(tmp_path, model_dir, stopping=stopping).run() is False
    assert not (tmp_path / "model").exists()


def _told(out):
    """What the run log says of each step but its time."""
    records = [record for record in read_run_log(out / "metrics.jsonl") if record["kind"] == "sft"]
    return [
        {name: r[name] for name in r if name not in ("time_s", "step_s", "tokens_per_s")} for r in records
    ]


def _forget(file):
    """Take a file out of the manifest of its checkpoint."""
    manifest = file.with_name("manifest.json")
    said = json.loads(manifest.read_text())
    del said["files"][file.name]
    manifest.write_text(json.dumps(said))


def test_the_checkpoint_of_a_job_with_adapters_becomes_a_merged_model_or_an_adapter(tmp_path, model_dir):
    run = tmp_path / "warm"
    run.mkdir()
    settings = {"steps": 2, "lora": {"rank": 2}}
    assert _trainer(run, model_dir, **settings).run()
    (run / "job.yaml").write_text(dump_job(_job(run, model_dir, **settings)))
    (run / LOCK).touch()
    assert write_checkpoint_model(run, "newest", tmp_path / "model") == 2
    assert write_checkpoint_model(run, "newest", tmp_path / "adapter", adapter=True) == 2
    for name in ("model", "adapter"):
        files = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        assert files == {path.name: path.read_bytes() for path in (run / name).iterdir()}


def test_the_best_checkpoint_becomes_a_model(tmp_path, model_dir):
    """By the accuracies in the run log; it is the model that was measured."""
    run = tmp_path / "warm"
    run.mkdir()
    settings = {"steps": 8, "evaluate_every": 4, "checkpoint": {"every_steps": 2}}
    assert _trainer(run, model_dir, **settings).run()
    (run / "job.yaml").write_text(dump_job(_job(run, model_dir, **settings)))
    (run / LOCK).touch()
    (run / "metrics.jsonl").unlink()
    with RunLog(run / "metrics.jsonl") as log:
        for step, accuracy in ((0, 0.9), (4, 0.5), (6, 0.2), (8, 0.4)):
            log.write("sft", policy="policy", step=step, accuracy=accuracy)
    assert write_checkpoint_model(run, "best", tmp_path / "best") == 4
    assert write_checkpoint_model(run, "newest", tmp_path / "newest") == 8
    folders = (tmp_path / "newest", run / "model")
    newest, whole = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert newest == whole
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    for moments in (run / "checkpoints" / "step-000004").glob("policy.exp_avg*"):
        moments.write_bytes(b"")  # whole by the manifest below, and not to be read
        _forget(moments)
    assert write_checkpoint_model(run, "4", tmp_path / "again") == 4
    with pytest.raises(ConfigError, match=r"--adapter: this job trains no adapters"):
        write_checkpoint_model(run, "4", tmp_path / "adapter", adapter=True)
    with pytest.raises(ConfigError, match=r"there is no checkpoint 3.*2, 4 \(0\.500\), 6 \(0\.200\), 8"):
        write_checkpoint_model(run, "3", tmp_path / "third")


def test_a_trainer_whose_accuracy_was_reached_before_it_died_trains_no_further(tmp_path):
    model = write_tiny_model(tmp_path / "start", hidden=64)
    wanted = {"stop_between": [0.5, 1.0], "checkpoint": {"every_steps": 5}}
    assert _trainer(tmp_path, model, **wanted).run()
    steps = max(record["step"] for record in _told(tmp_path))
    restored = CheckpointReader(job="warm", policy="policy").newest(tmp_path / "checkpoints")
    assert restored.manifest.step == steps
    (tmp_path / "metrics.jsonl").unlink()
    assert _trainer(tmp_path, model, **wanted).run(restored)
    assert _told(tmp_path) == []
