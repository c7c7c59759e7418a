"""The differences between kinds of inference servers, behind `HttpEngine`.

A new kind is a `ServerAdapter` and an `EnginePart` that makes an `HttpEngine` of it: `vllm/__init__.py`
is the shortest example. `sglang/` and `vllm/` have one layout: `adapter.py` has the command line too,
`messages.py` has requests, answers and what the server must offer, `weights.py` says how new weights are
taken. Which requests are in flight, who is told of a loss and what must hold before a request or a load
is sent is the engine's, and the same for all.

A server loads what it finds: a tensor that is missing keeps its old weights, one too many or a file that is
cut short may be the server's end. So a folder is compared with the first one (`check_folder`) before a server
sees it.
"""

from __future__ import annotations

import bisect
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import gettempdir
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from areal_async.base.addresses import interface_of
from areal_async.base.versions import VersionTag
from areal_async.config.devices import first_threads, names_of
from areal_async.config.engines import EngineMissing, find_engine_python, flag_name
from areal_async.config.job import JobConfig
from areal_async.config.routes import replayed_mixture
from areal_async.models.answers import Detokenizer, end_ids
from areal_async.models.files import Mixture
from areal_async.models.tokenizer import load_tokenizer
from areal_async.service.context import ServiceContext
from areal_async.trajectory import Sampling
from rollout_service.engines.base import (
    EngineError,
    GenerateRequest,
    GenerateResult,
    Tell,
    UpdateMode,
    trim,
)
from rollout_service.engines.devices import own_gpus
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.keyed import VARIABLE as KEY_VARIABLE

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype (safetensors' word) and shape of each tensor."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    vocab_size: int
    """Ids below it have a row in the embedding; a server may die of others."""
    positions: int | None
    """Most tokens that the model can place; None when its configuration sets no limit."""
    layers: int = 0
    """Blocks of the model; 0 where its configuration does not say."""


def read_model(folder: Path) -> ModelFacts:
    """Return the facts in `config.json`. Raises `EngineError`."""
    config = read_config(folder)
    config = config.get("text_config") or config
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise EngineError(f"{folder / 'config.json'} names no vocab_size: it is no model for text")
    return ModelFacts(vocab_size, config.get("max_position_embeddings"), config.get("num_hidden_layers") or 0)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the model's configuration. Raises `EngineError`."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise EngineError(f"{folder} has no config.json: it is no model that a server can load") from error
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise EngineError(f"{path} holds no configuration")
    return config


def read_layout(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of all safetensors files. Raises `EngineError`, also for a file that is cut
    short."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    view = tensors.get_slice(name)
                    found[name] = (view.get_dtype(), tuple(view.get_shape()))
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{file} cannot be read, or was cut short: {error}") from error
    if not found:
        raise EngineError(f"{folder} has no safetensors file with weights")
    return found


def check_folder(expected: Layout, folder: Path) -> None:
    """Raises `EngineError` unless a server that serves the tensors `expected` can load `folder`: it is a
    model with the same tensors, of the same shapes and dtypes, in whole files."""
    read_config(folder)
    found = read_layout(folder)
    missing, foreign = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    other = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    for what, names in (("lacks", missing), ("has besides", foreign), ("has in another form", other)):
        if names:
            raise EngineError(
                f"{folder} does not fit the engine's model: it {what} {', '.join(names[:3])}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            )


Flag = str | int | float | bool | None
"""The value of a flag in rollout.server.arguments."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Conditions for taking a server for dead that may only be slow."""

    misses: int = 3
    """Probes in a row without an answer."""
    span_s: float = 20.0
    """Least time from the first of these probes to the end of the last."""
    pause_s: float = 0.25
    """Seconds between two probes."""

    def is_over(self, misses: int, silent_s: float) -> bool:
        """Return whether a server is given up after `misses` probes without an answer, the first `silent_s`
        ago."""
        return misses >= self.misses and silent_s >= self.span_s


PATIENCE = Patience()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Either `url` or `python` is given. Raises `ValueError` otherwise."""

    slots: int
    """Most requests computed at once."""
    max_model_len: int
    """Most tokens of prompt and answer together."""
    update_mode: UpdateMode = "recompute"
    device: str = "cpu"
    gpus: tuple[str, ...] = ()
    """GPUs that a server started here sees, as `CUDA_VISIBLE_DEVICES` names them; none: all that this process
    sees."""
    dtype: str = "float32"
    torch_threads: int = 1
    """CPU threads of a server that is started here, where it has a setting for them."""
    activity: str = "rollout"
    """Name under which the engine's busy time is counted."""
    url: str | None = None
    """Address of a server that runs already, to attach to."""
    key: str = field(default_factory=lambda: os.environ.get(KEY_VARIABLE, ""), repr=False)
    """Key of the server. Empty: a server that is started here gets a key of its own, any other has none."""
    python: Path | None = None
    """Interpreter of the environment in which to start a server."""
    arguments: Mapping[str, Flag] = field(default_factory=dict)
    """Further flags of a server that is started here."""
    ready_s: float = 900.0
    """Seconds until it must serve."""
    mixture: Mixture | None = None
    """The mixture of experts of the server's model, if the server is to tell routes."""
    must_route: bool = False
    """True if an attached server that reports no routes is refused."""
    interface: str = ""
    """Network interface on which a server that is started here is in a process group with the trainer; empty:
    it is in none."""
    log_path: Path = Path("server.log")
    """File to which a server that is started here writes."""
    patience: Patience = PATIENCE

    def __post_init__(self) -> None:
        if (self.url is None) == (self.python is None):
            raise ValueError("give the url of a server, or the python of one to start")


def settings_of(
    job: JobConfig, *, slots: int, activity: str, place: ServiceContext | None, replica: int
) -> ServerSettings:
    """Return the settings of the server engine that the job names. The arguments are those of
    `engines.make_engine`.

    Raises `EngineError` if the server's environment or GPU is missing, or no server is named to attach to,
    and `EndpointError` if no network interface has the address of this host.
    """
    rollout = job.rollout
    url = attached_url(job, place, replica)
    try:
        python = find_engine_python(rollout.engine, rollout.server.environment) if url is None else None
    except EngineMissing as error:
        raise EngineError(str(error)) from error
    logs = place.run_dir / "logs" if place is not None else Path(gettempdir())
    owner = place.name if place is not None else "areal"
    return ServerSettings(
        slots=slots,
        max_model_len=rollout.max_model_len,
        update_mode=rollout.update_mode,
        device=rollout.device,
        gpus=names_of(own_gpus(job, place, replica), os.environ) if url is None else (),
        dtype=rollout.dtype,
        torch_threads=first_threads(rollout.torch_threads),
        activity=activity,
        url=url,
        python=python,
        arguments=rollout.server.arguments,
        ready_s=rollout.server.ready_s,
        mixture=replayed_mixture(job),
        must_route=rollout.routes == "replay",
        interface=interface_of(place.host.address) if place and job.weights.channel == "nccl" else "",
        log_path=logs / f"{owner}-{rollout.engine}-{replica}.log",
    )


def attached_url(job: JobConfig, place: ServiceContext | None, replica: int) -> str | None:
    """Return the server to attach to; None if a new one is to be started. Raises `EngineError` if the job
    names too few, or if the worker's name has no number."""
    urls = job.rollout.server.urls
    if not urls:
        return None
    if place is not None and place.role == "rollout" and place.name != f"rollout-{place.index}":
        # Its index is no place among the workers: it would swap the weights of another worker's server.
        raise EngineError(
            f"rollout.server.urls are given to workers by number, and {place.name} has none: start it with "
            "--name rollout-N, where N is a free number with servers of its own in the list"
        )
    index = (place.index if place is not None else 0) * job.rollout.replicas + replica
    if index >= len(urls):
        raise EngineError(
            f"rollout.server.urls names {len(urls)} servers, but this is replica {index}: name one for each "
            "replica of each worker"
        )
    return urls[index]


FOREIGN_VARIABLES = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSAFEPATH"})
"""Variables of this process's Python, which are wrong for the server's."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A snapshot's place: all that is kept of one. Its tensors are not asked for: they would be read, while
    the engine is paused, into memory of this process."""

    tag: VersionTag
    path: Path


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of a server."""

    settings: ServerSettings
    model: Path
    """Directory of the tokenizer."""
    weights: Directory
    """The first weights."""
    max_model_len: int
    """Most tokens of prompt and answer together: the limit of the settings, or the number of the model's
    positions if that is less."""
    port: int = 0


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A reading of a server's load."""

    waiting: int = 0
    """Requests in the server's queue."""
    kv_used: float = 0.0
    """Share of its KV room in use, 0 to 1; the fullest one's where it has several."""
    decoded: int = 0
    """Units sampled since the server started, as far as it counts them on the way."""


class AnswerReader:
    """The ends of a model's answers, and their text: a server is told the one, and its own text is not
    read."""

    def __init__(self, model: Path, vocab_size: int) -> None:
        tokenizer = load_tokenizer(model)
        ends = end_ids(tokenizer, model)
        self._text = Detokenizer(tokenizer, ends)
        self.ends = tuple(token for token in ends if token < vocab_size)

    def text(self, ids: Sequence[int], stop: Sequence[str]) -> str:
        text = self._text.text(ids)
        return trim(text, stop) if stop else text

    def n_until_stop(self, ids: Sequence[int], stop: Sequence[str]) -> int:
        """Return how many of `ids` there are up to the end of the first stop string; all of them without one.
        A server may have sampled on by the time it finds it."""

        def stopped(n: int) -> bool:
            text = self._text.text(ids[:n])
            return trim(text, stop) != text

        if len(ids) < 2 or not stopped(len(ids) - 1):
            return len(ids)
        return bisect.bisect_left(range(len(ids)), True, key=stopped)


class ServerAdapter(ABC):
    """One replica's way of talking to one kind of server. Calls raise `EngineLost` when the server cannot be
    reached, and `EngineError` when it refuses."""

    name: ClassVar[str]
    """The engine's name in `rollout.engine`."""
    title: ClassVar[str]
    """The server's name in messages."""
    ready_path: ClassVar[str]
    """Answers 200 once a server that was started can be used."""
    alive_path: ClassVar[str]
    """Answers 200 at once on a server that lives, a paused one too."""
    generate_path: ClassVar[str]
    answer_type: ClassVar[type]
    """Type to which an answer, or a part of a streamed one, is decoded."""
    watch_s: ClassVar[float]
    """Seconds between two readings of the load."""

    def __init__(self, model: Path, settings: ServerSettings) -> None:
        """`model` gives tokenizer and sizes, snapshots give the weights. Raises `EngineError`."""
        self.model = model
        self.settings = settings
        self.facts = read_model(model)
        self.max_model_len = min(settings.max_model_len, self.facts.positions or settings.max_model_len)

    @cached_property
    def reader(self) -> AnswerReader:
        """Reads the tokenizer of the model, once. Raises `TokenizerError`."""
        return AnswerReader(self.model, self.facts.vocab_size)

    @property
    def capacity(self) -> int:
        """Most requests that the server computes at once."""
        return self.settings.slots

    # --- starting ------------------------------------------------------------------------------------

    @abstractmethod
    def command(self, launch: Launch) -> list[str]:
        """Return the argument vector, `python … -m MODULE …`. Raises `EngineError` for a flag of the job file
        that is not the job's to give."""

    @abstractmethod
    def environment(self, launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the server's whole environment; `inherited` is this process's."""

    @abstractmethod
    async def open(self, client: ServerClient, weights: Directory) -> str:
        """Check a running server, and load `weights` into it. A started server already has them; an attached
        one may have any weights, or be paused. Returns its release. Raises `EngineError`, which names the
        missing feature."""

    # --- requests ------------------------------------------------------------------------------------

    @abstractmethod
    def body(
        self, rid: str, prompt: list[int], request: GenerateRequest, room: int, tag: VersionTag
    ) -> dict[str, Any]:
        """Return the body of a request for at most `room` units after `prompt`. Only requests with the same
        `tag` share its prefixes. The server knows the request as `rid`. Raises `RequestError` for sampling
        values that this server cannot take."""

    @abstractmethod
    def heard(self, tell: Tell) -> Any:
        """Return an empty streamed answer: `take(part)` adds its next part and tells its units, raising
        `RequestError` or `EngineError` for a refusal; `answer()` returns the whole or raises
        `EngineError`."""

    @abstractmethod
    def parse(self, answer: Any, sampling: Sampling) -> GenerateResult:
        """Return the sampled units, without their text. Raises `EngineError` if the answer does not account
        for each of its units, and `EngineLost` if the version of the weights is unknown."""

    def expert_ids(self, answer: Any) -> NDArray[np.integer] | None:
        """Return the experts of the tokens from `GenerateRequest.routes_from` on, of any integer type
        [tokens, layers of the model, experts], with an id below 0 for "none". Return None if the answer has
        no routes. Raises `EngineError` for any other form."""
        return None

    @abstractmethod
    async def abort(self, client: ServerClient, rid: str) -> None:
        """End a request now and return its units so far."""

    # --- weights -------------------------------------------------------------------------------------

    @abstractmethod
    async def pause(self, client: ServerClient) -> None:
        """Return when no unit will be sampled until `resume`, with requests in flight held as
        `rollout.update_mode` says."""

    @abstractmethod
    async def resume(self, client: ServerClient) -> None: ...

    async def prepare(self, client: ServerClient | None, weights: Directory) -> Directory:
        """Return the directory that the server is to load. Nothing has changed if this raises `EngineError`.
        Without a `client` the server is yet to be started."""
        return weights

    @abstractmethod
    async def load(self, client: ServerClient, weights: Directory) -> None:
        """Load `weights`, as `prepare` returned it, into the paused server, and set its version. Raises
        `EngineError`, after which the server's weights are unknown."""

    async def restore(self, client: ServerClient, weights: Directory) -> None:
        """Load old weights again after a load that failed. Raises `EngineError`."""
        raise EngineError(f"{self.title} cannot go back to them")

    # --- watching and ending -------------------------------------------------------------------------

    @abstractmethod
    async def read_load(self, client: ServerClient) -> ServerLoad: ...

    async def close(self) -> None:  # noqa: B027 - there may be nothing
        """Release the resources of this replica outside the server."""


def command_line(
    launch: Launch, start: Sequence[str], flags: Mapping[str, Flag], reserved: Mapping[str, str]
) -> list[str]:
    """Return `start` and the flags. Flags of the job file override ours. `reserved` has the flags that a job
    file may not give, each with the reason or the alternative; any of them raises `EngineError`."""
    merged = dict(flags)
    for given, value in launch.settings.arguments.items():
        name = flag_name(given)
        if name in reserved:
            raise EngineError(
                f"rollout.server.arguments.{given} cannot be given: {reserved[name]}. Remove it from the job "
                "file"
            )
        merged[name] = value
    words = [str(launch.settings.python), *start]
    for name, value in merged.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words += [f"--{name}", str(value)]
    return words


def server_variables(
    launch: Launch, inherited: Mapping[str, str], dropped: frozenset[str] = frozenset()
) -> dict[str, str]:
    """Return `inherited` without variables of our Python and without `dropped`, and with the variables that
    every server needs. It lets the server see only the GPUs of the settings."""
    variables = {
        name: value for name, value in inherited.items() if name not in FOREIGN_VARIABLES | dropped
    } | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if launch.settings.device != "cpu" and launch.settings.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(launch.settings.gpus)
    return variables
