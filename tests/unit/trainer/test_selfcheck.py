"""The self-check, at the start and after an update: an honest engine passes, what is wrong is named."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_async.config.engines import LOGPROB_BOUNDS
from areal_async.config.job import JobConfig
from areal_async.models.files import is_mixture
from areal_async.rpc.messages import Batch, BatchGroup
from areal_async.service.record import read_run_log
from areal_async.trajectory import Call, EpisodeBuilder, Sampling, pack
from rollout_service.engines.local import Local
from tests.unit.trainer import rank_process
from tests.unit.trainer.conftest import entry_of
from tests.unit.trainer.two_ranks import two_ranks
from trainer_service import metrics
from trainer_service.checkpoint import CheckpointReader
from trainer_service.checks.logprobs import ComparedUnits
from trainer_service.data.recording import write_step
from trainer_service.errors import SelfCheckError
from trainer_service.loop.learner import load_backend
from trainer_service.ranks import join_ranks

Lie = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(logits [n, V], ids [n], honest log-probs [n]) -> what the engine says."""


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def honest(logits, ids, logprobs):
    return logprobs


def episodes(
    model_dir,
    out,
    *,
    step=0,
    lie=honest,
    sampling=None,
    logprobs_of="sampled",
    versions=lambda step, n: np.full(n, step),
    weights=0.0,
    epoch=1,
    turns=2,
):
    """Record a batch that an engine with the weights of `model_dir` sampled, as it says it did."""
    how = sampling or Sampling(temperature=0.8, max_new_tokens=8)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(weights * torch.randn(parameter.shape, generator=noise))
    rng = np.random.default_rng(step)
    blobs, groups = {}, []
    for g in range(4):
        group_id, made = f"data0000:{g}:0#{step}", []
        for sample in range(4):
            builder = EpisodeBuilder("job", f"data0000:{g}:0", group_id, sample)
            path = rng.integers(2, 17, int(rng.integers(3, 7)))
            parent = builder.prompt(path)
            for _ in range(turns):
                ids, logprobs, rows = [], [], []
                n = int(rng.integers(2, 7))
                for _ in range(n):
                    with torch.no_grad():
                        logits = model(input_ids=torch.tensor([[*path, *ids]])).logits[0, -1].numpy()
                    rows.append(logits)
                    tempered = logits / (how.temperature or 1.0)
                    drawn = log_softmax(tempered)
                    ids.append(int(rng.choice(len(drawn), p=np.exp(drawn) / np.exp(drawn).sum())))
                    logprobs.append(drawn[ids[-1]])
                told = lie(np.array(rows), np.array(ids), np.array(logprobs))
                parent = builder.sampled(
                    np.array(ids),
                    told.astype(np.float32),
                    versions(step, n),
                    parent=parent,
                    call=Call(sampling=how, logprobs_of=logprobs_of),
                    epoch=epoch,
                )
                path = np.concatenate((path, ids))
            episode = builder.build()
            blobs[episode.episode_id] = pack(episode)
            made.append(entry_of(episode, float(sample % 2)))
        groups.append(BatchGroup(group_id, f"data0000:{g}:0", "test", made))
    batch = Batch(policy="policy", epoch=1, step=step, max_staleness=2, groups=groups)
    write_step(out / "batches", batch, blobs)
    return out / "batches"


def train(model, out, batches, *, steps=1, trained=0, restored=None, **changes):
    """Train the recorded steps; the self-check's records. Where it stops the job, `trained` updates were made
    before."""
    out.mkdir(exist_ok=True)
    job = rank_process.job_of(model, out, minibatches=1, micro_batch_tokens=48, steps=steps)
    job = JobConfig.model_validate(merged(job.model_dump(mode="json"), changes))
    backend = load_backend(job, join_ranks(0, 1))
    trainer = rank_process.trainer_of(job, out, rank_process.RecordedBuffer(batches), backend=backend)
    try:
        assert trainer.run(name="trainer", ready=lambda: None, restored=restored)
    except SelfCheckError:
        assert backend.updates == {"policy": trained}
        raise
    return records_of(out)


def records_of(out):
    return [r for r in read_run_log(out / "metrics.jsonl") if r["kind"] == "self_check"]


