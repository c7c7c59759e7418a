"""The page of the controller's jobs: who may see it, and what is not to be seen by it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from pathlib import Path

import msgspec
import pytest

from areal_async.cluster.folder import hash_of
from areal_async.show.page.app import POLICY, STATIC
from tests.unit.controller.served import Served, Serving
from tests.unit.controller.world import submission
from tests.unit.page.runs import append, episode, load, run_folder, step, write_samples
from tests.waiting import LIMIT_S

SECRET = "the answer that nobody but its job's people may read"
KEY = "/step-00000009.jsonl"
DATA = (
    "/v1/page/jobs",
    "/v1/page/jobs/sums",
    "/v1/page/jobs/sums/records",
    "/v1/page/jobs/sums/samples",
    f"/v1/page/jobs/sums/samples?key={KEY}",
    f"/v1/page/jobs/sums/samples?key={KEY}&episode=0",
    "/v1/page/jobs/sums/samples?search=answer",
)


def begin(there: Served, name: str = "sums", id: int = 1) -> Path:
    """What a run of the job has written."""
    folder = run_folder(there.folder.path / "jobs" / f"{id}-{name}" / "runs", name)
    worker = {"busy_s": {"rollout": 0.0}, "tokens": 0}
    append(
        folder, [load(0.0, 0, worker=worker), step(0), step(1, reward_mean=0.25), load(4.0, 2, worker=worker)]
    )
    write_samples(folder, KEY[1:], [episode([SECRET])])
    return folder


async def seen(there: Served, path: str, **headers: str) -> tuple[int, str]:
    """What is answered to the path as it stands here, with nothing in it put right on the way."""

    def ask() -> tuple[int, str]:
        host, _, port = there.server.url.removeprefix("http://").rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=LIMIT_S)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    return await asyncio.to_thread(ask)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_who_has_no_token_that_is_let_in_sees_nothing_of_any_job(served: Serving) -> None:
    async with served() as there:
        await there.start("sums")
        begin(there)
        good = there.folder.token("look")
        strangers: list[dict[str, str]] = [{}, *map(bearer, ("", "x", f"{good}x", good[:-1], hash_of(good)))]
        strangers += [
            {"authorization": f"Basic {good}"},
            {"authorization": good},
            {"cookie": f"token={good}"},
        ]
        for path in DATA:
            assert (await seen(there, path, **bearer(good)))[0] == 200, path
            for stranger in strangers:
                status, content = await seen(there, path, **stranger)
                assert status == 401, (path, stranger)
                assert list(json.loads(content)) == ["error", "mistakes"], content
            separator = "&" if "?" in path else "?"
            assert (await seen(there, f"{path}{separator}token={good}"))[0] == 401
        # Whose token was taken away sees nothing from then on.
        there.folder.tokens.write_text(f"look {hash_of('another')}\n")
        for path in DATA:
            assert (await seen(there, path, **bearer(good)))[0] == 401, path


async def test_who_may_look_is_shown_jobs_charts_and_samples(served: Serving) -> None:
    async with served() as there:
        await there.start("sums")
        begin(there)
        await there.on_thread(
            there.world.controller.submit, submission("wide", job={"rollout": {"workers": 9}})
        )
        for token in (there.folder.token("look"), there.folder.token()):

            async def told(path: str, token: str = token) -> object:
                status, headers, content = await there.ask("GET", path, token=token)
                assert (status, headers["cache-control"]) == (200, "no-store"), content
                return json.loads(content)

            wide, sums = await told(DATA[0])
            assert (sums["name"], sums["state"], sums["step"], sums["reward"]) == ("sums", "RUNNING", 2, 0.25)
            assert (wide["state"], wide["waits"], wide["step"]) == ("PENDING", "waits for 4 cores", 0)
            job = await told(DATA[1])
            assert (job["state"], job["steps"], job["bound"]) == ("RUNNING", 100, 4)
            records = await told(DATA[2])
            assert [row[1] for row in records["rows"]] == [0, 1, 2]
            assert await told(f"{DATA[2]}?offset={records['offset']}") == {**records, "rows": []}
            assert [each["key"] for each in await told(DATA[3])] == [KEY]
            assert (await told(DATA[5]))["segments"][1]["text"] == SECRET
            assert [each["index"] for each in await told(DATA[6])] == [0]
            # One that waits for its turn has nothing yet, which is no error.
            waiting = await told(f"/v1/page/jobs/{wide['key']}")
            assert (waiting["state"], waiting["waits"]) == ("PENDING", "waits for 4 cores")
            assert (await told("/v1/page/jobs/wide/records"))["rows"] == []
            assert await told("/v1/page/jobs/wide/samples") == []
        for name, kind in STATIC.items():
            path = "/" if name == "index.html" else f"/page/{name}"
            status, headers, _ = await there.ask("GET", path, token="")
            assert (status, headers["content-type"]) == (200, kind)
            assert headers["content-security-policy"] == POLICY
            assert headers["x-content-type-options"] == "nosniff"


async def test_a_job_that_took_the_name_of_an_ended_one_does_not_hide_it(served: Serving) -> None:
    async with served() as there:
        await there.start("sums")
        begin(there)
        there.world.real.end((1, 1), "failed", "out of memory")
        again = msgspec.structs.replace(submission("sums"), key="another-key")
        await there.on_thread(there.world.tick)
        await there.on_thread(there.world.controller.submit, again)
        _, _, content = await there.ask("GET", DATA[0])
        told = {each["key"]: (each["name"], each["state"], each["step"]) for each in json.loads(content)}
        assert told == {"2": ("sums", "PENDING", 0), "1": ("sums", "FAILED", 2)}
        for key, state, count in (("1", "FAILED", 1), ("2", "PENDING", 0), ("sums", "PENDING", 0)):
            overview = json.loads((await there.ask("GET", f"/v1/page/jobs/{key}"))[2])
            assert (overview["state"], overview["name"]) == (state, "sums")
            assert len(json.loads((await there.ask("GET", f"/v1/page/jobs/{key}/samples"))[2])) == count


async def test_no_name_that_a_reader_gives_leads_out_of_the_files_of_samples(served: Serving) -> None:
    async with served() as there:
        await there.start("sums")
        folder = begin(there)
        outside = there.folder.path / "step-00000009.jsonl"
        outside.write_text(json.dumps(episode(["outside"])) + "\n")
        good = bearer(there.folder.token("look"))
        ups = ".. %2e%2e %2e%2e%2f%2e%2e ..%2f..%2fjobs %252e%252e ..%5c.. %00 sums%00 %ff"
        names = (
            *ups.split(),
            "1-sums",
            "sums%2f..%2fsums",
            "%2Fetc",
            str(folder).replace("/", "%2f"),
            "9" * 400,
        )
        for name in names:
            for rest in ("", "/records", "/samples", f"/samples?key={KEY}", "/samples?search=outside"):
                status, content = await seen(there, f"/v1/page/jobs/{name}{rest}", **good)
                assert status in (404, 405), (name, rest, status)
                assert "outside" not in content.replace("search=outside", "")
        names = f"/../..{KEY} ..{KEY} {outside} /{outside} /job.yaml /../job.yaml \0 {KEY}\0 {KEY[1:]} /{KEY}"
        keys = names.split(" ")
        for key in (*keys, *(each.replace(".", "%2e").replace("/", "%2f") for each in keys)):
            for more in ("", "&episode=0"):
                quoted = key.replace("\0", "%00")
                status, content = await seen(there, f"/v1/page/jobs/sums/samples?key={quoted}{more}", **good)
                assert status == 404, (key, content)
        for index in ("1", "-1", "1e9", "9" * 400, "0x0", "..", "%c2%b2"):
            assert (await seen(there, f"{DATA[4]}&episode={index}", **good))[0] == 404, index
        for offset in ("-1", "1e9", "x", "9" * 400, "%d9%a1"):
            assert (await seen(there, f"{DATA[2]}?offset={offset}", **good))[0] == 200, offset
        for path in (
            "page/../app.py",
            "page/%2e%2e/app.py",
            "page/..%2fapp.py",
            "/page/page.js",
            "page/",
            "page/x",
        ):
            assert (await seen(there, f"/{path}", **good))[0] == 404, path


def secret_place(tmp_path: Path) -> Path:
    """A run elsewhere, that no reader of the controller's is to see."""
    folder = run_folder(tmp_path / "elsewhere")
    append(folder, [step(0, policy=SECRET, rewards={SECRET: 1.0})])
    (folder / "job.yaml").write_text(f"{SECRET}: [")
    write_samples(folder, KEY[1:], [episode([SECRET])])
    write_samples(folder / "policies" / "policy", KEY[1:], [episode([SECRET])])
    return folder


