"""The recipes' job files, planned for the GPUs that they are named after, and the commands of their pages."""

from __future__ import annotations

import io
import json
import re
import runpy
import shlex
import sys
from itertools import pairwise

import pytest
import recipe_plans
import recipe_runs
from plan_count import Model

from areal_async.base.mistakes import ConfigError
from areal_async.base.yaml_file import dump_yaml, read_mapping
from areal_async.config.advice import advise
from areal_async.config.load import load_job
from areal_async.data.examples import read_examples
from areal_async.data.tasks import task_row, task_rows
from tests.vision import picture

ROOT, RECIPES = recipe_runs.ROOT, recipe_runs.RECIPES
RUNS = json.loads((ROOT / "benchmarks/results/recipes.json").read_text())
NAMES = sorted(RUNS)
ON_GPUS = sorted({path.parent.name for path in recipe_plans.files()})
DATA = re.compile(r"## Data\n+```\n(.*?)```", re.DOTALL)


def said(role, content):
    return {"role": role, "content": content}


def gsm8k(i):
    return {"question": f"What is {i} + 1?", "answer": f"{i} and 1 are {i + 1}.\n#### {i + 1}"}


def maths(i, repeated=4):
    i //= repeated  # both data sets have each problem several times
    return {
        "data_source": "math_dapo",
        "prompt": [said("user", f"Solve x = {i} + 1. The last line should be Answer: $Answer")],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(i + 1), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(i)},
    }


def feedback(i):
    asked = said("user", f"Name {i} things.")
    return {
        "prompt": asked["content"],
        "prompt_id": f"{i:064x}",
        "chosen": [asked, said("assistant", "Gladly.")],
        "rejected": [asked, said("assistant", "Gladly." if i == 3 else "No.")],
        "messages": [asked, said("assistant", "Gladly.")],
        "score_chosen": 8.0,
        "score_rejected": 2.0,
    }


def eurus(i):
    ability = "code" if i % 4 == 0 else "math"
    tests = json.dumps({"inputs": [f"{i}\n"], "outputs": [f"{i + 1}\n"]})
    return {
        "data_source": "taco" if ability == "code" else "numina_olympiads",
        "prompt": [said("system", "Think."), said("user", f"Add one to {i}.")],
        "ability": ability,
        "reward_model": {"ground_truth": tests if ability == "code" else str(i), "style": "rule"},
        "extra_info": {"index": i, "split": "dummy"},
    }


def drawing(i):
    out = io.BytesIO()
    picture(40 + i, 30, seed=i).save(out, "PNG")
    return {"bytes": out.getvalue(), "path": None}


def geometry(i):
    return {"images": [drawing(i)], "problem": "<image>Find $x$.", "answer": f"{i} \\sqrt {{ 2 }}"}


def described(i):
    return {
        "question_id": str(i),
        "image": drawing(i),
        "question": "Please carefully observe the area circled in the image.",
        "answer": [f"the lamp {i}", f"lamp number {i}"],
        "segmentation": [4.0, 3.0, 24.0, 3.0, 24.0, 18.0],
        "bbox": [4.0, 3.0, 20.0, 15.0],  # x, y, width, height
        "iscrowd": 0,
        "file_name": f"COCO_train2014_{i:012}.jpg",
    }


