"""`validate` refuses each bad image and each bad row by one sentence with the row, the field and the fix."""

import importlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from areal_async.cli.main import app
from areal_async.config import files
from areal_async.config.load import load_job
from areal_async.launch import prompt_trial
from areal_async.launch.prompt_trial import tokenizer_mistakes
from tests.unit.data.test_images import FRAMES, png
from tests.vision import picture, write_vision_model

ROOT = Path(__file__).parents[3]
IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "1+1="}


def encoded(width, height):
    out = io.BytesIO()
    picture(width, height).save(out, "PNG")
    return out.getvalue()


def film():
    out = io.BytesIO()
    FRAMES[0].save(out, "GIF", save_all=True, append_images=FRAMES[1:])
    return out.getvalue()


FILES = {
    "ok.png": encoded(32, 32),
    "cut.png": encoded(100, 100)[:5000],
    "bomb.png": png(60_000, 60_000),
    "text.png": b"hello",
    "film.gif": film(),
    "drawing.svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>',
    "dot.png": encoded(1, 1),
    "thin.png": encoded(2000, 4),
    "large.png": encoded(640, 640),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def folder(tmp_path, model):
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    job = {"job": "sums", "model": str(model), "tasks": {"train": "train.jsonl"}}
    job |= {"rollout": {"max_model_len": 64, "sampling": {"max_new_tokens": 8}}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    return tmp_path


def write(folder, *rows):
    """Write tasks of (prompt, images) after a good one."""
    truth = {"style": "rule", "ground_truth": "2"}
    made = [
        {"prompt": prompt, "reward_model": truth} | ({} if images is None else {"images": images})
        for prompt, images in [("1+1=", ["ok.png"]), *rows]
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))


def said(folder, *overrides):
    done = CliRunner().invoke(app, ["validate", str(folder / "job.yaml"), *overrides])
    assert "Traceback" not in done.output
    return done.exit_code, " ".join(done.output.split())


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


REPLACE = "Replace it, or take the row out."
FOR_EACH = "Write one <image> for each image in `images`."
PARTS = r'Write \{"type": "text", "text": …\} or \{"type": "image"\}, and the images into `images`.'
BAD = {
    "a cut png": ("1+1=", ["cut.png"], f"image 1: its end is missing, .* {REPLACE}"),
    "a bomb": ("1+1=", ["bomb.png"], f"image 1: it has too many pixels: at most 67108864 are .* {REPLACE}"),
    "a text": ("1+1=", ["text.png"], f"image 1: it is no image of a known kind .* {REPLACE}"),
    "a film": ("1+1=", ["ok.png", "film.gif"], f"image 2: it has several frames: .* {REPLACE}"),
    "an svg": ("1+1=", ["drawing.svg"], f"image 1: it is no image of a known kind .* {REPLACE}"),
    "no file": ("1+1=", ["gone.png"], f"image 1: the file .*gone.png cannot be read: No such .* {REPLACE}"),
    "outside": ("1+1=", ["../x.png"], "image 1: its path '../x.png' leads out .* or give an absolute path."),
    "the web": ("1+1=", ["https://x.org/y.png"], "image 1: https://x.org/y.png is on the web, .* its path."),
    "a dot": ("1+1=", ["dot.png"], f"image 1: it has 1 x 1 pixels, which is too small .* {REPLACE}"),
    "a line": ("1+1=", ["thin.png"], f"image 1: it has 2000 x 4 pixels, .* thin .* {REPLACE}"),
    "two places": ("<image><image>1", ["ok.png"], f"images is 1, and that of <image> .* is 2. {FOR_EACH}"),
    "one place": (user(IMAGE, TEXT), ["ok.png"] * 2, f"images is 2, and .* is 1. {FOR_EACH}"),
    "no images": ("<image>1+1=", None, f"images is 0, and that of <image> in the prompt is 1. {FOR_EACH}"),
    "a part alone": (user(IMAGE, TEXT), None, f"images is 0, and .* is 1. {FOR_EACH}"),
    "a video": (user({"type": "video"}, TEXT), ["ok.png"], f"'video'}}, and only texts and .* {PARTS}"),
    "a part with a path": (user(IMAGE | {"image": "ok.png"}, TEXT), None, f"'ok.png'}}, and .* {PARTS}"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_refused_by_row_field_and_fix(folder, name):
    prompt, images, words = BAD[name]
    write(folder, (prompt, images))
    code, output = said(folder)
    assert code == 2
    before = r"error: \S+job.yaml: tasks.train: task file \S+train.jsonl, line 2: column `images`: "
    assert re.fullmatch(f"{before}.*{words} More is checked once this is mended: .*", output), output


def test_a_model_or_back_end_or_teacher_of_texts_refuses_tasks_with_images(folder):
    write(folder)
    plain = write_vision_model(folder / "plain")
    text = json.loads((plain / "config.json").read_text())["text_config"]
    (plain / "config.json").write_text(json.dumps(text | {"architectures": ["Qwen2ForCausalLM"]}))
    code, output = said(folder, f"model={plain}")
    assert code == 2
    assert re.search(r"tasks.train: row 1 of \S+ has images, and the model in \S+plain reads none\.", output)
    code, output = said(folder, "trainer.backend=megatron", "trainer.device=cuda")
    assert code == 2
    assert "trainer.backend: megatron trains on texts alone, and row 1 of" in output
    code, output = said(folder, "trainer.teacher={urls: ['http://127.0.0.1:9'], name: t}")
    assert code == 2
    assert "trainer.teacher.urls: servers are asked by the ids of tokens, and row 1 of" in output


def test_a_critic_of_its_own_refuses_tasks_with_images(folder):
    write(folder)
    code, output = said(folder, "trainer.objective.advantage=gae")
    assert code == 2
    assert "trainer.critic.kind: a critic that is a model of its own reads no images, and row 1 of" in output
    assert "Set it to head, or train without a critic" in output
    assert said(folder, "trainer.objective.advantage=gae", "trainer.critic.kind=head")[0] == 0


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("images", "words"),
    [
        (["cut.png"], "{place}: column `images`: image 1: its end is missing"),
        (["ok.png"], "trainer.critic.kind: a critic .* no images, and task file .*, {place} has images"),
    ],
)
def test_rows_over_a_whole_large_file_are_checked(folder, monkeypatch, kind, images, words):
    """The bad row comes after those that are all read, and among more than are read of the rest."""
    monkeypatch.setattr(prompt_trial, "MOST_IMAGE_ROWS", 5)
    monkeypatch.setattr(files, "READ_WHOLE_BYTES", 0)
    truth = {"style": "rule", "ground_truth": "2"}
    rows = [{"prompt": "1+1=", "reward_model": truth, "images": []} for _ in range(300)]
    for number in range(200, 210):
        rows[number]["images"] = images
    path = folder / f"train.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        schema = pa.Table.from_pylist([rows[200]]).schema
        pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=4)
    job = load_job(folder / "job.yaml", [f"tasks.train={path}", "trainer.objective.advantage=gae"])
    (found,) = (each for each in tokenizer_mistakes(job) if not each.warns)
    place = "(line|row) 2(0[1-9]|10)"
    assert re.search(words.format(place=place), str(found)), found


def test_the_bounds_of_pixels_decide_which_prompts_are_too_long(folder):
    """`validate` passes this function's result on; it runs in a process of its own there."""
    write(folder, ("1+1=", ["large.png"]))

    def found(*overrides):
        return [str(each) for each in tokenizer_mistakes(load_job(folder / "job.yaml", overrides))]

    refused, note = found()
    assert "1 of 2 prompts" in refused
    assert "64 tokens or more (the longest 70 in line 2, 64 of them for images)" in refused
    assert "Raise rollout.max_model_len, lower rollout.images.max_pixels, or take them out" in refused
    (note,) = found("rollout.images.max_pixels=1024")
    assert "images of 2 rows of " in note
    assert note.endswith("the largest 640 x 640 pixels, take 16 tokens each.")
    (wrong,) = found("rollout.images.min_pixels=100000")
    assert "rollout.images: min_pixels 100000 is more than max_pixels 4096" in wrong


def test_an_image_that_became_too_large_since_the_last_check_is_found(folder, monkeypatch):
    monkeypatch.setattr("areal_async.launch.preflight._tried", lambda job, *_: tokenizer_mistakes(job))
    write(folder)
    code, output = said(folder)
    assert code == 0, output
    assert output.index("note: tasks.train: images of 1 rows of") > output.index("trainer:")  # at the end
    Image.new("RGB", (640, 640)).save(folder / "ok.png")
    code, output = said(folder)
    assert code == 2
    assert "1 of 1 prompts" in output


def test_a_model_without_its_image_processor_is_refused(folder, tmp_path):
    plain = write_vision_model(tmp_path / "plain")
    (plain / "preprocessor_config.json").unlink()
    write(folder)
    (found,) = tokenizer_mistakes(load_job(folder / "job.yaml", [f"model={plain}"]))
    assert re.search(r"line 1 has images, and the image processor in \S+ cannot be used: Can't", str(found))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_the_tasks_of_the_page_about_images_are_valid_for_their_small_model(tmp_path, monkeypatch, kind):
    page = (ROOT / "docs/images.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    words = re.search(r"small_model.py (.*)", page)[1].split()
    command = [sys.executable, ROOT / "recipes/coloured-squares/small_model.py", *words, "--enough", "-1"]
    subprocess.run([*command, "--kind", kind], check=True)
    (tmp_path / "job.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    notes = [str(each) for each in tokenizer_mistakes(load_job(tmp_path / "job.yaml")) if not each.fix]
    told = re.compile(r"images of (\d+) rows .* largest (\d+ x \d+) pixels, take (\d+) tokens each")
    assert [told.search(note).groups() for note in notes] == [
        ("500", "224 x 224", "36"),
        ("50", "224 x 224", "36"),
    ]


ROW = {"prompt": "<image>, <image>?", "images": ["0.png", "1.png"], "reward_model": {"ground_truth": "yes"}}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Return the module `small_model`, and a function that writes rows to a task file beside two images."""
    monkeypatch.syspath_prepend(ROOT / "recipes/coloured-squares")
    for number, size in enumerate([(16, 16), (48, 16)]):
        Image.new("RGB", size, "red").save(tmp_path / f"{number}.png")

    def written(*rows):
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        return path

    return importlib.import_module("small_model"), written


def other(truth):
    return ROW | {"prompt": "?", "images": ["0.png"], "reward_model": {"ground_truth": truth}}


def test_the_small_model_reads_several_images_and_whole_numbers(small, tmp_path):
    small_model, written = small
    path = written(*[ROW, other(7)] * 20)
    made = tmp_path / "model"
    assert small_model.make_model(path, path, made, kind="qwen2_5_vl", seed=0, enough=1.0) == 1.0
    tasks = small_model.tasks_of(path)
    assert [task.answer for task in tasks[:2]] == ["yes", "7"]
    both = small_model.Teacher(made).shown(tasks[0])
    assert both.grids.tolist() == [[1, 2, 2], [1, 2, 6]]
    assert len(both.ids) == (2 + 1) + 2 + (2 + 3) + 1 + 3 + 1  # marks, cells, texts, answer, end


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (ROW | {"images": []}, r"images is \[\]. Here it must be a list of paths"),
        (ROW | {"images": ["0.png"]}, "1 images, but 2 <image>"),
        (ROW | {"images": ["0.png", "7.png"]}, r"the image \S+7.png cannot be read: .*No such file"),
        (
            ROW | {"images": ["0.png", "train.jsonl"]},
            r"the image \S+train.jsonl cannot be read: cannot identify",
        ),
        (ROW | {"prompt": [{"role": "user", "content": "?"}]}, r"prompt is \[.*Here it must be a text"),
        (other(["yes"]), r"reward_model.ground_truth is \['yes'\]. Here it must be a text"),
    ],
)
def test_the_small_model_refuses_a_row_by_its_number(small, row, said):
    small_model, written = small
    path = written(ROW, row)
    with pytest.raises(SystemExit, match=rf"train.jsonl:2: {said}"):
        small_model.tasks_of(path)


def test_a_small_model_that_learns_no_more_than_the_most_frequent_answer_leaves_no_weights(
    small, tmp_path, monkeypatch
):
    small_model, written = small
    monkeypatch.setattr(small_model, "STEPS", 10)
    made = tmp_path / "model"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"of an earlier run")
    path = written(*[other("no"), other("yes"), other("yes")] * 20)
    with pytest.raises(SystemExit, match=r"gets 0\.\d+ of the tests right, and 0\.7\d+ are needed"):
        small_model.make_model(path, path, made, kind="qwen3_vl", seed=0, enough=0.3)
    assert not (made / "model.safetensors").exists()
    with pytest.raises(SystemExit, match=r"train.jsonl: 3 rows. Give at least 40"):
        small_model.tasks_of(written(ROW, ROW, ROW))
