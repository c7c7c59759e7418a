"""The reference server: what it scores, what it refuses, its deadlines, the document that describes it."""

import asyncio
import base64
import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import aiohttp
import jsonschema
import msgspec
import psutil
import pytest
import yaml

from areal_async.base.errors import ArealError, EndpointError
from areal_async.base.verdicts import Abstain, FaultOf, Score, Timeout
from areal_async.cli.tools import ServeRequest
from reward_service.backends.remote.host.http import http_server, http_socket, tls_of
from reward_service.backends.remote.host.service import ScoringService, read_offers
from reward_service.backends.remote.schema import RequestLimits
from reward_service.inputs import RewardMedia
from reward_service.pool.pool import WorkerPool
from reward_service.sdk import RewardLoadError
from reward_service.tools.serve import serve as run_server
from tests.scoring import episode_blob, given
from tests.waiting import LIMIT_S, until

FILE = Path(__file__).with_name("offered.py")
DOCUMENT = Path(__file__).parents[4] / "docs" / "reward-rpc.openapi.yaml"


class Host(NamedTuple):
    """A reference server in this process."""

    service: ScoringService
    url: str


@pytest.fixture
def host():
    @contextlib.asynccontextmanager
    async def serving(
        *names, token="", wants=(), timeout_s=20.0, max_waiting=1024, offers=(), tls=None, **limits
    ):
        targets = [f"{FILE}:{name}" for name in names or ("behave",)]
        offers = offers or read_offers(targets, wants, timeout_s=timeout_s)
        async with WorkerPool([offer.spec for offer in offers], workers=1) as pool:
            service = ScoringService(pool, offers, limits=RequestLimits(**limits), max_waiting=max_waiting)
            server = http_server(service, token, http_socket("127.0.0.1:0", token), tls)
            server.start()
            try:
                yield Host(service, server.url)
            finally:
                await server.close()

    return serving


def body(*responses, **fields):
    request = {"protocol": 1, "request_id": "r", "reward": "behave", "timeout_ms": 20_000}
    request["deadline_ms"] = 20_000
    return {**request, "inputs": [{"response": text, "ground_truth": "1"} for text in responses], **fields}


NOT_UTF8 = json.dumps(body("a")).encode().replace(b'"a"', b'"\xff"')


async def post(url, content, token="", content_type="application/json"):
    headers = {"Content-Type": content_type, **({"Authorization": f"Bearer {token}"} if token else {})}
    data = content if isinstance(content, bytes) else json.dumps(content)
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/score", data=data, headers=headers) as answer:
            return answer.status, answer.headers, await answer.json()


async def get(url, path, token=""):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession() as session:
        async with session.get(url + path, headers=headers) as answer:
            return answer.status, await answer.read()


async def test_verdicts_are_those_of_the_pool(host, backend, collect):
    async with host(timeout_s=1.0) as server:
        async with backend(server.url, timeout_s=15.0, reward="behave") as entered:
            said = ["four", "nan", "abstain", "die", "hang", "x"]
            good, nan, declined, died, hung, last = await collect(entered, [given(text) for text in said])
    assert (good, last) == (Score(0.5, {"length": 4.0}), Score(0.5, {"length": 1.0}))
    assert nan.kind == "not_finite"
    assert declined == Abstain("no opinion")
    assert died.kind == "process_died"
    assert hung == Timeout(1000)


async def test_what_the_server_does_not_get_to_in_time_is_no_timeout(host):
    async with host(timeout_s=3.0) as server:
        first = asyncio.create_task(post(server.url, body("hang")))
        await until(lambda: server.service.health().in_flight == 1, "the first request")
        status, _, answer = await post(server.url, body("one", deadline_ms=200))
        _, _, hung = await first
    assert status == 200
    (verdict,) = answer["verdicts"]
    assert (verdict["type"], verdict["kind"]) == ("error", "not_run")
    assert hung["verdicts"] == [{"type": "timeout", "limit_ms": 3000}]