def merged(base, changes):
    return base | {k: merged(base[k], v) if isinstance(v, dict) else v for k, v in changes.items()}


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (Sampling(temperature=0.8), "sampled"),
        (Sampling(temperature=1.7), "temperature"),
        (Sampling(temperature=1.0), "raw"),
    ],
)
def test_an_honest_engine_passes_whatever_its_logprobs_are_of(tmp_path, model_dir, how, what):
    batches = episodes(model_dir, tmp_path, sampling=how, logprobs_of=what)
    (record,) = train(model_dir, tmp_path, batches)
    assert record["passed"]
    assert record["max"] < 2e-5
    assert record["bound"] == 1e-3
    assert record["n"] + sum(record["skipped"].values()) >= 16 * 2 * 2


def at_temperature(factor):
    def lie(logits, ids, logprobs):
        return log_softmax(logits / (0.8 * factor))[np.arange(len(ids)), ids]

    return lie


@pytest.mark.parametrize(
    ("lie", "weights"),
    [
        (at_temperature(1.25), 0.0),  # raw log-probs, said to be those of 0.8
        (lambda logits, ids, logprobs: np.roll(logprobs, 1), 0.0),
        (lambda logits, ids, logprobs: np.roll(logprobs, -1), 0.0),
        (lambda logits, ids, logprobs: logprobs - 1.0, 0.0),
        (honest, 0.03),
        (lambda logits, ids, logprobs: np.where(ids == 1, logprobs - 2.0, logprobs), 0.0),
    ],
    ids=["raw", "late", "early", "constant", "weights", "eos"],
)
def test_an_engine_that_is_wrong_stops_the_job_before_a_gradient_by_name(tmp_path, model_dir, lie, weights):
    batches = episodes(model_dir, tmp_path, lie=lie, weights=weights, turns=4)
    with pytest.raises(SelfCheckError) as caught:
        train(model_dir, tmp_path, batches)
    words = str(caught.value)
    assert "Possible causes: the engine" in words
    named = ("local engine (float32)", "position", "token id", "mean", "99.9%", "trainer.self_check.bound")
    assert all(part in words for part in named), words
    (record,) = records_of(tmp_path)
    assert not record["passed"]
    assert record["max"] > record["bound"]


def units(n, gaps, *, token=None, first_every=200):
    """`n` units of which the engine's log-probs are `gaps` above the trainer's."""
    place = np.arange(n)
    token = np.random.default_rng(1).integers(100, 20_000, n) if token is None else token
    trainer = np.full(n, -0.5)
    return ComparedUnits(place // first_every, place % first_every, token, trainer + gaps, trainer)


def of_rounding(n, kind):
    """Differences of which most are small and a few are not: as bf16 has them, and as router flips add."""
    rng = np.random.default_rng(0)
    gaps = rng.normal(0, 0.014, n)
    gaps[rng.choice(n, 30, replace=False)] += rng.choice([-3.0, 3.0], 30)
    if kind == "moe":
        gaps += rng.standard_t(3, n) * 0.06
    return gaps


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_million_units_in_bfloat16_pass_with_a_few_outliers(kind):
    n = 1_000_000
    gap = units(n, of_rounding(n, kind)).gap
    assert gap.within(LOGPROB_BOUNDS["bfloat16", kind])
    assert not gap.within(LOGPROB_BOUNDS["float32", kind])
    assert gap.within(LOGPROB_BOUNDS["bfloat16", "dense"]) == (kind == "dense")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda token, place: np.where(token == 7, -2.0, 0.0),
        lambda token, place: np.where(place % 200 == 0, -0.7, 0.0),
        lambda token, place: np.full(len(token), 0.25),
        lambda token, place: np.where(place % 3, 0.0, 0.9),
        lambda token, place: np.where(place % 400 == 5, np.where(place % 800 == 5, 9.0, -9.0), 0.0),
    ],
    ids=["one token of 20,000", "first of each answer", "constant", "a third", "one place of 400"],
)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_mistake_is_found_among_a_million_units_in_bfloat16(wrong, kind):
    n = 1_000_000
    token = np.random.default_rng(2).integers(0, 20_000, n)
    compared = units(n, of_rounding(n, kind) + wrong(token, np.arange(n)), token=token)
    assert not compared.gap.within(LOGPROB_BOUNDS["bfloat16", kind])


def test_a_log_prob_that_is_no_number_is_never_a_rare_outlier():
    gaps = np.zeros(1_000_000)
    for wrong in (np.nan, np.inf, -np.inf):
        gaps[5] = wrong
        assert not units(len(gaps), gaps).gap.within(LOGPROB_BOUNDS["bfloat16", "moe"])


