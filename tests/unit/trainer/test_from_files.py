"""Training from files of preferences and scores: each improves what it is measured by, on any ranks, and goes
on from a checkpoint as if it had never stopped."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_async.service.record import read_run_log
from reward_service.backends.reward_model import RewardModelArguments
from reward_service.backends.reward_model.scorer import ModelScorer
from tests.unit.trainer import files_process
from tests.unit.trainer.files_process import job_of, trainer_of
from tests.unit.trainer.forked_ranks import run_ranks
from trainer_service.checkpoint import CheckpointReader
from trainer_service.errors import BatchError

LOSSES = {
    "dpo": {"beta": 0.3},
    "ipo": {"beta": 0.3},
    "hinge": {"beta": 0.3},
    "orpo": {"beta": 0.5},
    "kto": {"beta": 0.3},
}


def form_of(loss):
    return "labelled" if loss == "kto" else "pairs"


def told(out):
    """What the run log says of each step but its time."""
    records = [record for record in read_run_log(out / "metrics.jsonl") if record["kind"] in KINDS]
    left_out = ("time_s", "step_s", "tokens_per_s", "kind", "policy")
    return [{name: r[name] for name in r if name not in left_out} for r in records]


KINDS = ("preference", "reward_model")


@pytest.mark.parametrize("loss", LOSSES)
def test_each_preference_loss_raises_held_out_accuracy_and_margin(tmp_path, model_dir, loss):
    job = job_of(tmp_path, model_dir, "preference", form_of(loss), loss=loss, **LOSSES[loss])
    assert trainer_of(job, tmp_path).run()
    measured = [record for record in told(tmp_path) if "accuracy" in record]
    first, last = measured[0], measured[-1]
    assert (first["step"], last["step"]) == (0, 40)
    assert last["accuracy"] >= max(0.8, first["accuracy"] + 0.2)
    assert last["margin"] > first["margin"]
    assert last["held_out_loss"] < first["held_out_loss"]


def test_the_loss_and_the_reference_are_those_of_the_plain_model(tmp_path, model_dir):
    """Before the first update policy and reference are one: dpo is log 2, and its reward difference 0. After
    one the held-out loss is that of log-probs by transformers."""
    job = job_of(tmp_path, model_dir, "preference", beta=0.3, trainer={"steps": 1})
    assert trainer_of(job, tmp_path).run()
    start, step, end = told(tmp_path)
    assert start["held_out_loss"] == pytest.approx(0.693147, abs=1e-6)
    assert step["loss"] == pytest.approx(0.693147, abs=1e-6)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "model", model_dir)]
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    losses = []
    for row in files_process.rows_of("pairs", 40, 1):
        gains = []
        for name in ("chosen", "rejected"):
            prompt, answer = (tokenizer(row[part])["input_ids"] for part in ("prompt", name))
            ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
            sums = []
            for model in models:
                logp = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                sums.append(float(logp.detach().gather(1, ids[0, len(prompt) :, None]).sum()))
            gains.append(sums[0] - sums[1])
        losses.append(-torch.nn.functional.logsigmoid(torch.tensor(0.3 * (gains[0] - gains[1]))))
    assert end["held_out_loss"] == pytest.approx(float(sum(losses)) / 40, abs=1e-5)


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path, model_dir, loss):
    """Also what the reference says, which is computed again by the model of the start."""
    job = job_of(tmp_path, model_dir, "preference", form_of(loss), loss=loss, trainer={"steps": 11})
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert trainer_of(job, whole).run()
    restored = CheckpointReader(job="files", policy="policy").open(whole / "checkpoints" / "step-000008")
    assert trainer_of(job, resumed).run(restored)
    assert told(resumed) == [record for record in told(whole) if record["step"] > 8]
    models = [(out / "model" / "model.safetensors").read_bytes() for out in (whole, resumed)]
    assert models[0] == models[1]


def test_two_ranks_train_what_one_trains(tmp_path, model_dir):
    """With so small a budget the rows of a pair are in different micro-batches."""
    settings = {"steps": 3, "micro_batch_tokens": 5}
    paths = []
    for loss in ("dpo", "kto"):
        (tmp_path / loss).mkdir()
        job = job_of(
            tmp_path / loss, model_dir, "preference", form_of(loss), loss=loss, trainer=settings, lr=1e-3
        )
        assert trainer_of(job, tmp_path / loss / "one").run()
        (tmp_path / loss / "job.json").write_text(job.model_dump_json())
        paths += [str(tmp_path / loss / "job.json"), str(tmp_path / loss / "two")]
    ended = run_ranks(files_process.__file__, *((rank, 2, *paths) for rank in range(2)))
    assert [status for status, *_ in ended] == [0, 0], ended
    for loss in ("dpo", "kto"):
        for one, two in zip(told(tmp_path / loss / "one"), told(tmp_path / loss / "two"), strict=True):
            assert two == pytest.approx(one, rel=1e-3, abs=1e-5)
        models = [load_file(tmp_path / loss / name / "model/model.safetensors") for name in ("one", "two")]
        assert all(torch.allclose(models[0][name], models[1][name], atol=2e-3) for name in models[0])


@pytest.mark.parametrize("form", ["pairs", "scored"])
def test_a_reward_model_learns_and_serves_as_the_reward_of_its_name(tmp_path, model_dir, form):
    """What it says as a reward is what it was measured by."""
    assert trainer_of(job_of(tmp_path, model_dir, "reward_model", form), tmp_path).run()
    measured = [record for record in told(tmp_path) if "accuracy" in record]
    assert measured[0]["accuracy"] == 0.5
    assert measured[-1]["accuracy"] >= {"pairs": 0.8, "scored": 0.6}[form]
    assert measured[-1]["held_out_loss"] < measured[0]["held_out_loss"] / 2
    scorer = ModelScorer(RewardModelArguments(model=str(tmp_path / "model")))
    rows = files_process.rows_of(form, 40, 1)

    def scores(name):
        verdicts = scorer.score(scorer.tokenize([(row["prompt"] + row[name], "") for row in rows]))
        return torch.tensor([verdict.value for verdict in verdicts])

    if form == "pairs":
        gaps = scores("chosen") - scores("rejected")
        assert float((gaps > 0).double().mean()) == pytest.approx(measured[-1]["accuracy"])
        loss = -torch.nn.functional.logsigmoid(gaps).mean()
    else:
        loss = (scores("completion") - torch.tensor([row["score"] for row in rows])).square().mean()
    assert float(loss) == pytest.approx(measured[-1]["held_out_loss"], rel=1e-3)


def test_examples_that_are_too_long_are_left_out(tmp_path, model_dir):
    job = job_of(tmp_path, model_dir, "preference", trainer={"steps": 1}, max_tokens=5)
    with pytest.raises(BatchError, match="every example has more than 5 tokens"):
        trainer_of(job, tmp_path)