async def test_a_server_that_asks_for_episodes_gets_them_as_base64_in_json(host, backend, collect):
    async with host("units", wants=("blob",)) as server:
        async with backend(server.url) as entered:
            found = await collect(entered, [given("57", blob=episode_blob())])
        sent = body("57", reward="units")
        sent["inputs"][0]["blob"] = base64.b64encode(episode_blob()).decode()
        check("Request", sent)
        _, _, answer = await post(server.url, sent)
    assert found == [Score(5.0)]
    assert answer["verdicts"][0]["value"] == 5.0


async def test_a_server_that_asks_for_images_gets_them_and_no_other_server_does(host, backend, collect):
    images = [RewardMedia(f"blake3:{n:02x}", "image/png", 5, b"\0\xffxyz") for n in range(2)]
    async with host("pictures", wants=("media",)) as server:
        async with backend(server.url) as entered:
            assert entered.wants_images
            found = await collect(entered, [given("57", media=images, blob=episode_blob())])
            unread = [msgspec.structs.replace(each, data=b"") for each in images]
            (without,) = await collect(entered, [given("57", media=unread)])
            assert (without.kind, without.fault) == ("remote", FaultOf.INFRASTRUCTURE)
            assert "wants images only now: restart the reward service" in without.message
        sent = body("57", reward="pictures")
        sent["inputs"][0]["media"] = json.loads(msgspec.json.encode(images))
        check("Request", sent)
        _, _, answer = await post(server.url, sent)
    assert found == [Score(10.0)]
    assert answer["verdicts"][0]["value"] == 10.0
    async with host("pictures") as server, backend(server.url) as entered:
        assert not entered.wants_images
        assert await collect(entered, [given("57", media=images)]) == [Score(0.0)]


async def test_images_that_are_too_large_for_a_server_are_not_the_fault_of_the_answer(host, backend, collect):
    async with host("pictures", wants=("media",), max_body_bytes=100_000) as server:
        async with backend(server.url) as entered:
            image = RewardMedia("blake3:00", "image/png", 200_000, bytes(200_000))
            (verdict,) = await collect(entered, [given("57", media=[image])])
    assert (verdict.kind, verdict.fault) == ("remote", FaultOf.INFRASTRUCTURE)


@pytest.mark.parametrize(
    ("content", "token", "status", "kind"),
    [
        (b"{", "t", 400, "invalid"), (b'{"\xff": 1}', "t", 400, "invalid"),
        (b"[" * 9000, "t", 400, "invalid"), (NOT_UTF8, "t", 400, "invalid"),
        (body("a", protocol=2), "t", 400, "protocol"),
        (body("a", reward="other"), "t", 404, "unknown_reward"),
        (body("a", scope="group"), "t", 400, "invalid"), (body("a", deadline_ms=0), "t", 400, "invalid"),
        (body("a", args={"word": 1}), "t", 400, "invalid"),
        (body("a", inputs=[{"response": 1}]), "t", 400, "invalid"), (body(*"abcde"), "t", 413, "too_large"),
        (b" " * 20_000, "t", 413, "too_large"), (body("a"), "wrong", 401, "unauthorized"),
        (body("a"), "", 401, "unauthorized"),
    ],
)  # fmt: skip
async def test_what_cannot_be_carried_out_is_refused_by_kind(content, token, status, kind, host):
    async with host(token="t", max_inputs=4, max_body_bytes=10_000) as server:
        got, _, answer = await post(server.url, content, token)
        after, _, good = await post(server.url, body("a"), "t")
    assert (got, answer["error"]["kind"]) == (status, kind)
    check("Refused", answer)
    assert (after, good["verdicts"][0]["value"]) == (200, 0.5)


