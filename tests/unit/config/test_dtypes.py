"""`dtype: auto`: bf16 on a GPU and fp32 on a CPU, resolved in one place that all readers ask."""

import ast

import pytest

from areal_async.config.devices import evaluation_rollout
from areal_async.config.job import TrainerSection
from areal_async.config.load import dump_job, load_job, resolved
from areal_async.config.rollout import RolloutSection
from rollout_service.engines.local import PART
from tests.imports import product
from trainer_service.backends.fsdp.memory import options_of


@pytest.mark.parametrize("section", [TrainerSection, RolloutSection])
def test_auto_is_the_default_and_follows_the_device(section):
    assert section().dtype == "auto"
    assert section().resolved_dtype == "float32"
    assert section(device="cuda").resolved_dtype == "bfloat16"
    assert section(device="cuda:3").resolved_dtype == "bfloat16"
    for dtype in ("float32", "bfloat16"):
        assert {section(device=device, dtype=dtype).resolved_dtype for device in ("cpu", "cuda")} == {dtype}


def test_an_engine_and_a_plan_use_what_auto_stands_for(folder):
    job = load_job(
        folder / "job.yaml", ["rollout.device=cuda", "evaluation.device=cpu", "trainer.device=cuda:1"]
    )
    assert PART.served_dtype(job.rollout) == "bfloat16"
    assert PART.served_dtype(evaluation_rollout(job)) == "float32", "the evaluation is on another device"
    assert options_of(job.trainer).compute_bytes == 2
    assert options_of(TrainerSection()).compute_bytes == 4


def test_a_job_keeps_auto_and_validate_shows_what_it_stands_for(folder):
    job = load_job(folder / "job.yaml")
    (folder / "run.yaml").write_text(dump_job(job))
    again = load_job(folder / "run.yaml", ["trainer.device=cuda"])
    assert again.trainer.resolved_dtype == "bfloat16", "the device decides anew"
    shown = resolved(again)
    assert (shown.trainer.dtype, shown.rollout.dtype) == ("bfloat16", "float32")


def test_each_policy_is_resolved_by_its_own_devices(folder):
    policies = "policies={a: {trainer: {device: 'cuda:0'}}, b: {trainer: {dtype: bfloat16}}, c: {}}"
    job = load_job(folder / "job.yaml", [policies, "rollout.workflow=flows.py:talk"], files=False)
    found = {name: view.trainer.dtype for name, view in resolved(job).views.items()}
    assert found == {"a": "bfloat16", "b": "bfloat16", "c": "float32"}


def test_no_reader_sees_auto():
    """The field itself is read where it is resolved alone."""
    sections = {"trainer", "rollout", "section"}
    found = []
    for path, text in product().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr == "dtype":
                of = node.value
                name = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
                found += [f"{path}:{node.lineno}"] if name in sections else []
    assert found == []
