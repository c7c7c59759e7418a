"""Task files with images: each form that data sets use is read, and each bad row is refused by its name."""

import base64
import io
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from areal_async.data.examples import read_examples
from areal_async.data.images import inspect_image
from areal_async.data.task_images import MOST_IMAGES
from areal_async.data.tasks import TaskFileError, read_tasks
from tests.unit.data.test_images import FRAMES, png
from tests.vision import picture

IMAGE, TEXT = {"type": "image"}, "text"


def encoded(seed=0, kind="PNG", size=(8, 8)):
    out = io.BytesIO()
    picture(*size, seed).save(out, kind)
    return out.getvalue()


def as_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def row(prompt="what?", **more):
    return {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "1"}, **more}


def text(said):
    return {"type": "text", "text": said}


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a").mkdir()
    for seed in range(3):
        (tmp_path / "a" / f"{seed}.png").write_bytes(encoded(seed))
    return tmp_path


def test_every_form_of_an_image_is_read_and_its_bytes_come_back(write, folder):
    store = folder / "store"
    store.mkdir()
    (store / "x.png").write_bytes(encoded(2))
    forms = ["a/0.png", str(folder / "a" / "1.png"), as_url(encoded(2)), f"file://{store}/x.png"]
    forms += [{"bytes": None, "path": "a/0.png"}, {"path": "./a/../a/1.png"}]
    table = read_tasks(write("tasks.jsonl", [row("no image", images=[]), row(images=forms)]))
    plain, task = table
    assert (plain.prompt, plain.images) == ("no image", ())
    assert [each.data for each in task.images] == [b""] * 6
    wanted = [encoded(seed) for seed in (0, 1, 2, 2, 0, 1)]
    assert [each.facts for each in task.images] == [inspect_image(data) for data in wanted]
    assert [each.data for each in table.images(1)] == wanted
    assert table.images(0) == []
    assert task.prompt == user(*[IMAGE] * 6, text("what?"))


@pytest.mark.parametrize("rows_of_a_group", [1, 3, 100])
def test_a_parquet_file_of_verl_or_of_the_hub_is_read(folder, rows_of_a_group):
    rows = [
        row(
            [{"role": "system", "content": "s"}, {"role": "user", "content": f"<image>see {number}"}],
            images=[{"bytes": encoded(number), "path": f"missing-{number}.png"}],
        )
        for number in range(7)
    ]
    path = folder / "tasks.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=rows_of_a_group)
    table = read_tasks(path)
    for number, task in enumerate(table):
        system, asked = task.prompt
        assert system == {"role": "system", "content": [text("s")]}
        assert asked["content"] == [IMAGE, text(f"see {number}")]
        assert table.images(number)[0].data == encoded(number)


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("a <image> b<image>", user(text("a "), IMAGE, text(" b"), IMAGE)),
        ([{"role": "user", "content": [IMAGE, text("x"), {"type": "image", "text": None}]}],
         user(IMAGE, text("x"), IMAGE)),
        ([{"role": "assistant", "content": "hi"}, {"role": "user", "content": "q"}],
         [{"role": "assistant", "content": [text("hi")]}, *user(IMAGE, IMAGE, text("q"))]),
    ],
)  # fmt: skip
def test_placeholders_become_parts_and_are_put_first_if_there_are_none(write, folder, prompt, wanted):
    (task,) = read_tasks(write("tasks.jsonl", [row(prompt, images=["a/0.png", "a/1.png"])]))
    assert task.prompt == wanted


def film():
    out = io.BytesIO()
    FRAMES[0].save(out, "GIF", save_all=True, append_images=FRAMES[1:])
    return out.getvalue()


