"""What the process of a reward model computes, without the process."""

import json
import random

import pytest
import torch
from msgspec.structs import replace
from transformers import Qwen2ForSequenceClassification

from areal_async.base.verdicts import Failure, FaultOf, Score
from areal_async.cli.quickstart.model import make_tokenizer
from reward_service.backends.reward_model import RewardModelArguments
from reward_service.backends.reward_model.scorer import ModelFunction, ModelScorer, Unusable
from reward_service.sdk import RewardInput
from tests.unit.reward_models.tiny import bare_scores, values, write_encoder, write_reward_model

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("classes"), labels=("bad", "good", "odd"))


def scorer(directory, **arguments):
    return ModelScorer(RewardModelArguments(model=str(directory), **{"device": "cpu", **arguments}))


def verdicts(one, *responses):
    return one.score(one.tokenize([(response, "") for response in responses]))


def texts(n, longest=60):
    rng = random.Random(5)
    return ["".join(rng.choices("0123456789+-=", k=rng.randint(1, longest))) for _ in range(n)]


def test_scores_are_those_of_transformers_whatever_the_company(directory):
    several = texts(40)
    expected = bare_scores(directory, several)
    assert max(expected) - min(expected) > 0.1  # else a mix-up would not show
    assert values(verdicts(scorer(directory, max_batch_tokens=200), *several)) == pytest.approx(
        expected, abs=1e-4
    )


def test_an_encoder_does_not_see_the_padding(tmp_path):
    several, encoder = texts(12), write_encoder(tmp_path)
    expected = bare_scores(encoder, several)
    assert max(expected) - min(expected) > 0.1
    assert values(verdicts(scorer(encoder), *several)) == pytest.approx(expected, abs=1e-4)


def test_a_model_without_a_padding_token_scores_the_same(directory, tmp_path):
    several = texts(20)
    other = write_reward_model(tmp_path)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    assert values(verdicts(scorer(other), *several)) == pytest.approx(
        bare_scores(directory, several), abs=1e-4
    )


def test_of_several_classes_the_reward_is_the_probability_of_one(classes):
    (by_name,) = verdicts(scorer(classes, label="good"), "1+1=2")
    (by_index,) = verdicts(scorer(classes, label=1), "1+1=2")
    assert by_name == by_index
    assert by_name.value == by_name.components["p_good"]
    assert sum(by_name.components.values()) == pytest.approx(1)


def test_a_sigmoid_bounds_the_reward(directory):
    (raw,) = verdicts(scorer(directory), "12")
    (bounded,) = verdicts(scorer(directory, activation="sigmoid"), "12")
    assert bounded.value == pytest.approx(torch.tensor(raw.value).sigmoid().item(), abs=1e-6)


def test_a_text_that_is_too_long_or_empty_is_an_error_of_its_own(directory):
    found = verdicts(scorer(directory), "1" * 65, "1", "")
    assert found[0] == Failure("input", "the text has 65 tokens, and the reward model reads 64")
    assert isinstance(found[1], Score)
    assert found[2] == Failure("input", "the text has no token")


def test_a_long_text_is_cut_where_the_job_says_so(directory):
    (cut,) = verdicts(scorer(directory, on_long="cut", max_tokens=10), "9" * 5 + "0123456789")
    (short,) = verdicts(scorer(directory), "0123456789")
    assert cut.value == pytest.approx(short.value, abs=1e-5)
    assert cut.components == {"cut_tokens": 5.0}


def test_a_text_that_cannot_be_computed_costs_the_others_nothing(directory, monkeypatch):
    one = scorer(directory)
    expected = verdicts(one, "1", "3")
    forward = Qwen2ForSequenceClassification.forward

    def fail(model, input_ids, **rest):
        if (input_ids == 13).any():
            raise RuntimeError("out of memory")
        return forward(model, input_ids, **rest)

    poison = make_tokenizer().convert_ids_to_tokens(13)
    monkeypatch.setattr(Qwen2ForSequenceClassification, "forward", fail)
    found = verdicts(one, "1", poison, "3")
    assert isinstance(found[1], Failure)
    assert found[1].kind == "model"
    assert "out of memory" in found[1].message
    assert values([found[0], found[2]]) == pytest.approx(values(expected), abs=1e-5)


@pytest.mark.parametrize("template", ["{response}", "{prompt}={response}", "{response}{ground_truth}"])
@pytest.mark.parametrize("response", ["1" * 65, "1" * 4000, ""])
def test_a_text_that_the_model_cannot_read_is_the_answers_fault_if_the_task_alone_can_be(
    directory, template, response
):
    function = ModelFunction(model=str(directory), device="cpu", template=template)
    good = RewardInput(prompt="1", response="2", ground_truth="3")
    bad, task = replace(good, response=response), replace(good, prompt="1" * 70, ground_truth="1" * 70)
    found = function([good, bad, task])
    assert isinstance(found[0], Score)
    if response or template == "{response}":
        assert found[1].fault is FaultOf.ANSWER
    if template != "{response}":
        assert found[2].fault is FaultOf.INFRASTRUCTURE


@pytest.mark.parametrize(
    ("fails", "fault"),
    [("once", FaultOf.INFRASTRUCTURE), ("at it", FaultOf.ANSWER), ("ever", FaultOf.INFRASTRUCTURE)],
)
def test_a_text_that_the_model_cannot_compute_is_at_fault_if_it_fails_again_and_another_does_not(
    directory, monkeypatch, fails, fault
):
    function = ModelFunction(model=str(directory), device="cpu", template="{response}")
    forward, failures = Qwen2ForSequenceClassification.forward, []

    def fail(model, input_ids, **rest):
        mine = (input_ids == 13).any()
        if fails == "ever" or (mine and (fails == "at it" or not failures)):
            failures.append(None)
            raise RuntimeError("out of memory")
        return forward(model, input_ids, **rest)

    monkeypatch.setattr(Qwen2ForSequenceClassification, "forward", fail)
    poison = make_tokenizer().convert_ids_to_tokens(13)
    (found,) = function([RewardInput(response=poison)])
    assert (found.kind, found.fault) == ("model", fault)


def test_what_is_not_a_number_is_no_score(tmp_path):
    model = Qwen2ForSequenceClassification.from_pretrained(write_reward_model(tmp_path))
    torch.nn.init.constant_(model.score.weight, float("nan"))
    model.save_pretrained(tmp_path)
    (found,) = verdicts(scorer(tmp_path), "1")
    assert found.kind == "not_finite"


def test_a_chat_template_is_that_of_the_model(tmp_path, directory):
    own = write_reward_model(tmp_path)
    with pytest.raises(Unusable, match="no chat template"):
        scorer(own, template="chat")
    (own / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}={% endfor %}")
    one = scorer(own, template="chat")
    (found,) = one.score(one.tokenize([("1+1", "2")]))
    assert found.value == pytest.approx(bare_scores(directory, ["1+1=2="])[0], abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({}, "Set reward.args.label"), ({"label": "best"}, "'best', and the model has the classes 0 .bad.")],
)
def test_a_model_with_classes_needs_to_know_which_is_good(classes, arguments, says):
    with pytest.raises(Unusable, match=says):
        scorer(classes, **arguments)


def test_a_model_without_a_trained_head_is_refused(tmp_path):
    from areal_async.cli.quickstart.model import write_model

    write_model(tmp_path, seed=0)
    with pytest.raises(Unusable, match="not a trained reward model"):
        scorer(tmp_path)
