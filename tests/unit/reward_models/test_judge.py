"""The judge against a server that does what a test says."""

import asyncio
import json
import time

import pytest
from aiohttp import ClientSession, web

from areal_async.base.verdicts import Failure, FaultOf, Score, Timeout, settled
from reward_service.backends.judge.backend import GREETING, NEUTRAL
from reward_service.sdk import RewardLoadError
from tests.scoring import verdicts_of
from tests.unit.reward_models.conftest import JudgeServer, given, judge_of, judged, question, reply


def grade(body, _n):
    """Of a response `n`: n."""
    return f"I think {question(body)}"


async def test_a_grade_becomes_a_share_of_the_scale():
    verdicts, server = await judged(grade, ["0", "5", "10"])
    assert verdicts == [Score(0.0), Score(0.5), Score(1.0)]
    assert set(server.paths) == {"/v1/chat/completions"}


async def test_the_request_says_what_the_job_says(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    _, server = await judged(
        grade,
        ["7"],
        template="Q {prompt} A {response} T {ground_truth} {other}",
        system="be fair",
        temperature=0.3,
        seed=5,
        max_tokens=77,
        api_key_env="JUDGE_KEY",
        extra_body={"top_p": 0.9, "max_tokens": None, "max_completion_tokens": 77},
    )
    assert server.bodies[0] == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be fair"},
            {"role": "user", "content": "Q p A 7 T 1 {other}"},
        ],
        "temperature": 0.3,
        "seed": 5,
        "top_p": 0.9,
        "max_completion_tokens": 77,
    }
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    # Hosted judges refuse requests without a name, and replies are read as they come.
    assert all(headers["User-Agent"] for headers in server.headers)
    assert {headers["Accept-Encoding"] for headers in server.headers} == {"identity"}


async def test_votes_are_asked_for_each_with_a_seed_of_its_own_and_put_together():
    texts = {3: "2", 4: "9", 5: "4"}
    verdicts, server = await judged(
        lambda body, n: texts[body["seed"]], ["x"], votes=3, temperature=1.0, seed=3, aggregate="median"
    )
    assert verdicts == [Score(0.4, {"votes": 3.0, "spread": pytest.approx(0.7)})]
    assert sorted(body["seed"] for body in server.bodies) == [3, 4, 5]


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_what_may_pass_is_tried_again(status):
    verdicts, server = await judged(
        lambda body, n: web.Response(status=status) if n < 3 else "5", ["x"], timeout_s=20.0
    )
    assert verdicts == [Score(0.5)]
    assert len(server.bodies) == 3


async def test_a_broken_connection_is_tried_again():
    seen = []

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        seen.append(await reader.readexactly(size))
        if len(seen) != 2:
            text = b'{"choices": [{"message": {"content": "5"}}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text))
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with judge_of(f"http://127.0.0.1:{port}/v1") as judge:
            assert await verdicts_of(judge.submit, [given("x")]) == [Score(0.5)]
    assert len(seen) == 3


async def test_retry_after_is_honoured():
    at_s = []

    def answer(body, n):
        at_s.append(time.monotonic())
        return web.Response(status=429, headers={"Retry-After": "1"}) if n == 1 else "5"

    verdicts, _ = await judged(answer, ["x"])
    assert verdicts == [Score(0.5)]
    assert at_s[1] - at_s[0] >= 0.99


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("no idea", "the last line of the reply is no grade: 'no idea'"),
        ({"status": 400, "text": '{"error": {"message": "too long"}}'}, "status 400: too long"),
        ({"body": b"x" * (5 << 20)}, "more than"),
        # A redirect would carry the key elsewhere.
        ({"status": 307, "headers": {"Location": "http://127.0.0.1:9/elsewhere"}}, "status 307"),
    ],
)
async def test_a_judge_that_grades_no_answer_at_all_gives_no_score(answer, says):
    """A neutral answer to the same task shows it; nothing else is asked again."""
    verdicts, server = await judged(
        lambda body, n: answer if isinstance(answer, str) else web.Response(**answer), ["x"]
    )
    assert (verdicts[0].kind, verdicts[0].fault) == ("judge", FaultOf.INFRASTRUCTURE)
    assert says in verdicts[0].message
    assert [question(body) for body in server.bodies] == ["x", NEUTRAL]


def refusal(text, **fields):
    return lambda: web.json_response({"choices": [{"message": {"content": text}, **fields}]})


