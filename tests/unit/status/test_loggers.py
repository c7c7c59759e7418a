"""What loggers are told: read back by each one's own library, it is what metrics.jsonl says."""

import io
import json
import logging
import struct
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from PIL import Image

from areal_async.base.log import get_logger, setup_logging
from areal_async.base.mistakes import ConfigError
from areal_async.base.secrecy import is_secret, shown
from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.data.images import preview_of
from areal_async.service.record import RunLog, read_run_log
from areal_async.service.samples import file_name, lines_of, write_samples
from areal_async.show import loggers
from areal_async.show.loggers import figures_of, watched_by_loggers
from areal_async.show.loggers.tables import COLUMNS, markdown, row
from areal_async.show.page.report import differences
from tests.waiting import wait_for


def png_of(width, height, color):
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


SAMPLE = {
    "policy": "policy", "group": "g", "episode": "g.0", "task": "t", "ground_truth": 5, "reward": 1.0,
    "rewards": {"right": 1.0}, "finish": "stop", "version": 2,
    "segments": [
        {"author": "prompt", "text": "2+3="},
        {"author": "assistant", "text": "calc", "tokens": ["calc"]},
        {"author": "tool", "text": "5"},
        {"author": "assistant", "text": "It is 5."},
    ],
}  # fmt: skip


RED, BLUE = (preview_of(png_of(*each)) for each in ((256, 64, "red"), (8, 8, "blue")))
SEEN = SAMPLE | {"episode": "g.2", "images": {"a": RED, "b": BLUE}}
"""An episode with two images, and what is shown of them: both side by side."""


def assert_shows_both(file):
    with Image.open(file) as shown:
        image = shown.convert("RGB")
    assert image.size == (128 + 8, 32)
    places = ((64, 16), (132, 4), (132, 24))
    assert [tuple(round(value, -2) for value in image.getpixel(place)) for place in places] == [
        (300, 0, 0), (0, 0, 300), (300, 300, 300),
    ]  # fmt: skip


def a_run(folder, steps, first=0):
    """Records as a trainer and an evaluator write them."""
    with RunLog(folder / "metrics.jsonl") as run_log:
        run_log.write("resume" if first else "start")
        for step in range(first, steps):
            run_log.write(
                "step", policy="policy", step=step, version=step + 1, reward_mean=0.1 * step,
                loss=-0.5 / (step + 1), grad_norm=1.5, lr=1e-3, entropy=2.0 - 0.1 * step,
                kl=0.01 * step, clip_ratio=0.02,
                response_length_mean=12.5, response_length_max=20, prompt_length_mean=7.0, tokens=100,
                tokens_per_s=50.0 + step, staleness_mean=0.5, staleness_max=1, step_s=2.0, wait_s=0.5,
                mfu=None, rewards={"right": 0.1 * step}, phases={"update": 1.0}, correction={"ess": 0.9},
            )  # fmt: skip
            if step % 3 == 2:
                run_log.write(
                    "evaluation", policy="policy", version=step + 1, accuracy=0.2 + 0.1 * step,
                    best=[0.5, None, None], maj=[None, None, None], by_source={"gsm8k": 0.3},
                )  # fmt: skip
        run_log.write("load", steps=steps)
        write_samples(folder, file_name("step", first), lines_of([SAMPLE, SAMPLE | {"episode": "g.1"}]))
        write_samples(folder, file_name("evaluation", first + 3), lines_of([SAMPLE, SEEN]))
        run_log.write("end", ending="finished")


def expected(folder):
    """By name the value at each number of steps."""
    found = {}
    for record in read_run_log(folder / "metrics.jsonl"):
        steps, values = figures_of(record)
        for name, value in values.items():
            found.setdefault(name, {})[steps] = pytest.approx(value)
    return found


def watch(folder, *named):
    """A life of the run as far as its loggers see it."""
    settings = {"observe": {"loggers": named}, "job": "sums", "model": "m", "tasks": {"train": "t"}}
    with watched_by_loggers(JobConfig.model_validate(settings), folder) as threads:
        pass
    assert [thread._kept.lost for thread in threads] == [0] * len(named)
    return threads


def live_twice(folder, *named):
    a_run(folder, 4)
    watch(folder, *named)
    a_run(folder, 7, first=2)  # steps 2 and 3 are done again
    watch(folder, *named)


