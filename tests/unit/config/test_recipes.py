"""The recipes' job files, planned for the GPUs that they are named after, and the commands of their pages."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest
import recipe_plans
import recipe_runs
from typer.testing import CliRunner

from areal_async.cli.main import app
from areal_async.config.errors import ConfigError
from areal_async.config.load import load_job
from areal_async.config.yamlfile import dump_yaml, read_mapping
from areal_async.examples import read_examples
from areal_async.tasks import task_rows

ROOT, RECIPES = recipe_runs.ROOT, recipe_runs.RECIPES
NAMES = (
    "code-sandbox",
    "dapo-maths",
    "distillation",
    "dpo",
    "gsm8k-grpo",
    "multi-turn-agent",
    "rm-ppo",
    "tool-use",
)
DATA = re.compile(r"## Data\n+```\n(.*?)```", re.DOTALL)


def said(role, content):
    return {"role": role, "content": content}


def of_the_hub(name, i):
    """A row with the columns that the data set of this name has."""
    match name:
        case "openai/gsm8k":
            return {"question": f"What is {i} + 1?", "answer": f"{i} and 1 are {i + 1}.\n#### {i + 1}"}
        case "BytedTsinghua-SIA/DAPO-Math-17k":
            return {
                "data_source": "math_dapo",
                "prompt": [said("user", f"Solve x = {i} + 1. The last line should be Answer: $Answer")],
                "ability": "MATH",
                "reward_model": {"ground_truth": str(i + 1), "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": str(i)},
            }
        case "HuggingFaceH4/ultrafeedback_binarized":
            asked = said("user", f"Name {i} things.")
            return {
                "prompt": asked["content"],
                "prompt_id": f"{i:064x}",
                "chosen": [asked, said("assistant", "Gladly.")],
                "rejected": [asked, said("assistant", "No.")],
                "messages": [asked, said("assistant", "Gladly.")],
                "score_chosen": 8.0,
                "score_rejected": 2.0,
            }
    raise AssertionError(f"write down which columns {name} has")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def test_each_recipe_has_a_page_and_every_size():
    assert tuple(recipe_runs.names()) == NAMES
    for name in NAMES:
        there = {path.name for path in (RECIPES / name).iterdir()}
        assert there >= {"README.md", "1_gpu.yaml", "8_gpus.yaml", "64_gpus.yaml", "tiny.yaml"}


@pytest.mark.parametrize("path", recipe_plans.files(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_job_file_for_gpus_is_valid_and_fits_them(path, models):
    plan = recipe_plans.planned(path, models, simulate=False)
    named = int(re.search(r"(\d+)_gpus?$", path.stem)[1])
    # The reward model of the largest size is smaller than its policy, and takes one host.
    assert named - 1 <= plan["gpus"] <= named or path.stem == "reward_model_64_gpus"
    assert plan["peak_gib"] <= plan["fits_gib"]


def test_a_mistake_in_a_recipe_is_found_without_its_model(tmp_path, models):
    content = read_mapping(RECIPES / "gsm8k-grpo" / "8_gpus.yaml")
    content["rollout"]["max_model_len"] = 512  # less than a response may have
    (tmp_path / "8_gpus.yaml").write_text(dump_yaml(content))
    with pytest.raises(ConfigError, match=r"max_new_tokens|max_model_len"):
        recipe_plans.loaded(tmp_path / "8_gpus.yaml", models)


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_for_two_cores_end_in_the_small_job(name):
    commands = recipe_runs.commands(name)
    assert commands[-1][:2] == ["areal-async", "run"]
    assert commands[-1][2].endswith("/tiny.yaml")
    for words in commands:
        if words[0] == "python":
            assert (ROOT / words[1]).is_file()
        elif words[1] == "run":
            job_file = RECIPES / name / words[2].rpartition("/")[2]
            load_job(job_file, files=False)


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_for_the_data_make_what_the_jobs_name(name, tmp_path):
    block = DATA.search((RECIPES / name / "README.md").read_text())[1].replace("\\\n", " ")
    made = set()
    for words in map(shlex.split, block.splitlines()):
        words = [word.replace(f"recipes/{name}/data", str(tmp_path)) for word in words]
        if words[:3] == ["areal-async", "data", "prepare"]:
            source = tmp_path / "hub.jsonl"
            rows = [of_the_hub(words[3], i) for i in range(20)]
            source.write_text("".join(json.dumps(row) + "\n" for row in rows))
            asked = words[words.index("--held-out") + 1]
            words = ["3" if word == asked else word for word in words]
            done = CliRunner().invoke(app, [*words[1:3], str(source), *words[4:], "--overwrite"])
            assert done.exit_code == 0, done.output
        elif words[0] == "python":
            if "only_code.py" in words[1]:
                words[2] = code_rows(tmp_path)
            subprocess.run([sys.executable, *words[1:]], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    for path in (RECIPES / name).glob("*_gpu*.yaml"):
        job = read_mapping(path)
        for file in job["tasks"].values():
            made.add(file)
            prepared = tmp_path / file.removeprefix("data/")
            if job.get("kind", "rl") == "rl":
                assert list(task_rows(prepared, ("prompt", "reward_model"), []))
            else:
                assert list(read_examples(prepared, job["kind"])[1])
    assert made


def code_rows(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    tests = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
    rows = [
        {
            "data_source": "taco",
            "prompt": [said("user", "Add one.")],
            "ability": ability,
            "reward_model": {"ground_truth": tests, "style": "rule"},
        }
        for ability in ("math", "code")
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "of_both.parquet")
    return str(folder / "of_both.parquet")
