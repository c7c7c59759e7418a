"""The API on the real server, over a controller whose processes are made up."""

import asyncio
import json
import os
from pathlib import Path

import msgspec
import pytest
from prometheus_client import REGISTRY

from areal_async.base.errors import RpcTimeout, RunError
from areal_async.base.http_server import HttpServer, listen
from areal_async.base.mistakes import ConfigError
from areal_async.cluster import api as api_module
from areal_async.cluster import messages
from areal_async.cluster.api import LIMITS, LOG_BYTES, OPERATIONS
from areal_async.cluster.client import ControllerClient, ControllerGone, TokenRefused, reached
from areal_async.cluster.folder import hash_of
from areal_async.cluster.states import JobRefused, UnknownJob
from areal_async.launch.launcher import WAITS
from areal_async.rpc.control_messages import ScaleWorkers, WorkersChanged
from tests.unit.controller.world import submission
from tests.waiting import until

DOCS = Path(__file__).parents[3] / "docs"


def counted(reason):
    return REGISTRY.get_sample_value("areal_controller_refused_total", {"reason": reason}) or 0


ANSWERS = {
    ("get", "/v1/targets"): list[messages.ScrapeTargets],
    ("get", "/v1/cluster"): messages.ClusterAnswer,
    ("get", "/v1/jobs/{job}"): messages.JobDetailAnswer,
    ("get", "/v1/jobs/{job}/figures"): messages.FiguresAnswer,
    ("post", "/v1/jobs/{job}/scale"): WorkersChanged,
    ("post", "/v1/jobs/{job}/drain"): WorkersChanged,
}
"""The message that answers each operation; `JobsAnswer` the others."""
TEXTS = ("/healthz", "/metrics", "/v1/jobs/{job}/logs/{log}")


def check(method, path, status, content):
    """Read an answer as the message that the operation has, with no field that the message lacks."""
    kind = ANSWERS.get((method, path), messages.JobsAnswer) if status < 400 else messages.RefusalAnswer
    if status >= 400 or path not in TEXTS:
        answer = msgspec.json.decode(content, type=kind)
        assert json.loads(msgspec.json.encode(answer)) == json.loads(content)


def test_the_page_lists_every_operation_with_the_right_that_it_takes():
    page = (DOCS / "controller.md").read_text()
    for operation in OPERATIONS:
        assert f"| `{operation.method} {operation.path}` | {operation.right or 'no'} token |" in page


async def test_every_answer_is_the_message_of_its_operation(served, monkeypatch):
    monkeypatch.setattr(
        api_module, "change_workers", lambda folder, change: WorkersChanged("started rollout-1", ["a", "b"])
    )
    job = "/v1/jobs/{job}"
    async with served() as there:
        await there.start("sums")
        log = there.world.folder / "jobs" / "1-sums" / "output.log"
        log.write_text("hello")
        asked = [
            ("get", "/healthz", "", None, 200),
            ("get", "/metrics", "", None, 200),
            ("get", "/v1/targets", "", None, 200),
            ("get", "/v1/cluster", "", None, 200),
            ("post", "/v1/jobs", "", submission("two"), 201),
            ("post", "/v1/jobs", "", msgspec.structs.replace(submission("sums"), key="another-key"), 409),
            ("post", "/v1/jobs", "", submission("Sums"), 422),
            ("get", "/v1/jobs", "", None, 200),
            ("get", "/v1/jobs", "?ended=2", None, 400),
            ("get", job, "sums", None, 200),
            ("get", job, "none", None, 404),
            ("get", f"{job}/figures", "sums", None, 200),
            ("get", f"{job}/logs/{{log}}", "sums", None, 200),
            ("post", f"{job}/scale", "sums", {"workers": 2}, 200),
            ("post", f"{job}/scale", "sums", {"worker": 2}, 400),
            ("post", f"{job}/drain", "sums", {"worker": "rollout-0"}, 200),
            ("post", f"{job}/drain", "two", {"worker": "rollout-0"}, 409),
            ("post", f"{job}/pause", "sums", None, 200),
            ("post", f"{job}/resume", "sums", None, 409),
            ("post", f"{job}/resume", "sums", {"override": []}, 400),
            ("post", f"{job}/stop", "sums", None, 200),
            ("post", "/v1/down", "", {"keep_jobs": False}, 202),
        ]
        for method, path, name, body, expected in asked:
            real = path.replace("{job}", name if "{job}" in path else "").replace("{log}", "run")
            real += name if name.startswith("?") else ""
            status, _, content = await there.ask(method.upper(), real, body)
            assert status == expected, (path, content)
            check(method, path, status, content)
        for operation in OPERATIONS:
            if operation.right is None:
                continue
            path = operation.path.replace("{job}", "sums").replace("{log}", "run")
            status, headers, content = await there.ask(operation.method, path, token="no-token")
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            check(operation.method.lower(), operation.path, status, content)
    tried = {(method, path) for method, path, *_ in asked}
    assert tried == {(operation.method.lower(), operation.path) for operation in OPERATIONS}


