"""A back end with several models: what a value head gives, which are trained, and what is kept of them."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from areal_async.config.job import LoraSection, OptimizerSection
from areal_async.weights.pieces import whole_tensors
from reward_service.backends.reward_model import RewardModelArguments
from reward_service.backends.reward_model.scorer import ModelScorer
from tests.unit.trainer.conftest import SYMBOLS, plain_row
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data.microbatch import build_micro_batch, plan_passes
from trainer_service.durable_files import companion_files, write_model
from trainer_service.errors import CheckpointError, DivergenceError, GradientNotFinite, ModelError
from trainer_service.ranks import join_ranks

OPTIMIZER = OptimizerSection(lr=1e-2)


def backend_of(model, classifier, ranks, **options):
    """A policy with a value head, a critic and a reference that follows."""
    models = {
        "policy": ModelUse(model, OPTIMIZER, 100, head="both"),
        "critic": ModelUse(classifier, OPTIMIZER, 100, head="value"),
        "ref": ModelUse(model, follows=True),
    }
    return FsdpBackend(models, ranks, **{"dtype": torch.float32, **options})


def exported(backend):
    """The tensors of all models by model and name."""
    return {
        f"{model}/{name}": tensor
        for model in backend.updates
        for name, tensor in _weights(backend, model).items()
    }


@pytest.fixture(scope="module")
def classifier_dir(tmp_path_factory, untied_model_dir):
    """A sequence classifier with one label."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("classifier")
    model = AutoModelForSequenceClassification.from_pretrained(untied_model_dir, num_labels=1)
    model.save_pretrained(folder)
    return folder


def _one(folder, head="value", *, name="critic", optimizer=OPTIMIZER):
    models = {name: ModelUse(folder, optimizer, 10, head=head)}
    return FsdpBackend(models, join_ranks(0, 1), dtype=torch.float32)


def _rows(seed=0, *, feeds_last=False):
    """Rows of two groups, each with a beginning of its own that its rows share; without the space, which the
    tokenizer drops."""
    rng = np.random.default_rng(seed)
    starts = [rng.integers(2, 16, 6), rng.integers(2, 16, 9)]
    rows = []
    for episode in range(7):
        start = starts[episode % 2]
        ids = np.concatenate([start, rng.integers(2, 16, int(rng.integers(2, 9)))])
        sampled = slice(len(start) - 2 * (episode % 3), None)
        rows.append(plain_row(ids, sampled, episode=episode, feeds_last=feeds_last))
    return rows


def _batch(seed=0, **how):
    """One micro-batch of rows that share what they begin with, and the rows in its order."""
    groups = np.arange(7) % 2
    ((*rows,),) = plan_passes(_rows(seed, **how), join_ranks(0, 1), 1 << 20, groups=groups)
    batch = build_micro_batch(rows)
    assert batch.shared_tokens > 0
    assert any(part is not None for part in batch.branching)
    return batch, rows


def _column(backend, batch, name, model="critic"):
    return backend.evaluate(model, [batch], lambda _, columns: columns[name], columns=(name,))[0]


def _weights(backend, model):
    return {name: tensor.clone() for name, tensor in whole_tensors(backend.export(model)).items()}


@pytest.mark.parametrize("name", ["value", "score"])
def test_values_and_their_gradients_are_those_of_the_plain_model(classifier_dir, name):
    """Row by row, of the state before the unit's token or at it, however rows share what they begin with."""
    # With so large an eps AdamW takes the gradient itself off the weights.
    plain_steps = OptimizerSection(lr=1e6, eps=1e6, clip_grad_norm=1e6)
    backend = _one(classifier_dir, optimizer=plain_steps)
    before, (batch, rows) = _weights(backend, "critic"), _batch(feeds_last=name == "score")
    plain = AutoModelForSequenceClassification.from_pretrained(classifier_dir)
    wanted = []
    for row in rows:
        ids = torch.from_numpy(row.token_ids[None].astype(np.int64))
        states = plain.model(input_ids=ids).last_hidden_state[0]
        wanted.append(plain.score(states)[row.position - (name == "value"), 0])
    want = torch.cat(wanted)
    torch.testing.assert_close(_column(backend, batch, name), want.detach(), atol=1e-5, rtol=1e-5)
    weights = torch.linspace(-1, 1, len(want))
    backend.train("critic", [batch], lambda _, c: (c[name].square() * weights).sum(), columns=(name,))
    (want.square() * weights).sum().backward()
    backend.optimizer_step("critic")
    after = _weights(backend, "critic")
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(before[key] - after[key], parameter.grad, atol=1e-4, rtol=1e-4)


def test_a_row_whose_last_token_is_not_fed_has_no_score(classifier_dir, model_dir):
    backend = _one(classifier_dir)
    with pytest.raises(ValueError, match=r"no column score: .* the last token of a row not fed"):
        _column(backend, _batch()[0], "score")
    with pytest.raises(ValueError, match="no column value: the model has no value head"):
        _column(_one(model_dir, "tokens"), _batch()[0], "value")