def test_what_has_no_bounds_is_not_judged_but_told(tmp_path, model_dir, monkeypatch, caplog):
    """As an engine in a package of its own, or one whose precision nobody has measured."""
    monkeypatch.setattr(Local, "logprob_bounds", {})
    batches = episodes(model_dir, tmp_path, lie=lambda logits, ids, logprobs: logprobs - 1.0)
    (record,) = train(model_dir, tmp_path, batches)
    assert (record["passed"], record["bound"], record["allowed"]) == (False, 0.0, None)
    (told,) = [record for record in caplog.records if "no bounds are known" in record.message]
    assert "99.9% 1," in told.areal_fields["differences"]
    with pytest.raises(SelfCheckError):
        train(model_dir, tmp_path / "named", batches, trainer={"self_check": {"bound": 0.5}})


def test_a_quantised_server_is_not_judged_by_the_bounds_of_its_dtype(tmp_path, model_dir, monkeypatch):
    monkeypatch.setattr(Local, "served_dtype", lambda self, rollout: "fp8")
    batches = episodes(model_dir, tmp_path, lie=lambda logits, ids, logprobs: logprobs - 1.0)
    (record,) = train(model_dir, tmp_path, batches)
    assert (record["passed"], record["dtype"], record["allowed"]) == (False, "fp8", None)


def test_the_kind_of_a_model_is_read_from_its_config(tmp_path, model_dir):
    assert not is_mixture(model_dir)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        config = {
            "model_type": {"num_experts": "qwen3_moe", "num_local_experts": "mixtral"}.get(
                name, "deepseek_v3"
            )
        }
        (tmp_path / "config.json").write_text(json.dumps(config | {name: 8}))
        assert is_mixture(tmp_path)


def test_the_worst_unit_is_named(tmp_path, model_dir):
    count = 0

    def lie(logits, ids, logprobs):
        nonlocal count
        count += 1
        return logprobs - np.where(np.arange(len(ids)) == 1, 0.5 if count == 7 else 0.0, 0.0)

    with pytest.raises(SelfCheckError, match=r"episode data0000:1:0#0\.2, position \d+, token id"):
        train(model_dir, tmp_path, episodes(model_dir, tmp_path, lie=lie, turns=1))


def test_a_warning_and_a_wider_bound_let_the_job_go_on(tmp_path, model_dir):
    batches = episodes(model_dir, tmp_path, lie=lambda logits, ids, logprobs: logprobs - 0.02)
    warn = {"trainer": {"self_check": {"action": "warn"}}}
    (record,) = train(model_dir, tmp_path / "warn", batches, **warn)
    assert not record["passed"]
    (record,) = train(model_dir, tmp_path / "wide", batches, trainer={"self_check": {"bound": 0.5}})
    assert record["passed"]
    assert record["bound"] == 0.5
    assert record["max"] == pytest.approx(0.02, abs=1e-4)


def first_of_version_before(model, out, versions, **rollout):
    """The record of a run whose first batch is of the version before, and whose second is of `versions`."""
    episodes(model, out, step=0, versions=lambda step, n: np.zeros(n, int), epoch=7)
    episodes(model, out, step=1, versions=versions, turns=1)
    frozen = {"trainer": {"optimizer": {"lr": 1e-12}}, "rollout": rollout}
    (record,) = train(model, out, out / "batches", steps=2, **frozen)
    assert (record["step"], record["passed"]) == (1, True)
    return record


def test_it_waits_for_the_first_batch_with_units_of_the_starting_version(tmp_path, model_dir):
    """Of the mixed one only what version 1 sampled is compared, with the weights of version 1."""
    mixed = first_of_version_before(model_dir, tmp_path, lambda step, n: np.where(np.arange(n) < 2, 0, 1))
    assert mixed["skipped"] == {"another version": 32}


FROZEN = {"trainer": {"optimizer": {"lr": 1e-12}}}  # so that every version has the weights of the first


def test_a_version_that_came_by_an_update_is_compared_too_and_then_no_more(tmp_path, model_dir):
    for step in range(4):
        stale = step == 1  # the next is waited for
        episodes(model_dir, tmp_path, step=step, versions=lambda s, n, stale=stale: np.full(n, s - stale))
    records = train(model_dir, tmp_path, tmp_path / "batches", steps=4, **FROZEN)
    assert [(r["version"], r["step"], r["passed"]) for r in records] == [(0, 0, True), (2, 2, True)]
    series = {
        sample.labels["version"]: sample.value
        for family in metrics.SELF_CHECK.collect()
        for sample in family.samples
    }
    assert (series["0"], series["2"]) == (records[0]["max"], records[1]["max"])


