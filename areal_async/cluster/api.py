"""The HTTP API of the controller. It checks the token and passes the request to the controller's single
thread.

Promises: a request has no effect without a token that allows it. Every refusal is JSON with the reason. The
size of each request is limited (below, and in `submission.py`). Logs are read in pieces. The client names the
first byte of each piece, so a reader can continue after a lost connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, partialmethod
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import prometheus_client
from msgspec import structs
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
from areal_async.base.own_files import read_record
from areal_async.base.secrecy import shown as hidden
from areal_async.cluster.controller import Controller
from areal_async.cluster.folder import ClusterFolder, Right
from areal_async.cluster.logs import read_log
from areal_async.cluster.messages import (
    LOG_WAIT_S,
    OFFSET_HEADER,
    OVER_HEADER,
    ClusterAnswer,
    DownRequest,
    FiguresAnswer,
    JobAnswer,
    JobDetailAnswer,
    JobsAnswer,
    RefusalAnswer,
    ResumeRequest,
    ScrapeTargets,
)
from areal_async.cluster.metrics import JOBS, REFUSED
from areal_async.cluster.states import ACTIVE, ENDED, STATES, JobRefused, UnknownJob, Verb
from areal_async.cluster.store import StoredJob
from areal_async.cluster.submission import read_submission
from areal_async.config.cluster import ClusterConfig
from areal_async.config.job import JobConfig
from areal_async.launch.run_handle import Run, change_workers
from areal_async.rpc.control_messages import DrainWorker, ScaleWorkers, WorkersChanged
from areal_async.show.page.app import page_routes
from areal_async.show.page.folder import told_of

LIMITS = HttpLimits(connections=256, held_bytes=256 << 20, answer_s=700.0)
SUBMISSION_BYTES = 96 << 20  # Largest submission, with its files in Base64
BODY_BYTES = 256 << 10
LOG_BYTES = 256 << 10  # Most bytes of a log in one answer
MOST_LISTED = 1000
LONGEST_CHANGE_MS = 600_000
LOOK_S = 0.25  # Poll interval of a log while a request waits for it

log = get_logger("controller")
T = TypeVar("T")
M = TypeVar("M", bound=msgspec.Struct)


class Operation(NamedTuple):
    """One method of one path. If `right` is None, the operation needs no token."""

    name: str
    method: Literal["GET", "POST"]
    path: str
    right: Right | None
    status: int = 200


OPERATIONS = (
    Operation("health", "GET", "/healthz", None),
    Operation("metrics", "GET", "/metrics", "look"),
    Operation("targets", "GET", "/v1/targets", "look"),
    Operation("cluster", "GET", "/v1/cluster", "look"),
    Operation("list_jobs", "GET", "/v1/jobs", "look"),
    Operation("submit", "POST", "/v1/jobs", "submit", 201),
    Operation("job", "GET", "/v1/jobs/{job}", "look"),
    Operation("figures", "GET", "/v1/jobs/{job}/figures", "look"),
    Operation("pause", "POST", "/v1/jobs/{job}/pause", "submit"),
    Operation("stop", "POST", "/v1/jobs/{job}/stop", "submit"),
    Operation("resume", "POST", "/v1/jobs/{job}/resume", "submit"),
    Operation("scale", "POST", "/v1/jobs/{job}/scale", "submit"),
    Operation("drain", "POST", "/v1/jobs/{job}/drain", "submit"),
    Operation("log", "GET", "/v1/jobs/{job}/logs/{log}", "look"),
    Operation("down", "POST", "/v1/down", "submit", 202),
)
"""The operations of the API, explained in docs/controller.md. The method `_NAME` of `ControllerApi` answers
operation NAME."""


class ApiRefusal(ArealError):
    """A refused request; the response has this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ControllerApi:
    """The application `app` for `controller`. It accepts the tokens of `folder`.

    The controller's methods run on the single thread of `thread`. `wake` is called when the controller may
    have work. `on_down` is called when the controller must end; its argument is true if jobs keep running.
    The web page also gets its runs from this API."""

    def __init__(
        self,
        controller: Controller,
        cluster: ClusterConfig,
        folder: ClusterFolder,
        thread: ThreadPoolExecutor,
        *,
        wake: Callable[[], None],
        on_down: Callable[[bool], None],
    ) -> None:
        self._controller = controller
        self._config = cluster
        self._folder = folder
        self._thread = thread
        self._wake = wake
        self._on_down = on_down
        self._since_s = time.time()
        routes = [Route(each.path, partial(self._answer, each), methods=[each.method]) for each in OPERATIONS]
        look = partial(self._check_right, next(each for each in OPERATIONS if each.name == "job"))
        routes += page_routes(self, look, _counted_refusal)
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_path})

    async def _answer(self, operation: Operation, request: Request) -> Response:
        try:
            self._check_right(operation, request)
            handler: Callable[[Request], Awaitable[Response | msgspec.Struct]]
            handler = getattr(self, f"_{operation.name}")
            answer = await handler(request)
        except Exception as error:
            if (refusal := _counted_refusal(error)) is None:
                raise
            return refusal
        return answer if isinstance(answer, Response) else _json(answer, operation.status)

    def _check_right(self, operation: Operation, request: Request) -> None:
        if operation.right is None:
            return
        peer = request.client.host if request.client is not None else ""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        right = self._folder.right_of(token.strip()) if scheme.lower() == "bearer" else None
        if right is None:
            log.warning("a token is not let in", peer=peer)
            raise ApiRefusal(401, "give a token that is let in: `Authorization: Bearer TOKEN`")
        if operation.right == "submit" and right != "submit":
            log.warning("a token may only look", peer=peer, operation=operation.name)
            raise ApiRefusal(403, f"this token may only look, and {operation.name} takes one that may submit")

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the controller's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _job_of(self, request: Request) -> StoredJob:
        return await self._call(self._controller.find, request.path_params["job"])

    async def jobs(self) -> list[dict[str, Any]]:
        """Return the jobs for the list on the page, newest first."""
        listed = await self._call(lambda: self._listed(self._controller.store.in_states(STATES, MOST_LISTED)))
        return await asyncio.to_thread(
            lambda: [told_of(Path(job.run_folder)) | _said(job) for job in reversed(listed.jobs)]
        )

    async def find(self, key: str) -> tuple[Path, dict[str, Any]]:
        """Return the run folder of the job with this name or id. Also return facts that override the folder's
        on the page.

        Raises `UnknownJob`."""
        (job,) = (await self._call(lambda: self._listed([self._controller.find(key)]))).jobs
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
        """Return the metrics targets of a job, labelled with its name in the cluster. Empty until all
        its services serve."""
        path = self._controller.folder(job).targets
        found = read_record(path, list[ScrapeTargets], max_bytes=BODY_BYTES) or []
        return [ScrapeTargets(each.targets, each.labels | {"job": job.name}) for each in found]

    async def _cluster(self, request: Request) -> ClusterAnswer:
        counts, free = await self._call(lambda: (self._controller.store.counts(), self._controller.free()))
        about = (self._config.cluster, self._config.launcher, __version__, self._since_s)
        return ClusterAnswer(*about, self._controller.total, free, {str(s): n for s, n in counts.items()})

    async def _list_jobs(self, request: Request) -> JobsAnswer:
        ended = () if _number(request, "ended", 0, 0, 1) else ENDED
        states = [state for state in STATES if state not in ended]
        return await self._call(lambda: self._listed(self._controller.store.in_states(states, MOST_LISTED)))

    async def _submit(self, request: Request) -> JobsAnswer:
        body = await read_body(request, SUBMISSION_BYTES)
        answer = await self._call(lambda: self._listed([self._controller.submit(read_submission(body))]))
        self._wake()
        return answer

    async def _job(self, request: Request) -> JobDetailAnswer:
        def detail() -> JobDetailAnswer:
            job = self._controller.find(request.path_params["job"])
            (shown,) = self._listed([job]).jobs
            try:
                config = self._controller.config_of(job).model_dump(mode="json")
            except (ConfigError, RunFolderError):
                config = job.content  # another release may read job files differently
            return JobDetailAnswer(shown, job.history, hidden(config, JobConfig))

        return await self._call(detail)

    async def _ask(self, verb: Verb, request: Request) -> JobsAnswer:
        overrides = (await _message(request, ResumeRequest)).overrides if verb == "resume" else ()
        name = request.path_params["job"]
        answer = await self._call(lambda: self._listed([self._controller.ask(name, verb, overrides)]))
        self._wake()
        return answer

    _pause = partialmethod(_ask, "pause")
    _stop = partialmethod(_ask, "stop")
    _resume = partialmethod(_ask, "resume")

    async def _change(self, kind: type[ScaleWorkers] | type[DrainWorker], request: Request) -> WorkersChanged:
        change = await _message(request, kind)
        if not 0 <= change.limit_ms <= LONGEST_CHANGE_MS:
            raise ApiRefusal(400, f"limit_ms is not within 0 and {LONGEST_CHANGE_MS}")
        if isinstance(change, ScaleWorkers) and change.workers < 1:
            raise ApiRefusal(400, f"workers is {change.workers}, and a run has at least one")
        job = await self._job_of(request)
        if job.state not in ACTIVE or job.wish != "run":
            raise JobRefused(f"job {job.name} is {job.state}, and only a job that runs has workers")
        done = await asyncio.to_thread(change_workers, self._controller.folder(job).run_folder, change)
        if done.workers:
            await self._call(self._controller.scaled, job, len(done.workers))
        return done

    _scale = partialmethod(_change, ScaleWorkers)
    _drain = partialmethod(_change, DrainWorker)

    async def _figures(self, request: Request) -> FiguresAnswer:
        job = await self._job_of(request)
        folder = self._controller.folder(job).run_folder
        try:
            status = await asyncio.to_thread(lambda: Run.open(folder).status())
        except RunFolderError:
            return FiguresAnswer()  # the run has not begun
        found = msgspec.convert(status, FiguresAnswer, from_attributes=True)
        return found if status.stall is None else structs.replace(found, message=status.stall.detail)

    async def _log(self, request: Request) -> Response:
        offset = int(_number(request, "offset", 0, 0, 2**53))
        wait_s = _number(request, "wait_s", 0, 0, LOG_WAIT_S)
        job, name = await self._job_of(request), request.path_params["log"]
        logs = await asyncio.to_thread(self._controller.folder(job).logs)
        if name not in logs:
            there = ", ".join(logs)
            raise ApiRefusal(404, f"job {job.name} has no such log. Its logs are: {there}")
        deadline_s = time.monotonic() + wait_s
        while True:
            state = (await self._call(self._controller.store.get, job.id)).state
            found, following = await asyncio.to_thread(read_log, logs[name], offset, LOG_BYTES)
            over = not found and state not in (*ACTIVE, "PENDING")
            if found or over or time.monotonic() >= deadline_s:
                break
            await asyncio.sleep(LOOK_S)
        headers = {OFFSET_HEADER: str(following), OVER_HEADER: "true" if over else "false"}
        return Response(found, media_type="text/plain", headers=headers)

    async def _down(self, request: Request) -> JobsAnswer:
        keep = (await _message(request, DownRequest)).keep_jobs
        ending = await self._call(lambda: self._listed([] if keep else self._controller.stop_all()))
        self._on_down(keep)
        return ending

    def _listed(self, jobs: list[StoredJob]) -> JobsAnswer:
        waits = self._controller.turns().waits if any(job.state == "PENDING" for job in jobs) else {}
        answers = []
        for job in jobs:
            folder = self._controller.folder(job)
            wait = folder.waits() if job.state == "STARTING" else waits.get(job.id, "")
            answers.append(JobAnswer.of(job, str(folder.run_folder), wait))
        return JobsAnswer(answers)