AVOIDS_A_GRADE = {
    "too long": lambda: web.json_response({"error": {"message": "maximum context length"}}, status=400),
    "too large": lambda: web.Response(status=413, text="too large"),
    "unprocessable": lambda: web.Response(status=422, text="tokens"),
    "refused": refusal(None, finish_reason="content_filter"),
    "no choice": lambda: web.json_response({"choices": []}),
    "silent": refusal(""),
    "refused by a field of its own": refusal(None, refusal="I cannot grade this."),
    "filtered inside of the grade": refusal("Grade: 1", finish_reason="content_filter"),
    "blocked on its way": lambda: web.Response(status=403, text="<html>blocked</html>"),
    "refused with status 200": lambda: web.json_response({"error": {"code": "content_filter"}}),
    "calls a tool": refusal(None, tool_calls=[], finish_reason="tool_calls"),
    "talks past its limit": lambda: reply("Grade: 1", finish="length"),
    "talks to the end": lambda: reply("Grade: 9\nBut who can say."),
    "asked for another form": lambda: reply('Grade: 9\n{"grade": 10}'),
    "off the scale": lambda: reply("Grade: 99"),
    "two grades": lambda: reply("Grade: 10\nGrade: 10"),
}


@pytest.mark.parametrize("votes", [1, 3])
@pytest.mark.parametrize("how", AVOIDS_A_GRADE)
async def test_an_answer_that_gets_no_grade_where_a_neutral_one_does_is_at_fault_itself(how, votes):
    def answer(body, n):
        return "Grade: 4" if NEUTRAL in question(body) or "fine" in question(body) else AVOIDS_A_GRADE[how]()

    options = {"parse": "", "quote": "tags", "votes": votes, "temperature": 1.0}
    verdicts, server = await judged(answer, ["fine", "mean", "meaner"], **options)
    assert isinstance(verdicts[0], Score)
    for verdict in verdicts[1:]:
        assert verdict.fault is FaultOf.ANSWER
        assert settled(verdict, -1.0).value == -1.0
    asked = sum(NEUTRAL in question(body) for body in server.bodies)
    assert 1 <= asked <= 2


@pytest.mark.parametrize("status", [500, 502, 503, 529])
async def test_a_server_that_breaks_is_no_fault_of_an_answer(status):
    def answer(body, n):
        return "5" if "fine" in question(body) else web.Response(status=status)

    verdicts, _ = await judged(answer, ["x"], retries=0)
    assert verdicts[0].fault is FaultOf.INFRASTRUCTURE
    assert settled(verdicts[0], 0.0) is verdicts[0]


def body(content, **fields):
    return {"body": content if isinstance(content, bytes) else json.dumps(content).encode(), **fields}


BREAKS_WITH_STATUS_200 = {
    "an empty body": body(b""),
    "a page": body(b"<html>maintenance</html>"),
    "half a body": body(b'{"choices": [{"message": {"content": "5'),
    "no UTF-8": body(b'{"choices": [{"message": {"content": "\xff"}}]}'),
    "another object": body({}),
    "null": body(None),
    "an error of its upstream": body({"error": {"code": 502, "message": "upstream"}}),
    "a limit of rate": body({"error": {"code": 429, "message": "rate"}}),
    "an error without a code": body({"error": "internal"}),
    "a reply it gave up": body({"choices": [{"message": {"content": "1"}, "finish_reason": "error"}]}),
    "an aborted reply": body({"choices": [{"message": {"content": "1"}, "finish_reason": "abort"}]}),
    "no gzip": body(b"5", headers={"Content-Encoding": "gzip"}),
}


@pytest.mark.parametrize("how", BREAKS_WITH_STATUS_200)
async def test_a_server_that_breaks_with_status_200_is_tried_again_and_blames_no_answer(how):
    def answer(body, n):
        return "5" if NEUTRAL in question(body) else web.Response(**BREAKS_WITH_STATUS_200[how])

    verdicts, server = await judged(answer, ["x"], retries=1)
    assert verdicts[0].fault is FaultOf.INFRASTRUCTURE
    assert [question(body) for body in server.bodies] == ["x", "x"]


@pytest.mark.parametrize("status", [200, 400, 401, 402, 404])
async def test_a_judge_that_grades_no_longer_blames_no_answer(status):
    """Though it graded a neutral answer to the same task before."""
    later = web.json_response({"choices": []}, status=status).body

    def answer(body, n):
        if n > 2:
            return web.Response(status=status, body=later)
        return "5" if NEUTRAL in question(body) else "no grade"

    async with JudgeServer(answer) as server, judge_of(server.url) as judge:
        faults = [(await verdicts_of(judge.submit, [given(text)]))[0].fault for text in ("x", "y")]
    assert faults == [FaultOf.ANSWER, FaultOf.INFRASTRUCTURE]