@pytest.mark.parametrize("head", ["value", "both"])
def test_on_a_language_model_values_begin_as_zeros(untied_model_dir, model_dir, head):
    for folder in (untied_model_dir, model_dir):
        backend = _one(folder, head)
        batch, _ = _batch()
        assert not _column(backend, batch, "value").any()
        backend.train("critic", [batch], lambda _, c: (c["value"] - 1).square().mean(), columns=("value",))
        backend.optimizer_step("critic")
        assert _column(backend, batch, "value").all()


def test_what_was_trained_as_a_reward_model_serves_as_one(tmp_path, untied_model_dir):
    """The same numbers come of the reward `reward_model`, and transformers finds all weights."""
    backend = _one(untied_model_dir)
    for step in range(4):
        batch, _ = _batch(step, feeds_last=True)
        backend.train("critic", [batch], lambda _, c: (c["score"] - 2).square().mean(), columns=("score",))
        backend.optimizer_step("critic")
    files = companion_files(untied_model_dir, "float32", values=True)
    write_model(tmp_path / "model", lambda: backend.export("critic"), files, join_ranks(0, 1))
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == {
        name for name in load_file(untied_model_dir / "model.safetensors") if name != "lm_head.weight"
    } | {"score.weight"}
    batch, rows = _batch(9, feeds_last=True)
    scores = _column(backend, batch, "score").split([len(row.position) for row in rows])
    scorer = ModelScorer(RewardModelArguments(model=str(tmp_path / "model"), device="cpu"))
    texts = [("".join(SYMBOLS[i] for i in row.token_ids), "") for row in rows]
    served = [verdict.value for verdict in scorer.score(scorer.tokenize(texts))]
    assert served == pytest.approx([float(score[-1]) for score in scores], abs=1e-5)
    assert max(served) - min(served) > 0.05
    # What it was written as is read again, as a model to train on.
    torch.testing.assert_close(_column(_one(tmp_path / "model"), batch, "score"), torch.cat(scores))


def test_padding_that_ends_texts_too_is_not_named(tmp_path, model_dir):
    config = (model_dir / "config.json").read_text()
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(config.replace('"pad_token_id": 0', '"pad_token_id": 1'))
    assert b'"pad_token_id": 0' in companion_files(tmp_path, "float32", values=True)["config.json"]
    (tmp_path / "config.json").write_text(config.replace('"eos_token_id": 1', '"eos_token_id": [1, 0]'))
    assert b'"pad_token_id": null' in companion_files(tmp_path, "float32", values=True)["config.json"]


def test_a_value_head_on_the_policy_is_saved_and_not_given_out(tmp_path, model_dir):
    batch, _ = _batch()
    plain, both = (_one(model_dir, head, name="policy") for head in ("tokens", "both"))
    assert torch.equal(_column(plain, batch, "logp", "policy"), _column(both, batch, "logp", "policy"))
    names = ("value", "logp")
    both.train("policy", [batch], lambda _, c: (c["value"] - 1 + c["logp"]).square().sum(), columns=names)
    both.optimizer_step()
    assert _weights(plain, "policy").keys() == _weights(both, "policy").keys()
    both.save(tmp_path)()
    again = _one(model_dir, "both", name="policy")
    again.load(tmp_path, both.updates)
    assert _column(again, batch, "value", "policy").all()
    assert torch.equal(_column(again, batch, "value", "policy"), _column(both, batch, "value", "policy"))
    # An update in which no loss has used it goes as well.
    again.train("policy", [batch], lambda _, c: c["logp"].sum())
    again.optimizer_step()


def test_a_value_is_computed_in_fp32_and_a_frozen_model_held_in_what_it_computes_in(
    classifier_dir, model_dir
):
    models = {"critic": ModelUse(classifier_dir, OPTIMIZER, 10, head="value"), "ref": ModelUse(model_dir)}
    backend = FsdpBackend(models, join_ranks(0, 1), dtype=torch.bfloat16)
    batch, _ = _batch()
    low, exact = _column(backend, batch, "value"), _column(_one(classifier_dir), batch, "value")
    assert low.dtype == torch.float32
    assert 0 < (low - exact).abs().max() < 0.1
    assert not torch.equal(low, low.bfloat16().float())
    held = {name: {p.dtype for p in backend._models[name].module.parameters()} for name in models}
    assert held == {"critic": {torch.float32}, "ref": {torch.bfloat16}}


def test_a_model_is_trained_by_its_own_optimizer_alone(classifier_dir, model_dir):
    backend = backend_of(model_dir, classifier_dir, join_ranks(0, 1))
    before, (batch, _) = exported(backend), _batch()
    backend.train("critic", [batch], lambda _, c: c["value"].square().sum(), columns=("value",))
    assert backend.optimizer_step("critic") > 0
    changed = {
        name.split("/")[0] for name, t in exported(backend).items() if not torch.equal(t, before[name])
    }
    assert changed == {"critic"}
    assert backend.updates == {"policy": 0, "critic": 1, "ref": 0}
    with pytest.raises(ValueError, match="'ref' is not trained"):
        backend.optimizer_step("ref")