def test_figures_have_the_names_that_their_users_know(tmp_path):
    a_run(tmp_path, 3)
    found = expected(tmp_path)
    names = (
        "reward kl entropy response_length clip_ratio grad_norm lr throughput loss rewards/right time/update"
    )
    assert {*names.split(), "ess", "held_out/gsm8k/accuracy"} <= found.keys()
    assert {"mfu", "held_out/maj"}.isdisjoint(found)
    assert found["reward"] == {1: 0.0, 2: pytest.approx(0.1), 3: pytest.approx(0.2)}
    assert found["held_out/accuracy"] == {3: pytest.approx(0.4)}
    held_out = figures_of({"kind": "evaluation", "version": 4, "accuracy": 0.5, "rewards": {"exact": 0.25}})
    assert held_out == (4, {"held_out/accuracy": 0.5, "held_out/rewards/exact": 0.25})
    record = {"kind": "sft", "step": 4, "loss": 1.0, "held_out_loss": 2.0, "accuracy": None}
    assert figures_of(record, "coder/") == (4, {"coder/loss": 1.0, "coder/held_out/loss": 2.0})
    assert figures_of({"kind": "restart", "service": "x"})[1] == {}
    shown = dict(zip(COLUMNS, row(SAMPLE), strict=True))
    assert (shown["prompt"], shown["response"]) == ("2+3=", "calc\n[tool]\n5It is 5.")
    assert (shown["ground_truth"], shown["rewards"]) == ("5", '{"right": 1.0}')


def test_tensorboard_reads_what_the_records_say_and_a_resume_goes_on(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    live_twice(tmp_path, "tensorboard")
    events = EventAccumulator(
        str(tmp_path / "loggers" / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}
    )
    events.Reload()
    want = expected(tmp_path)
    assert {*events.Tags()["scalars"]} == {*want}
    for name, values in want.items():
        told = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in told] == sorted({*values})  # each once
        assert dict(told) == values
    (text, later) = events.Tensors("samples/step")
    assert (text.step, later.step) == (1, 3)
    assert text.tensor_proto.string_val[0].decode() == markdown(SAMPLE)
    assert "samples/step/images" not in events.Tags()["tensors"]
    (seen, _) = events.Tensors("samples/evaluation/images")
    width, height, file = seen.tensor_proto.string_val
    assert (seen.step, width, height) == (3, b"136", b"32")
    assert_shows_both(io.BytesIO(file))
    plugin = events.SummaryMetadata("samples/evaluation/images").plugin_data.plugin_name
    assert plugin == "images"
    assert "    calc\n    [tool]\n    5It is 5." in markdown(SAMPLE)


