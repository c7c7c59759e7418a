"""The reward `remote` against servers that do well, fail, hang, lie, die and come back."""

import asyncio
import json
import signal
import time

import pytest

from areal_async.base.verdicts import Abstain, Failure, FaultOf, Parts, Score, Timeout
from reward_service import metrics
from reward_service.backends.remote.connection import RemoteServer
from reward_service.sdk import RewardInput, RewardLoadError
from tests.scoring import episode_blob, given
from tests.waiting import until


def score(value):
    return json.dumps({"type": "score", "value": value})


async def test_a_server_in_any_language_scores_every_call(example, backend, collect):
    server = example()
    async with backend(server.url, reward="share_of_ones", args={"digit": "7"}) as entered:
        verdicts = await collect(entered, [given("7" * n + "0" * 7) for n in range(200)])
    assert [v.value for v in verdicts] == [pytest.approx(n / (n + 7)) for n in range(200)]
    assert verdicts[3].components == {"length": 10.0}


async def test_a_killed_and_restarted_server_loses_nothing(example, backend, collect):
    server = example()
    async with backend(server.url, max_in_flight=4, timeout_s=60.0) as entered:
        server.process.send_signal(signal.SIGSTOP)  # so that requests are surely under way when it dies
        collecting = asyncio.create_task(collect(entered, [given("1" * n + "0") for n in range(200)]))
        await until(lambda: sum(r.state.in_flight for r in entered.replicas) == 4, "requests under way")
        server.kill()
        await until(lambda: not entered.alive, "the loss of the server")
        server.start()
        verdicts = await collecting
    assert [v.value for v in verdicts] == [pytest.approx(n / (n + 1)) for n in range(200)]


async def test_a_wrong_token_is_found_at_the_start(example, backend, collect, tmp_path):
    token = tmp_path / "token"

    server = example(REWARD_TOKEN="open-sesame")
    token.write_text("wrong\n")
    with pytest.raises(RewardLoadError, match="unauthorized"):
        async with backend(server.url, token_file=str(token)):
            pass
    token.write_text("open-sesame\n")
    async with backend(server.url, token_file=str(token)) as entered:
        found = await collect(entered, [given("1")])
    assert found[0].value == 1.0


ONE = {"type": "score", "value": 1}


@pytest.fixture
def ask(scripted, backend, collect):
    """`await ask(responses, *answers, **options)`: verdicts of a server that gives these answers first, and
    the number of requests that it got."""

    async def asked(responses, *answers, **options):
        async with scripted().serving() as server, backend(server.url, **options) as entered:
            server.answers += answers
            calls = [one if isinstance(one, RewardInput) else given(one) for one in responses]
            return await collect(entered, calls), len(server.requests)

    return asked


def answer(status=200, body=b"", **headers):
    return lambda asked: (status, headers, body if isinstance(body, bytes) else json.dumps(body).encode())


async def test_every_kind_of_verdict_arrives_as_it_was_sent(ask):
    said = [
        ONE | {"components": {"format": 0.5}, "parts": {"segments": {"1": 2.0}, "units": [1.0] * 5}},
        {"type": "abstain", "reason": "no opinion"},
        {"type": "error", "kind": "exception", "message": "it broke"},
        {"type": "timeout", "limit_ms": 100},
    ]
    (good, *others), _ = await ask([given(json.dumps(one), blob=episode_blob()) for one in said])
    assert good == Score(1.0, {"format": 0.5}, parts=Parts(segments={1: 2.0}, units=[1.0] * 5))
    assert others == [Abstain("no opinion"), Failure("exception", "it broke"), Timeout(100)]


NO_VERDICT = ["1.0", "null", '{"value": 1}', '{"type": "score"}', '{"type": "score", "value": "1"}', "[]"]


@pytest.mark.parametrize(
    ("bad", "kind", "options"),
    [
        *((said, "remote", {}) for said in NO_VERDICT),
        ("hang", "timeout", {"timeout_s": 0.5}), ("drop", "unreachable", {"retries": 1}),
        (given(score(1), extra_info={"x": object()}), "input", {}),
        (given(json.dumps(ONE | {"parts": {"units": [1.0] * 4}}), blob=episode_blob()), "parts", {}),
    ],
)  # fmt: skip
async def test_an_input_that_goes_wrong_is_an_error_and_its_neighbours_are_scored(bad, kind, options, ask):
    (first, wrong, last), _ = await ask([score(0.25), bad, score(0.75)], **options)
    assert (first, last) == (Score(0.25), Score(0.75))
    assert wrong == Timeout(500) if kind == "timeout" else isinstance(wrong, Failure)
    assert kind in ("timeout", "parts") or wrong.kind == kind


