"""The loop around the steps: publications, records, waiting, stopping, and what ends it."""

import io
import json
import threading
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from prometheus_client import REGISTRY
from transformers import AutoModelForCausalLM

from areal_async.base.errors import FaultError, SnapshotError
from areal_async.base.log import setup_logging
from areal_async.base.metrics import busy
from areal_async.base.versions import VersionTag
from areal_async.config.job import JobConfig
from areal_async.data.images import digest_of, preview_of
from areal_async.rpc.board import board
from areal_async.rpc.messages import BatchEpisode, Commit, OpenTrainer, Waiting
from areal_async.rpc.secret import RunSecret
from areal_async.service.record import RunLog, read_run_log
from areal_async.service.samples import read_samples, sample_files
from areal_async.trajectory import unpack
from areal_async.weights.channels import PublishingEnd
from areal_async.weights.snapshot import open_snapshot
from tests.scoring import episode_blob
from tests.unit.trainer import rank_process
from tests.waiting import LIMIT_S, wait_for
from trainer_service.checkpoint import CheckpointReader
from trainer_service.data.loader import FetchedBytes
from trainer_service.data.recording import read_step, write_step
from trainer_service.durable_files import companion_files
from trainer_service.errors import BatchError, DiskFull, StalenessViolation
from trainer_service.loop.samples import StepSamples
from trainer_service.publishing.publisher import Publisher
from trainer_service.ranks import join_ranks
from trainer_service.saved_states import States, left_in_memory


@pytest.fixture
def batches(tmp_path, make_batch):
    for step in range(4):
        batch, blobs = make_batch(step, max_staleness=2)
        write_step(tmp_path / "batches", batch, blobs)
    return tmp_path / "batches"


class Recording(Publisher):
    """A publisher that also writes its publications into the buffer's list of calls."""

    calls: list

    def begin(self, tag, pieces, *, evaluate=False, final=False):
        self.calls.append(("publish", tag.version, evaluate, final))
        return super().begin(tag, pieces, evaluate=evaluate, final=final)

    def wait_evaluated(self, timeout_s):
        self.calls.append(("wait_evaluated", timeout_s > 0))
        return True


@contextmanager
def publishing(folder, buffer, *, kind=Recording, **options):
    made = kind(folder / "shm", f"ipc://{folder}/w", job="job", access=RunSecret(bytes(32)), **options)
    made.calls = buffer.calls
    made.start()
    with closing(made):
        yield made


def _trainer(model, out, buffer, *, changes=None, **options):
    job = rank_process.job_of(model, out, minibatches=1, micro_batch_tokens=8192)
    if changes:
        job = JobConfig.model_validate({**job.model_dump(mode="json"), **changes})
    return rank_process.trainer_of(job, out, buffer, files=companion_files(model, "float32"), **options)


def test_each_version_is_published_before_its_step_is_committed(tmp_path, model_dir, batches):
    """A whole run: versions 0, 2 and the last are for the evaluator, and the last is marked so."""
    buffer = rank_process.RecordedBuffer(batches)
    ready = []
    with publishing(tmp_path, buffer) as publisher:
        tasks = {"train": "a.jsonl", "evaluation": "b.jsonl"}
        changes = {"tasks": tasks, "evaluation": {"every_steps": 2}, "checkpoint": {"every_steps": 3}}
        trainer = _trainer(model_dir, tmp_path, buffer, publisher=publisher, changes=changes)
        assert trainer.run(name="trainer", ready=lambda: ready.append(list(buffer.calls)))
        last = open_snapshot(tmp_path / "shm" / "policy-e1-v4")
    batches_asked = [call for call in buffer.calls if call[0] in ("next", "fetch")]
    assert batches_asked == [call for step in range(4) for call in (("next", step), ("fetch", 16))]
    assert [call for call in buffer.calls if call not in batches_asked and call[0] != "checkpointed"] == [
        ("open", 0, b""),
        ("publish", 0, True, False),
        *[("publish", 1, False, False), ("commit", 0)],
        *[("publish", 2, True, False), ("commit", 1)],
        *[("publish", 3, False, False), ("commit", 2), ("export", 3)],
        *[("publish", 4, True, True), ("commit", 3), ("export", 4)],
        ("wait_evaluated", True),
    ]
    at = buffer.calls.index
    assert at(("export", 3)) < at(("checkpointed", 3)) < at(("checkpointed", 4))
    assert at(("commit", 2)) < at(("export", 3)) < at(("commit", 3)), "the ledger is of that very commit"
    assert ready == [buffer.calls[:2]]
    assert last.tag == VersionTag("policy", 1, 4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, last.tensors[name])


