"""The SGLang engine without a server: how one is started, asked, understood and refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_async.rpc.schema import VersionTag
from rollout_service.engines.base import EngineError, EngineLost
from rollout_service.engines.http.adapter import Directory, Launch, ServerSettings
from rollout_service.engines.http.client import KEEPALIVE_S, ServerClient
from rollout_service.engines.sglang.adapter import Loads, command, variables
from rollout_service.engines.sglang.messages import Generated, parse
from tests.waiting import LIMIT_S

WEIGHTS = Directory(VersionTag("policy", 1, 7), Path("/snapshots/policy-e1-v7"))


def launched(**settings: Any) -> Launch:
    given = {"slots": 16, "max_model_len": 64, "python": Path("/env/bin/python")} | settings
    return Launch(ServerSettings(**given), Path("/model"), WEIGHTS, 64, 1234)


def flags(launch: Launch) -> dict[str, str | bool]:
    words = command(launch)
    assert words[:6] == ["/env/bin/python", "-W", "ignore", "-P", "-m", "sglang.launch_server"]
    found: dict[str, str | bool] = {}
    for word, following in zip(words[6:], [*words[7:], "--"], strict=True):
        if word.startswith("--"):
            found[word[2:]] = True if following.startswith("--") else following
    return found


def test_a_server_starts_on_the_snapshot_under_its_version() -> None:
    found = flags(launched())
    assert found["model-path"] == "/snapshots/policy-e1-v7"
    assert found["weight-version"] == "policy-e1-v7"
    assert found["load-format"] == "safetensors"
    assert found["host"] == "127.0.0.1"
    assert found["context-length"] == "72"  # the server ends two tokens before it
    assert found["max-total-tokens"] == str(16 * 72)


def test_a_gpu_gets_no_flag_of_a_cpu() -> None:
    found = flags(launched(device="cuda:3", dtype="bfloat16"))
    assert found["device"] == "cuda"
    assert not {"attention-backend", "disable-cuda-graph", "max-total-tokens"} & set(found)
    assert "disable-overlap-schedule" not in found
    assert "disable-overlap-schedule" in flags(launched(device="cuda", update_mode="keep"))


def test_arguments_of_the_job_file_are_added_changed_and_left_out() -> None:
    arguments = {"tp_size": 2, "sleep-on-idle": False, "log-level": None, "enable-mixed-chunk": True}
    found = flags(launched(arguments=arguments))
    assert found["tp-size"] == "2"
    assert found["enable-mixed-chunk"] is True
    assert not {"sleep-on-idle", "log-level"} & set(found)
    says = r"rollout\.server\.arguments\.context_length.*rollout\.max_model_len"
    with pytest.raises(EngineError, match=says):
        flags(launched(arguments={"context_length": 9}))


def test_the_servers_environment_is_its_own() -> None:
    foreign = {"PYTHONPATH": "/here", "SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "VIRTUAL_ENV": "/v"}
    ours = foreign | {"HOME": "/home"}
    found = variables(launched(), ours)
    assert not set(foreign) & set(found)
    assert (found["HOME"], found["SGLANG_USE_CPU_ENGINE"]) == ("/home", "1")
    assert float(found["SGLANG_TIMEOUT_KEEP_ALIVE"]) > 10 * KEEPALIVE_S
    gpu = variables(launched(device="cuda"), ours)
    assert not {"SGLANG_USE_CPU_ENGINE", "CUDA_VISIBLE_DEVICES"} & set(gpu)
    several = variables(launched(device="cuda:3", gpus=("3", "4")), ours)
    assert several["CUDA_VISIBLE_DEVICES"] == "3,4"


def answer(**changes: Any) -> Generated:
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length", "length": 3},
        "output_token_logprobs": [[-0.5, 4, None], [-1.5, 5, None], [-2.5, 6, None]],
        "weight_versions": [
            {"version": "policy-e0-v1", "start": 0, "end": 2},
            {"version": "policy-e1-v2", "start": 2, "end": 3},
        ],
    }
    ids = changes.pop("output_ids", [4, 5, 6])
    content = {"text": "abc", "output_ids": ids, "meta_info": meta | changes}
    return msgspec.json.decode(msgspec.json.encode(content), type=Generated)


def test_an_aborted_answer_has_what_was_handed_over() -> None:
    none = parse(answer(finish_reason={"type": "abort", "message": "x"}, output_ids=[]), "sampled")
    assert (none.finish_reason, none.token_ids.size, none.versions.size) == ("abort", 0, 0)
    spans = [{"version": "policy-e0-v1", "start": 0, "end": 0}]
    waiting: Any = {
        "output_token_logprobs": None,
        "weight_versions": spans,
        "finish_reason": {"type": "abort"},
    }
    assert parse(answer(**waiting), "sampled").token_ids.size == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output_ids": [4, 5]}, "log-probs of others"),
        ({"output_ids": [4, 5, 7]}, "log-probs of others"),
        ({"output_token_logprobs": [[None, 4, None], [-1, 5, None], [-1, 6, None]]}, "not finite"),
        ({"weight_versions": None}, "names no version"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 3}]}, "no version of this project"),
        ({"weight_versions": [{"version": "policy-e0-v1", "start": 1, "end": 3}]}, "do not fit"),
        ({"finish_reason": {"type": "tool"}}, "tool"),
    ],
)
def test_an_answer_that_does_not_account_for_its_units_is_refused(changes: Any, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        parse(answer(**changes), "sampled")


def test_units_are_counted_over_ranks_and_before_the_first_step() -> None:
    content = b'{"loads": [{"decode_moments": [2, 6, 1, 1, 1, 6.0]}, {"decode_moments": null}, {}]}'
    assert msgspec.json.decode(content, type=Loads).decoded == 6


async def test_an_idle_connection_is_closed_from_this_side() -> None:
    """A request on one that the server is just closing would look like the server's death."""
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        assert await reader.read() == b""
        closed.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = ServerClient("it", f"http://127.0.0.1:{port}", keepalive_s=0.05)
        assert await client.get("/", dict) == {}
        await asyncio.wait_for(closed.wait(), LIMIT_S)
        await client.close()


async def test_a_server_that_is_not_there_is_lost() -> None:
    client = ServerClient("it", "http://127.0.0.1:9")
    assert not await client.serves("/model_info")
    with pytest.raises(EngineLost, match="it is not to be reached"):
        await client.get("/model_info", dict)
    await client.close()