async def test_a_token_that_may_look_changes_nothing_and_none_sees_nothing(served):
    async with served() as there:
        await there.start("sums")
        look = there.folder.token("look")
        tokens, rights = counted("token"), counted("right")
        for operation in OPERATIONS:
            path = operation.path.replace("{job}", "sums").replace("{log}", "run")
            status, _, _ = await there.ask(operation.method, path, b"{}", token=look)
            assert status == (403 if operation.right == "submit" else 200), operation.name
            for header in ("", "Bearer", "Bearer ", f"Basic {there.folder.token()}", f"Bearer x{look}"):
                status, _, _ = await there.ask(operation.method, path, b"{}", token="", Authorization=header)
                assert status == (200 if operation.right is None else 401), (operation.name, header)
        assert counted("right") - rights == sum(each.right == "submit" for each in OPERATIONS)
        assert counted("token") - tokens == 5 * sum(each.right is not None for each in OPERATIONS)
        assert await there.on_thread(there.world.states) == {"sums": "RUNNING"}
        assert there.downs == []


async def test_a_token_that_was_replaced_is_no_longer_let_in(served, caplog):
    async with served() as there:
        old = there.folder.token()
        assert (await there.ask("GET", "/v1/jobs", token=old))[0] == 200
        new = there.folder.path / "new"
        new.write_text(f"submit {hash_of('mine')}\n")
        new.chmod(0o600)
        new.replace(there.folder.tokens)
        before = counted("token")
        assert (await there.ask("GET", "/v1/jobs", token=old))[0] == 401
        assert counted("token") == before + 1
        assert "a token is not let in" in caplog.messages
        assert not any(old in str(vars(record)) for record in caplog.records)
        assert (await there.ask("GET", "/v1/jobs", token="mine"))[0] == 200


async def test_bodies_and_paths_have_bounds(served, monkeypatch):
    monkeypatch.setattr(api_module, "SUBMISSION_BYTES", 1000)
    async with served() as there:
        status, _, content = await there.ask("POST", "/v1/jobs", b"x" * 1001)
        assert status == 413
        check("post", "/v1/jobs", status, content)
        assert (await there.ask("POST", "/v1/down", b"x" * (api_module.BODY_BYTES + 1)))[0] == 413
        assert (await there.ask("POST", "/v1/jobs/sums/resume", b"[" * 100_000))[0] == 400
        for path in ("/v1/jobs/%2e%2e", "/v1/jobs/..%2fx", "/v1/jobs/" + "x" * 5000, "/v1/jobs/%00"):
            assert (await there.ask("GET", path))[0] == 404
        status, _, content = await there.ask("GET", "/v1/nothing")
        assert (status, "error" in json.loads(content)) == (404, True)
        assert (await there.ask("DELETE", "/v1/jobs"))[0] == 405
        assert await there.on_thread(there.world.states) == {}


