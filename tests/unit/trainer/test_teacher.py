"""A teacher on servers: what it is asked, what of its answers is used, and what is done about bad ones."""

import asyncio
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import ClientTimeout, client, web

from areal_async.config.objective import TeacherSection
from tests.unit.trainer.conftest import plain_row
from tests.waiting import LIMIT_S
from trainer_service.teacher import TeacherError, TeacherServers

LAST = 10
"""Of the vocabulary: SGLang calls it 0."""


def logp_of(ids, place):
    """What the stand-in says of a token: a function of all before it."""
    return -0.01 * (sum(ids[: place + 1]) + place)


def sglang(body):
    ids = body["input_ids"]
    assert body["return_logprob"]
    assert body["logprob_start_len"] == 0
    said = [0 if token == LAST else token for token in ids]
    entries = [[None if i == 0 else logp_of(ids, i), token, None] for i, token in enumerate(said)]
    return {"meta_info": {"input_token_logprobs": entries}}


def vllm(body):
    ids = body["prompt"]
    assert body["model"] == "big"
    entries = [{str(token): {"logprob": logp_of(ids, i)}} for i, token in enumerate(ids)]
    return {"choices": [{"prompt_logprobs": [None, *entries[1:]]}]}


@contextmanager
def serving(answer):
    """`answer(request, body)` gives each response; yields the server's URL."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    runners, where = [], []

    async def handle(request):
        return answer(request, await request.json())

    async def start():
        app = web.Application()
        app.router.add_post("/{path:.*}", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        where.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()

    def run():
        asyncio.set_event_loop(loop)
        loop.create_task(start())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(LIMIT_S)
    try:
        yield where[0]
    finally:
        asyncio.run_coroutine_threadsafe(runners[0].cleanup(), loop).result(LIMIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LIMIT_S)


def rows():
    return [
        plain_row(range(5, 5 + size), [place for place in range(1, size) if place != size // 2])
        for size in (3, 6, 4)
    ]


def wanted():
    return [logp_of(row.token_ids.tolist(), int(place)) for row in rows() for place in row.position]


def servers(*urls, api="sglang", timeout_s=30.0, **more):
    return TeacherServers(TeacherSection(urls=urls, api=api, name="big", timeout_s=timeout_s, **more))


@pytest.mark.parametrize(("api", "answer"), [("sglang", sglang), ("vllm", vllm)])
def test_each_unit_gets_the_log_prob_of_its_own_token(api, answer):
    with serving(lambda request, body: web.json_response(answer(body))) as url:
        found = servers(url, api=api).logprobs(rows())
    assert found.tolist() == pytest.approx(wanted(), rel=1e-6)
    assert servers("http://h").logprobs([]).tolist() == []


def test_a_server_that_is_busy_is_asked_again_and_another_one_too(monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "s3cret")
    seen = []

    def answer(request, body):
        seen.append(request.headers["Authorization"])
        busy = len(seen) <= 2
        return web.json_response({}, status=503) if busy else web.json_response(sglang(body))

    with serving(answer) as url:
        found = servers("http://127.0.0.1:9", url, key_env="TEACHER_KEY").logprobs(rows())
    assert found.tolist() == pytest.approx(wanted(), rel=1e-6)
    assert set(seen) == {"Bearer s3cret"}
    assert len(seen) == 5


def other_tokens(body):
    said = sglang(body)
    said["meta_info"]["input_token_logprobs"][-1][1] += 1
    return said


def not_a_number(body):
    said = sglang(body)
    for entry in said["meta_info"]["input_token_logprobs"][1:]:
        entry[0] = float("nan")
    return said


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda body: web.json_response({}, status=404), "refuses.*404"),
        (lambda body: web.json_response(other_tokens(body)), "other tokens.*tokenizer"),
        (lambda body: web.json_response({"text": ""}), r"no log-probs.*trainer\.teacher\.api"),
        (lambda body: web.json_response(not_a_number(body)), "not finite"),
        (lambda body: web.Response(text="<html>", content_type="text/html"), r"no log-probs.*\.api"),
        (lambda body: web.Response(body=b"{\xff", content_type="application/json"), r"no log-probs.*\.api"),
    ],
)
def test_an_answer_that_cannot_be_used_is_an_error(answer, says):
    with serving(lambda request, body: answer(body)) as url, pytest.raises(TeacherError, match=says):
        servers(url).logprobs(rows())


def test_a_teacher_that_stays_away_is_an_error_in_time():
    with pytest.raises(TeacherError, match=r"not scored 3 rows within trainer\.teacher\.timeout_s = 0\.5 s"):
        servers("http://127.0.0.1:9", timeout_s=0.5).logprobs(rows())


def test_the_only_limit_of_a_long_answer_is_that_of_the_step(monkeypatch):
    monkeypatch.setattr(client, "DEFAULT_TIMEOUT", ClientTimeout(total=0.05))  # 300 s without this

    def slow(request, body):
        time.sleep(0.1)  # the fault itself: longer than the client's own limit
        return web.json_response(sglang(body))

    with serving(slow) as url:
        assert servers(url).logprobs(rows()).tolist() == pytest.approx(wanted(), rel=1e-6)


def test_what_a_call_sampled_at_another_temperature_is_not_compared():
    row = rows()[0]
    other = replace(row, temperature=np.full_like(row.temperature, 0.5))
    with pytest.raises(TeacherError, match=r"score at temperature 1, and a call .* sampled at 0\.5"):
        servers("http://h").logprobs([*rows(), other])


def test_a_key_that_is_not_there_is_named(monkeypatch):
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(TeacherError, match="TEACHER_KEY is not set"):
        servers("http://h", key_env="TEACHER_KEY")
