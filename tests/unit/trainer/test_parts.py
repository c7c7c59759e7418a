"""Parts of the objective from outside the tree drive a training step; what they declare is held."""

import subprocess
import sys

import pytest

from areal_async.config.job import ObjectiveSection
from areal_async.config.parts import own_part_mistakes
from areal_async.registry import PartError
from tests.unit.trainer import rank_process
from trainer_service.algorithms.objective import Objective
from trainer_service.errors import ObjectiveError
from trainer_service.loop.learner import load_backend

OWN = """
from trainer_service.algorithms.parts import advantage, correction, loss

@advantage(needs_group=3)
def scaled(rewards, groups, *, scale=1.0):
    return (scale * rewards).float()

def undeclared(rewards, groups):
    return rewards.float()

@loss(columns=("advantage", "prox"), shares=("rewarded",))
def reinforce(logp, units, *, clip_low, weight=1.0):
    assert clip_low == 0.25
    ratio = (logp - units["prox"]).exp()
    return -weight * ratio * units.advantage, {"rewarded": units.advantage > 0}

@loss(columns=("value",))
def with_value(logp, units):
    return logp

def divided(mask, episode, units_of_episode, *, by):
    return mask.float() / by

def refusing(models, optimizer, ranks, *, dtype, total_updates, word):
    raise SystemExit(f"{list(models)} {total_updates} {word}")

@correction(columns=("prox",))
def capped_at(weight, units, *, cap, floor=0.0):
    return weight.clamp(floor, cap)
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
    views = {name: memoryview(blob) for name, blob in blobs.items()}
    return learner.train(batch, learner.plan(batch, 0), views)


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
    with pytest.raises(ObjectiveError, match=r"needs the columns \['value'\]"):
        Objective(ObjectiveSection(loss=own("with_value")))


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
    assert objective.shares == ("rewarded", "truncated")
    assert objective.wants_prox
    assert not Objective(ObjectiveSection(loss="sft", correction="none")).wants_prox


def test_parts_are_read_without_torch():
    code = (
        "import sys\n"
        "from areal_async import registry\n"
        "for kind in ('ADVANTAGES', 'LOSSES', 'CORRECTIONS', 'NORMALISERS', 'BACKENDS'):\n"
        "    parts = getattr(registry, kind)\n"
        "    for name in parts.built_in:\n"
        "        parts.find(name)\n"
        "print('torch' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout == "False\n", run.stderr
