"""Parts of the objective from outside the tree drive a training step; what they declare is held."""

import subprocess
import sys

import pytest

from areal_async.config.objective import ObjectiveSection
from areal_async.config.parts import own_part_mistakes
from areal_async.config.registry import PartError
from areal_async.service.main import restart_may_help
from tests.unit.trainer import rank_process
from tests.unit.trainer.rank_process import train_batch
from tests.waiting import LIMIT_S
from trainer_service.algorithms.objective import Objective
from trainer_service.algorithms.parts import advantage
from trainer_service.errors import NotFinite, ObjectiveError
from trainer_service.loop.learner import load_backend

OWN = """
from trainer_service.algorithms.parts import advantage, correction, loss

@advantage(needs_group=3)
def scaled(samples, *, scale=1.0):
    return scale * samples.reward

def undeclared(samples):
    return samples.reward

@loss(columns=("advantage", "prox"), figures=("rewarded_share",))
def reinforce(logp, units, *, clip_low, weight=1.0):
    assert clip_low == 0.25
    ratio = (logp - units["prox"]).exp()
    return -weight * ratio * units.advantage, {"rewarded_share": units.advantage > 0}

@loss(columns=("surprise",))
def with_surprise(logp, units):
    return logp

@advantage(of="unit", columns=("value",))
def valued(units):
    return units["reward"] - units["value"]

@advantage(of="unit")
def unnamed(units):
    return {"advantages": units["reward"]}

@loss(columns=("advantage", "return"))
def to_return(logp, units):
    return -logp * units["return"]

@loss(columns=("advantage", "reward"))
def rewarded(logp, units):
    return -logp * units["reward"]

def divided(units, totals, *, by):
    return units.mask.float() / by

def refusing(models, ranks, *, dtype, word):
    raise SystemExit(f"{list(models)} {models['policy'].total_updates} {word}")

@correction(columns=("prox",))
def capped_at(weight, units, *, cap, floor=0.0):
    return weight.clamp(floor, cap)


@loss(columns=("advantage",))
def rooted(logp, units):
    nothing = (logp - logp.detach()).abs()
    return -logp * units.advantage + (nothing > 0) * nothing.sqrt()


@loss(columns=("advantage",))
def logged(logp, units):
    return -logp * units.advantage + (logp - logp.detach()).log()


@loss(columns=("advantage",))
def detached(logp, units):
    return -logp.detach() * units.advantage


def in_numpy(samples):
    return samples.reward.numpy()


@advantage(of="unit")
def divides(units):
    return units.behaviour / units.missing


@advantage(of="unit")
def reads_prox(units):
    return units["prox"]
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return lambda name: f"{path}:{name}"


def trained(model, out, make_batch, **objective):
    """The result of one step with this objective."""
    _, learner = rank_process.learner_of(model, out, objective=objective)
    batch, blobs = make_batch(0)
    return train_batch(learner, batch, blobs)


def test_an_advantage_of_a_users_file_drives_a_step(model_dir, tmp_path, make_batch, own):
    """A policy gradient on the bare rewards: its loss is twice as large at twice the scale."""
    one, two = (
        trained(model_dir, tmp_path, make_batch, advantage=own("scaled"), advantage_args={"scale": scale})
        for scale in (1.0, 2.0)
    )
    assert two.loss == pytest.approx(2 * one.loss, rel=1e-5)
    assert one.loss != trained(model_dir, tmp_path, make_batch).loss
    undeclared = trained(model_dir, tmp_path, make_batch, advantage=own("undeclared"))
    assert undeclared.loss == pytest.approx(one.loss, rel=1e-6)


def test_what_a_part_raises_names_it_and_ends_the_job(model_dir, tmp_path, make_batch, own):
    """A restart would meet it again."""
    with pytest.raises(AttributeError, match="missing") as raised:
        trained(model_dir, tmp_path, make_batch, advantage=own("divides"))
    assert "`divides` is a part of the job's objective." in raised.value.__notes__
    assert not restart_may_help(raised.value, served=True)
    with pytest.raises(ObjectiveError, match=r"no column 'prox' here.* columns=\('prox',\)"):
        trained(model_dir, tmp_path, make_batch, advantage=own("reads_prox"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("rooted", r"is finite, and its gradient is not. Look at the loss own\.py:rooted first"),
        ("logged", r"minibatch 0, is -?(inf|nan).*\. Look at the loss own\.py:logged first"),
    ],
)
def test_a_loss_of_the_users_is_the_first_suspect_of_what_is_not_finite(
    model_dir, tmp_path, make_batch, own, name, says
):
    with pytest.raises(NotFinite, match=says):
        trained(model_dir, tmp_path, make_batch, loss=own(name))


def test_an_advantage_of_what_there_is_none_of_is_refused():
    with pytest.raises(ValueError, match="of='sampel': an advantage is of 'sample' or 'segment' or 'unit'"):
        advantage(of="sampel")


def test_a_loss_and_a_correction_of_a_users_file_get_their_columns_and_arguments(
    model_dir, tmp_path, make_batch, own
):
    result = trained(
        model_dir,
        tmp_path,
        make_batch,
        loss=own("reinforce"),
        loss_args={"weight": 0.0, "clip_low": 0.25},
        correction=own("capped_at"),
        correction_args={"cap": 5.0, "floor": 0.5},
    )
    assert result.loss == 0
    assert 0 < result.statistics["rewarded_share"] < 1
    assert "clip_low_share" not in result.statistics


def test_what_a_part_of_a_users_file_declares_is_held_when_the_trainer_starts(model_dir, tmp_path, own):
    job = rank_process.job_of(model_dir, tmp_path, objective={"advantage": own("scaled")})
    small = job.model_copy(update={"rollout": job.rollout.model_copy(update={"group_size": 2})})
    Objective(job.trainer.objective, job)
    with pytest.raises(ObjectiveError, match=r"rollout\.group_size: .* Set it to 3 or more"):
        Objective(small.trainer.objective, small)
    with pytest.raises(ObjectiveError, match=r"needs the columns \['surprise'\]"):
        Objective(ObjectiveSection(loss=own("with_surprise")))


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        ({"loss": "detached"}, r"own\.py:detached returned a tensor without a gradient. Compute it from"),
        (
            {"advantage": "in_numpy"},
            r"in_numpy .* returned a numpy\.ndarray\. Make it one",
        ),
        ({"advantage": "valued"}, "a critic learns the column return, which the advantage .*valued does not"),
        ({"advantage": "unnamed"}, r"unnamed was to return the columns advantage .* returned advantages"),
        ({"loss": "to_return"}, "needs the column return, which the advantage grpo does not"),
    ],
)
def test_what_a_part_returns_or_reads_wrongly_is_named(model_dir, tmp_path, make_batch, own, objective, says):
    named = {kind: own(name) for kind, name in objective.items()}
    with pytest.raises(ObjectiveError, match=says):
        trained(model_dir, tmp_path, make_batch, **named)


def test_a_loss_is_given_what_units_earned(model_dir, tmp_path, make_batch, own):
    """Each sampled unit has the reward that `reinforce_pp` sums up."""
    batch, _ = make_batch(0)
    result = trained(model_dir, tmp_path, make_batch, loss=own("rewarded"))
    assert any(e.reward for group in batch.groups for e in group.episodes)
    assert result.loss > 0


def test_a_normaliser_and_a_back_end_of_a_users_file_get_their_arguments(
    model_dir, tmp_path, make_batch, own
):
    normaliser = {"normaliser": own("divided")}
    half, one = (
        trained(model_dir, tmp_path, make_batch, **normaliser, normaliser_args={"by": by}) for by in (2, 1)
    )
    assert one.loss == pytest.approx(2 * half.loss, rel=1e-5)
    with pytest.raises(ObjectiveError, match=r"normaliser_args\.by: .* is missing"):
        trained(model_dir, tmp_path, make_batch, **normaliser)
    job = rank_process.job_of(model_dir, tmp_path, backend=own("refusing"), backend_args={"word": "mine"})
    assert [*own_part_mistakes(job)] == []
    with pytest.raises(SystemExit, match=r"\['policy'\] 8 mine"):
        load_backend(job, None)
    with pytest.raises(PartError, match=r"backend_args\.word: .* is missing"):
        load_backend(rank_process.job_of(model_dir, tmp_path, backend=own("refusing")), None)


def test_shares_are_those_that_are_declared(own):
    objective = Objective(ObjectiveSection(loss=own("reinforce")))
    assert objective.figures == ("rewarded_share", "truncated_share")
    assert "prox" not in objective.columns
    several = ObjectiveSection(loss=own("reinforce"))
    assert "prox" in Objective(several, minibatches=2).columns
    assert not Objective(ObjectiveSection(loss="reinforce", correction="none"), minibatches=2).columns


def test_parts_are_read_without_torch():
    code = (
        "import sys\n"
        "from areal_async.config import registry\n"
        "for kind in ('ADVANTAGES', 'LOSSES', 'CORRECTIONS', 'NORMALISERS', 'BACKENDS'):\n"
        "    parts = getattr(registry, kind)\n"
        "    for name in parts.built_in:\n"
        "        parts.find(name)\n"
        "print('torch' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert run.stdout == "False\n", run.stderr
