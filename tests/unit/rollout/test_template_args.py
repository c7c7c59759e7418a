"""`rollout.template_args` reach the chat template wherever prompts become ids."""

import json
import shutil

import pytest

from areal_async.cli.quickstart.model import make_tokenizer, write_model
from areal_async.config.load import load_job
from areal_async.models.prompts import prompt_ids, with_template_args
from areal_async.models.tokenizer import load_tokenizer
from rollout_service.process import make_renderers

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}={% endif %}"
)
CHAT = [{"role": "user", "content": "1+1"}]
SHORT = {"enable_thinking": False}


@pytest.fixture
def job_of(tmp_path):
    """`job_of(rollout, …)`: a job whose model has the template, with more in its rollout."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    write_model(tmp_path / "model", seed=0, tokenizer=tokenizer)
    row = {"prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "2"}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    (tmp_path / "flow.py").write_text("async def flow(ctx, task): ...\n")

    def make(rollout, **more):
        how = {"max_model_len": 64, "sampling": {"max_new_tokens": 8}} | rollout
        content = {"job": "x", "tasks": {"train": "train.jsonl"}, "rollout": how} | more
        return load_job(content, source="job.yaml", base=tmp_path)

    return make


@pytest.mark.parametrize(
    ("given", "found"), [({}, (3, "1+1")), (SHORT, (4, "1+1=")), ({"enable_thinking": True}, (3, "1+1"))]
)
def test_engines_and_data_tools_give_a_prompt_the_same_ids(job_of, given, found):
    job = job_of({"template_args": given}, model="model")
    (renderer,) = make_renderers(job).values()
    ids = renderer(CHAT)
    assert list(ids.ids) == prompt_ids(with_template_args(load_tokenizer(job.model), given), CHAT)
    assert (len(ids.ids), ids.text) == found


def test_policies_of_one_tokenizer_share_no_renderer_where_their_arguments_differ(job_of):
    policies = {name: {"model": "model"} for name in ("one", "two", "three")}
    policies["two"]["rollout"] = {"template_args": SHORT}
    renderers = make_renderers(job_of({"workflow": "flow.py:flow"}, policies=policies))
    assert renderers["one"] is renderers["three"]
    assert [len(renderers[name](CHAT).ids) for name in ("one", "two")] == [3, 4]


def test_policies_with_other_image_processors_share_no_renderer(job_of):
    policies = {name: {"model": "model"} for name in ("one", "two", "three")}
    job = job_of({"workflow": "flow.py:flow"}, policies=policies)
    seeing = job.model.parent / "seeing"
    shutil.copytree(job.model, seeing)
    (seeing / "preprocessor_config.json").write_text('{"patch_size": 4}')
    policies["two"]["model"] = "seeing"
    renderers = make_renderers(job_of({"workflow": "flow.py:flow"}, policies=policies))
    assert renderers["one"] is renderers["three"] is not renderers["two"]


def test_what_a_call_names_goes_before_what_the_job_says():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    with_template_args(tokenizer, SHORT)
    how = {"tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(CHAT, **how) == "1+1="
    assert tokenizer.apply_chat_template(CHAT, enable_thinking=True, **how) == "1+1"
