"""What a file may cost, and what numbers a job file may hold: both have bounds, and an error names the
field.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from areal_async.base.mistakes import ConfigError
from areal_async.base.yaml_file import MOST_LEVELS, too_nested
from areal_async.config.base import Section
from areal_async.config.job import JobConfig
from areal_async.config.load import load_job, overrides_of
from areal_async.config.registry import REWARDS, WORKFLOWS
from areal_async.config.reward import RouteSection
from areal_async.data.tasks import TaskFileError, read_tasks
from reward_service.verifiers.composed import WeightedPart

HUGE = 10**30


def numeric_fields(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field below `model` that may hold a number by itself."""
    for name, info in model.model_fields.items():
        path = (*prefix, info.alias or name)
        several = get_origin(info.annotation) in (tuple, dict)
        kinds = [] if several else [info.annotation, *get_args(info.annotation)]
        section = next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)
        if section is not None:
            yield from numeric_fields(section, path)
        elif {int, float} & {k for k in kinds if isinstance(k, type)}:
            yield path


PARTS = {name: kind.find(name) for kind in (REWARDS, WORKFLOWS) for name in kind.built_in}
ARGUMENTS = {name: part.Arguments for name, part in PARTS.items() if hasattr(part, "Arguments")}
MODELS = {"job": JobConfig, "route": RouteSection, "part": WeightedPart, **ARGUMENTS}
FIELDS = [(name, path) for name, model in MODELS.items() for path in numeric_fields(model)]


def test_every_kind_of_section_is_looked_at():
    assert len(FIELDS) > 120
    assert ("job", ("trainer", "steps")) in FIELDS
    assert ("job", ("reward", "workers")) in FIELDS
    assert ("judge", ("votes",)) in FIELDS


@pytest.mark.parametrize(("name", "path"), FIELDS, ids=[".".join((n, *p)) for n, p in FIELDS])
def test_a_number_that_nobody_means_is_refused_with_its_field_and_bound(name, path):
    content: dict[str, Any] = {}
    inner = content
    for key in path[:-1]:
        inner = inner.setdefault(key, {})
    inner[path[-1]] = HUGE
    with pytest.raises((ValidationError, ConfigError)) as caught:
        MODELS[name].model_validate(content)
    refused = caught.value.__cause__ if name == "job" else caught.value
    assert isinstance(refused, ValidationError)
    found = [detail for detail in refused.errors() if detail["loc"][: len(path)] == path]
    assert found
    assert found[0]["type"] in ("less_than_equal", "less_than"), found
    assert found[0]["ctx"].get("le", found[0]["ctx"].get("lt")) < HUGE


def test_numbers_in_lists_and_mappings_are_bounded_too():
    for content in ({"scale": [0, HUGE]}, {"grades": {"yes": HUGE}}):
        with pytest.raises(ValidationError, match="less than or equal"):
            ARGUMENTS["judge"].model_validate({"base_url": "http://a/v1", "model": "m", **content})


def only_mistake(folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_job(folder / "job.yaml", overrides)
    return str(caught.value)


@pytest.mark.parametrize("depth", [MOST_LEVELS + 2, 5_000, 100_000])
@pytest.mark.parametrize("brackets", ["[]", ("{a: ", "}")])
def test_a_nested_job_file_or_override_ends_in_a_sentence_that_names_the_field(folder, depth, brackets):
    nested = brackets[0] * depth + "1" + brackets[1] * depth
    if depth <= 5_000:
        said = only_mistake(folder, f"reward.args={nested}")
        assert "reward.args: the override's value" in said
        assert "nested more than" in said
        assert len(said) < 1_000
    text = (folder / "job.yaml").read_text()
    (folder / "job.yaml").write_text(f"{text}reward:\n  args:\n    rules: {nested}\n")
    said = only_mistake(folder)
    assert "reward.args.rules" in said
    assert "nested more than 32 levels deep" in said


@pytest.mark.parametrize("depth", [MOST_LEVELS, 500, 100_000])
def test_a_key_of_very_many_parts_is_refused(folder, depth):
    said = only_mistake(folder, f"reward.{'args.' * depth}rules=1")
    assert f"reward.args.args.args: the key has {depth + 2} parts" in said
    assert len(said) < 1_000
    deep: Any = {"args": 1}
    for _ in range(depth):
        deep = {"args": deep}
    with pytest.raises(ConfigError, match=r"args\.args.*nested more than"):
        overrides_of(deep)


def test_a_job_given_as_values_may_not_be_nested_either():
    deep: Any = 1
    for _ in range(50_000):
        deep = [deep]
    with pytest.raises(ConfigError, match=r"reward\.args.*nested more than"):
        load_job({"reward": {"args": {"rules": deep}}}, source="job.yaml", base=Path("/nowhere"))


TEN_TO_THE_TWELFTH = ["x0: &x0 [a, a, a, a, a, a, a, a, a, a]"]
TEN_TO_THE_TWELFTH += [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 12)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\n".join(TEN_TO_THE_TWELFTH), "has over 200000 values"),
        ("job: sums\nreward: &r\n  args: {again: *r}\n", "nested more than"),
    ],
)
def test_aliases_that_stand_for_more_than_a_machine_holds_are_refused(folder, text, says):
    (folder / "job.yaml").write_text(text)
    assert says in only_mistake(folder)


def test_a_job_file_of_any_size_is_refused_without_being_read(folder):
    os.truncate(folder / "job.yaml", 1 << 40)
    assert "more than 4194304 bytes" in only_mistake(folder)


def test_a_structure_that_holds_itself_is_too_nested():
    inner: dict[str, Any] = {}
    inner["a"] = inner
    assert too_nested({"top": inner}) == "top.a.a.a"
    assert too_nested([[1], {"a": (2, 3)}]) is None


