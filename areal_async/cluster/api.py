"""The HTTP API of the controller: who asks is checked, what is asked goes to the controller's one thread.

Promises: nothing is done for a request without a token that allows it; every refusal is JSON that says why;
no request takes more than its bounds (`operations.py`, `submission.py`); logs are read in pieces, each from a
byte that the client names, so that a reader goes on after a connection was lost.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_async import __version__
from areal_async.base.errors import ArealError, FaultError, RunError, RunFolderError, WireError
from areal_async.base.http_server import BodyTooLong, HttpLimits, ServerFull, read_body
from areal_async.base.log import get_logger
from areal_async.base.mistakes import ConfigError
from areal_async.base.own_files import NotOurs, read_own
from areal_async.base.secrecy import shown as hidden
from areal_async.cluster import logs
from areal_async.cluster.controller import Controller
from areal_async.cluster.folder import TokenBook
from areal_async.cluster.messages import (
    ClusterAnswer,
    DownRequest,
    DrainRequest,
    FiguresAnswer,
    JobAnswer,
    JobDetailAnswer,
    JobsAnswer,
    LogFile,
    LogsAnswer,
    MistakeAnswer,
    RefusalAnswer,
    ResumeRequest,
    ScaleRequest,
    ScrapeTargets,
    WorkersAnswer,
)
from areal_async.cluster.metrics import JOBS, REFUSED
from areal_async.cluster.operations import (
    LOG_BYTES,
    MOST_LISTED,
    OFFSET_HEADER,
    OPERATIONS,
    OVER_HEADER,
    Operation,
    openapi_document,
)
from areal_async.cluster.states import ACTIVE, ENDED, STATES, JobRefused, UnknownJob, Verb
from areal_async.cluster.store import StoredJob
from areal_async.cluster.submission import read_submission
from areal_async.config.cluster import ClusterConfig
from areal_async.config.job import JobConfig
from areal_async.launch.run_handle import Run, change_workers
from areal_async.rpc.control_messages import DrainWorker, ScaleWorkers
from areal_async.show.page.app import page_routes
from areal_async.show.page.folder import told_of

LIMITS = HttpLimits(connections=256, held_bytes=256 << 20, answer_s=700.0)
SUBMISSION_BYTES = 96 << 20  # A submission with as many files as it may have, in Base64
BODY_BYTES = 256 << 10
LONGEST_CHANGE_S = 600.0
LOOK_S = 0.25  # How often a log is looked at that is waited for

log = get_logger("controller")
T = TypeVar("T")
M = TypeVar("M", bound=msgspec.Struct)


class ApiRefusal(ArealError):
    """A request is refused with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ControllerApi:
    """`app` answers for `controller`, whose methods run on the one thread of `thread`. `wake` is called when
    there may be something to do, `on_down` when the controller is to end, with whether jobs are kept."""

    def __init__(
        self,
        controller: Controller,
        cluster: ClusterConfig,
        tokens: TokenBook,
        thread: ThreadPoolExecutor,
        *,
        wake: Callable[[], None],
        on_down: Callable[[bool], None],
    ) -> None:
        self._controller = controller
        self._config = cluster
        self._tokens = tokens
        self._thread = thread
        self._wake = wake
        self._on_down = on_down
        self._since_s = time.time()
        self.app = Starlette(
            routes=[
                Route(operation.path, partial(self._answer, operation), methods=[operation.method])
                for operation in OPERATIONS
            ]
            + page_routes(_ControllerRuns(self), self._check_look, _counted_refusal),
            exception_handlers={HTTPException: _no_such_path},
        )

    async def _answer(self, operation: Operation, request: Request) -> Response:
        try:
            self._check_right(operation, request)
            handler: Callable[[Request], Awaitable[Response | msgspec.Struct]] = getattr(
                self, f"_{operation.name}"
            )
            answer = await handler(request)
        except Exception as error:
            refusal = _counted_refusal(error)
            if refusal is None:
                raise
            return refusal
        if isinstance(answer, Response):
            return answer
        return _json(answer, operation.status)

    def _check_look(self, request: Request) -> None:
        self._check_right(next(each for each in OPERATIONS if each.name == "job"), request)

    def _check_right(self, operation: Operation, request: Request) -> None:
        if operation.right is None:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        right = self._tokens.right_of(token.strip()) if scheme.lower() == "bearer" else None
        if right is None:
            log.warning("a token is not let in", peer=_peer(request))
            raise ApiRefusal(401, "give a token that is let in: `Authorization: Bearer TOKEN`")
        if operation.right == "submit" and right != "submit":
            log.warning("a token may only look", peer=_peer(request), operation=operation.name)
            raise ApiRefusal(403, f"this token may only look, and {operation.name} takes one that may submit")

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """On the controller's thread."""
        call = partial(function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _job_of(self, request: Request) -> StoredJob:
        return await self._call(self._controller.find, request.path_params["job"])

    async def told_jobs(self) -> list[dict[str, Any]]:
        """The jobs as the page lists them, the newest first."""
        listed = await self._call(
            self._listed, lambda: self._controller.store.in_states(STATES, most=MOST_LISTED)
        )
        return await asyncio.to_thread(lambda: [*map(_told, reversed(listed.jobs))])

    async def told_job(self, key: str) -> tuple[Path, dict[str, Any]]:
        """The run folder of a job by its name or id, and what the page says of it in place of what the
        folder says. Raises `UnknownJob`."""
        (job,) = (await self._call(self._listed, lambda: [self._controller.find(key)])).jobs
        return Path(job.run_folder), {each: said for each, said in _said(job).items() if said}

    # --- operations, by their names ----------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def _metrics(self, request: Request) -> Response:
        for state, count in (await self._call(self._controller.store.counts)).items():
            JOBS.labels(state).set(count)
        return Response(prometheus_client.generate_latest(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def _targets(self, request: Request) -> Response:
        running = await self._call(self._controller.store.in_states, ACTIVE)
        found = await asyncio.to_thread(lambda: [*chain.from_iterable(map(self._targets_of, running))])
        return Response(msgspec.json.encode(found), media_type="application/json")

    def _targets_of(self, job: StoredJob) -> list[ScrapeTargets]:
        """Those of one job, under its own name whatever its file says; none before it serves."""
        path = self._controller.folder(job).targets(job.name)
        try:
            content = read_own(path, max_bytes=BODY_BYTES)
            found = msgspec.json.decode(content, type=list[ScrapeTargets])
        except (OSError, NotOurs, msgspec.DecodeError):
            return []
        return [ScrapeTargets(each.targets, each.labels | {"job": job.name}) for each in found]

    async def _document(self, request: Request) -> Response:
        return Response(msgspec.json.encode(openapi_document()), media_type="application/json")

    async def _cluster(self, request: Request) -> ClusterAnswer:
        counts = await self._call(self._controller.store.counts)
        return ClusterAnswer(
            self._config.cluster,
            self._config.launcher,
            __version__,
            self._since_s,
            self._controller.total,
            await self._call(self._controller.free),
            {state: counts[state] for state in STATES},
        )

    async def _list_jobs(self, request: Request) -> JobsAnswer:
        with_ended, limit = (_parameter("list_jobs", name, request) for name in ("ended", "limit"))
        states = STATES if with_ended else tuple(state for state in STATES if state not in ENDED)
        return await self._call(
            self._listed, lambda: self._controller.store.in_states(states, most=int(limit))
        )

    async def _submit(self, request: Request) -> JobsAnswer:
        body = await read_body(request, SUBMISSION_BYTES)

        def submit() -> list[StoredJob]:
            return self._controller.submit(read_submission(body))

        answer = await self._call(self._listed, submit)
        self._wake()
        return answer

    async def _job(self, request: Request) -> JobDetailAnswer:
        def detail() -> JobDetailAnswer:
            job = self._controller.find(request.path_params["job"])
            (shown,) = self._listed(lambda: [job]).jobs
            try:
                config = self._controller.config_of(job).model_dump(mode="json")
            except (ConfigError, RunFolderError):
                config = job.content  # a release that reads job files in another way
            public = hidden(config, JobConfig)
            return JobDetailAnswer(shown, self._controller.store.history(job.id), public)

        return await self._call(detail)

    async def _pause(self, request: Request) -> JobsAnswer:
        return await self._ask(request, "pause")

    async def _stop(self, request: Request) -> JobsAnswer:
        return await self._ask(request, "stop")

    async def _resume(self, request: Request) -> JobsAnswer:
        return await self._ask(request, "resume", (await _message(request, ResumeRequest)).overrides)

    async def _ask(self, request: Request, verb: Verb, overrides: list[str] | None = None) -> JobsAnswer:
        name = request.path_params["job"]
        ask = partial(self._controller.ask, name, verb, overrides or [])
        answer = await self._call(self._listed, lambda: [ask()])
        self._wake()
        return answer

    async def _scale(self, request: Request) -> WorkersAnswer:
        given = await _message(request, ScaleRequest)
        if not 1 <= given.workers <= 10_000:
            raise ApiRefusal(400, "workers is not within 1 and 10000")
        answer = await self._change(request, ScaleWorkers(given.workers, _ms(given.timeout_s)))
        await self._call(self._controller.scaled, request.path_params["job"], given.workers)
        return answer

    async def _drain(self, request: Request) -> WorkersAnswer:
        given = await _message(request, DrainRequest)
        drain = DrainWorker(given.worker, _ms(given.timeout_s), given.outside)
        answer = await self._change(request, drain)
        if answer.workers:
            await self._call(self._controller.scaled, request.path_params["job"], len(answer.workers))
        return answer

    async def _change(self, request: Request, change: ScaleWorkers | DrainWorker) -> WorkersAnswer:
        job = await self._job_of(request)
        if job.state not in ACTIVE or job.wish != "run":
            raise JobRefused(f"job {job.name} is {job.state}, and only a job that runs has workers")
        folder = self._controller.folder(job).run_folder(job.name)
        done = await asyncio.to_thread(change_workers, folder, change)
        return WorkersAnswer(done.text, done.workers)

    async def _figures(self, request: Request) -> FiguresAnswer:
        job = await self._job_of(request)
        folder = self._controller.folder(job).run_folder(job.name)
        return await asyncio.to_thread(_figures_of, folder)

    async def _list_logs(self, request: Request) -> LogsAnswer:
        job = await self._job_of(request)
        found = await asyncio.to_thread(lambda: list(logs.log_sizes(self._controller.folder(job), job.name)))
        return LogsAnswer([LogFile(name, size) for name, size in found])

    async def _log(self, request: Request) -> Response:
        offset, wait_s = (_parameter("log", name, request) for name in ("offset", "wait_s"))
        job = await self._job_of(request)
        folder = self._controller.folder(job)
        name = request.path_params["log"]
        path = logs.log_path(folder, job.name, name)
        is_there = path is not None and await asyncio.to_thread(os.path.lexists, path)
        if path is None or not (is_there or name == logs.OF_THE_RUN):
            names = ", ".join(name for name, _ in logs.log_sizes(folder, job.name)) or "none yet"
            raise ApiRefusal(404, f"job {job.name} has no such log. Its logs are: {names}")
        deadline_s = time.monotonic() + wait_s
        while True:
            state = (await self._call(self._controller.store.get, job.id)).state
            found, following = await asyncio.to_thread(logs.read_log, path, int(offset), LOG_BYTES)
            over = not found and state not in (*ACTIVE, "PENDING")
            if found or over or time.monotonic() >= deadline_s:
                break
            await asyncio.sleep(LOOK_S)
        headers = {OFFSET_HEADER: str(following), OVER_HEADER: "true" if over else "false"}
        return Response(found, media_type="text/plain", headers=headers)

    async def _down(self, request: Request) -> JobsAnswer:
        keep = (await _message(request, DownRequest)).keep_jobs
        ending = await self._call(self._listed, lambda: [] if keep else self._controller.stop_all())
        self._on_down(keep)
        return ending

    def _listed(self, jobs: Callable[[], list[StoredJob]]) -> JobsAnswer:
        found = jobs()
        waits = self._controller.turns().waits if any(job.state == "PENDING" for job in found) else {}
        answers = []
        for job in found:
            folder = self._controller.folder(job)
            wait = folder.waits() if job.state == "STARTING" else waits.get(job.id, "")
            answers.append(JobAnswer.of(job, str(folder.run_folder(job.name)), wait))
        return JobsAnswer(answers)


class _ControllerRuns:
    """The runs of the controller's jobs, for the page."""

    def __init__(self, api: ControllerApi) -> None:
        self._api = api

    async def jobs(self) -> list[dict[str, Any]]:
        return await self._api.told_jobs()

    async def find(self, key: str) -> tuple[Path, dict[str, Any]]:
        return await self._api.told_job(key)


def _told(answer: JobAnswer) -> dict[str, Any]:
    """A job in the page's list: what its run folder says, under the state that the controller has it in."""
    return told_of(Path(answer.run_folder)) | _said(answer)


def _said(answer: JobAnswer) -> dict[str, Any]:
    waits = answer.waits_for or (answer.reason if answer.state in ("FAILED", "PAUSED", "STOPPED") else "")
    said = {"state": answer.state, "doing": answer.doing, "changed_s": answer.changed_s, "waits": waits}
    return said | {"key": str(answer.id), "name": answer.name}


def _counted_refusal(error: Exception) -> Response | None:
    refusal = _refusal(error)
    if refusal is not None:
        REFUSED.labels({401: "token", 403: "right"}.get(refusal.status_code, "request")).inc()
    return refusal


def _figures_of(folder: Any) -> FiguresAnswer:
    try:
        status = Run.open(folder).status()
    except RunFolderError:
        return FiguresAnswer()  # it has not begun
    return FiguresAnswer(
        **{name: getattr(status, name) for name in FiguresAnswer.__struct_fields__ if name != "message"},
        message=status.stall.detail if status.stall is not None else status.message,
    )


async def _no_such_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    REFUSED.labels("request").inc()
    return _json(RefusalAnswer("there is no such operation: /v1/openapi.json names those that are"), status)


def _peer(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def _ms(seconds: float) -> int:
    if not 0 <= seconds <= LONGEST_CHANGE_S:
        raise ApiRefusal(400, f"timeout_s is not within 0 and {LONGEST_CHANGE_S:g}")
    return int(seconds * 1000)


def _parameter(operation: str, name: str, request: Request) -> float:
    parameters = {
        each.name: each for found in OPERATIONS if found.name == operation for each in found.parameters
    }
    try:
        return parameters[name].read(request.query_params.get(name))
    except ValueError as error:
        raise ApiRefusal(400, f"{name}: {error}") from None


async def _message(request: Request, kind: type[M]) -> M:
    return msgspec.json.decode(await read_body(request, BODY_BYTES) or b"{}", type=kind)


def _json(answer: msgspec.Struct, status: int) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def _refusal(error: Exception) -> Response | None:
    """What to answer for an error; None for one of ours."""
    headers: dict[str, str] = {}
    answer = RefusalAnswer(str(error))
    match error:
        case ApiRefusal():
            status = error.status
            if status == 401:
                headers["www-authenticate"] = "Bearer"
        case UnknownJob():
            status = 404
        case ConfigError():
            status = 422
            mistakes = [MistakeAnswer(each.field, each.problem, each.fix) for each in error.mistakes]
            answer = RefusalAnswer(str(error), mistakes)
        case JobRefused() | RunFolderError() | RunError() | FaultError():
            status = 409
        case WireError():
            status, answer = 504, RefusalAnswer(f"the run does not answer: {error}")
        case msgspec.DecodeError() | UnicodeDecodeError() | RecursionError():
            status = 400
        case BodyTooLong():
            status, answer = 413, RefusalAnswer("the body is too large")
            headers["connection"] = "close"
        case ServerFull():
            status, answer = 503, RefusalAnswer("too much is under way: ask again later")
        case _:
            return None
    return Response(msgspec.json.encode(answer), status, headers, "application/json")