@pytest.mark.parametrize(
    "wrong",
    [
        answer(body={"verdicts": [ONE] * 2}), answer(body={"verdicts": []}),
        answer(body={"verdicts": [ONE], "request_id": "another"}), answer(body=b"<html>not json</html>"),
        answer(body={"scores": [1]}), answer(307, Location="/elsewhere"), answer(body=b""),
        answer(body=b'{"verdicts": [' + b"[" * 5000 + b"]" * 5000 + b"]}"), answer(body=b'{"\xff": 1}'),
        answer(body=b'{"verdicts": [{"type": "score", "value": "\xff"}]}'),
    ],
)  # fmt: skip
async def test_an_answer_outside_the_protocol_is_an_error_never_zero(wrong, ask):
    for verdict in (await ask([score(1)], wrong))[0]:
        assert isinstance(verdict, Failure)
        assert verdict.kind == "remote"
        assert "127.0.0.1" in verdict.message or "verdict is none" in verdict.message
        assert verdict.fault is FaultOf.INFRASTRUCTURE


@pytest.mark.parametrize("takes_neutral", [True, False])
@pytest.mark.parametrize("status", [415, 422])
async def test_an_answer_that_a_server_refuses_is_at_fault_where_a_neutral_one_is_taken(
    status, takes_neutral, scripted, backend, collect
):
    """A server of another language that limits the length of a text."""

    def of(asked):
        refused = not takes_neutral or any("x" in one["response"] for one in asked["inputs"])
        return status if refused else 200, {}, json.dumps({"verdicts": [ONE] * len(asked["inputs"])}).encode()

    async with scripted().serving() as server, backend(server.url) as entered:
        server.answers += [of] * 5
        (verdict,) = await collect(entered, [given("x")])
    assert verdict.fault is (FaultOf.ANSWER if takes_neutral else FaultOf.INFRASTRUCTURE)


BUSY = answer(429, {"error": {"kind": "busy", "message": "full", "retry_after_ms": 300}})
OOPS = answer(500, b"oops")


@pytest.mark.parametrize(
    ("answers", "options", "kind", "requests", "least_s"),
    [
        ([BUSY, BUSY], {}, "", 3, 0.6), ([answer(429, b"", **{"Retry-After": "²"})], {}, "", 2, 0),
        ([answer(429, b"")] * 1000, {"outage_s": 0.5}, "rate_limited", None, 0),
        ([OOPS] * 2, {"retries": 2}, "", 3, 0), ([OOPS] * 3, {"retries": 2}, "remote", 3, 0),
    ],
    ids=["busy", "a time that is none", "busy for good", "fails and heals", "fails"],
)  # fmt: skip
async def test_a_server_is_asked_again_so_often_and_after_the_time_it_names(
    answers, options, kind, requests, least_s, ask
):
    began_s = time.monotonic()
    (verdict,), asked = await ask([score(0.5)], *answers, **options)
    assert time.monotonic() - began_s >= least_s
    assert verdict.kind == kind if kind else verdict == Score(0.5)
    assert requests in (None, asked)
    assert kind != "remote" or "oops" in verdict.message


async def test_without_any_server_for_long_the_verdict_is_unreachable(scripted, backend, collect):
    server = scripted()
    async with server.serving():
        entered = await backend(server.url, outage_s=0.5).__aenter__()
    try:
        await until(lambda: not entered.alive, "the loss of the server")
        found = await collect(entered, [given(score(1)), given(score(1))])
    finally:
        await entered.close()
    for verdict in found:
        assert verdict.kind == "unreachable"
        assert "cannot connect" in verdict.message