@pytest.mark.parametrize(
    "place",
    [f"samples{KEY}", "samples", "policies", "policies/policy", "metrics.jsonl", "job.yaml", "run.lock", ""],
)
async def test_what_a_jobs_code_linked_into_its_folder_is_not_shown(
    served: Serving, tmp_path: Path, place: str
) -> None:
    elsewhere = secret_place(tmp_path)
    async with served() as there:
        await there.start("sums")
        folder = run_folder(there.folder.path / "jobs" / "1-sums" / "runs")
        link = folder / place
        link.parent.mkdir(exist_ok=True, mode=0o700)
        if link.is_dir():
            for each in link.iterdir():
                each.unlink()
            link.rmdir()
        link.unlink(missing_ok=True)
        link.symlink_to(elsewhere / place)
        for path in (
            *DATA,
            f"/v1/page/jobs/sums/samples?key=policy{KEY}",
            "/v1/page/jobs/sums/samples?search=nobody",
        ):
            status, content = await seen(there, path, **bearer(there.folder.token()))
            assert status in (200, 404, 409), (path, content)
            assert SECRET not in content, path


async def test_what_is_no_file_keeps_no_reader_waiting(served: Serving) -> None:
    async with served() as there:
        await there.start("sums")
        folder = begin(there)
        for path in (folder / "metrics.jsonl", folder / "job.yaml", folder / "samples" / KEY[1:]):
            path.unlink()
            os.mkfifo(path, 0o600)
        answers = [(await seen(there, path, **bearer(there.folder.token())))[0] for path in DATA]
        assert answers == [200, 409, 200, 200, 404, 404, 200]
