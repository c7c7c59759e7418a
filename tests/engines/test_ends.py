"""A model whose marks of thought and answer are special tokens, and whose generation config does not name the
token that ends a turn: text, stop, length and reward are the same with every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agreement import Snapshots, job_for

from areal_async.base.versions import VersionTag
from areal_async.config.registry import REWARDS
from areal_async.trajectory import Sampling
from reward_service.sdk import RewardInput
from rollout_service.engines import make_engine
from rollout_service.engines.base import GenerateRequest
from tests.unit.rollout.recited import byte_tokenizer, ids_of, write_reciting_model

MARKS = ("<think>", "</think>", "<answer>", "</answer>")
SAID = "<think>7</think><answer>5</answer>"
LOCAL = pytest.param("local", id="local")
SERVERS = [pytest.param(name, id=name, marks=pytest.mark.engine) for name in ("sglang", "vllm")]


@pytest.fixture(scope="module", params=[LOCAL, *SERVERS])
def engine(
    request: pytest.FixtureRequest, run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = byte_tokenizer(special=("<|im_start|>", *MARKS))
    padding = tokenizer.pad_token_id
    model = write_reciting_model(folder / "model", tokenizer, f"{SAID}<|im_end|>", ends=padding, after="z")
    made = make_engine(job_for(request.param, model, max_model_len=64), slots=4, activity="ends")
    run(made.start(Snapshots(model, folder / "snapshots").write(VersionTag("policy", 0, 0))), None)
    yield made
    run(made.stop())


@pytest.mark.parametrize(
    ("stop", "most", "said", "units", "reason"),
    [
        ((), 24, SAID, 7, "stop"),
        ((), 4, "<think>7</think><answer>", 4, "length"),
        (("</think>",), 24, "<think>7", 3, "stop"),
        (("5</answer>",), 24, "<think>7</think><answer>", 6, "stop"),
        (("zz",), 24, SAID, 7, "stop"),
    ],
    ids=["whole", "length", "stop at a special token", "stop over one", "stop that never comes"],
)
async def test_an_answer_ends_and_reads_the_same(
    engine: Any, stop: tuple[str, ...], most: int, said: str, units: int, reason: str
) -> None:
    tokenizer = byte_tokenizer(special=("<|im_start|>", *MARKS))
    sampling = Sampling(temperature=1.0, max_new_tokens=most, stop=stop, seed=1)
    found = await engine.generate(GenerateRequest("r", ids_of(tokenizer, "q\n"), sampling))
    assert (found.text, len(found.token_ids), found.finish_reason) == (said, units, reason)
    whole = ids_of(tokenizer, f"{SAID}<|im_end|>")
    assert found.token_ids.tolist() == whole[:units]
    verdict = REWARDS.find("format_tags")(RewardInput(response=found.text))
    assert verdict.value == float(said == SAID)
