"""A teacher on servers: what it is asked, what of its answers is used, and what is done about bad ones."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from aiohttp import ClientTimeout, client
from msgspec.structs import replace

from areal_async.config.objective import TeacherSection
from tests.unit.trainer.conftest import plain_row
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


def reply(content, status=200, kind="application/json"):
    return status, kind, content if isinstance(content, bytes) else json.dumps(content).encode()


@contextmanager
def serving(answer):
    """`answer(headers, body)` gives each reply; yields the server's URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, kind, data = answer(self.headers, body)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


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
    with serving(lambda headers, body: reply(answer(body))) as url:
        found = servers(url, api=api).logprobs(rows())
    assert found.tolist() == pytest.approx(wanted(), rel=1e-6)
    assert servers("http://h").logprobs([]).tolist() == []


def test_a_server_that_is_busy_is_asked_again_and_another_one_too(monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "s3cret")
    seen = []

    def answer(headers, body):
        seen.append(headers["Authorization"])
        busy = len(seen) <= 2
        return reply({}, 503) if busy else reply(sglang(body))

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
        (lambda body: reply({}, 404), "refuses.*404"),
        (lambda body: reply(other_tokens(body)), "other tokens.*tokenizer"),
        (lambda body: reply({"text": ""}), r"no log-probs.*trainer\.teacher\.api"),
        (lambda body: reply(not_a_number(body)), "not finite"),
        (lambda body: reply(b"<html>", kind="text/html"), r"no log-probs.*\.api"),
        (lambda body: reply(b"{\xff"), r"no log-probs.*\.api"),
    ],
)
def test_an_answer_that_cannot_be_used_is_an_error(answer, says):
    with serving(lambda headers, body: answer(body)) as url, pytest.raises(TeacherError, match=says):
        servers(url).logprobs(rows())


def test_a_teacher_that_stays_away_is_an_error_in_time():
    with pytest.raises(TeacherError, match=r"not scored 3 rows within trainer\.teacher\.timeout_s = 0\.5 s"):
        servers("http://127.0.0.1:9", timeout_s=0.5).logprobs(rows())


def test_the_only_limit_of_a_long_answer_is_that_of_the_step(monkeypatch):
    monkeypatch.setattr(client, "DEFAULT_TIMEOUT", ClientTimeout(total=0.05))  # 300 s without this

    def slow(headers, body):
        time.sleep(0.1)  # the fault itself: longer than the client's own limit
        return reply(sglang(body))

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
