"""The pure parts that server engines share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.base.versions import VersionTag
from areal_async.config.engines import EngineMissing, find_engine_python
from areal_async.launch.folders import write_keys
from areal_async.launch.one_host import make_host, topology_here
from areal_async.rpc.secret import RunSecret
from areal_async.service.context import ServiceContext
from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, GenerateRequest, checked_request
from rollout_service.engines.http.adapter import AnswerReader, ServerSettings, attached_url, read_model
from rollout_service.engines.http.client import VersionSpan, parse_tag, stamp
from rollout_service.engines.http.process import cause_of
from rollout_service.engines.sglang.adapter import SGLangAdapter
from tests.unit.gateway.fakes import VOCAB, write_chat_model
from tests.unit.rollout.fakes import job as make_job

numbers = st.integers(0, 2**31 - 1)


@given(numbers, numbers)
def test_a_tag_survives_the_server(epoch: int, version: int) -> None:
    assert parse_tag(VersionTag("policy", epoch, version).label) == VersionTag("policy", epoch, version)


@pytest.mark.parametrize(
    "text", ["default", "", "e1", "v1-e1", "policy-e01-v1", "e1-v-1", "policy-e1-v1 ", "policy-e１-v1"]
)
def test_a_version_of_another_is_refused(text: str) -> None:
    with pytest.raises(EngineError, match="no version of this project"):
        parse_tag(text)


@pytest.mark.parametrize("spans", [[], [(0, 2)], [(1, 4)], [(0, 2), (3, 4)], [(0, 3), (2, 4)], [(0, 5)]])
def test_spans_that_do_not_cover_each_unit_once_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(EngineError):
        stamp(4, [VersionSpan("policy-e0-v0", start, stop) for start, stop in spans])


def test_a_good_prompt_is_i32_and_its_answer_is_bounded() -> None:
    def room(most: int) -> int:
        request = GenerateRequest("r", [0, 7, 3], Sampling(max_new_tokens=most))
        ids, room = checked_request(request, vocab_size=8, max_model_len=6)
        assert (ids.tolist(), ids.dtype) == ([0, 7, 3], np.int32)
        return room

    assert (room(100), room(2)) == (3, 2)


def test_the_environment_is_found_where_it_is_said_to_be(tmp_path: Path) -> None:
    for name in ("named", "folder/sglang"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
    variables = {"AREAL_ASYNC_ENGINES": str(tmp_path / "folder")}
    named = find_engine_python("sglang", tmp_path / "named", variables=variables)
    assert named == tmp_path / "named" / "bin" / "python"
    found = find_engine_python("sglang", variables=variables)
    assert found == tmp_path / "folder" / "sglang" / "bin" / "python"
    with pytest.raises(EngineMissing, match=r"AREAL_ASYNC_ENGINES.*make engines"):
        find_engine_python("vllm", variables=variables)
    with pytest.raises(EngineMissing, match=r"rollout\.server\.environment"):
        find_engine_python("sglang", tmp_path / "nowhere", variables=variables)
    own = f"{tmp_path}/mine.py:SERVER"
    assert find_engine_python(own, tmp_path / "named") == named
    with pytest.raises(EngineMissing, match=r"SERVER.*rollout\.server\.environment.*rollout\.server\.urls"):
        find_engine_python(own, variables=variables)


def test_a_models_facts_are_read_from_its_files(tmp_path: Path) -> None:
    config = {"vocab_size": 16, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_model(tmp_path)
    assert (facts.vocab_size, facts.positions) == (16, 64)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    assert read_model(tmp_path).vocab_size == 16
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="vocab_size"):
        read_model(tmp_path)


def test_servers_are_given_by_the_workers_number_and_a_guest_without_one_is_refused(tmp_path: Path) -> None:
    servers = [f"http://h:{n}" for n in range(6)]
    job = make_job(engine="sglang", replicas=2, server={"urls": servers})
    host = make_host("local", run_dir=tmp_path, socket_dir=tmp_path, shm_dir=tmp_path)
    Path(host.socket_dir).mkdir(exist_ok=True)  # a shorter one where pytest's is too long
    write_keys(RunSecret.generate(), Path(host.socket_dir))
    path = tmp_path / "topology.json"
    path.write_bytes(msgspec.json.encode(topology_here("r", host, [], job.model_dump(mode="json"), {})))

    def urls(name: str) -> list[str | None]:
        return [attached_url(job, ServiceContext.load(path, name), replica) for replica in range(2)]

    assert urls("rollout-0") == ["http://h:0", "http://h:1"]
    assert urls("rollout-2") == ["http://h:4", "http://h:5"]
    for name in ("rollout-b", "rollout-02"):
        with pytest.raises(EngineError, match=rf"rollout\.server\.urls .* {name} has none.*--name rollout-N"):
            urls(name)
    with pytest.raises(EngineError, match="names 6 servers"):
        urls("rollout-3")


@pytest.mark.parametrize(
    ("said", "stop", "kept"),
    [
        ("67+088777", ("77", "12"), 8),  # the server sampled on before it saw the stop
        ("67+08877", ("77",), 8),
        ("1277777", ("77", "12"), 2),
        ("6+8", ("77",), 3),
        ("7", ("7",), 1),
        ("", ("7",), 0),
    ],
)
def test_an_answer_ends_with_its_first_stop_string_however_far_the_server_sampled(
    tmp_path: Path, said: str, stop: tuple[str, ...], kept: int
) -> None:
    write_chat_model(tmp_path)
    reader = AnswerReader(tmp_path, len(VOCAB))
    assert reader.n_until_stop([VOCAB.index(sign) for sign in said], stop) == kept


IN_CHILD = """\
(EngineCore pid=7) ERROR 12-01 05:57:44 [core.py:1510] ValueError: no kernel for it
Traceback (most recent call last):
ValueError: no kernel for it
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
vllm.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."""
OF_PYDANTIC = """\
pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Assertion failed, Chunked prefill is required. [type=assertion_error, input_value=1, input_type=int]
python ended with status 1"""
ASSERTED = """\
(EngineCore pid=7) ERROR 12-01 05:57:44 [core.py:1510]     assert rope_scaling is not None
(EngineCore pid=7) ERROR 12-01 05:57:44 [core.py:1510]            ^^^^^^^^^^^^^^^^^^^^^^^^
(EngineCore pid=7) ERROR 12-01 05:57:44 [core.py:1510] AssertionError
requests.exceptions.ConnectionError: Max retries exceeded with url: /freeze_gc