HUB = {  # folder and names of its files -> their rows; the places and columns that they have on the hub
    "openai/gsm8k/main train test": gsm8k,
    "openai/gsm8k/socratic train test": gsm8k,
    "BytedTsinghua-SIA/DAPO-Math-17k/data dapo-math-17k": maths,
    "BytedTsinghua-SIA/AIME-2024/data aime-2024": maths,
    "HuggingFaceH4/ultrafeedback_binarized/data "
    "train_prefs train_sft train_gen test_prefs test_sft test_gen": feedback,
    "PRIME-RL/Eurus-2-RL-Data/data train validation": eurus,
    "hiyouga/geometry3k/data train validation test": geometry,
    "lmms-lab/RefCOCOg/data val test": described,
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder with the data sets of the recipes as the hub has them, a few rows each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("hub")
    for (place, *names), row in ((key.split(), row) for key, row in HUB.items()):
        (folder / place).mkdir(parents=True)
        for name in names:
            file = name if row is maths else f"{name}-00000-of-00001"
            pq.write_table(
                pa.Table.from_pylist([row(i) for i in range(40)]), folder / place / f"{file}.parquet"
            )
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def test_each_recipe_has_a_page_and_every_size():
    assert {*NAMES} <= {*recipe_runs.names()}
    for name in ON_GPUS:
        there = {path.name for path in (RECIPES / name).iterdir()}
        assert there >= {"README.md", "1_gpu.yaml", "8_gpus.yaml", "64_gpus.yaml"}
        page = (RECIPES / name / "README.md").read_text()
        assert f"areal-async run recipes/{name}/1_gpu.yaml " in page
        assert {"(1_gpu.yaml)", "(8_gpus.yaml)", "(64_gpus.yaml)"} <= {*re.findall(r"\(\w+\.yaml\)", page)}


@pytest.mark.parametrize("path", recipe_plans.files(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_job_file_for_gpus_is_valid_and_fits_them_by_two_counts(path, models):
    """The second count shares no formula with the plan."""
    plan = recipe_plans.planned(path, models, simulate=False)
    named = recipe_plans.gpus_named(path)
    # The reward model of the largest size is smaller than its policy, and takes one host.
    assert named - 1 <= plan["gpus"] <= named or path.stem == "reward_model_64_gpus"
    assert plan["mistakes"] == []
    assert plan["fits"]
    assert plan["ratio"] <= 1.06, plan


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen2.5-VL-3B", 3_754_622_976),
        ("Qwen2.5-VL-7B", 8_292_166_656),
        ("Qwen2.5-VL-32B", 33_452_718_336),
        ("Qwen3-VL-2B", 2_127_532_032),
        ("Qwen3-VL-8B", 8_767_123_696),
    ],
)
def test_the_configs_of_models_with_images_give_their_published_sizes(name, parameters):
    model = Model(recipe_plans.config_of(f"Qwen/{name}-Instruct"))
    assert model.size + model.tower_shard(1) == parameters


def test_the_page_tells_the_figures_of_the_long_job_with_images():
    plans = json.loads((ROOT / "benchmarks/results/recipe_plans.json").read_text())
    assert {f"{path.parent.name}/{path.name}" for path in recipe_plans.files()} == {*plans}
    row, page = plans["geo3k/long_8_gpus.yaml"], (RECIPES / "geo3k/README.md").read_text()
    assert f"{row['peak_gib'][0]} of {row['fits_gib']} GiB" in page.replace("\n", " ")
    step_s, waits = round(row["step_s"], -1), f"{row['trainer_idle']:.0%}".replace("%", " %")
    assert f"a step takes {step_s:.0f} s, in which the trainer waits {waits} of the time" in page


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
def test_the_pages_tell_the_figures_of_the_last_run(name):
    row = RUNS[name]
    assert recipe_runs.has_learned(row)
    before, after = row["figure"]
    told, steps = f"{before:.3f} → {after:.3f}", row["steps"]
    assert re.search(
        rf"^\| {name} \| [^|]* \| {told} \| {steps} \|", (ROOT / "docs/quickstart.md").read_text(), re.M
    )
    assert f"{told} in {steps} steps" in (RECIPES / name / "README.md").read_text()


@pytest.mark.parametrize("name", ON_GPUS)
def test_the_commands_for_the_data_make_what_the_jobs_name(name, hub, monkeypatch):
    monkeypatch.chdir(hub)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repository, **_: str(hub / repository))
    monkeypatch.syspath_prepend(RECIPES)
    for words in map(shlex.split, DATA.search((RECIPES / name / "README.md").read_text())[1].splitlines()):
        few = ["5" if before == "--held-out" else word for before, word in pairwise(["", *words])]
        monkeypatch.setattr(sys, "argv", few[1:])
        runpy.run_path(str(ROOT / few[1]), run_name="__main__")
    rows = {}
    for path in (RECIPES / name).glob("*_gpu*.yaml"):
        job = read_mapping(path)
        for file in job["tasks"].values():
            prepared = hub / "recipes" / name / file
            if job.get("kind", "rl") == "rl":
                rows[file] = [task_row(where, row) for where, row in task_rows(prepared, None)]
            else:
                rows[file] = list(read_examples(prepared, job["kind"])[1])
    assert rows
    assert all(rows.values())
    if name == "code-sandbox":
        assert {row["ability"] for row in rows["data/train.jsonl"]} == {"code"}
    if name == "geo3k":  # equal prompts with different images
        assert len(rows["data/train.jsonl"]) == len(rows["data/held_out.jsonl"]) == 40
        first = rows["data/four.jsonl"][0]
        assert [part["type"] for part in first["prompt"][0]["content"]].count("image") == 4
        assert len({image.facts.digest for image in first["images"]}) == 4
        assert first["reward_model"]["ground_truth"].count("\\sqrt") == 4
    if name == "referring-expressions":
        assert len(rows["data/train.jsonl"]) == 80
        for row in rows["data/train.jsonl"]:
            (image,) = row["images"]
            x1, y1, x2, y2 = json.loads(row["reward_model"]["ground_truth"])
            assert (y1, y2) == (100, 600)
            assert (round(x1 * image.facts.width / 1000), round(x2 * image.facts.width / 1000)) == (4, 24)
    if name == "dapo-maths":
        assert len(rows["data/held_out.jsonl"]) == 10  # each problem once


@pytest.mark.parametrize(
    "file", sorted(RECIPES.glob("*/*.yaml")), ids=lambda file: f"{file.parent.name}-{file.stem}"
)
def test_no_recipe_is_warned_of(file):
    """Its files are not read and need not exist."""
    assert [str(each) for each in advise(load_job(file, files=False))] == []