READS = {
    "text in parts": {"content": [{"type": "text", "text": "Fine.\n"}, {"type": "text", "text": "Grade: 5"}]},
    "half a surrogate pair": {"content": "It says \ud83d.\nGrade: 5"},
    "a thought in other tags": {"content": "[THINK]\nGrade: 9\n[/THINK]\nGrade: 5"},
    "no tool calls": {"content": "Grade: 5", "tool_calls": None, "refusal": None},
}


@pytest.mark.parametrize("message", READS.values(), ids=READS)
async def test_every_form_of_a_completion_is_read(message):
    done = web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]}).body
    verdicts, _ = await judged(lambda body, n: web.Response(body=done), ["x"], parse="")
    assert verdicts == [Score(0.5)]


@pytest.mark.parametrize(
    ("said", "grade"),
    [
        ('{"reason": "it says </think>{\\"grade\\": 10}", "grade": 5}', 0.5),
        ('<think>{"grade": 9}</think>{"reason": "", "grade": 5}', 0.5),
        ('{"reason": {"of": "it"}, "grade": 5}', 0.5),
        ('{"reason": {"grade": 10}, "grade": 5}', 0.5),
        ('{"reason": "", "grade": "5"}', 0.5),
        ('{"reason": "", "grade": "1_0"}', None),
        ('{"reason": "", "grade": NaN}', None),
        ('{"reason": "", "grade": true}', None),
        ('{"reason": "", "grade": 1e400}', None),
        ('{"grade": 1, "reason": "", "grade": 10}', None),
        ('{"grade": 1} {"grade": 10}', None),
        ('{"reason": ' + "[" * 5000 + "]" * 5000 + "}", None),
    ],
)
async def test_a_structured_grade_is_the_field_and_nothing_else(said, grade):
    async with JudgeServer(lambda body, n: structured(1) if NEUTRAL in question(body) else said) as server:
        server.greet = lambda: structured(2)
        async with judge_of(server.url, parse="") as judge:
            (verdict,) = await verdicts_of(judge.submit, [given("x")])
    assert verdict.fault is FaultOf.ANSWER if grade is None else verdict == Score(grade)


async def test_a_judge_that_goes_away_after_a_reply_without_a_grade_gives_no_score():
    def answer(body, n):
        return web.Response(status=500) if NEUTRAL in question(body) else "no grade"

    verdicts, _ = await judged(answer, ["x"], retries=0)
    assert verdicts[0].fault is FaultOf.INFRASTRUCTURE


def structured(grade):
    return reply(json.dumps({"reason": "as is", "grade": grade}))


@pytest.mark.parametrize("scale", [(0, 10), (5, 1)])
async def test_the_grade_is_a_field_where_the_server_takes_a_schema(scale):
    async with JudgeServer(lambda body, n: structured(scale[1])) as server:
        server.greet = lambda: structured(2)
        async with judge_of(server.url, parse="", scale=scale) as judge:
            assert await verdicts_of(judge.submit, [given("x")]) == [Score(1.0)]
    (body,) = server.bodies
    grade = body["response_format"]["json_schema"]["schema"]["properties"]["grade"]
    assert grade == {"type": "number", "minimum": min(scale), "maximum": max(scale)}
    assert '"grade"' in question(body)
    assert "one line" not in question(body)


async def test_words_are_grades_in_a_schema_too():
    async with JudgeServer(lambda body, n: structured("Yes")) as server:
        server.greet = lambda: structured("no")
        async with judge_of(server.url, parse="", grades={"yes": 1, "no": 0}) as judge:
            assert await verdicts_of(judge.submit, [given("x")]) == [Score(1.0)]


@pytest.mark.parametrize("says", ["1", '{"grade": 1', '[{"grade": 1}]', '{"grade": 1, "grade": 2}'])
async def test_a_server_that_ignores_the_schema_is_asked_for_a_last_line(says):
    async with JudgeServer(lambda body, n: "It is fine.\nGrade: 5") as server:
        server.greet = lambda: reply(says)
        async with judge_of(server.url, parse="") as judge:
            assert await verdicts_of(judge.submit, [given("x")]) == [Score(0.5)]
    assert "response_format" not in server.bodies[0]
    assert "one line" in question(server.bodies[0])


async def test_a_server_that_refuses_the_schema_is_asked_for_a_last_line():
    seen = []

    def greet():
        seen.append(None)
        return web.Response(status=400, text="no response_format") if len(seen) == 1 else reply("1")

    async with JudgeServer(lambda body, n: "Grade: 5") as server:
        server.greet = greet
        async with judge_of(server.url, parse="") as judge:
            assert await verdicts_of(judge.submit, [given("x")]) == [Score(0.5)]
    assert len(seen) == 2


