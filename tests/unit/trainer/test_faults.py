"""A step in which something is not finite, or nothing is to be learned: left out or the end, and kept so that
it can be replayed."""

import json
import math
import re
from functools import partial

import pytest
import torch
from msgspec.structs import replace

from areal_async.service.record import read_run_log
from areal_async.weights.pieces import whole_tensors
from tests.unit.trainer import rank_process
from tests.unit.trainer.rank_process import train_batch
from tests.unit.trainer.two_ranks import two_ranks
from trainer_service.algorithms.off_policy import EffectiveSamplesWatch
from trainer_service.data.recording import Recording, read_step, write_step
from trainer_service.errors import NotFinite, NothingToLearn
from trainer_service.loop.rl import FAULTY_STEPS, more_effective

SKIP = {"objective": {"on_non_finite": "skip"}}
NAN = float("nan")


def with_rewards(batch, reward):
    """`reward` is a function of the group's and the sample's number, and of the reward there was."""
    groups = [
        replace(
            group,
            episodes=[replace(e, reward=reward(g, s, e.reward)) for s, e in enumerate(group.episodes)],
        )
        for g, group in enumerate(batch.groups)
    ]
    return replace(batch, groups=groups)


def first_is_nan(batch):
    return with_rewards(batch, lambda g, s, r: NAN if (g, s) == (0, 0) else r)


def all_equal(batch):
    return with_rewards(batch, lambda g, s, r: float(g))


def weights_of(backend):
    return {name: tensor.clone() for name, tensor in whole_tensors(backend.export("policy")).items()}


def same(found, wanted):
    return all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def spoiling(backend, *, number, factor=1.0, value=None):
    """Have the backward pass of one call of `train` (the minibatches count up) meet what is not finite: the
    loss times `factor`, or log-probs and values that are `value`."""
    train, calls = backend.train, []

    def spoilt(model, batches, loss_of, *, columns=("logp",)):
        calls.append(0)
        if len(calls) - 1 != number:
            return train(model, batches, loss_of, columns=columns)

        def broken(index, found):
            if value is not None:
                found = {name: column * value for name, column in found.items()}
            return loss_of(index, found) * factor

        return train(model, batches, broken, columns=columns)

    backend.train = spoilt
    return backend


GAE = {"objective": {"on_non_finite": "skip", "advantage": "gae"}}
NOT_FINITE = "units whose log-prob, value or loss is not finite"


@pytest.mark.parametrize(
    ("section", "spoil", "says"),
    [
        (SKIP, {"number": 0, "value": NAN}, "the loss of step 0, minibatch 0, is nan"),
        (SKIP, {"number": 0, "value": math.inf}, NOT_FINITE),
        (SKIP, {"number": 0, "factor": math.inf}, "the gradient's norm is"),
        (SKIP, {"number": 0, "factor": NAN}, "the loss of step 0|the gradient's norm"),
        (SKIP, None, "the advantage of episode"),
        # The pass of the policy comes first.
        (GAE, {"number": 1, "factor": math.inf}, "the gradient's norm is .* in optimizer update 1 of critic"),
        (GAE, {"number": 1, "value": NAN}, NOT_FINITE),
        (GAE, {"number": 0, "factor": math.inf}, "the gradient's norm is .* in optimizer update 1 of policy"),
    ],
    ids=[
        "log-prob",
        "infinite",
        "gradient",
        "loss",
        "reward",
        "of the critic",
        "value",
        "of the policy",
    ],
)
def test_what_is_not_finite_is_left_out_and_changes_neither_weights_nor_moments(
    tmp_path, model_dir, make_batch, section, spoil, says
):
    """The step after it comes out bit by bit as if the faulty one had never been. With a critic neither of
    the two is trained where one of them is not finite."""
    batch, blobs = make_batch(0)
    faulty = first_is_nan(batch) if spoil is None else batch
    backend, learner = rank_process.learner_of(model_dir, tmp_path, **section)
    other, clean = rank_process.learner_of(model_dir, tmp_path, **section)
    first = train_batch(learner, batch, blobs)
    train_batch(clean, batch, blobs)
    before, sound = weights_of(backend), backend.train
    if spoil is not None:
        spoiling(backend, **spoil)
    met = []
    result = train_batch(learner, faulty, blobs, on_fault=lambda: met.append(0) or "")
    backend.train = sound
    assert met == [0]
    assert re.search(says, result.skipped), result.skipped
    assert (result.grad_norms, result.loss, result.updates) == ([0.0], 0.0, 0)
    assert math.isnan(result.losses[0])
    assert result.statistics["units"] == 0, "nothing of it is in the figures"
    assert (first.skipped, first.updates) == ("", 1)
    assert set(backend.updates.values()) == {1}
    assert same(weights_of(backend), before)
    again, wanted = (train_batch(each, batch, blobs) for each in (learner, clean))
    assert (again.losses, again.grad_norms, again.critic) == (wanted.losses, wanted.grad_norms, wanted.critic)
    assert same(weights_of(backend), weights_of(other))


