"""What a user imports, and a run as it looks from Python."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import areal_async
from areal_async import Job, Run, load_job
from areal_async.base.errors import ArealError, RunFailed, RunFolderError, RunInterrupted
from areal_async.base.mistakes import ConfigError
from areal_async.cli.main import app
from areal_async.cli.targets import is_run
from areal_async.config import registry
from areal_async.config.load import dump_job
from areal_async.launch.one_host import topology_here
from areal_async.launch.plan import services_of
from areal_async.rpc.control_messages import ServiceFigures, ServiceStatus
from areal_async.runner.start import start
from tests.unit.launch.launching import STAND_IN, changed


def test_the_public_names_are_these():
    names = """
        ArealError Job Mistake Run RunStatus Section Task VersionTag load_job run Context Reply SegmentKind
        TemplateRewrites ToolReply tool workflow Environment EnvironmentFailure Step level_seed
        load_environment Abstain Parts RewardInput Score TooCostly answer_of load_reward reward
        FaultOf InfrastructureFault blocks program_of within
        Failure LocalScorer
        Program RunLimits Sandbox Timeout Verdict BackendReward RewardLoadError ScoringBackend
        RankPlace TensorPiece TrainingBackend advantage correction loss DeadlinePassed Engine
        EngineError EngineLost EnginePart EngineStats GenerateRequest GenerateResult HttpEngine
        RequestError ServerAdapter engine_part Channel PublishingEnd ReceivingEnd SnapshotError
        SnapshotNotice Episode EpisodeBuilder pack read_samples read_step training_rows unpack make_tokenizer
        quickstart_job
        write_model
    """
    assert areal_async.__all__ == names.split()
    assert all(getattr(areal_async, name) is not None for name in areal_async.__all__)
    assert set(areal_async.__all__) <= set(dir(areal_async))
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        areal_async.rum  # noqa: B018


def test_a_job_takes_its_changes_as_a_text_a_list_or_a_mapping_and_says_how_it_is_changed(job_file):
    for changes in (
        "trainer.steps=3",
        ["trainer.steps=3"],
        {"trainer.steps": 3},
        {"trainer": {"steps": 3, "optimizer": {"lr": 1e-3}}},
    ):
        assert load_job(job_file, changes).trainer.steps == 3
    faster = load_job(job_file, ["trainer.optimizer.lr=1e-3", "trainer.optimizer.warmup_steps=7"])
    kept = load_job(faster, {"trainer": {"steps": 3, "optimizer": {"lr": 0.5}}}).trainer
    assert (kept.steps, kept.optimizer.lr, kept.optimizer.warmup_steps) == (3, 0.5, 7)
    job = load_job(str(job_file))
    assert load_job(job, {"rollout.sampling.stop": ["a=b"]}).rollout.sampling.stop == ("a=b",)
    assert load_job(load_job(job, {"reward.timeout_s": 3}), {"trainer.hang_s": None}).trainer.hang_s is None
    for wrong in ([3], 3, [["trainer.steps=3"]]):
        with pytest.raises(ConfigError, match=r"the overrides: .* Give 'trainer\.steps=3', a list"):
            load_job(job_file, wrong)
    with pytest.raises(ConfigError, match=r"trainer\.stps: .* Did you mean trainer\.steps"):
        load_job(job, {"trainer.stps": 3})
    with pytest.raises(AttributeError, match=r"steps cannot be set: .*load_job\(job"):
        job.trainer.steps = 3
    with pytest.raises(ConfigError, match=r"(?s)the job.*model: this field is missing"):
        areal_async.run({"job": "sums"})
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: there is no such file"):
        areal_async.run("nowhere.yaml")
    for nothing in (None, 3, [job_file]):
        with pytest.raises(ConfigError, match=r"is neither a path nor a mapping\. Give the path"):
            load_job(nothing)
    with pytest.raises(ConfigError, match="3 is neither a path nor a mapping"):
        areal_async.run(3)
    known = {"job": "sums", "model": job.model, "tasks": {"train": job.tasks.train}}
    assert Job(**known).job == "sums"
    for wrong, said in (
        ({"trainer": {"stps": 3}}, r"trainer\.stps: there is no such field. Did you mean trainer\.steps"),
        ({"seed": None}, r"seed: null is not a whole number"),
        ({"job": "Sums"}, r"job: 'Sums' does not have the right form"),
        ({"reward": [1]}, r"reward: \[1\] is not a section"),
    ):
        with pytest.raises(ConfigError, match=said):
            Job(**known | wrong)
    with pytest.raises(ConfigError, match=r"(?s)model: this field is missing. Add it"):
        Job(job="sums")


@pytest.mark.parametrize("name", ["", "none.jsonl", "other.txt", 3])
def test_what_holds_no_samples_or_steps_is_refused_with_what_does(tmp_path, name):
    (tmp_path / "other.txt").write_text("no JSON")
    place = str(tmp_path / name) if isinstance(name, str) else name
    with pytest.raises(RunFolderError, match="Name a file in the folder samples of a run"):
        areal_async.read_samples(place)
    if isinstance(place, str):
        with pytest.raises(ArealError, match="no step is recorded in"):
            areal_async.read_step(place, 1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda file: Job(job="x"), "the job has 2 mistakes:.*model: this field is missing. Add it"),
        (lambda file: Job(job="X y", model="m", tasks={"train": "t"}), "job: 'X y' does not have the right"),
        (lambda file: Job({"job": "x"}), "Write Job\\(job=…, model=…, tasks=…\\)"),
        (lambda file: Job.model_validate({"job": "x", "modle": "m"}), "modle: .* Did you mean model"),
        (lambda file: load_job({"job": "x"}), "the job has 2 mistakes:.*tasks: this field is missing"),
        (lambda file: load_job(3), "3 is neither a path nor a mapping. Give the path of a job file"),
        (lambda file: areal_async.run(None), "None is neither a path nor a mapping"),
        (lambda file: Run.open(3), "3 is no run: give the path of its folder"),
    ],
)
def test_what_python_gives_wrongly_is_an_error_of_ours_with_the_words_of_the_cli(job_file, call, says):
    with pytest.raises(areal_async.ArealError, match=f"(?s){says}"):
        call(job_file)


def test_a_job_is_loaded_from_its_fields_too(job_file):
    job = load_job(job_file)
    assert load_job(job.model_dump(mode="json"), "trainer.steps=3").trainer.steps == 3


KINDS = [kind for kind in vars(registry).values() if isinstance(kind, registry.Registry)]
GROUPS = "|".join(kind.group.removeprefix("areal_async.") for kind in KINDS)
INSIDE = re.compile(
    r"(?:from|import) (?:replay_buffer|\w+_service)\b.*"
    rf"|(?<!-m )\b(?:areal_async\.(?!(?:{GROUPS})\b)|replay_buffer\.|\w+_service\.)[a-z]\w*"
)
"""An import from inside, or the dotted path of what is there: no group of entry points and no command."""


def test_examples_and_pages_import_nothing_but_the_public_names():
    root = Path(areal_async.__file__).parents[1]
    pages = [*root.glob("docs/*.md"), root / "README.md", root / "examples" / "README.md"]
    pages.remove(root / "docs" / "api.md")  # it names every public name by its dotted path
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in (*root.glob("examples/**/*.py"), *root.glob("recipes/**/*.py"), *pages)
    }
    assert len(texts) > 40
    assert {path: found for path, text in texts.items() if (found := INSIDE.findall(text))} == {}
    lines = re.findall(r"from areal_async import (\w[\w, ]*)", " ".join(texts.values()))
    assert {name for line in lines for name in line.split(", ")} <= set(areal_async.__all__)


def test_to_import_the_package_and_to_write_a_reward_loads_no_torch():
    code = (
        "import sys, areal_async\n"
        "assert not [name for name in sys.modules if name.startswith('areal_async.')]\n"
        "from areal_async import Job, Run, RewardInput, reward, run\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_is_followed_from_python_to_its_summary(job, behave):
    behave({"trainer": "trains"})
    running = start(changed(job, "trainer", steps=5), modules=STAND_IN)
    assert [record["step"] for record in running.metrics()] == [0, 1, 2, 3, 4]
    summary = running.wait(timeout_s=60)
    assert (summary["steps"], summary["accuracy_end"]) == (5, 0.75)
    found = Run.open(running.folder)
    assert not found.alive
    assert found.summary() == found.wait() == summary
    assert (found.status().step, found.status().accuracy) == (5, 0.75)
    assert len(list(found.metrics(follow=False))) == 5


NODES = ("n1", "n2")


def told_status(*arguments):
    told = CliRunner().invoke(app, ["status", *map(str, arguments)])
    assert told.exit_code == 0, told.output
    return told.output


def test_status_shows_a_run_that_is_spread_over_a_cluster_by_its_folder(job, folders, monkeypatch):
    records = [{"kind": "step", "step": step, "version": step + 1, "reward_mean": 0.5} for step in range(3)]
    (folders.run_dir / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (folders.run_dir / "job.yaml").write_bytes(dump_job(job).encode())
    assert "waiting for its places" in told_status(folders.run_dir)
    places = services_of(job, STAND_IN)
    nodes = {"buffer": "n1", "trainer": "n2", "reward": "n1"}
    placed = [msgspec.structs.replace(place, node_id=nodes.get(place.name, "")) for place in places]
    there = {n: msgspec.structs.replace(folders.host, node_id=n, address=f"10.0.0.{n[1]}") for n in NODES}
    hosts = {"home": folders.host, **there}
    topology = topology_here(folders.run_id, folders.host, placed, job.model_dump(mode="json"), {})
    topology = msgspec.structs.replace(topology, home="home", hosts=hosts, services=placed)
    folders.topology.write_bytes(msgspec.json.encode(topology))
    figures = msgspec.to_builtins(Run.open(folders.run_dir)._from_records())
    said = ServiceStatus("supervisor", 1, "serving", {}, {}, ServiceFigures(run=figures))
    monkeypatch.setattr(Run, "ask", lambda *_, **__: said)
    page = told_status(folders.run_dir)
    assert "running" in page
    assert "3 of" in page
    lines = [line.split() for line in page.splitlines()]
    for name, address in (("buffer", "10.0.0.1"), ("trainer", "10.0.0.2"), ("reward", "10.0.0.1")):
        assert [name, address] in [line[:2] for line in lines]
    assert ["rollout-0", "not", "placed"] in [line[:3] for line in lines]
    answer = json.loads(told_status(folders.run_dir, "--json"))
    assert (answer["state"], answer["step"], answer["hosts"]["trainer"]) == ("running", 3, "10.0.0.2")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("runs/x", True), ("./x", True), ("job.yaml", True), ("s3://runs/x", True), ("x", False), ("7", False)],
)
def test_what_names_a_place_is_a_run_and_what_does_not_a_job_of_the_controller(
    tmp_path, monkeypatch, name, is_one
):
    monkeypatch.chdir(tmp_path)
    assert is_run(name) is is_one
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "run.lock").touch()
    assert is_run(name) is (is_one or name == "x")


def test_a_run_lives_beside_a_running_loop_and_outlives_the_thread_that_started_it(job, behave):
    behave({})
    runs = []

    async def in_a_notebook():
        runs.append(start(job, modules=STAND_IN))

    thread = threading.Thread(target=lambda: asyncio.run(in_a_notebook()))
    thread.start()
    thread.join()
    (running,) = runs
    while "serving" not in {service.phase for service in running.status().services}:
        assert running.alive
    status = Run.open(running.folder).status()
    assert {service.name for service in status.services} == {"buffer", "trainer", "reward", "rollout-0"}
    with pytest.raises(TimeoutError):
        running.wait(timeout_s=0)
    with pytest.raises(RunFolderError, match="already running"):
        start(job, modules=STAND_IN)
    Run.open(running.folder).stop()
    with pytest.raises(RunInterrupted, match="stopped on request; every process has ended"):
        running.wait(timeout_s=60)
    with pytest.raises(RunFolderError, match="has not finished"):
        running.summary()


def test_a_run_that_fails_says_why(job, behave):
    behave({"reward": "dies at start"})
    running = start(job, modules=STAND_IN)
    with pytest.raises(RunFailed, match=r"(?s)reward ended with status 1.*has no config.*logs/reward\.log"):
        running.wait(timeout_s=60)
    assert not (running.folder / "summary.json").exists()


def test_a_job_is_checked_before_anything_is_started(job, tmp_path):
    with pytest.raises(ConfigError, match="model"):
        areal_async.run(job)
    (tmp_path / "job.yaml").write_text(json.dumps({"job": "test", "steps": 3}))
    with pytest.raises(ConfigError, match="steps"):
        areal_async.run(tmp_path / "job.yaml")
    with pytest.raises(ConfigError, match="steps"):
        load_job(tmp_path / "job.yaml")


def test_a_workflow_is_a_coroutine_function():
    with pytest.raises(areal_async.ArealError, match="async def"):

        @areal_async.workflow
        def slow(ctx, task): ...