def _said(answer: JobAnswer) -> dict[str, Any]:
    """Return the facts about a job for which the controller, not the run folder, is the source."""
    waits = answer.waits_for or (answer.reason if answer.state in ("FAILED", "PAUSED", "STOPPED") else "")
    said = {"state": answer.state, "doing": answer.doing, "changed_s": answer.changed_s, "waits": waits}
    return said | {"key": str(answer.id), "name": answer.name}


async def _no_such_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    REFUSED.labels("request").inc()
    return _json(RefusalAnswer("there is no such operation: docs/controller.md lists them"), status)


def _number(request: Request, name: str, default: float, least: float, most: float) -> float:
    """Return a number from the query. It must be within its bounds."""
    try:
        value = float(request.query_params.get(name, default))
    except ValueError as error:
        raise ApiRefusal(400, f"{name}: {error}") from None
    if not least <= value <= most:
        raise ApiRefusal(400, f"{name} is not within {least:g} and {most:g}")
    return value


async def _message(request: Request, kind: type[M]) -> M:
    return msgspec.json.decode(await read_body(request, BODY_BYTES) or b"{}", type=kind)


def _json(answer: msgspec.Struct, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(answer), status, headers, "application/json")


STATUS_OF: dict[tuple[type[Exception], ...], tuple[int, str]] = {
    (UnknownJob,): (404, "{}"),
    (ConfigError,): (422, "{}"),
    (JobRefused, RunFolderError, RunError, FaultError): (409, "{}"),
    (WireError,): (504, "the run does not answer: {}"),
    (msgspec.DecodeError, UnicodeDecodeError, RecursionError): (400, "{}"),
    (BodyTooLong,): (413, "the body is too large"),
    (ServerFull,): (503, "too much is under way: ask again later"),
}
"""Status and text for each error. The first matching entry is used."""
HEADERS_OF = {401: {"www-authenticate": "Bearer"}, 413: {"connection": "close"}}


def _counted_refusal(error: Exception) -> Response | None:
    """Count an error that the client caused, and return the answer to it. Return None for other errors."""
    fits = (found for kinds, found in STATUS_OF.items() if isinstance(error, kinds))
    status, text = (error.status, "{}") if isinstance(error, ApiRefusal) else next(fits, (0, ""))
    if not status:
        return None
    REFUSED.labels({401: "token", 403: "right"}.get(status, "request")).inc()
    mistakes = error.mistakes if isinstance(error, ConfigError) else ()
    return _json(RefusalAnswer(text.format(error), mistakes), status, HEADERS_OF.get(status))