@pytest.mark.parametrize("leaf", [1, [], {}, [[]], (1,), b"x"])
def test_the_deepest_place_has_a_value_and_no_list(leaf):
    value = leaf
    for _ in range(MOST_LEVELS):
        value = [value]
    assert (too_nested(value) is None) == (not isinstance(leaf, (list, dict, tuple)))
    assert too_nested(value[0] if leaf != [[]] else value[0][0]) is None


def test_values_are_counted_once_per_reference():
    shared = list(range(1000))
    assert too_nested([shared] * 190) is None
    assert too_nested([shared] * 200) is not None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('job: sums\ndescription: "a \\ud83d"\n', "description"),
        ('job: sums\nrollout: {sampling: {stop: [a, "\\udc00"]}}\n', "rollout.sampling.stop.1"),
        ('job: sums\nreward: {args: {"\\ud83d": 1}}\n', r"reward.args.\ud83d"),
    ],
)
def test_half_a_character_in_a_job_file_is_named(folder, text, named):
    (folder / "job.yaml").write_text(text)
    said = only_mistake(folder)
    assert named in said
    assert "half of a surrogate pair" in said


@pytest.mark.parametrize("column", ["extra_info", "reward_model", "prompt"])
@pytest.mark.parametrize("depth", [100, 100_000])
def test_a_nested_row_ends_in_a_sentence_that_names_the_column(folder, column, depth):
    row = {"prompt": '"1"', "reward_model": '{"ground_truth": "1"}'} | {column: "[" * depth + "]" * depth}
    if depth == 100 and column != "extra_info":
        row |= {"reward_model": f'{{"ground_truth": {row[column]}}}', "prompt": '"1"'}
        column = "reward_model"
    text = "{" + ", ".join(f'"{name}": {value}' for name, value in row.items()) + "}\n"
    (folder / "train.jsonl").write_text(text)
    said = only_mistake(folder)
    assert "tasks.train" in said
    assert column in said
    assert "nested more than 32 levels deep" in said


def test_a_nested_configuration_of_a_model_ends_in_a_sentence(folder):
    (folder / "model" / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    assert "has no readable config.json" in only_mistake(folder)


PEAK = """
import re, sys
from pathlib import Path
from areal_async.data.tasks import TaskFileError, read_tasks
try:
    read_tasks(Path(sys.argv[1]))
except TaskFileError as error:
    print(error)
else:
    print("read")
print(int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024)
"""


def read_apart(path: Path) -> tuple[str, int]:
    """What reading it says, and the most MiB that the process had."""
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    said, peak = done.stdout.splitlines()
    return said, int(peak)


def truth(count: int) -> Any:
    import pyarrow as pa

    kind = pa.struct([("style", pa.string()), ("ground_truth", pa.string())])
    return pa.array([{"style": "rule", "ground_truth": "1"}] * count, kind)


def bomb(kind: str) -> tuple[Any, dict[str, bool]]:
    """Return a table that is small as a file and large in memory, and how to write it."""
    import pyarrow as pa

    if kind == "one text in 4,000 rows":
        texts = pa.DictionaryArray.from_arrays(pa.array([0] * 4_000, pa.int32()), pa.array(["1" * (1 << 20)]))
        return pa.table({"prompt": texts, "reward_model": truth(4_000)}), {}
    if kind == "rows of nothing":
        return pa.table({"prompt": pa.nulls(20_000_000, pa.string())}), {}
    if kind == "one long text":
        plain = {"use_dictionary": False, "write_statistics": False}
        return pa.table({"prompt": ["1" * (288 << 20)], "reward_model": truth(1)}), plain
    lists = pa.LargeListArray.from_arrays([0, 50_000_000], pa.nulls(50_000_000, pa.int8()))
    return pa.table({"prompt": ["1"], "extra_info": lists}), {}


@pytest.mark.parametrize(
    "kind", ["one text in 4,000 rows", "rows of nothing", "one long text", "one long list"]
)
def test_a_small_parquet_file_may_not_unfold_to_gigabytes(tmp_path, kind):
    import pyarrow.parquet as pq

    path = tmp_path / "bomb.parquet"
    table, options = bomb(kind)
    pq.write_table(table, path, compression="zstd", **options)
    assert path.stat().st_size < 1 << 20
    said, peak_mib = read_apart(path)
    assert "times its size" in said
    assert str(path) in said
    assert peak_mib < 1_500


def test_equal_prompts_and_only_columns_that_are_needed_are_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, n = tmp_path / "tasks.parquet", 5_000
    columns = {"prompt": ["system text " * 100] * n, "reward_model": truth(n)}
    table = pa.table(columns | {"response": ["2"] * n, "notes": ["x"] * n})
    pq.write_table(table, path, compression="zstd")
    tasks = read_tasks(path)
    assert (len(tasks), tasks.extra(0, "notes")) == (n, None)
    assert read_tasks(path, extra=["response"]).extra(0, "response") == "2"


def test_a_line_without_an_end_is_refused_before_it_is_held(tmp_path):
    path = tmp_path / "tasks.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 36)
    said, peak_mib = read_apart(path)
    assert "line 1 is longer than" in said
    assert peak_mib < 1_500


def test_a_long_file_of_short_lines_is_read(tmp_path):
    row = {"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "tasks.jsonl").write_text((json.dumps(row) + "\n") * 20_000)
    assert len(read_tasks(tmp_path / "tasks.jsonl")) == 20_000
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(TaskFileError, match="has no rows"):
        read_tasks(tmp_path / "empty.jsonl")
