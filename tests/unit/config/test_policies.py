"""`policies: {name: …}`: the flat form is the shorthand for one; of several each has something of its own."""

from pathlib import Path
from typing import Any

import pytest

from areal_async.base.mistakes import ConfigError
from areal_async.base.yaml_file import parse_yaml
from areal_async.config.advice import advise
from areal_async.config.job import JobConfig
from areal_async.config.load import dump_job, load_job

REST = {"job": "duel", "tasks": {"train": "tasks.jsonl"}}
POLICY = {"model": "model", "trainer": {"steps": 7}, "rollout": {"group_size": 4}}


def load(base: Path, overrides: tuple[str, ...] = (), **content: Any) -> JobConfig:
    return load_job(REST | content, overrides, source="job.yaml", base=base, files=False)


def mistakes(base: Path, **content: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load(base, **content)
    return [f"{mistake.field}: {mistake.problem}" for mistake in refused.value.mistakes]


def loaded_again(job: JobConfig, base: Path) -> JobConfig:
    again: dict[str, Any] = parse_yaml(dump_job(job))
    return load_job(again, (), source="job.yaml", base=base, files=False)


def test_the_flat_form_is_the_shorthand_for_one_policy(tmp_path):
    flat = load(tmp_path, **POLICY)
    assert flat.policy == "policy"
    assert "policies" not in dump_job(flat)
    assert load(tmp_path, policies={"policy": POLICY}) == flat
    named = load(tmp_path, policies={"alice": POLICY})
    assert (named.policy, named.model) == ("alice", tmp_path / "model")
    assert (named.trainer, named.rollout) == (flat.trainer, flat.rollout)
    assert loaded_again(named, tmp_path) == named
    job = load(tmp_path, ("policies.alice.trainer.steps=9",), policies={"alice": POLICY})
    assert job.trainer.steps == 9


DUET = {"workflow": "duet.py:duet"}
DAPO = {"objective": {"preset": "dapo"}}
CODER: dict[str, Any] = {"model": "model", "trainer": {"steps": 7, "optimizer": {"lr": 0.01}}}
TESTER: dict[str, Any] = {"model": "other", "rollout": {"sampling": {"max_new_tokens": 8}}}
TESTER["buffer"] = {"max_staleness": 1}


def test_the_sections_of_the_job_are_the_defaults_of_its_policies(tmp_path):
    content = {
        "policies": {"coder": CODER, "tester": TESTER},
        "trainer": {"steps": 5, "optimizer": {"eps": 0.5}},
        "rollout": {"group_size": 2} | DUET,
    }
    job = load(tmp_path, **content)
    coder, tester = job.views.values()
    assert (job.policy, coder.policy, tester.policy) == ("coder", "coder", "tester")
    assert (coder.model, tester.model) == (tmp_path / "model", tmp_path / "other")
    assert (coder.trainer.steps, tester.trainer.steps) == (7, 5)
    assert (coder.trainer.optimizer.lr, coder.trainer.optimizer.eps) == (0.01, 0.5)
    assert (coder.buffer.max_staleness, tester.buffer.max_staleness) == (4, 1)
    assert (coder.rollout.sampling.max_new_tokens, tester.rollout.sampling.max_new_tokens) == (256, 8)
    assert coder.rollout.group_size == tester.rollout.group_size == 2
    assert coder.policies == {} == tester.policies
    assert loaded_again(job, tmp_path) == job
    assert JobConfig.model_validate(job.model_dump(mode="json")).views == job.views


def test_held_out_tasks_are_the_first_policys(tmp_path):
    tasks = {"train": "tasks.jsonl", "evaluation": "held.jsonl"}
    job = load(tmp_path, policies={"coder": CODER, "tester": TESTER}, tasks=tasks, rollout=DUET)
    assert job.of("coder").tasks.evaluation is not None
    assert job.of("tester").tasks.evaluation is None


def test_what_concerns_all_policies_is_named_once(tmp_path):
    both = {"policies": {"coder": CODER, "tester": TESTER}, "rollout": DUET}
    (found,) = mistakes(tmp_path, buffer={"group": {"min_samples": 3}}, **both)
    assert found.startswith("buffer.group.min_samples:")


def test_what_is_said_of_one_policy_has_its_name(tmp_path):
    noise = {"trainer": {"objective": {"kl": {"coefficient": 0.1, "estimator": "k1"}}}}
    of_all = {"rollout": DUET, "sft": {"batch_size": 3}}
    job = load(tmp_path, policies={"coder": CODER, "tester": TESTER | noise}, **of_all)
    told = [warning.field for warning in advise(job) if warning.field.count("trainer")]
    assert told == ["policies.tester.trainer.objective.kl.estimator"]
    assert [warning.field for warning in advise(job)].count("sft.batch_size") == 1


def two(**tester: Any) -> dict[str, Any]:
    return {"policies": {"coder": CODER, "tester": {"model": "other", **tester}}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"policies": {"Alice!": POLICY}}, "policies.Alice!: 'Alice!' cannot be the name"),
        ({"policies": {"alice": POLICY | {"reward": {}}}}, "policies.alice.reward: no policy has it"),
        ({"policies": {"alice": "model"}}, "policies.alice: it is no section"),
        ({"policies": []}, "policies: it names no policy"),
        ({"policies": {"alice": POLICY}, "policy": "bob"}, "policy: `policies` names the policy already"),
        ({"policies": {"alice": POLICY | {"trainer": {"steps": -1}}}}, "policies.alice.trainer.steps: "),
        ({"policies": {"coder": CODER, "tester": {}}}, "policies.tester.model: this field is missing"),
        (
            {"policies": {"coder": CODER, "v-2": TESTER}},
            "policies.v-2: its trainer would be called trainer-v",
        ),
        (two(rollout={"workers": 2}), "policies.tester.rollout.workers: all policies share it"),
        (two(buffer={"max_groups": 2}), "policies.tester.buffer.max_groups: all policies share it"),
        (two(buffer={"max_stale": 2}), "policies.tester.buffer.max_stale: "),
        (two(trainer={"minibatches": 99}), "policies.tester.trainer.minibatches: "),
        (two(trainer=DAPO) | {"rollout": DUET}, "buffer.dynamic_filtering: all policies share it, and by"),
        (two(), "rollout.workflow: single_turn speaks with one policy only"),
        (two() | {"kind": "sft"}, "policies: `kind: sft` trains one policy"),
        (two() | {"kind": "preference"}, "policies: `kind: preference` trains one policy"),
        (two() | {"trainer": {"device": "cuda"}}, "policies.tester.trainer.device: cuda:0 is a GPU of"),
        (two(rollout={"device": "cuda"}), "policies.tester.rollout.device: with several policies it is not"),
    ],
)
def test_what_is_wrong_is_named_where_it_was_written(tmp_path, content, expected):
    assert any(found.startswith(expected) for found in mistakes(tmp_path, **content))