def test_a_critic_that_yields_what_is_no_number_is_named(tmp_path, model_dir, make_batch):
    batch, blobs = make_batch(0)
    backend, learner = rank_process.learner_of(model_dir, tmp_path, **GAE)
    evaluate = backend.evaluate

    def spoilt(model, batches, fn, *, columns=("logp",)):
        factor = NAN if model == "critic" else 1.0

        def broken(index, found):
            return fn(index, {name: column * factor for name, column in found.items()})

        return evaluate(model, batches, broken, columns=columns)

    backend.evaluate = spoilt
    met = []
    result = train_batch(learner, batch, blobs, on_fault=lambda: met.append(0) or "")
    assert met == [0]
    assert "The column value, which the model critic computes, is not finite" in result.skipped
    assert backend.updates == {"policy": 0, "critic": 0}


def test_a_process_reward_model_that_is_faulty_is_left_out_after_the_policy(tmp_path, model_dir, make_batch):
    """The state that is kept has seen every minibatch, so a replay passes over them."""
    batch, blobs = make_batch(0)
    objective = {"on_non_finite": "skip", "advantage": "prime"}
    backend, learner = rank_process.learner_of(model_dir, tmp_path, objective=objective)
    spoiling(backend, number=1, factor=math.inf)
    met = []
    result = train_batch(learner, batch, blobs, on_fault=lambda: met.append(0) or "")
    assert met == [0]
    assert "of process" in result.skipped
    assert backend.updates == {"policy": 1, "process": 0}


def test_only_the_faulty_minibatch_is_left_out(tmp_path, model_dir, make_batch):
    batch, blobs = make_batch(0)
    job = rank_process.job_of(model_dir, tmp_path, minibatches=4, **SKIP)
    ranks = rank_process.join_ranks(0, 1)
    backend = rank_process.load_backend(job, ranks)
    learner = rank_process.Learner(job, ranks, spoiling(backend, number=2, value=NAN))
    met = []
    result = train_batch(learner, batch, blobs, on_fault=lambda: met.append(0) or "")
    assert met == [0]
    assert [math.isfinite(loss) for loss in result.losses] == [True, True, False, True]
    assert [norm > 0 for norm in result.grad_norms] == [False, True, False, True], "group 0 has equal rewards"
    assert math.isfinite(result.loss)
    assert backend.updates == {"policy": 3}
    rest = [e.n_sampled for g in (0, 1, 3) for e in batch.groups[g].episodes]
    assert result.statistics["units"] == sum(rest)
    assert all(math.isfinite(value) for value in result.statistics.values() if isinstance(value, float))


def test_a_step_without_anything_to_learn_takes_no_pass_or_ends_the_job(tmp_path, model_dir, make_batch):
    batch, blobs = make_batch(0)
    equal = all_equal(batch)
    backend, learner = rank_process.learner_of(model_dir, tmp_path)
    before = weights_of(backend)
    result = train_batch(learner, equal, blobs)
    assert "every advantage of step 0 is 0" in result.skipped
    assert (result.losses, result.grad_norms, result.micro_batches) == ([0.0], [0.0], 0)
    assert result.packed_tokens > 0
    assert same(weights_of(backend), before)
    assert backend.updates == {"policy": 0}
    _, stopping = rank_process.learner_of(model_dir, tmp_path, objective={"on_nothing_to_learn": "stop"})
    met = []
    with pytest.raises(NothingToLearn, match=r"rewards of each group are equal.*on_nothing_to_learn: skip"):
        train_batch(stopping, equal, blobs, on_fault=lambda: met.append(0) or "")
    assert met == [0]


@pytest.mark.parametrize("objective", [{"entropy": 0.1}, {"advantage": "reward"}])
def test_a_step_that_has_a_gradient_without_comparisons_is_trained(
    tmp_path, model_dir, make_batch, objective
):
    batch, blobs = make_batch(0)
    equal = with_rewards(batch, lambda g, s, r: 1.0)
    backend, learner = rank_process.learner_of(model_dir, tmp_path, objective=objective)
    result = train_batch(learner, equal, blobs)
    assert result.skipped == ""
    assert result.grad_norm > 0
    assert backend.updates == {"policy": 1}


def test_a_loss_that_reads_no_advantage_is_trained_where_all_are_0(tmp_path, model_dir, make_batch):
    own = tmp_path / "own.py"
    own.write_text(
        "from areal_async import loss\n\n\n@loss(columns=('prox',))\n"
        "def wide(logp, units):\n    return logp + 0 * units['prox']\n"
    )
    batch, blobs = make_batch(0)
    equal = all_equal(batch)
    objective = {"loss": f"{own}:wide"}
    backend, learner = rank_process.learner_of(model_dir, tmp_path, objective=objective)
    assert train_batch(learner, equal, blobs).skipped == ""
    assert backend.updates == {"policy": 1}


