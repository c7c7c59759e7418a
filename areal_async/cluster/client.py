"""A client of the controller's API, for the command line."""

from __future__ import annotations

import http.client
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from areal_async.base.addresses import is_loopback
from areal_async.base.errors import ArealError
from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.base.retry import Tries
from areal_async.cluster.folder import ClusterFolder
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
)
from areal_async.cluster.states import JobRefused, UnknownJob
from areal_async.cluster.submission import Submission
from areal_async.config.cluster import cluster_dir
from areal_async.rpc.control_messages import DrainWorker, ScaleWorkers, WorkersChanged

URL_VARIABLE = "AREAL_ASYNC_CONTROLLER"
"""Environment variable with the URL of a controller on another machine."""
TOKEN_VARIABLE = "AREAL_ASYNC_TOKEN_FILE"
"""Environment variable with the path of a file. The file contains a token of that controller."""
ANSWER_S = 60.0
RETRY_S = 30.0  # Longest time of retries while the controller does not answer
PAUSE_S = 0.3
MOST_FAILURES = 3  # Answers with status 500 before a client gives up

KINDS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}

A = TypeVar("A", bound=msgspec.Struct)
Answer = tuple[int, Mapping[str, str], bytes]
"""Status, headers and body."""


class ControllerGone(ArealError):
    """No controller runs, or it does not answer."""

    exit_status = 3