async def test_the_client_says_what_the_controller_says(served, monkeypatch):
    async def ask(function, *arguments, **options):
        return await asyncio.to_thread(function, *arguments, **options)

    async with served() as there:
        client = there.client
        (job,) = await ask(client.submit, submission("sums"))
        assert (job.name, job.state, there.woken) == ("sums", "PENDING", 1)
        assert await ask(client.submit, submission("sums")) == [job]  # it heard no answer, say
        (second,) = await ask(client.submit, submission("wide", job={"rollout": {"workers": 9}}))
        await there.on_thread(there.world.tick)
        jobs = await ask(client.jobs, ended=False)
        waits = [(each.state, each.waits_for) for each in jobs]
        assert waits == [("STARTING", ""), ("PENDING", "waits for 4 cores")]
        assert (await ask(client.cluster)).free.cpus == 2
        output = Path(job.run_folder).parents[1] / "output.log"
        output.write_text(f"a line\n{WAITS}, for its trainer: GPU 1\n")
        assert (await ask(client.job, "sums")).job.waits_for == f"{WAITS}, for its trainer: GPU 1"
        output.write_text(f"{WAITS}\n0:01 starting buffer\n")
        assert (await ask(client.job, "sums")).job.waits_for == ""
        assert (await ask(client.ask, "sums", "stop")).doing == "stopping"
        assert (await ask(client.ask, str(second.id), "pause")).state == "PAUSED"
        detail = await ask(client.job, "wide")
        assert [entry.state for entry in detail.history] == ["PENDING", "PAUSED"]
        assert detail.config["rollout"]["workers"] == 9
        assert (await ask(client.resume, "wide", ["rollout.workers=1"])).needs.cpus == 2
        with pytest.raises(UnknownJob, match="has no job 'none'"):
            await ask(client.job, "none")
        with pytest.raises(JobRefused, match="waits for its turn"):
            await ask(client.resume, "wide", [])
        with pytest.raises(ConfigError, match=r"trainer.stepz: there is no such field") as caught:
            await ask(client.submit, submission("wrong", job={"trainer": {"stepz": 1}}))
        assert caught.value.source == "job wrong"
        with pytest.raises(TokenRefused, match="let in"):
            await ask(ControllerClient(client.url, "x").jobs, ended=True)
        with pytest.raises(TokenRefused, match="may only look"):
            await ask(ControllerClient(client.url, there.folder.token("look")).ask, "wide", "stop")
        await ask(client.down, keep_jobs=True)
        assert there.downs == [True]
        assert await ask(reached, client.url)
    assert not await ask(reached, client.url)
    monkeypatch.setattr("areal_async.cluster.client.RETRY_S", 0.0)
    with pytest.raises(ControllerGone, match="does not answer"):
        await ask(client.jobs, ended=True)


async def test_what_a_run_refuses_or_does_not_answer_is_told(served, monkeypatch):
    async with served() as there:
        await there.start("sums")
        for error, status in ((RunError("nothing was changed"), 409), (RpcTimeout("no answer"), 504)):

            def change(folder, change, error=error):
                raise error

            monkeypatch.setattr(api_module, "change_workers", change)
            assert (await there.ask("POST", "/v1/jobs/sums/scale", {"workers": 2}))[0] == status
        for wrong in ({"workers": "0"}, {"workers": 0}, {"workers": 2, "limit_s": 5}):
            assert (await there.ask("POST", "/v1/jobs/sums/scale", wrong))[0] == 400
        too_long = {"worker": "a", "limit_ms": 601_000}
        assert (await there.ask("POST", "/v1/jobs/sums/drain", too_long))[0] == 400

        def broken(folder, change):
            raise KeyError("a bug")

        monkeypatch.setattr(api_module, "change_workers", broken)
        assert (await there.ask("POST", "/v1/jobs/sums/scale", {"workers": 2}))[0] == 500
        monkeypatch.setattr(api_module, "change_workers", lambda *_: WorkersChanged("two", ["a", "b"]))
        client = there.client
        answer = await asyncio.to_thread(client.change, "sums", ScaleWorkers(2, 1000))
        assert answer == WorkersChanged("two", ["a", "b"])
        assert (await asyncio.to_thread(client.job, "sums")).job.needs.cpus == 3


