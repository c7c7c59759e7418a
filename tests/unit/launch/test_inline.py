"""What cannot be in one process, and what of a job its services are told there."""

import threading

import pytest

from areal_async.base.errors import RunError
from areal_async.base.mistakes import ConfigError
from areal_async.config.cluster import ClusterConfig
from areal_async.launch.inline import LONG_S, without_limits
from areal_async.launch.preflight import check_inline
from tests.unit.launch.launching import changed


@pytest.mark.parametrize(
    ("section", "fields", "named", "fix"),
    [
        ("trainer", {"ranks": 2}, "trainer.ranks: it is 2", "Set it to 1"),
        ("rollout", {"workers": 3}, "rollout.workers: it is 3", "Set it to 1"),
        ("rollout", {"replicas": 2}, "rollout.replicas: it is 2", "Set it to 1"),
        ("rollout", {"engine": "vllm"}, "rollout.engine: vllm is a server", "Set it to local"),
        ("evaluation", {"engine": "sglang"}, "evaluation.engine: sglang is a server", "Set it to local"),
        ("placement", {"pretend": {"rollout-0": "host-1"}}, "placement.pretend", "Remove it"),
    ],
)
def test_what_is_several_processes_is_refused_with_its_field(job, section, fields, named, fix):
    check_inline(job, source="job.yaml")
    with pytest.raises(ConfigError) as refused:
        check_inline(changed(job, section, **fields), source="job.yaml")
    (mistake,) = refused.value.mistakes
    assert named in str(mistake)
    assert fix in mistake.fix


def test_a_cluster_is_refused(job):
    with pytest.raises(ConfigError) as refused:
        check_inline(job, ClusterConfig(), source="job.yaml")
    assert [mistake.field for mistake in refused.value.mistakes] == ["--cluster"]


def test_the_trainer_is_in_the_main_thread(job):
    raised = []

    def elsewhere():
        try:
            check_inline(job, source="job.yaml")
        except RunError as error:
            raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert "main thread" in str(raised)


def test_nothing_is_given_up_for_want_of_a_sign_of_life(job):
    group = job.buffer.group.model_copy(update={"policy": "deadline_drop", "deadline_s": 5.0})
    given = changed(changed(job, "buffer", lease_s=1.0, group=group), "trainer", torch_threads=3)
    told = without_limits(changed(given, "rollout", episode_timeout_s=2.0))
    assert {told.buffer.lease_s, told.buffer.on_overtaken.limit_s, told.buffer.group.deadline_s} == {LONG_S}
    assert told.rollout.episode_timeout_s is None
    assert {told.rollout.torch_threads, told.evaluation.torch_threads} == {3}
    assert told.reward == given.reward
    assert without_limits(job).buffer.group.deadline_s is None