class Held(rank_process.RecordedBuffer):
    """The batch of step 1 has been asked for once `asked` is set."""

    def __init__(self, root):
        super().__init__(root)
        self.asked = threading.Event()

    def next_batch(self, epoch, step):
        if step == 1:
            self.asked.set()
        return super().next_batch(epoch, step)


class Slow(Recording):
    """Announces version 1 when the batch of step 1 is asked for, or not at all."""

    def begin(self, tag, pieces, *, evaluate=False, final=False):
        publication = super().begin(tag, pieces, evaluate=evaluate, final=final)
        if tag.version != 1:
            return publication
        return SimpleNamespace(result=lambda: self.after(publication))

    def after(self, publication):
        assert self.buffer.asked.wait(LIMIT_S), "the next batch waits for the publication"
        return publication.result()


class Failing(Slow):
    def after(self, publication):
        raise SnapshotError("no room in shared memory")


def test_the_next_step_begins_while_the_version_is_published(tmp_path, model_dir, batches):
    buffer = Held(batches)
    with publishing(tmp_path, buffer, kind=Slow) as publisher:
        publisher.buffer = buffer
        assert _trainer(model_dir, tmp_path, buffer, publisher=publisher).run(name="t", ready=lambda: None)
    at = buffer.calls.index
    assert at(("next", 1)) < at(("commit", 0)) < at(("publish", 2, False, False))
    first = read_run_log(tmp_path / "metrics.jsonl")[0]
    assert first["publication_s"] >= 0
    assert {"publish_s", "weights_hash"} <= first.keys()


def test_a_trainer_that_waits_for_a_commit_says_so_and_is_not_busy(tmp_path, model_dir, batches):
    found = []

    def told():
        return board.status("trainer", serves=True).waiting_for

    class Withheld(rank_process.RecordedBuffer):
        def call(self, request, *, attachments=()):
            if isinstance(request, Commit) and request.step == 1:
                wait_for(lambda: "commit" in told(), "a word of the trainer")
                found.append((told(), busy.seconds("publish"), busy.seconds("publish")))
            return super().call(request, attachments=attachments)

    assert _trainer(model_dir, tmp_path, Withheld(batches)).run(name="t", ready=lambda: None)
    ((waits, before_s, after_s),) = found
    assert waits == {"commit": "version 2 to be published and its step to be committed"}
    assert before_s == after_s, "seconds of what runs count up at each look"
    assert told() == {}


def test_a_publication_that_fails_ends_a_trainer_that_waits_for_its_batch(tmp_path, model_dir, batches):
    class Starving(Held):
        def next_batch(self, epoch, step):
            return super().next_batch(epoch, step) if step == 0 else Waiting("scored groups", "none")

    buffer = Starving(batches)
    with publishing(tmp_path, buffer, kind=Failing) as publisher:
        trainer = _trainer(model_dir, tmp_path, buffer, publisher=publisher)
        with pytest.raises(SnapshotError, match="no room in shared memory"):
            trainer.run(name="trainer", ready=lambda: None)
    assert ("commit", 0) not in buffer.calls, "what is committed is published"


class Recorder(PublishingEnd):
    """A channel's end that remembers the order of what it is told, and the weights."""

    takes_tensors = True

    def __init__(self):
        self.calls, self.weights = [], {}

    def offer(self, tag, tensors):
        self.calls.append(f"offer {tag.label}")
        self.weights[tag.version] = {name: tensor.clone() for name, tensor in tensors.items()}

    def add(self, directory, manifest_hash):
        self.calls.append(f"add {directory.name}")