# --- logs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait_s", [0.01, 30.0])
async def test_a_log_is_followed_over_a_lost_connection_to_the_end_of_its_job(served, monkeypatch, wait_s):
    monkeypatch.setattr("areal_async.cluster.client.LOG_WAIT_S", wait_s)
    async with served() as there:
        await there.start("sums")
        log = there.world.folder / "jobs" / "1-sums" / "output.log"
        log.write_bytes(b"x" * (LOG_BYTES + 10))
        found, asked, request = bytearray(), [], there.client.request
        there.client.request = lambda *given: (asked.append(given), request(*given))[1]

        def follow():
            for piece in there.client.log("sums", "run", follow=True):
                found.extend(piece)

        following = asyncio.create_task(asyncio.to_thread(follow))
        await until(lambda: following.done() or len(found) == LOG_BYTES + 10)
        before = len(asked)
        await until(lambda: following.done() or wait_s > 1 or len(asked) > before + 1)  # nothing was new
        # The server goes, and another comes at the same address.
        port = int(there.server.url.rpartition(":")[2])
        await there.server.close(grace_s=0.0)
        with log.open("ab") as file:
            file.write("grüße".encode())
        there.server = HttpServer(there.app, listen("127.0.0.1", port), LIMITS, name="controller")
        there.server.start()
        await until(lambda: following.done() or bytes(found).endswith("grüße".encode()))
        there.world.real.end((1, 1))
        await there.on_thread(there.world.tick)
        await following
        assert bytes(found) == b"x" * (LOG_BYTES + 10) + "grüße".encode()


async def test_a_log_that_began_anew_is_read_from_its_beginning(served):
    async with served() as there:
        await there.start("sums")
        log = there.world.folder / "jobs" / "1-sums" / "output.log"
        log.write_text("new")
        status, headers, content = await there.ask("GET", "/v1/jobs/sums/logs/run?offset=100")
        assert (status, headers["areal-log-offset"], content) == (200, "3", b"new")
        for query in ("offset=-1", "offset=x", "offset=nan", "wait_s=31", "offset=1e30"):
            assert (await there.ask("GET", f"/v1/jobs/sums/logs/run?{query}"))[0] == 400


async def test_what_a_job_puts_in_a_logs_place_is_not_read(served, tmp_path):
    async with served() as there:
        await there.start("sums")
        folder = there.world.folder / "jobs" / "1-sums"
        logs = folder / "runs" / "sums" / "logs"
        logs.mkdir(parents=True, mode=0o700)
        (logs / "trainer.log").write_text("it trains")
        (logs / "link.log").symlink_to(there.folder.path / "look.token")
        (logs / "hard.log").hardlink_to(there.folder.path / "submit.token")
        os.mkfifo(logs / "pipe.log")
        (folder / "output.log").symlink_to(there.folder.path / "look.token")
        assert (await there.ask("GET", "/v1/jobs/sums/logs/trainer"))[2] == b"it trains"
        for name in ("link", "hard", "pipe", "run"):
            status, _, content = await there.ask("GET", f"/v1/jobs/sums/logs/{name}")
            assert (status, content) == (200, b"")
        for name in ("..%2f..%2f..%2fsubmit", "no-such", "%00", "A"):
            assert (await there.ask("GET", f"/v1/jobs/sums/logs/{name}"))[0] == 404


async def test_prometheus_is_told_what_the_runs_of_jobs_say_under_their_names(served):
    async with served() as there:
        await there.start("sums")
        folder = there.world.folder / "jobs" / "1-sums" / "runs" / "prometheus"
        folder.mkdir(parents=True)
        for text, told in (
            (None, []),
            ("{", []),
            ('[{"targets": "127.0.0.1:1"}]', []),
            (
                '[{"targets": ["127.0.0.1:1"], "labels": {"job": "other", "process": "trainer"}}]',
                ["127.0.0.1:1"],
            ),
        ):
            if text is not None:
                (folder / "sums.json").write_text(text)
            status, _, content = await there.ask("GET", "/v1/targets")
            found = json.loads(content)
            assert (status, [each["targets"] for each in found]) == (200, [told] if told else [])
        assert found[0]["labels"] == {"job": "sums", "process": "trainer"}
        (folder / "sums.json").rename(folder / "elsewhere.json")
        (folder / "sums.json").symlink_to(folder / "elsewhere.json")
        assert json.loads((await there.ask("GET", "/v1/targets"))[2]) == []
