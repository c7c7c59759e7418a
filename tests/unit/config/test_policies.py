"""`policies: {name: {model, trainer, rollout}}`, of which the flat form is the shorthand for one."""

from pathlib import Path
from typing import Any

import pytest

from areal_async.config.errors import ConfigError
from areal_async.config.job import JobConfig
from areal_async.config.load import dump_job, job_from_mapping
from areal_async.config.yamlfile import parse_yaml

REST = {"job": "duel", "tasks": {"train": "tasks.jsonl"}}
POLICY = {"model": "model", "trainer": {"steps": 7}, "rollout": {"group_size": 4}}


def load(base: Path, overrides: tuple[str, ...] = (), **content: Any) -> JobConfig:
    return job_from_mapping(REST | content, overrides, source="job.yaml", base=base, files=False)


def mistakes(base: Path, **content: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load(base, **content)
    return [f"{mistake.field}: {mistake.problem}" for mistake in refused.value.mistakes]


def test_the_flat_form_is_the_shorthand_for_one_policy(tmp_path):
    flat = load(tmp_path, **POLICY)
    assert flat.policy == "policy"
    assert load(tmp_path, policies={"policy": POLICY}) == flat
    named = load(tmp_path, policies={"alice": POLICY})
    assert (named.policy, named.model) == ("alice", tmp_path / "model")
    assert (named.trainer, named.rollout) == (flat.trainer, flat.rollout)


def test_the_resolved_job_gives_the_same_job_again(tmp_path):
    named = load(tmp_path, policies={"alice": POLICY})
    again: dict[str, Any] = parse_yaml(dump_job(named))
    assert job_from_mapping(again, (), source="job.yaml", base=tmp_path, files=False) == named


def test_overrides_reach_into_a_policy(tmp_path):
    job = load(tmp_path, ("policies.alice.trainer.steps=9",), policies={"alice": POLICY})
    assert job.trainer.steps == 9


def test_a_job_of_two_policies_is_refused_with_the_reason(tmp_path):
    (refused,) = mistakes(tmp_path, policies={"alice": POLICY, "bob": POLICY})
    assert refused.startswith("policies: alice, bob are 2 policies; agents cannot say yet which of them")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"policies": {"Alice!": POLICY}}, "policies.Alice!: 'Alice!' cannot be the name"),
        ({"policies": {"alice": POLICY | {"reward": {}}}}, "policies.alice.reward: no policy has it"),
        ({"policies": {"alice": "model"}}, "policies.alice: it is no section"),
        ({"policies": []}, "policies: it names no policy"),
        ({"policies": {"alice": POLICY}, "trainer": {"steps": 3}}, "trainer: policies.alice.trainer is"),
        ({"policies": {"alice": POLICY}, "policy": "bob"}, "policy: `policies` names the policy already"),
        ({"policies": {"alice": POLICY | {"trainer": {"steps": -1}}}}, "policies.alice.trainer.steps: "),
    ],
)
def test_what_is_wrong_is_named_where_it_was_written(tmp_path, content, expected):
    assert any(found.startswith(expected) for found in mistakes(tmp_path, **content))