Received sigquit from a child process. It usually means the child failed."""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (IN_CHILD, "ValueError: no kernel for it"),
        (OF_PYDANTIC, "VllmConfig: Assertion failed, Chunked prefill is required."),
        (ASSERTED, "AssertionError: assert rope_scaling is not None"),
        ("(EngineCore pid=7) ERROR 12-01 [core.py:1] KeyError: 'a'\nbye", "KeyError: 'a'"),
        ("Found ulimit: can cause errors like `OSError: [Errno 24]`.\nAll is well", ""),
        ("", ""),
    ],
)
def test_the_error_that_ended_a_server_is_found_in_its_log(log: str, cause: str) -> None:
    found = cause_of(log.splitlines())
    assert found.endswith(cause)
    assert bool(found) == bool(cause)


SLIDING = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}


@pytest.mark.parametrize(
    ("config", "device", "length", "says"),
    [
        (
            {"model_type": "mistral", "sliding_window": 8},
            "cuda",
            9,
            "SGLang ignores the sliding window of mistral",
        ),
        ({"model_type": "mistral", "sliding_window": 8}, "cuda", 8, ""),
        ({"model_type": "mistral", "sliding_window": None}, "cpu", 9, ""),
        ({"model_type": "olmo3", **SLIDING}, "cpu", 9, "SGLang on a CPU ignores the sliding window of olmo3"),
        ({"model_type": "olmo3", **SLIDING}, "cuda:1", 9, ""),
        ({"model_type": "mistral3", "text_config": {"sliding_window": 8}}, "cuda", 9, "window of mistral3"),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, "cpu", 9, ""),
        ({"model_type": "qwen2", "sliding_window": 8, "layer_types": ["full_attention"]}, "cpu", 9, ""),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "cpu", 9, "ignores that gemma2 caps"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "cuda", 9, ""),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": None, **SLIDING}, "cuda", 9, ""),
    ],
)
def test_attention_that_sglang_ignores_is_refused(
    tmp_path: Path, config: dict[str, object], device: str, length: int, says: str
) -> None:
    inner = config.get("text_config", config)
    assert isinstance(inner, dict)
    inner |= {"vocab_size": 8, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    own: dict[str, Any] = {"log_path": tmp_path / "log", "python": Path(sys.executable), "slots": 1}
    settings = ServerSettings(**own, max_model_len=length, device=device)
    if not says:
        SGLangAdapter(tmp_path, settings)
        return
    with pytest.raises(EngineError, match=says):
        SGLangAdapter(tmp_path, settings)