class Unready(ControllerGone):
    """The controller is busy, or it cancels the request because it is ending."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"it answers with status {answer[0]}")
        self.answer = answer


class TokenRefused(ArealError):
    """The controller rejects this token, or the token does not allow this request."""

    exit_status = 4


def reached(url: str, timeout_s: float = 5.0) -> bool:
    """Return whether a controller answers at `url`."""
    try:
        return ControllerClient(url, "").request("GET", "/healthz", timeout_s=timeout_s)[0] == 200
    except ControllerGone:
        return False


@dataclass
class ControllerClient:
    """A client of the controller at `url`. For a controller on this machine, it also knows the `folder`.

    Methods raise `ControllerGone`, `TokenRefused`, `JobRefused` with the controller's reason, and
    `ConfigError` with the mistakes that the controller found."""

    url: str
    token: str = field(repr=False)
    folder: ClusterFolder | None = None

    @classmethod
    def find(cls) -> ControllerClient:
        """Return a client of the controller that the environment names. If it names none, return a client of
        the controller of the cluster folder."""
        if url := os.environ.get(URL_VARIABLE):
            if urlsplit(url).scheme not in KINDS or not urlsplit(url).hostname:
                fix = "Give one such as http://host:8470"
                raise ConfigError("the environment", [Mistake(URL_VARIABLE, f"{url!r} is no URL", fix)])
            return cls(url, _token_of(os.environ.get(TOKEN_VARIABLE)))
        folder = ClusterFolder(cluster_dir())
        found = folder.url()
        if found is None:
            raise ControllerGone(
                f"no controller is up in {folder.path}. `areal-async up` brings one up, and so does "
                "`areal-async submit JOB.YAML`"
            )
        return cls(found, folder.token(), folder)

    @property
    def here(self) -> bool:
        return self.folder is not None or is_loopback(urlsplit(self.url).hostname or "")

    # --- operations --------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> list[JobAnswer]:
        """Submit a job. If no answer comes, the client retries. The job is stored once, however often it is
        sent."""
        return self._ask(JobsAnswer, "POST", "/v1/jobs", submission).jobs

    def cluster(self) -> ClusterAnswer:
        return self._ask(ClusterAnswer, "GET", "/v1/cluster")

    def jobs(self, *, ended: bool) -> list[JobAnswer]:
        return self._ask(JobsAnswer, "GET", f"/v1/jobs?ended={int(ended)}").jobs

    def job(self, name: str) -> JobDetailAnswer:
        return self._ask(JobDetailAnswer, "GET", _path(name))

    def figures(self, name: str) -> FiguresAnswer:
        return self._ask(FiguresAnswer, "GET", _path(name, "figures"))

    def ask(self, name: str, verb: Literal["pause", "stop"]) -> JobAnswer:
        return self._ask(JobsAnswer, "POST", _path(name, verb)).jobs[0]

    def resume(self, name: str, overrides: Sequence[str]) -> JobAnswer:
        request = ResumeRequest(list(overrides))
        return self._ask(JobsAnswer, "POST", _path(name, "resume"), request, once_s=ANSWER_S).jobs[0]

    def change(self, name: str, change: ScaleWorkers | DrainWorker) -> WorkersChanged:
        """Scale the workers, or drain a worker."""
        how = "scale" if isinstance(change, ScaleWorkers) else "drain"
        limit_s = change.limit_ms / 1000 + ANSWER_S
        return self._ask(WorkersChanged, "POST", _path(name, how), change, once_s=limit_s)

    def down(self, *, keep_jobs: bool) -> list[JobAnswer]:
        return self._ask(JobsAnswer, "POST", "/v1/down", DownRequest(keep_jobs)).jobs

    def log(self, name: str, log: str, *, follow: bool) -> Iterator[bytes]:
        """Yield the content of a job's log. With `follow`, yield new content until the job has ended.

        After a lost connection, it continues at the same byte: no byte is repeated or lost."""
        offset = 0
        while True:
            query = urlencode({"offset": offset, "wait_s": LOG_WAIT_S if follow else 0})
            path = f"{_path(name, 'logs')}/{quote(log, safe='')}?{query}"
            status, headers, found = self._repeated("GET", path)
            _raise_refusal(status, found)
            offset = int(headers.get(OFFSET_HEADER, 0))
            if found:
                yield found
            elif not follow or headers.get(OVER_HEADER) == "true":
                return

    # --- requests ----------------------------------------------------------------------------------

    def _ask(
        self, answer: type[A], method: str, path: str, request: object = None, once_s: float | None = None
    ) -> A:
        """Return the answer to a request, and retry while the controller does not answer.

        With `once_s`, the request is sent once, with this timeout in seconds."""
        body = b"" if request is None else msgspec.json.encode(request)
        ask = self._repeated if once_s is None else partial(self.request, timeout_s=once_s)
        status, _, content = ask(method, path, body)
        _raise_refusal(status, content)
        try:
            return msgspec.json.decode(content, type=answer)
        except (ValueError, RecursionError) as error:
            raise ControllerGone(
                f"what answers at {self.url} is no controller of this release: {error}"
            ) from error

    def _repeated(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Retry a request while the controller does not answer. The controller may be restarting, possibly at
        another address."""
        failures = itertools.count(1)

        def ask() -> Answer:
            if self.folder is not None:
                if (url := self.folder.url()) is None:  # another process may use its port now
                    raise ControllerGone(f"no controller is up in {self.folder.path} any more")
                self.url = url
            answer = self.request(method, path, body)
            if answer[0] == 503 or (answer[0] == 500 and next(failures) <= MOST_FAILURES):
                raise Unready(answer)
            return answer

        try:
            tries = Tries(RETRY_S, longest_pause_s=PAUSE_S)
            return tries.run(ask, lambda error: isinstance(error, ControllerGone))
        except Unready as unready:
            return unready.answer

    def request(self, method: str, path: str, body: bytes = b"", timeout_s: float = ANSWER_S) -> Answer:
        """Send a request once and return the answer. Raises `ControllerGone`."""
        at = urlsplit(self.url)
        connection = KINDS[at.scheme](at.hostname or "", at.port, timeout=timeout_s)
        headers = {"content-type": "application/json", "connection": "close"}
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"
        try:
            connection.request(method, at.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ControllerGone(f"the controller at {self.url} does not answer: {error}") from error
        finally:
            connection.close()


def _path(name: str, below: str = "") -> str:
    return f"/v1/jobs/{quote(name, safe='')}" + (f"/{below}" if below else "")


def _raise_refusal(status: int, content: bytes) -> None:
    if status < 400:
        return
    try:
        refusal = msgspec.json.decode(content, type=RefusalAnswer)
    except (ValueError, RecursionError):
        raise ControllerGone(
            f"the controller answered with status {status}; its log has the reason"
        ) from None
    if refusal.mistakes:
        raise ConfigError(refusal.error.partition(": ")[0].partition(" has ")[0], refusal.mistakes)
    if status in (401, 403):
        raise TokenRefused(refusal.error)
    if status >= 500:
        raise ControllerGone(refusal.error)
    raise (UnknownJob if status == 404 else JobRefused)(refusal.error)


def _token_of(path: str | None) -> str:
    if path is None:
        raise TokenRefused(f"{TOKEN_VARIABLE} does not name the file with a token of the controller")
    try:
        return Path(path).expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenRefused(f"the token in {path} cannot be read: {error}") from error