def test_mlflow_reads_what_the_records_say_and_a_resume_goes_on(tmp_path):
    mlflow = pytest.importorskip("mlflow")

    live_twice(tmp_path, "mlflow")
    own = tmp_path / "loggers" / "mlflow"
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{own / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "areal-async"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("sums", "FINISHED")
    assert run.data.params["model"] == "m"
    want = expected(tmp_path)
    assert {*run.data.metrics} == {*want}
    for name, values in want.items():
        history = client.get_metric_history(run.info.run_id, name)
        assert len(history) == len(values)
        assert {metric.step: metric.value for metric in history} == values
    tables = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert [table["path"] for table in tables] == [
        "samples/step-00000001.json", "samples/evaluation-00000003.json",
        "samples/step-00000003.json", "samples/evaluation-00000005.json",
    ]  # fmt: skip
    path = client.download_artifacts(run.info.run_id, "samples/step-00000001.json", str(tmp_path))
    table = json.loads(Path(path).read_text())
    assert table["columns"] == [*COLUMNS]
    assert table["data"][0] == row(SAMPLE)
    path = client.download_artifacts(run.info.run_id, "samples/evaluation-00000003.json", str(tmp_path))
    table = json.loads(Path(path).read_text())
    assert table["columns"] == [*COLUMNS, "images"]
    assert table["data"][0] == [*row(SAMPLE), None]
    shown = table["data"][1][-1]
    assert shown["type"] == "image"
    for name in ("filepath", "compressed_filepath"):
        assert_shows_both(client.download_artifacts(run.info.run_id, shown[name], str(tmp_path)))


def entries_of(data, block=32768):
    """The entries of an offline file of wandb: LevelDB's log format behind 7 bytes of its own."""
    assert data[:4] == b":W&B"
    at, held = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block  # padding
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        held += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield held
            held = b""


def test_wandb_offline_reads_what_the_records_say(tmp_path, monkeypatch):
    """Two loggers of one process: who closes first does not end the other."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    live_twice(tmp_path, *({"name": "wandb", "args": {"project": name}} for name in ("sums", "twice")))
    found, pictures, tables = defaultdict(list), [], []
    for path in sorted((tmp_path / "loggers" / "wandb").glob("offline-run-*/*.wandb")):
        for data in entries_of(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for entry in record.artifact.manifest.contents:
                (pictures if entry.path.endswith(".png") else tables).append(Path(entry.local_path))
            if record.HasField("run"):
                run = (record.run.run_id, record.run.project, record.run.display_name)
            if record.HasField("history"):
                items = record.history.item
                names = [item.key or "/".join(item.nested_key) for item in items]
                values = [json.loads(item.value_json) for item in items]
                found[run].append(dict(zip(names, values, strict=True)))
    assert sorted(run[1:] for run in found) == [("sums", "sums"), ("twice", "sums")]
    for said in found.values():
        for name, values in expected(tmp_path).items():
            told = [(row["steps"], row[name]) for row in said if name in row]
            assert len(told) == len(values)
            assert dict(told) == values
        sampled = [row["steps"] for row in said if any(name.startswith("samples/") for name in row)]
        assert sampled == [1, 3, 3, 5]
    table = next(tmp_path.glob("loggers/wandb/offline-run-*/files/media/table/samples/step*.table.json"))
    assert json.loads(table.read_text())["data"][0] == row(SAMPLE)
    # The pictures are files of the table's artifact.
    assert len(pictures) == 4  # of two evaluations, in two runs
    for path in pictures:
        assert_shows_both(path)
    seen = [table for path in tables if (table := json.loads(path.read_text()))["columns"] != [*COLUMNS]]
    assert [table["columns"] for table in seen] == [[*COLUMNS, "images"]] * 4
    assert [row[-1] and row[-1]["_type"] for row in seen[0]["data"]] == [None, "image-file"]


class Told:
    """A logger that keeps what it is told; it refuses figures of some steps, or hangs."""

    def __init__(self, run, refuses=(), hangs=None):
        self.run, self.refuses, self.hangs, self.calls = run, refuses, hangs, []

    def figures(self, steps, values):
        if self.hangs is not None:
            self.hangs.wait()
        if steps in self.refuses:
            raise ValueError("not this one")
        self.calls.append(("figures", steps, values["loss"]))

    def samples(self, steps, kind, samples):
        self.calls.append((kind, steps, len(samples)))

    def flush(self):
        self.calls.append("flush")

    def close(self, ending):
        self.calls.append(ending)


def test_a_logger_that_raises_or_hangs_costs_nothing_but_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "LOOK_S", 0.02)
    monkeypatch.setattr(loggers, "RETRY_S", 0.05)
    monkeypatch.setattr(loggers, "CLOSE_S", 0.5)
    release, made, opens = threading.Event(), {}, []

    def found(name):
        def make(run, **args):
            opens.append(name)
            if name == "absent" or (opens.count("late") == 1 and name == "late"):
                raise ConnectionError("no server")
            made[name] = Told(
                run, refuses=(2,) if name == "refusing" else (), hangs=release if name == "hanging" else None
            )
            return made[name]

        return make

    monkeypatch.setattr(loggers.LOGGERS, "find", found)
    names = ("refusing", "hanging", "absent", "late")
    section = SimpleNamespace(loggers=[SimpleNamespace(name=name, args={}) for name in names])
    job = SimpleNamespace(
        job="j", policies={}, observe=section, model_dump=lambda mode: {"api_key": "x", "a": 1}
    )
    with RunLog(tmp_path / "metrics.jsonl") as run_log, watched_by_loggers(job, tmp_path) as threads:
        for step in range(3):
            run_log.write("step", step=step, loss=float(step))
        wait_for(lambda: "late" in made and len(made["late"].calls) >= 4)
        run_log.write("end", ending="interrupted")
    # The hanging one kept nobody waiting for longer than it may; the absent one was tried again and again.
    assert [thread.name for thread in threads if not thread.wait(0.0)] == ["hanging"]
    release.set()
    assert opens.count("absent") >= 2
    assert made["late"].calls[-1] == "interrupted"
    assert [call for call in made["late"].calls if call[0] == "figures"] == [
        ("figures", 1, 0.0), ("figures", 2, 1.0), ("figures", 3, 2.0),
    ]  # fmt: skip
    assert [call[1] for call in made["refusing"].calls if call[0] == "figures"] == [1, 3]
    assert msgspec.json.decode((tmp_path / "loggers" / "refusing.json").read_bytes())["lost"] == 1
    assert made["refusing"].run.config == {"api_key": "…", "a": 1}


def test_what_a_logger_lacks_is_found_when_the_job_file_is_read(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("class Mine:\n    def __init__(self, run, *, level=1): ...\n")
    (tmp_path / "m").mkdir()
    text = "job: j\nmodel: m\ntasks: {train: t.jsonl}\nobserve:\n  loggers: %s\n"

    def mistakes_of(given):
        (tmp_path / "job.yaml").write_text(text % given)
        with pytest.raises(ConfigError) as refused:
            load_job(tmp_path / "job.yaml")
        return str(refused.value)

    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    said = mistakes_of("[tensorboard, {name: wandb, args: {projekt: x}}, tensorbord, ./mine.py:Yours]")
    assert "observe.loggers.0.name" in said
    assert "pip install 'areal-async[tensorboard]'" in said
    assert "wandb has no argument 'projekt'" in said
    assert "there is no logger 'tensorbord'" in said
    assert "mine.py defines no 'Yours'" in said


def test_the_logger_that_the_page_shows_is_one(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "watching.md").read_text()
    (tmp_path / "lines.py").write_text(page.split("```python\n")[1].split("```")[0])
    a_run(tmp_path, 3)
    watch(tmp_path, {"name": f"{tmp_path / 'lines.py'}:Lines", "args": {"name": "told.jsonl"}})
    lines = [json.loads(line) for line in (tmp_path / "loggers" / "told.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in lines if "lr" in line] == [0.0, pytest.approx(0.1), pytest.approx(0.2)]
    assert [line["episode"] for line in lines if "episode" in line] == ["g.0", "g.1", "g.0", "g.2"]


NAMES = [
    "auth",
    "credentials",
    "dsn",
    "cookie",
    "pat",
    "bearer",
    "x",
    "whatever",
    "apiKey",
    "user",
    "HF_TOKEN",
]
PLACES = [
    "reward.args.{name}",
    "reward.args.deep.{name}",
    "rollout.workflow_args.{name}",
    "rollout.engine_args.{name}",
    "trainer.backend_args.{name}",
    "trainer.objective.loss_args.{name}",
    "weights.channel_args.{name}",
    "rollout.server.arguments.{name}",
]


@pytest.mark.parametrize("name", NAMES)
def test_text_that_may_be_a_secret_leaves_the_job_by_no_way_out(job, tmp_path, name):
    """Whatever it is called and wherever it stands: what loggers, report and controller give away."""
    secret = "hush-hush"
    content = job.model_dump(mode="json")
    for place in PLACES:
        *sections, last = place.format(name=name).split(".")
        inner = content
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = secret
        inner["list"] = [secret, {"inner": secret}]
        inner["number"] = 7
    public = shown(content, JobConfig)
    assert secret not in str(public)
    assert public["reward"]["args"]["number"] == 7
    assert public["reward"]["args"]["list"] == ["…", {"inner": "…"}]
    assert public["job"] == content["job"]
    assert public["rollout"]["engine"] == content["rollout"]["engine"]
    assert secret not in str(differences([content, job.model_dump(mode="json")]))
    several = {"policies": {"coder": {"rollout": {"workflow_args": {name: secret}}, "model": "m"}}}
    assert shown(several, JobConfig)["policies"] == {
        "coder": {"rollout": {"workflow_args": {name: "…"}}, "model": "m"}
    }


@pytest.mark.parametrize(
    ("name", "text", "is_one"),
    [
        ("by", "-----BEGIN EC PRIVATE KEY-----", True),
        ("by", "Bearer abcdefgh12345", True),
        ("by", "eyJhbGciOiJIUzI1NiJ9.e30.x", True),
        ("by", "a8f5f167f44f4964e6c998dee827110c", True),
        ("db_dsn", "x", True),
        ("sessionId", "x", True),
        ("userPass", "x", True),
        ("path", "/models/qwen2.5-0.5b-instruct-with-a-long-name/snapshot", False),
        ("author", "me", True),
        ("max_tokens", "512", False),
        ("keyword", "x", False),
        ("passes", "x", False),
        ("model", "Qwen/Qwen2.5-0.5B-Instruct", False),
    ],
)
def test_a_secret_is_known_by_its_name_or_by_its_form(name, text, is_one):
    assert is_secret(name, text) is is_one
    assert not is_secret(name, 12345678901234567890)


def test_a_log_line_holds_no_login_and_no_secret_field():
    stream = io.StringIO()
    before = logging.getLogger().handlers[:]
    try:
        setup_logging("j", "p", stream=stream)
        said = ValueError("cannot reach redis://front:hush@h:1/0")
        get_logger("t").warning("told https://me:hush@host/x", url="https://:hush@h", cookie="hush", tokens=7)
        get_logger("t").warning("failed", error=str(said))
        get_logger("t").warning("no redis://:hu@hush@h/0?db=7&password=hush", at="s3://b/x?sig=hush&n=1")
    finally:
        logging.getLogger().handlers[:] = before
    assert "hush" not in stream.getvalue()
    assert '"tokens":7' in stream.getvalue()
    assert "redis://…@h/0?db=7&password=…" in stream.getvalue()