@pytest.mark.parametrize(
    ("name", "own", "asked"),
    [
        ("weighted", {"parts": [{"name": "exact_match"}]}, {"parts": [{"name": "FILE"}]}),
        (
            "weighted",
            {"parts": [{"name": "exact_match"}]},
            {"parts": [{"name": "weighted", "args": {"parts": [{"name": "FILE"}]}}]},
        ),
        ("code_stdio", {}, {"sandbox": "none"}),
        (f"{FILE}:concise", {"most": 1}, {"nope": 1}),
        (f"{FILE}:concise", {"most": 1}, {"most": 2}),
    ],
)
async def test_no_client_chooses_code_or_the_sandbox(name, own, asked, host, backend, tmp_path):
    ran = tmp_path / "ran"
    file = tmp_path / "evil.py"
    file.write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n")
    asked = json.loads(json.dumps(asked).replace("FILE", f"{file}:f"))

    async with host(offers=read_offers([name], args=own)) as server:
        with pytest.raises(RewardLoadError, match=f"only the server may set {next(iter(asked))}"):
            async with backend(server.url, reward=name.rpartition(":")[2], args=asked, connect_s=2.0):
                pass
        async with backend(server.url, reward=name.rpartition(":")[2], args=own) as entered:
            alive = entered.alive
    assert alive > 0
    assert not ran.exists()


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_what_a_page_in_a_browser_may_post_unasked_is_refused(content_type, host):
    async with host() as server:
        json_too, _, _ = await post(server.url, body("a"), content_type="Application/JSON; charset=utf-8")
        status, _, answer = await post(server.url, body("a"), content_type=content_type)
    assert (status, answer["error"]["kind"], json_too) == (415, "invalid", 200)
    assert "Content-Type: application/json" in answer["error"]["message"]
    check("Refused", answer)


async def test_a_full_server_is_busy_and_says_when_to_come_again(host):
    async with host(timeout_s=3.0, max_waiting=2) as server:
        first = asyncio.create_task(post(server.url, body("hang", "hang", deadline_ms=1000)))
        await until(lambda: server.service.health().in_flight == 2, "the first request")
        status, headers, answer = await post(server.url, body("a"))
        await first
    assert (status, answer["error"]["kind"]) == (429, "busy")
    assert answer["error"]["retry_after_ms"] > 0
    assert int(headers["Retry-After"]) >= 1


async def test_a_server_that_ends_takes_nothing_more_and_finishes_what_it_has(host):
    async with host() as server:
        await server.service.drain(1.0)
        status, health = await get(server.url, "/v1/health")
        refused, _, answer = await post(server.url, body("a"))
    assert (status, json.loads(health)["status"]) == (503, "draining")
    assert (refused, answer["error"]["kind"]) == (503, "unavailable")


async def test_the_reference_server_is_what_the_document_says(host):
    document = yaml.safe_load(DOCUMENT.read_text())

    async with host("behave", "longest", token="t", max_inputs=4) as server:
        found = [
            ("/v1/info", "get", *await get(server.url, "/v1/info", "t")),
            ("/v1/info", "get", *await get(server.url, "/v1/info")),
            ("/v1/health", "get", *await get(server.url, "/v1/health")),
            *[
                ("/v1/score", "post", status, json.dumps(answer).encode())
                for status, _, answer in [
                    await post(server.url, body("four", "nan", "abstain", "die"), "t"),
                    await post(server.url, body("a", "b", reward="longest", scope="group"), "t"),
                    await post(server.url, body(), "t"),
                    await post(server.url, body("a", reward="other"), "t"),
                    await post(server.url, body(*"abcde"), "t"),
                    await post(server.url, body("a"), "t", content_type="text/plain"),
                ]
            ],
        ]
    for path, method, status, content in found:
        described = document["paths"][path][method]["responses"][str(status)]
        if "$ref" in described:
            described = document["components"]["responses"][described["$ref"].rpartition("/")[2]]
        schema = described["content"]["application/json"]["schema"]
        check(schema["$ref"].rpartition("/")[2], json.loads(content))


@pytest.mark.parametrize("name", ["Request", "Verdicts", "Info"])
def test_the_document_refuses_what_is_wrong(name):
    wrong = {"Request": {"protocol": 2}, "Verdicts": {"verdicts": [{"type": "score"}]}, "Info": {}}
    with pytest.raises(jsonschema.ValidationError):
        check(name, wrong[name])