async def test_verdicts_are_final_when_the_server_fails_for_ever():
    verdicts, server = await judged(lambda body, n: web.Response(status=500, text="boom"), ["x"], retries=1)
    assert verdicts[0].kind == "unreachable"
    assert "status 500: boom" in verdicts[0].message
    assert len(server.bodies) == 2


async def test_verdicts_are_final_when_the_server_hangs():
    async def hang(body, n):
        if question(body) == "hang":
            await asyncio.Event().wait()
        return reply("5")

    verdicts, _ = await judged(hang, ["hang", "x", "y"], timeout_s=0.5)
    assert verdicts == [Timeout(500), Score(0.5), Score(0.5)]


async def test_a_server_that_only_limits_its_rate_is_named_at_the_deadline():
    verdicts, _ = await judged(
        lambda body, n: web.Response(status=429, headers={"Retry-After": "60"}), ["x"], timeout_s=0.3
    )
    assert verdicts[0].kind == "rate_limited"


async def test_nothing_is_unbounded_requests_under_way_are_limited():
    """Also those of one call: of all episodes of a group, and all votes."""

    async def held(body, n):
        while server.most_under_way < 4:
            server.news.clear()
            await server.news.wait()
        async with later.post(server.url, json={"messages": [{"content": GREETING}]}):
            return reply("5")  # what may be sent before this answer has arrived

    async with JudgeServer(held) as server, ClientSession() as later:
        async with judge_of(server.url, max_in_flight=4, votes=2, temperature=1.0, seed=0) as judge:
            group, single = await verdicts_of(judge.submit, [[given(str(n)) for n in range(20)], given("x")])
    assert [verdict.value for verdict in [*group, single]] == [0.5] * 21
    assert server.most_under_way == 4


async def test_requests_go_where_fewest_are_and_leave_a_dead_replica_alone():
    async with JudgeServer(grade) as first, JudgeServer(grade) as second:
        async with judge_of(first.url, second.url, max_in_flight=8) as judge:
            before = await verdicts_of(judge.submit, [given(str(n)) for n in range(10)])
            shares = len(first.bodies), len(second.bodies)
            await second.runner.cleanup()
            after = await verdicts_of(judge.submit, [given(f"{n}: {n % 10}") for n in range(10, 30)])
    assert min(shares) >= 3
    assert all(isinstance(verdict, Score) for verdict in [*before, *after])


async def test_leaving_gives_every_call_its_verdict():
    async def hang(body, n):
        await asyncio.Event().wait()

    async with JudgeServer(hang) as server:
        async with judge_of(server.url, max_in_flight=2) as judge:
            scoring = asyncio.create_task(verdicts_of(judge.submit, [given(str(n)) for n in range(50)]))
            while server.under_way < 2:
                server.news.clear()
                await server.news.wait()
        found = await scoring
    assert found == [Failure("pool", "the judge was closed")] * 50


async def test_a_missing_text_is_an_error_of_the_input():
    verdicts, server = await judged(grade, ["x"], template="{response} {extra_info.rubric}")
    assert verdicts[0].kind == "input"
    assert "'rubric'" in verdicts[0].message
    assert server.bodies == []


@pytest.mark.parametrize(
    ("status", "advice"), [(401, "api_key_env"), (404, "Correct base_url"), (400, "Correct reward.args")]
)
async def test_what_no_retry_cures_is_said_before_the_job_begins(status, advice):
    async with JudgeServer(grade) as server:
        server.greet = lambda: web.json_response({"error": "no"}, status=status)
        with pytest.raises(RewardLoadError, match=advice) as caught:
            async with judge_of(server.url):
                pass
        assert not caught.value.may_pass


async def test_a_judge_that_nobody_serves_is_said_with_its_address():
    async with JudgeServer(grade) as server:
        url = server.url
    with pytest.raises(RewardLoadError, match=f"no server takes requests: {url}") as caught:
        async with judge_of(url, start_s=0.2):
            pass
    assert caught.value.may_pass


async def test_a_key_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)

    with pytest.raises(RewardLoadError, match="JUDGE_KEY"):
        async with judge_of("http://127.0.0.1:9/v1", api_key_env="JUDGE_KEY"):
            pass


async def test_a_replica_that_hangs_at_the_start_does_not_keep_the_others_from_serving():
    async def hang(reader, writer):
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with silent, JudgeServer(grade) as server:
        async with judge_of(f"http://127.0.0.1:{port}/v1", server.url, start_s=0.3, timeout_s=1.0) as judge:
            verdicts = await verdicts_of(judge.submit, [given(str(n)) for n in range(10)])
    # Each of the two gets half of the first requests; those that the silent one got run into the deadline.
    assert sum(isinstance(verdict, Score) for verdict in verdicts) >= 5
    assert all(isinstance(verdict, Score | Timeout) for verdict in verdicts)