def _update(backend, seed, scale=1.0):
    batch, _ = _batch(seed)
    backend.train("critic", [batch], lambda _, c: (c["value"] - 1).square().sum() * scale, columns=("value",))
    return backend.optimizer_step("critic")


@pytest.mark.parametrize("how", ["gradient", "discarded"])
def test_a_minibatch_that_is_skipped_leaves_no_trace(classifier_dir, how):
    """Weights are bit-equal, and the next update is as if it had not been."""
    plain, skipping = _one(classifier_dir), _one(classifier_dir)
    for backend in (plain, skipping):
        _update(backend, 0)
    before = _weights(skipping, "critic")
    if how == "gradient":
        with pytest.raises(GradientNotFinite, match=r"update 1 of critic: .* trainer\.critic\.optimizer\.lr"):
            _update(skipping, 1, float("nan"))
        assert issubclass(GradientNotFinite, DivergenceError)
    else:
        batch, _ = _batch(1)
        skipping.train("critic", [batch], lambda _, c: c["value"].sum(), columns=("value",))
        skipping.discard("critic")
    assert all(torch.equal(t, before[name]) for name, t in _weights(skipping, "critic").items())
    assert skipping.updates == {"critic": 1}
    assert _update(plain, 2) == _update(skipping, 2)
    after = _weights(plain, "critic")
    assert all(torch.equal(t, after[name]) for name, t in _weights(skipping, "critic").items())


def test_a_reference_follows_the_policy(model_dir, untied_model_dir, classifier_dir):
    backend = backend_of(model_dir, classifier_dir, join_ranks(0, 1))
    first = _weights(backend, "ref")
    batch, _ = _batch()
    backend.train("policy", [batch], lambda _, c: c["logp"].sum())
    backend.optimizer_step()
    backend.follow("ref", "policy", 0.25)
    policy = _weights(backend, "policy")
    for name, tensor in _weights(backend, "ref").items():
        torch.testing.assert_close(tensor, 0.75 * first[name] + 0.25 * policy[name], atol=1e-7, rtol=1e-6)
    backend.follow("ref", "policy", 1.0)
    assert all(torch.equal(tensor, policy[name]) for name, tensor in _weights(backend, "ref").items())
    assert torch.equal(*(_column(backend, batch, "logp", model) for model in ("ref", "policy")))
    assert backend.updates["ref"] == 2
    with pytest.raises(ValueError, match="'critic' was not made to follow"):
        backend.follow("critic", "policy", 0.5)
    models = {
        "critic": ModelUse(classifier_dir, head="value"),
        "ref": ModelUse(untied_model_dir, follows=True),
    }
    backend = FsdpBackend(models, join_ranks(0, 1), dtype=torch.float32)
    with pytest.raises(ModelError, match=r"cannot follow 'critic', which has no lm_head\.weight"):
        backend.follow("ref", "critic", 0.5)


def test_a_checkpoint_holds_what_changes_and_nothing_else(model_dir, classifier_dir, tmp_path):
    trained = backend_of(model_dir, classifier_dir, join_ranks(0, 1))
    before, (batch, _) = exported(trained), _batch()
    trained.train("policy", [batch], lambda _, c: c["logp"].sum())
    trained.optimizer_step()
    trained.follow("ref", "policy", 0.5)
    _update(trained, 0)
    trained.save(tmp_path)()
    kinds = {path.name.split("-0000")[0] for path in tmp_path.glob("*-of-00001.safetensors")}
    moments = {f"{model}.{moment}" for model in ("policy", "critic") for moment in ("exp_avg", "exp_avg_sq")}
    assert kinds == {"policy", "critic", "ref"} | moments
    alone = FsdpBackend({"policy": ModelUse(model_dir)}, join_ranks(0, 1), dtype=torch.float32)
    (tmp_path / "alone").mkdir()
    assert [*alone.save(tmp_path / "alone")()] == ["rng-00000.safetensors"]
    # Without counts the weights of what is trained come back, to be given out; the reference is as it was.
    given = backend_of(model_dir, classifier_dir, join_ranks(0, 1))
    given.load(tmp_path, {})
    found = exported(trained)
    for name, tensor in exported(given).items():
        assert torch.equal(tensor, (before if name.startswith("ref/") else found)[name])
    with pytest.raises(CheckpointError, match=r"holds no model 'critic', which the job trains"):
        given.load(tmp_path, {"policy": 2})


def test_adapters_are_the_policys_alone_and_a_value_head_is_trained_beside_them(model_dir, classifier_dir):
    backend = backend_of(model_dir, classifier_dir, join_ranks(0, 1), lora=LoraSection(rank=2))
    batch, _ = _batch()
    names = ("value", "logp")
    backend.train("policy", [batch], lambda _, c: (c["value"] - 1 + c["logp"]).square().sum(), columns=names)
    backend.optimizer_step()
    assert _column(backend, batch, "value", "policy").all()
    assert all(".lora_" in name for name in _weights(backend, "policy"))
    assert not any(".lora_" in name for name in _weights(backend, "critic"))
    with pytest.raises(ModelError, match="adapters cannot be followed"):
        backend.follow("ref", "policy", 0.5)
