"""The operations of the API: one table, of which both the routes and the OpenAPI document are made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from areal_async.cluster.folder import Right
from areal_async.cluster.messages import (
    ClusterAnswer,
    DownRequest,
    DrainRequest,
    FiguresAnswer,
    JobDetailAnswer,
    JobsAnswer,
    LogsAnswer,
    RefusalAnswer,
    ResumeRequest,
    ScaleRequest,
    WorkersAnswer,
)
from areal_async.cluster.submission import Submission

Json = dict[str, Any]

OFFSET_HEADER, OVER_HEADER = "areal-log-offset", "areal-log-over"
LOG_BYTES = 256 << 10  # Most of a log in one answer
LOG_WAIT_S = 30.0
MOST_LISTED = 1000

REFUSALS: Mapping[int, str] = {
    400: "What was sent is not what the operation takes.",
    401: "No token, or one that is not let in.",
    403: "The token may only read.",
    404: "There is no such job or log.",
    409: "It makes no sense as the job stands now; nothing was done.",
    413: "The body is too large.",
    422: "What was sent has mistakes, which are named.",
    503: "Too much is under way: ask again later.",
    504: "The run of the job does not answer.",
}


@dataclass(frozen=True)
class Parameter:
    """A number in the query of a request, with its bounds and default."""

    name: str
    about: str
    default: float
    least: float
    most: float

    @property
    def schema(self) -> Json:
        return {"type": "number", "minimum": self.least, "maximum": self.most, "default": self.default}

    def read(self, given: str | None) -> float:
        """Raises ValueError."""
        if given is None:
            return self.default
        value = float(given)
        if not self.least <= value <= self.most:
            raise ValueError(f"{self.name} is not within {self.least:g} and {self.most:g}")
        return value


@dataclass(frozen=True)
class Operation:
    """One method of one path. `right` None: it is answered without a token."""

    name: str
    method: Literal["GET", "POST"]
    path: str
    right: Right | None
    about: str
    answers: type[msgspec.Struct] | str  # A message, or the media type of anything else
    takes: type[msgspec.Struct] | None = None
    status: int = 200
    refusals: Sequence[int] = ()
    parameters: Sequence[Parameter] = ()


OFFSET = Parameter("offset", "First byte that is wanted, as the last answer has said.", 0, 0, 2**53)
WAIT = Parameter("wait_s", "Longest wait for something new at the end of the log.", 0, 0, LOG_WAIT_S)
ENDED = Parameter("ended", "1: those that have ended as well.", 0, 0, 1)
LIMIT = Parameter("limit", "Most jobs; the newest are answered.", MOST_LISTED, 1, MOST_LISTED)

OPERATIONS: tuple[Operation, ...] = (
    Operation("health", "GET", "/healthz", None, "Whether the controller answers.", "text/plain"),
    Operation("metrics", "GET", "/metrics", "look", "Jobs by state and more, for Prometheus.", "text/plain"),
    Operation("targets", "GET", "/v1/targets", "look",
              "Where the processes of jobs serve their metrics, as Prometheus discovers it by HTTP.",
              "application/json"),
    Operation("document", "GET", "/v1/openapi.json", None, "This document.", "application/json"),
    Operation("cluster", "GET", "/v1/cluster", "look", "What there is, and what is free.", ClusterAnswer),
    Operation(
        "list_jobs", "GET", "/v1/jobs", "look", "The jobs.", JobsAnswer, parameters=(ENDED, LIMIT),
        refusals=(400,),
    ),
    Operation(
        "submit", "POST", "/v1/jobs", "submit", "Submit a job, or the jobs of a sweep: all or none.",
        JobsAnswer, Submission, 201, (400, 409, 413, 422, 503),
    ),
    Operation("job", "GET", "/v1/jobs/{job}", "look", "A job by its name or id.", JobDetailAnswer,
              refusals=(404,)),
    Operation("figures", "GET", "/v1/jobs/{job}/figures", "look", "How the run of a job stands.",
              FiguresAnswer, refusals=(404, 504)),
    Operation("pause", "POST", "/v1/jobs/{job}/pause", "submit",
              "End a job's processes in order, and keep it for a resume.", JobsAnswer, refusals=(404, 409)),
    Operation("stop", "POST", "/v1/jobs/{job}/stop", "submit", "End a job in order.", JobsAnswer,
              refusals=(404, 409)),
    Operation("resume", "POST", "/v1/jobs/{job}/resume", "submit",
              "Queue a job that is PAUSED, FAILED or STOPPED again, to go on from its newest checkpoint.",
              JobsAnswer, ResumeRequest, refusals=(400, 404, 409, 413, 422)),
    Operation("scale", "POST", "/v1/jobs/{job}/scale", "submit", "Have more or fewer rollout workers.",
              WorkersAnswer, ScaleRequest, refusals=(400, 404, 409, 413, 504)),
    Operation("drain", "POST", "/v1/jobs/{job}/drain", "submit", "Have one rollout worker leave.",
              WorkersAnswer, DrainRequest, refusals=(400, 404, 409, 413, 504)),
    Operation("list_logs", "GET", "/v1/jobs/{job}/logs", "look", "The logs of a job.", LogsAnswer,
              refusals=(404,)),
    Operation("log", "GET", "/v1/jobs/{job}/logs/{log}", "look",
              "A log from a byte on. The header `areal-log-offset` says where the next request is to go on, "
              "`areal-log-over` whether nothing more will come.", "text/plain",
              parameters=(OFFSET, WAIT), refusals=(400, 404)),
    Operation("down", "POST", "/v1/down", "submit", "End the jobs and the controller.", JobsAnswer,
              DownRequest, 202, (400, 413)),
)  # fmt: skip


def openapi_document() -> Json:
    """The OpenAPI 3.1 document of the API."""
    messages = [
        kind
        for operation in OPERATIONS
        for kind in (operation.answers, operation.takes)
        if kind is not None and not isinstance(kind, str)
    ]
    references, components = msgspec.json.schema_components(
        [*messages, RefusalAnswer], ref_template="#/components/schemas/{name}"
    )
    schema_of: dict[type, Json] = dict(zip([*messages, RefusalAnswer], references, strict=True))
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "areal-async controller",
            "version": "1",
            "description": "Jobs of a cluster: submitted, listed, followed, paused, stopped, resumed.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation, schema_of: Mapping[type, Json]) -> Json:
    answers = operation.answers
    content: Json = {answers: {}} if isinstance(answers, str) else _json(schema_of[answers])
    responses: Json = {str(operation.status): {"description": operation.about, "content": content}}
    if operation.name == "log":
        headers = {OFFSET_HEADER: {"type": "integer"}, OVER_HEADER: {"enum": ["true", "false"]}}
        responses["200"]["headers"] = {name: {"schema": schema} for name, schema in headers.items()}
    refusals = [*operation.refusals, *((401,) if operation.right else ())]
    refusals += [403] if operation.right == "submit" else []
    for status in sorted(refusals):
        refused = {"description": REFUSALS[status], "content": _json(schema_of[RefusalAnswer])}
        responses[str(status)] = refused
    described: Json = {"operationId": operation.name, "summary": operation.about, "responses": responses}
    described["security"] = [{"token": []}] if operation.right else []
    in_path = re.findall(r"{(\w+)}", operation.path)
    parameters: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in in_path
    ]
    parameters += [
        {"name": each.name, "in": "query", "description": each.about, "schema": each.schema}
        for each in operation.parameters
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.takes is not None:
        described["requestBody"] = {
            "required": operation.takes is Submission or "workers" in str(operation.takes.__struct_fields__),
            "content": _json(schema_of[operation.takes]),
        }
    return described


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}