def check(name, content):
    """`content` against the schema of that name in the document. Raises `jsonschema.ValidationError`."""
    document = yaml.safe_load(DOCUMENT.read_text())
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(content)


def test_other_machines_are_served_only_with_a_token():
    with pytest.raises(EndpointError, match="--token-file"):
        http_socket("0.0.0.0:0", "")
    http_socket("0.0.0.0:0", "t").close()
    with pytest.raises(EndpointError, match="HOST:PORT"):
        http_socket("8700", "t")


async def test_the_example_server_answers_the_handshake_as_the_document_says(example):
    url = example().url
    _, info = await get(url, "/v1/info")
    status, _, verdicts = await post(url, body("11", reward="share_of_ones"))
    assert status == 200
    check("Info", json.loads(info))
    check("Verdicts", verdicts)
    assert verdicts["verdicts"][0]["value"] == 1.0


def serve(*arguments):
    command = [sys.executable, "-m", "areal_async.cli.main", "reward", "serve", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def test_reward_serve_says_where_it_serves_and_leaves_nothing(backend, collect, tmp_path):
    with serve(f"{FILE}:concise", "--listen", "127.0.0.1:0", "--token-file", tmp_path / "token") as server:
        try:
            lines = []
            while not lines or not lines[-1].startswith("Ctrl-C"):
                lines.append(server.stdout.readline())
                assert lines[-1], server.stderr.read()
            urls = [line.split()[1] for line in lines if line.startswith("serves ")]
            assert len(urls) == 1
            assert "token_env" in "".join(lines)

            async with backend(urls, token_file=str(tmp_path / "token")) as entered:
                assert await collect(entered, [given("the 1")] * 20) == [Score(1.0)] * 20
            assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
            _, metrics = await get(urls[0], "/metrics", (tmp_path / "token").read_text().strip())
            assert b'areal_reward_verdicts_total{kind="score",reward="offered.py:concise"} 20.0' in metrics
            assert b"areal_reward_workers_alive 1.0" in metrics
            children = psutil.Process(server.pid).children(recursive=True)
            assert children
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(LIMIT_S) == 0
        _, alive = psutil.wait_procs(children, 5)
    assert not alive


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (ServeRequest([f"{FILE}:nothing"]), "nothing"),
        (ServeRequest(["no_such_reward"]), "there is no reward 'no_such_reward'"),
        (ServeRequest([f"{FILE}:concise", f"{FILE}:concise"]), "two rewards are called 'concise'"),
        (ServeRequest([f"{FILE}:concise"], listen="0.0.0.0:0"), "--token-file"),
        (ServeRequest([f"{FILE}:concise"], token_file="/nowhere/token"), "--token-file"),
        (ServeRequest([f"{FILE}:needs"]), r"needs 'word', and it is missing\. Add it"),
        (ServeRequest([f"{FILE}:concise"], args="3"), "--args"),
    ],
)
async def test_reward_serve_says_what_is_wrong_before_it_serves(request_, told, capsys):
    with pytest.raises(ArealError, match=told):
        await run_server(request_)
    assert "serves" not in capsys.readouterr().out


async def test_https_works_with_a_certificate_that_is_trusted_and_with_no_other(
    certificate, host, backend, collect, monkeypatch
):
    monkeypatch.setenv("REWARD_TEST_TOKEN", "t")
    token = {"token_env": "REWARD_TEST_TOKEN"}
    async with host("concise", token="t", tls=tls_of(*certificate)) as server:
        assert server.url.startswith("https://")
        with pytest.raises(RewardLoadError, match="certificate"):
            async with backend(server.url, connect_s=1.0, **token):
                pass
        async with backend(server.url, ca_file=str(certificate[0]), **token) as entered:
            assert await collect(entered, [given("the 1")]) == [Score(1.0)]
