"""Whatever a job file holds, it is loaded or refused with a `ConfigError`; nothing else is ever raised."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.base.mistakes import ConfigError
from areal_async.base.yaml_file import dump_yaml, parse_yaml
from areal_async.config.job import job_fields
from areal_async.config.load import load_job
from tests.harness.profiles import examples

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from(["", "~", "a.py:b", "redis://[", "unix://", "/", "cuda:0", "local", "\x00"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=8), st.integers()), inner, max_size=3),
    ),
    max_leaves=5,
)
SECTIONS = sorted({path.rpartition(".")[0] for path in job_fields()} - {""})
KEYS = st.sampled_from([*job_fields(), *SECTIONS, "nowhere", "buffer.nowhere"])


@settings(max_examples=examples(300))
@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=8))
def test_hostile_values_give_a_typed_error(changes):
    content: dict[str, Any] = {"job": "a", "model": "m", "tasks": {"train": "t.jsonl"}}
    for path, value in changes.items():
        inner: Any = content
        *sections, last = path.split(".")
        for name in sections:
            inner = inner.setdefault(name, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner[last] = value
    with pytest.raises(ConfigError) as caught:  # the model does not exist, so none of these is right
        load_job(content, source="job.yaml", base=Path("/nowhere"))
    assert all(mistake.field and mistake.problem and mistake.fix for mistake in caught.value.mistakes)


@settings(max_examples=examples(200))
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
def test_hostile_bytes_give_a_typed_error(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_bytes(data)
        with pytest.raises(ConfigError):
            load_job(path)


@given(st.lists(st.text(max_size=30), max_size=3))
def test_hostile_overrides_give_a_typed_error(overrides):
    with pytest.raises(ConfigError):
        load_job({}, overrides, source="job.yaml", base=Path("/nowhere"))


TEXT = st.one_of(
    st.text(max_size=8), st.from_regex(r"[-+]?[0-9]{1,2}(\.[0-9_]*)?[eE][-+]?[0-9]", fullmatch=True)
)


@given(st.dictionaries(TEXT, st.one_of(st.integers(), st.floats(allow_nan=False), TEXT), max_size=4))
def test_yaml_of_our_own_is_read_back(content):
    assert parse_yaml(dump_yaml(content)) == content


def test_anchors_and_merges_work_and_odd_keys_do_not():
    inner = {"b": [1, [2]]}
    read = parse_yaml("a: &x {b: [1, [2]]}\nc: {<<: *x, d: 2}\ne: [*x, *x]")
    assert read == {"a": inner, "c": inner | {"d": 2}, "e": [inner, inner]}
    for text in ("{[1]: 2}", "? {a: b}\n: c", "a: !!python/object:os.system {}"):
        with pytest.raises(yaml.YAMLError):
            parse_yaml(text)