def test_tensors_can_be_had_before_their_version_is_announced(tmp_path, model_dir, batches):
    buffer = rank_process.RecordedBuffer(batches)
    channel = Recorder()
    with publishing(tmp_path, buffer, keep=9, channel=channel) as publisher:
        changes = {"weights": {"channel": "nccl"}}
        trainer = _trainer(model_dir, tmp_path, buffer, publisher=publisher, changes=changes)
        assert trainer.run(name="trainer", ready=lambda: None)
        assert channel.calls == [
            f"{what} policy-e1-v{version}" for version in range(5) for what in ("offer", "add")
        ]
        for version, offered in channel.weights.items():
            published = open_snapshot(tmp_path / "shm" / f"policy-e1-v{version}").tensors
            assert offered.keys() == published.keys()
            assert all(torch.equal(tensor, published[name]) for name, tensor in offered.items())


def test_a_record_of_every_step(tmp_path, model_dir, batches):
    buffer = rank_process.RecordedBuffer(batches)
    assert _trainer(model_dir, tmp_path, buffer).run(name="trainer", ready=lambda: None)
    *records, last = read_run_log(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert (last["kind"], last["policy"], last["epoch"]) == ("model", "policy", records[-1]["epoch"])
    third = records[2]
    assert (third["kind"], third["policy"], third["version"], third["episodes"]) == ("step", "policy", 3, 16)
    assert REGISTRY.get_sample_value("areal_trainer_step", {"policy": "policy"}) == 4
    episodes = [e for group in read_step(batches, 2).batch.groups for e in group.episodes]
    assert third["tokens"] == sum(e.n_sampled for e in episodes)
    assert third["reward_mean"] == pytest.approx(sum(e.reward for e in episodes) / 16)
    assert third["staleness_max"] == max(2 - e.min_version for e in episodes)
    assert {"loss", "grad_norm", "share_stale", "share_multi_version", "staleness_mean"} <= third.keys()
    assert third["step_s"] >= third["wait_s"] + third["busy_s"] > 0
    correction = {"w_mean", "w_max", "w_min", "ess", "chi2", "kl_prox_beh", "by_staleness"}
    assert correction <= third["correction"].keys()
    assert third["lr"] == 1e-3
    assert 0 < third["entropy"] == third["correction"]["entropy"]
    shares = third["correction"]
    assert third["clip_ratio"] == shares["clip_low_share"] + shares["clip_high_share"]
    assert third["response_length_max"] == max(e.n_sampled for e in episodes)
    assert third["response_length_mean"] == sum(e.n_sampled for e in episodes) / 16
    assert third["prompt_length_mean"] == sum(e.n_units - e.n_sampled for e in episodes) / 16
    assert third["tokens_per_s"] == pytest.approx(third["tokens"] / third["step_s"], rel=1e-3)
    assert not {"mfu", "kl"} & third.keys()
    phases = third["phases"]
    assert {*phases} == {"wait", "fetch", "prepare", "columns", "update", "commit", "publish"}
    assert sum(phases.values()) == pytest.approx(third["step_s"], abs=0.05)
    of_last = {"policy": "policy"}
    assert REGISTRY.get_sample_value("areal_trainer_entropy", of_last) == records[-1]["entropy"]
    by_staleness = records[-1]["correction"]["by_staleness"]
    for staleness in map(str, range(5)):
        labels = of_last | {"staleness": staleness, "figure": "units"}
        found = REGISTRY.get_sample_value("areal_trainer_by_staleness", labels)
        assert found == by_staleness.get(staleness, {}).get("units")
    update = of_last | {"phase": "update"}
    assert REGISTRY.get_sample_value("areal_trainer_phase_seconds_total", update) >= phases["update"]


def test_samples_of_a_step_show_the_images_of_their_episodes(tmp_path, model_dir, batches):
    job, run_log = rank_process.job_of(model_dir, tmp_path), RunLog(tmp_path / "metrics.jsonl")
    samples = StepSamples(job, run_log, rank_process.RecordedBuffer(batches), "")
    Image.new("RGB", (200, 100), "red").save(file := io.BytesIO(), "PNG")
    seen = file.getvalue()
    blobs = FetchedBytes({"t#0.0": memoryview(episode_blob(media=[seen]))})
    blobs.media = {digest_of(data): memoryview(data) for data in (seen, b"of another episode")}
    plan = SimpleNamespace(episodes=[BatchEpisode("t#0.0", 0, 3, 1, 0, 0, 0.5)], groups=[0])
    groups = [SimpleNamespace(task_id="t", data_source="sums")]
    batch = SimpleNamespace(step=0, policy="policy", lowest_version=0, groups=groups)
    samples.write(batch, plan, [0], blobs, {})
    samples.writing.wait()
    ((_, _, path),) = sample_files(tmp_path)
    (sample,) = read_samples(path)
    assert sample["images"] == {digest_of(seen): preview_of(seen)}


def test_every_few_steps_some_episodes_are_kept_as_text_with_their_advantages(
    tmp_path, model_dir, batches, monkeypatch
):
    changes = {"observe": {"samples_every_steps": 2, "samples": 6}}
    job = JobConfig.model_validate(rank_process.job_of(model_dir, tmp_path).model_dump(mode="json") | changes)
    buffer, run_log = rank_process.RecordedBuffer(batches), RunLog(tmp_path / "metrics.jsonl")
    samples = StepSamples(job, run_log, buffer, "")
    trainer = _trainer(model_dir, tmp_path, buffer, changes=changes, samples=samples)
    assert trainer.run(name="trainer", ready=lambda: None)
    files = sample_files(tmp_path)
    assert [entry[:2] for entry in files] == [("step", 0), ("step", 2)]
    recorded = read_step(batches, 2)
    entries = {e.episode_id: (e, group) for group in recorded.batch.groups for e in group.episodes}
    told = read_samples(files[1][2])
    assert len({sample["group"] for sample in told}) == len(recorded.batch.groups)  # then a second of some
    for sample in told:
        entry, group = entries[sample["episode"]]
        rewards = [e.reward for e in group.episodes]
        episode = unpack(recorded.blobs[sample["episode"]])
        assert (sample["reward"], sample["step"], sample["policy"]) == (entry.reward, 2, "policy")
        assert sample["ground_truth"] == f"truth of {group.task_id}"
        units = [segment for segment in sample["segments"] if segment["author"] == "assistant"]
        assert [value for segment in units for value in segment["version"]] == [
            version for version in episode.units.version.tolist() if version >= 0
        ]
        given = [value for segment in units for value in segment["advantage"]]
        logp = [value for segment in units for value in segment["logp"]]
        assert logp == pytest.approx([value for value in episode.units.logprob.tolist() if value], abs=1e-5)
        # of the group: above its mean an episode is pushed up, below it down
        above = entry.reward - sum(rewards) / len(rewards)
        assert all((value > 0) == (above > 0) and (value < 0) == (above < 0) for value in given)
        assert all("".join(segment["tokens"]).split() == segment["text"].split() for segment in units)

    def broken(*args):
        raise ValueError("no text for this")

    # What cannot be told costs the samples alone; a full disk ends the trainer as it does elsewhere.
    monkeypatch.setattr("trainer_service.loop.samples.sample_of", broken)
    plan = SimpleNamespace(episodes=[entry for entry, _ in entries.values()], groups=[0] * len(entries))
    samples.write(recorded.batch, plan, [0], FetchedBytes(recorded.blobs), {})
    samples.writing.wait()
    monkeypatch.undo()
    monkeypatch.setattr(run_log, "write_samples", lambda *args: (_ for _ in ()).throw(OSError(28, "full")))
    samples.write(recorded.batch, plan, [0], FetchedBytes(recorded.blobs), {})
    with pytest.raises(DiskFull, match="samples of a step"):
        samples.writing.wait()


def test_staleness_is_bounded_whatever_the_manifest_says(tmp_path, model_dir, make_batch):
    """A manifest that names stale units, and one that hides them: both end the trainer before a gradient."""
    batch, blobs = make_batch(5, max_staleness=4)
    write_step(tmp_path / "batches", batch, blobs)

    hidden = []
    for group in batch.groups:
        fresh = [replace(entry, min_version=max(3, entry.min_version)) for entry in group.episodes]
        hidden.append(replace(group, episodes=fresh))
    lie = replace(batch, groups=hidden)
    backend, learner = rank_process.learner_of(model_dir, tmp_path)
    with pytest.raises(StalenessViolation, match=r"outside 0 … 2"):
        learner.plan(batch, 5)
    with pytest.raises(BatchError, match=r"the bytes fetched hold"):
        learner.train(lie, learner.plan(lie, 5), {name: memoryview(blob) for name, blob in blobs.items()})
    assert backend.updates == {"policy": 0}


def test_a_unit_of_a_version_to_come_ends_the_trainer_before_a_gradient(tmp_path, model_dir, make_batch):
    """The manifest names it truly, and the plan looks at the oldest versions only."""
    batch, blobs = make_batch(6, max_staleness=2)
    groups = [
        replace(group, episodes=[e for e in group.episodes if e.min_version < 6]) for group in batch.groups
    ]
    early = replace(batch, step=5, groups=groups)
    assert any(e.max_version == 6 for group in groups for e in group.episodes)
    backend, learner = rank_process.learner_of(model_dir, tmp_path)
    with pytest.raises(StalenessViolation, match="which is not published yet"):
        learner.train(early, learner.plan(early, 5), {name: memoryview(blob) for name, blob in blobs.items()})
    assert backend.updates == {"policy": 0}


def test_a_wait_is_reported_with_its_edge_and_a_stop_ends_it(tmp_path, model_dir):
    stopping = threading.Event()

    class Starving(rank_process.RecordedBuffer):
        def next_batch(self, epoch, step):
            self.calls.append(("next", step))
            if len(self.calls) > 4:
                stopping.set()
            return Waiting("reward -> buffer", "0 of 4 workers alive")

    written = io.StringIO()
    setup_logging("job", "trainer", "info", written)
    buffer = Starving(tmp_path)
    trainer = _trainer(model_dir, tmp_path, buffer, stopping=stopping)
    assert trainer.run(name="trainer", ready=lambda: None) is False
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    waits = [line for line in lines if line["event"] == "waiting for a batch"]
    told = [(line["edge"], line["detail"]) for line in waits]
    assert told == [("reward -> buffer", "0 of 4 workers alive")]
    assert not (tmp_path / "model").exists()


class LosingBuffer(rank_process.RecordedBuffer):
    """A ledger that has lost what the state in memory is of."""

    def exchange(self, request, *, attachments=()):
        if isinstance(request, OpenTrainer) and request.memory_epoch:
            self.calls.append(("refused", request.step, request.memory_epoch))
            raise FaultError("invalid", "a trainer at step 3 cannot join a ledger at step 1")
        return super().exchange(request, attachments=attachments)


@pytest.mark.parametrize("lost", [False, True])
def test_a_trainer_goes_on_from_memory_or_from_disk_and_ends_with_the_same_weights(
    tmp_path, model_dir, batches, lost, monkeypatch
):
    places = {1: "memory", 2: "disk", 3: "memory", 4: "disk"}
    monkeypatch.setattr(States, "due", lambda states, step, asked=False: places[step])

    def trained(out, buffer, shm=None, **options):
        job = rank_process.job_of(model_dir, out)
        trainer = rank_process.trainer_of(job, out, buffer, shm_dir=shm)
        assert trainer.run(name="trainer", ready=lambda: None, **options)
        return (out / "model" / "model.safetensors").read_bytes()

    shm = tmp_path / "shm"
    shm.mkdir()
    whole = trained(tmp_path / "whole", rank_process.RecordedBuffer(batches), shm)
    in_memory = left_in_memory(
        shm, CheckpointReader(job="job", policy="policy", ranks=join_ranks(0, 1)), above=None
    )
    assert in_memory.manifest.step == 3
    buffer = (LosingBuffer if lost else rank_process.RecordedBuffer)(batches)
    two = tmp_path / "whole" / "checkpoints" / "step-000002"
    restored = CheckpointReader(job="job", policy="policy").open(two)
    again = trained(tmp_path / "again", buffer, shm, restored=restored, left=in_memory)
    assert again == whole
    begins = [call for call in buffer.calls if call[0] in ("refused", "open")]
    if lost:
        assert begins == [("refused", 3, 1), ("open", 2, b"ledger of 2")]
    else:
        assert begins == [("open", 3, b"")]