@pytest.mark.parametrize("action", ["stop", "warn"])
def test_an_engine_that_keeps_other_weights_at_its_first_update_is_found(tmp_path, model_dir, action):
    """The first step passes, and the second one is not trained."""
    episodes(model_dir, tmp_path, step=0)
    batches = episodes(model_dir, tmp_path, step=1, weights=0.03, turns=4)
    changes = {"trainer": FROZEN["trainer"] | {"self_check": {"action": action}}}
    if action == "stop":
        with pytest.raises(SelfCheckError, match=r"of version 1 .* Possible causes"):
            train(model_dir, tmp_path, batches, steps=2, trained=1, **changes)
    else:
        train(model_dir, tmp_path, batches, steps=2, **changes)
    assert [(r["version"], r["passed"]) for r in records_of(tmp_path)] == [(0, True), (1, False)]


@pytest.mark.parametrize("stale", [0, 1])
def test_after_a_restart_the_version_that_it_went_on_from_does_not_stand_for_an_update(
    tmp_path, model_dir, stale
):
    """Engines are started with that version. Where only one that the process made comes, it is enough."""
    for step in range(5):
        late = stale * (step == 2)
        episodes(model_dir, tmp_path, step=step, versions=lambda s, n, late=late: np.full(n, s - late))
    train(model_dir, tmp_path, tmp_path / "batches", steps=2, **FROZEN)
    kept = CheckpointReader(job="job", policy="policy").open(tmp_path / "checkpoints" / "step-000002")
    again = train(model_dir, tmp_path / "again", tmp_path / "batches", steps=5, restored=kept, **FROZEN)
    assert [r["version"] for r in again] == ([3] if stale else [2, 3])


def test_kept_kv_is_not_compared(tmp_path, model_dir):
    """In mode `keep` what follows a unit of another version is approximate by the engine's own account."""
    versions = lambda step, n: np.full(n, 1) if n < 4 else np.where(np.arange(n) < 1, 0, 1)  # noqa: E731
    record = first_of_version_before(model_dir, tmp_path, versions, update_mode="keep")
    assert record["skipped"]["kept KV of another version"] > 0
    assert record["n"] > 0


def test_of_a_session_that_began_under_other_weights_nothing_is_compared(tmp_path, model_dir):
    """Its paths share a cache: also what no unit of another version precedes is approximate."""
    branches = lambda step, n: np.full(n, 1) if n < 4 else np.where(np.arange(n) >= n - 1, 0, 1)  # noqa: E731
    kept = first_of_version_before(model_dir, tmp_path / "keep", branches, update_mode="keep")
    session = first_of_version_before(
        model_dir, tmp_path / "session", branches, update_mode="session", engine="sglang"
    )
    assert session["n"] < kept["n"]
    assert session["skipped"]["kept KV of another version"] > 0


def test_bfloat16_has_a_bound_of_its_own(tmp_path, model_dir):
    (record,) = train(model_dir, tmp_path, episodes(model_dir, tmp_path), trainer={"dtype": "bfloat16"})
    assert record["bound"] == 1.0
    assert 1e-4 < record["max"] < 1.0


def test_two_ranks_come_to_one_verdict(tmp_path, model_dir):
    """Both fail, with the same words, whichever holds the worst unit."""

    def run(name, lie):
        out = tmp_path / name
        batches = episodes(model_dir, out, lie=lie)
        ends = two_ranks(model_dir, batches, out, STEPS="1")
        return [errors for _, errors in ends], records_of(out)

    count = 0

    def lie(logits, ids, logprobs):
        nonlocal count
        count += 1
        return logprobs - (0.3 if count == 5 else 0.0)

    ends, (record,) = run("wrong", lie)
    said = [end.split("SelfCheckError: ")[1].splitlines()[0] for end in ends]
    assert said[0] == said[1]
    assert "data0000:0:0#0.2" in said[0]
    assert not record["passed"]
    # The worst unit of the other rank.
    count = -3
    ends, _ = run("other", lie)
    assert "SelfCheckError" in ends[0]
    assert ends[0].split("Worst unit:")[1][:40] != said[0].split("Worst unit:")[1][:40]