BAD = {
    "a missing file": (["a/9.png"], "image 1: the file .*/a/9.png cannot be read: No such file.* Replace it"),
    "its own folder": (["./"], "cannot be read: .* Replace it"),
    "a folder": (["a/0.png", "a"], "image 2: the file .*/a cannot be read: .* Replace it"),
    "a pipe": (["pipe"], "cannot be read: it is no regular file"),
    "an empty file": (["empty.png"], "image 1: it is empty. Replace it, or take the row out."),
    "no image": (["text.png"], "no image of a known kind"),
    "a cut png": ([as_url(encoded(size=(64, 64))[:-40])], "image 1: its end is missing"),
    "a cut jpeg": ([as_url(encoded(kind="JPEG", size=(64, 64))[:-40], "image/jpeg")], "its end is missing"),
    "a bomb": ([as_url(png(60_000, 60_000))], "pixels"),
    "a film": ([as_url(film(), "image/gif")], "several frames"),
    "a path that leaves": (["a/../../x.png"], r"leads out of the folder.* Put it into that folder, or give"),
    "a type of data": ([as_url(b"%PDF", "application/pdf")], "no such type. Write data:TYPE;base64,"),
    "text in a data URL": (["data:image/png,xyz"], "has no such type"),
    "bad base64": (["data:image/png;base64,@@@"], "no valid base64"),
    "the web": (["https://x.org/y.png"], "is on the web.* Download it beside the task file"),
    "no file in a store": (["file:///nowhere/x.png"], "there is no file file:///nowhere/x.png. Check"),
    "an unknown scheme": (["gopher://x/y.png"], "no file system is known by the name gopher"),
    "no list": ("a/0.png", "column `images`: it is no list .* Write a list"),
    "an empty object": ([{"bytes": None, "path": None}], "image 1: it is no image .* Give bytes, a path"),
    "a number": ([3], "image 1: it is no image"),
    "too many": (["a/0.png"] * (MOST_IMAGES + 1), "65 images, and at most 64"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_named_by_file_row_column_and_number(write, folder, name):
    images, said = BAD[name]
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_text("<html>")
    os.mkfifo(folder / "pipe")
    path = write("tasks.jsonl", [row("fine"), row(images=images)])
    with pytest.raises(TaskFileError, match=said) as error:
        read_tasks(path)
    assert str(error.value).startswith(f"task file {path}, line 2: column `images`: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("<image> or <image>", r"images is 1, and that of <image> in the prompt is 2\. Write one <image>"),
        ([{"role": "system", "content": "s"}], "no message of the user"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "the content part"),
        ([{"role": "user", "content": [{"type": "image", "image": "a/1.png"}]}], "images into `images`"),
        ([{"role": "user", "content": [{"type": "video"}]}], "the content part"),
        ([{"role": "user", "content": 3}], "no text"),
    ],
)
def test_a_prompt_that_does_not_fit_its_images_is_refused(write, folder, prompt, said):
    with pytest.raises(TaskFileError, match=said):
        read_tasks(write("tasks.jsonl", [row(prompt, images=["a/0.png"])]))


@pytest.mark.parametrize("prompt", ["see <image>", [{"role": "user", "content": [IMAGE, text("q")]}]])
def test_a_placeholder_without_an_image_is_refused(write, prompt):
    with pytest.raises(
        TaskFileError, match=r"the number of images is 0, and that of <image> in the prompt is 1\. Write one"
    ):
        read_tasks(write("tasks.jsonl", [row(prompt)]))


def test_parts_of_text_alone_become_one_text(write):
    (task,) = read_tasks(write("tasks.jsonl", [row(user(text("see "), text("this")))]))
    assert task.prompt == [{"role": "user", "content": "see this"}]


@pytest.mark.parametrize("column", ["image", "videos", "video", "audios", "audio"])
def test_other_media_are_refused_by_name(write, column):
    with pytest.raises(TaskFileError, match=f"the column {column}: .*into the column `images`"):
        read_tasks(write("tasks.jsonl", [row(**{column: ["x"]})]))


def test_trainings_on_text_refuse_images_by_name(write):
    rows = [{"prompt": "q", "completion": "a", "images": ["x.png"]}]
    with pytest.raises(TaskFileError, match=r"the column images.*only text is trained here"):
        list(read_examples(write("rows.jsonl", rows), "sft")[1])


def test_images_that_change_during_a_job_are_refused_and_change_the_hash(write, folder):
    path = write("tasks.jsonl", [row(images=["a/0.png"]), row(images=["a/1.png"])])
    table = read_tasks(path)
    (folder / "a" / "0.png").write_bytes(encoded(5))
    with pytest.raises(TaskFileError, match=r"line 1.* have changed since the job began"):
        table.images(0)
    assert table.images(1)[0].data == encoded(1)
    assert read_tasks(path).dataset_hash != table.dataset_hash
    path.write_text("")
    with pytest.raises(TaskFileError, match=r"line 2: the file is shorter than when the job began"):
        table.images(1)


def test_an_image_that_is_gone_is_named_by_its_row(write, folder):
    table = read_tasks(write("tasks.jsonl", [row(images=["a/0.png"]), row(images=["a/1.png"])]))
    (folder / "a" / "1.png").unlink()
    with pytest.raises(TaskFileError, match=r"tasks.jsonl, line 2: column `images`: image 1: the file"):
        table.images(1)


def test_the_bytes_of_images_are_not_kept_in_memory(write, folder):
    big = Image.effect_noise((500, 500), 100)
    out = io.BytesIO()
    big.save(out, "PNG")
    table = read_tasks(write("tasks.jsonl", [row(images=[as_url(out.getvalue())])] * 3))
    assert len(repr(table._rows)) < 3000
    assert table.images(2)[0].data == out.getvalue()
