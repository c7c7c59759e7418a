"""Sweeps: combinations and names."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.base.mistakes import ConfigError
from areal_async.cluster.sweeps import combinations, named_jobs


def test_every_combination_is_a_job_the_last_key_changing_fastest():
    found = combinations(["lr=1e-6,3e-6", "buffer.max_staleness=0,4"])
    assert [each.overrides for each in found] == [
        ("trainer.optimizer.lr=1e-6", "buffer.max_staleness=0"),
        ("trainer.optimizer.lr=1e-6", "buffer.max_staleness=4"),
        ("trainer.optimizer.lr=3e-6", "buffer.max_staleness=0"),
        ("trainer.optimizer.lr=3e-6", "buffer.max_staleness=4"),
    ]
    assert named_jobs("sums", ["x", "x-2", "x"]) == ["sums-x", "sums-x-2", "sums-x-3"]
    assert named_jobs("sums", [each.suffix for each in found])[0] == "sums-lr-1e-6-max_staleness-0"
    (none,) = combinations([])
    assert none.overrides == ()


def test_values_may_be_lists_and_texts():
    found = combinations(["betas=[[0.9, 0.99], [0.9, 0.999]]", "model=/a/b,/a/c"])
    assert found[0].overrides == ("trainer.optimizer.betas=[0.9, 0.99]", "model=/a/b")
    assert combinations(["rollout.workflow_args.turns=1,2"])[1].overrides == (
        "rollout.workflow_args.turns=2",
    )


@pytest.mark.parametrize(
    ("sweeps", "said"),
    [
        (["lr"], "not key=a,b"),
        (["=1,2"], "not key=a,b"),
        (["lr="], "no values|no list"),
        (["lr=1,1"], "given twice"),
        (["lr=1,2", "trainer.optimizer.lr=3"], "swept twice"),
        (["torch_threads=1,2"], "several fields are called torch_threads"),
        (["learning_rat=1,2"], "no such field"),
        (["lr=[1,"], "no list of values"),
        (["lr=!!python/object/apply:os.system [id]"], "no list of values"),
        (["seed=" + ",".join(map(str, range(17))), "lr=" + ",".join(f"1e-{n}" for n in range(17))], "289"),
    ],
)
def test_what_is_no_sweep_is_refused(sweeps, said):
    with pytest.raises(ConfigError, match=said):
        combinations(sweeps)


@given(
    st.from_regex(r"[a-z0-9][a-z0-9_-]{0,47}", fullmatch=True),
    st.lists(st.text(max_size=60) | st.sampled_from(["x", "x-2", "x-3", "X"]), min_size=1, max_size=20),
)
def test_names_are_those_of_jobs_and_unlike_each_other(name, suffixes):
    found = named_jobs(name, [suffix or "x" for suffix in suffixes])
    assert len(set(found)) == len(suffixes)
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,47}", each) for each in found)