async def test_two_servers_share_the_work_and_one_does_it_all_when_the_other_dies(scripted, backend, collect):
    first, second = scripted(), scripted()
    async with first.serving():
        async with second.serving():
            urls = [first.url, second.url]
            entered = await backend(urls, max_in_flight=4).__aenter__()
            await until(lambda: entered.alive == 8, "both servers")
            verdicts = await collect(entered, [given(score(n)) for n in range(100)])
            assert min(len(first.requests), len(second.requests)) >= 20
        verdicts += await collect(entered, [given(score(n)) for n in range(100)])
        await entered.close()
    assert [v.value for v in verdicts] == [*range(100), *range(100)]


async def test_a_group_goes_in_one_request_and_gets_one_verdict_each(scripted, backend, collect):
    server = scripted()
    server.info["rewards"][0]["scope"] = "group"
    async with server.serving(), backend(server.url, scope="group") as entered:
        groups = [[given(score(n)) for n in range(4)], [given(score(n)) for n in range(3)]]
        verdicts = await collect(entered, groups)
    assert [[v.value for v in group] for group in verdicts] == [[0, 1, 2, 3], [0, 1, 2]]
    assert sorted(len(request["inputs"]) for request in server.requests) == [3, 4]


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ({"protocol": 2, "rewards": [{"name": "scripted"}]}, "version 2"),
        ({"protocol": 1, "rewards": [{"name": "other"}]}, "no reward 'scripted'; it offers: other"),
        ({"protocol": 1, "rewards": [{"name": "scripted", "scope": "group"}]}, "the scope group"),
        ({"protocol": 1, "rewards": [{"name": "scripted", "version": "2"}]}, "the version '2', not '1'"),
        ({"rewards": []}, "protocol"),
    ],
)
async def test_a_server_that_does_not_fit_is_named_at_the_start(info, told, scripted, backend):
    server = scripted()
    server.info = info
    async with server.serving():
        with pytest.raises(RewardLoadError, match=told) as caught:
            await backend(server.url, reward="scripted", version="1").__aenter__()
        assert not caught.value.may_pass


async def test_a_server_that_is_away_at_the_start_may_come_back(scripted, backend):
    server, unfit = scripted(), scripted()
    async with server.serving():
        away = server.url
    unfit.info = {"protocol": 2, "rewards": []}
    async with unfit.serving():
        for urls in ([away], [unfit.url, away]):
            with pytest.raises(RewardLoadError, match="none of its servers") as caught:
                await backend(urls, connect_s=0.3).__aenter__()
            assert caught.value.may_pass


async def test_a_server_that_is_not_there_yet_is_waited_for(scripted, backend, collect):
    asked = asyncio.Event()

    def turn_away(reader, writer):
        asked.set()
        writer.close()

    closed = await asyncio.start_server(turn_away, "127.0.0.1", 0)
    port = closed.sockets[0].getsockname()[1]
    entering = asyncio.create_task(backend(f"http://127.0.0.1:{port}", connect_s=20).__aenter__())
    await asked.wait()
    closed.close()
    async with scripted().serving(port):
        entered = await entering
        assert await collect(entered, [given(score(0.5))]) == [Score(0.5)]
        await entered.close()


async def test_a_bug_of_ours_does_not_end_the_watch_over_a_server(scripted, backend, collect, monkeypatch):
    look, looks = RemoteServer._look, []

    async def broken_once(self):
        looks.append(self)
        if len(looks) == 1:
            raise KeyError("a bug")
        return await look(self)

    monkeypatch.setattr(RemoteServer, "_look", broken_once)
    async with scripted().serving() as server, backend(server.url, connect_s=20) as entered:
        assert await collect(entered, [given(score(0.5))]) == [Score(0.5)]


async def test_closing_gives_what_waits_its_verdict(scripted, backend, collect):
    async with scripted().serving() as server:
        async with backend(server.url, max_in_flight=2) as entered:
            collecting = asyncio.create_task(collect(entered, [given("hang")] * 100))
            await server.arrived.wait()
        found = await collecting
    assert {verdict.kind for verdict in found} == {"pool"}


async def test_a_server_is_shown_while_it_is_asked(scripted, backend):
    def shown():
        return {s.labels["server"]: s.value for m in metrics.REMOTE_READY.collect() for s in m.samples}

    async with scripted().serving() as server:
        async with backend(server.url):
            assert shown()[server.url] == 1.0
        with pytest.raises(RewardLoadError):
            async with backend(server.url, reward="other", connect_s=1.0):
                pass
        assert server.url not in shown()