@pytest.fixture
def given(tmp_path, make_batch):
    """Four steps, of which the one of number 2 has a reward that is no number."""
    for step in range(4):
        batch, blobs = make_batch(step, max_staleness=2)
        batch = first_is_nan(batch) if step == 2 else batch
        write_step(tmp_path / "given", batch, blobs)
    return tmp_path / "given"


def run_of(model, out, given, **trainer):
    job = rank_process.job_of(model, out, **trainer)
    buffer = rank_process.RecordedBuffer(given)
    return job, buffer, rank_process.trainer_of(job, out, buffer)


def test_a_step_that_is_left_out_is_committed_and_recorded(tmp_path, model_dir, given):
    out = tmp_path / "out"
    _, buffer, trainer = run_of(model_dir, out, given, **SKIP)
    assert trainer.run(name="trainer", ready=lambda: None)
    assert [call[1] for call in buffer.calls if call[0] == "commit"] == [0, 1, 2, 3]
    steps = [record for record in read_run_log(out / "metrics.jsonl") if record["kind"] == "step"]
    assert ["skipped" in step for step in steps] == [False, False, True, False]
    assert "is not finite" in steps[2]["skipped"]
    assert [(step["updates"], step["updates_planned"]) for step in steps] == [(2, 2), (2, 2), (0, 2), (2, 2)]
    assert (steps[2]["loss"], steps[2]["grad_norm"]) == (0.0, 0.0)
    recording = Recording(out)
    assert recording.steps == [2], "no other one was to be recorded"
    assert len(recording.read(2).losses) == 2


def test_a_step_that_ends_the_job_is_recorded_and_the_error_names_the_folder(tmp_path, model_dir, given):
    out = tmp_path / "an out"
    _, buffer, trainer = run_of(model_dir, out, given)
    with pytest.raises(NotFinite, match="the advantage of episode") as ended:
        trainer.run(name="trainer", ready=lambda: None)
    assert f"The batch is kept in {out / 'batches'}." in str(ended.value)
    assert [call[1] for call in buffer.calls if call[0] == "commit"] == [0, 1]
    assert Recording(out).read(2).losses == [], "nothing was trained"


def test_two_ranks_leave_the_same_step_out_and_record_their_parts(tmp_path, model_dir, given):
    for status, errors in two_ranks(model_dir, given, tmp_path / "two", TRAINER=json.dumps(SKIP)):
        assert status == 0, errors
    assert Recording(tmp_path / "two").read(2).blobs == read_step(given, 2).blobs


def test_no_more_than_a_few_faulty_steps_are_kept(tmp_path, model_dir, make_batch):
    steps = FAULTY_STEPS + 2
    for step in range(steps):
        batch, blobs = make_batch(step, max_staleness=2)
        write_step(tmp_path / "given", first_is_nan(batch), blobs)
    out = tmp_path / "out"
    _, buffer, trainer = run_of(model_dir, out, tmp_path / "given", steps=steps, **SKIP)
    assert trainer.run(name="trainer", ready=lambda: None)
    assert Recording(out).steps == list(range(FAULTY_STEPS))
    assert len([call for call in buffer.calls if call[0] == "commit"]) == steps


def test_few_effective_samples_are_told_once_and_again_after_they_have_been_enough(tmp_path):
    job = rank_process.job_of(tmp_path, tmp_path, minibatches=4)
    watch = EffectiveSamplesWatch(0.3, 3, more_effective(job))
    told = [watch.after_step(share) for share in (0.1, 0.2, 0.4, 0.1, 0.1, None, 0.25, 0.1, 0.1)]
    assert [bool(text) for text in told] == [False] * 6 + [True] + [False] * 2
    for part in (
        "below 0.3 in 3 steps",
        "last at 0.25",
        "buffer.max_staleness (2)",
        "trainer.minibatches (4)",
    ):
        assert part in told[6]
    assert [bool(watch.after_step(share)) for share in (0.3, 0.2, 0.2, 0.2)] == [False, False, False, True]
    assert "correction to m2po" in told[6]
    assert not {"icepop", "mis"} & {*told[6].replace(",", "").split()}, "they break down on stale samples"
    for objective in ({"correction": "m2po"}, {"loss": "topr", "correction": "none"}):
        job = rank_process.job_of(tmp_path, tmp_path, objective=objective)
        assert "correction" not in more_effective(job)
    never = EffectiveSamplesWatch(0.0, 1, "")
    assert not any(map(never.after_step, (0.0, 0.5)))


def test_a_job_with_few_effective_samples_has_the_advice_in_its_records(tmp_path, model_dir, make_batch):
    for step in range(3):
        batch, blobs = make_batch(step, max_staleness=2)
        write_step(tmp_path / "given", batch, blobs)
    section = {"objective": {"ess_floor": 1.0, "ess_patience": 2}, "steps": 3}
    _, _, trainer = run_of(model_dir, tmp_path / "out", tmp_path / "given", **section)
    assert trainer.run(name="trainer", ready=partial(int))
    records = read_run_log(tmp_path / "out" / "metrics.jsonl")
    assert ["advice" in r for r in records if r["kind"] == "step"] == [False, True, False]
