"""Differences between kinds of inference servers, behind `HttpEngine`.

A new kind of server needs a `ServerAdapter`, and an `EnginePart` that makes an `HttpEngine` with this
adapter. `vllm/__init__.py` is the shortest example. `sglang/` and `vllm/` have the same layout. `adapter.py`
also has the command line. `messages.py` has requests, answers and the features that the server must have.
`weights.py` has the loading of new weights. `HttpEngine` does the rest for all servers: it tracks requests in
flight, reports a loss, and checks conditions before a request or a load.

A server does not check the folder that it loads. If a tensor is missing, the server keeps the old tensor. A
surplus tensor or a truncated file may crash the server. So each folder is compared with the first one
(`check_folder`) before a server reads it.
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
from areal_async.base.gpus import names_of
from areal_async.base.versions import VersionTag
from areal_async.config.devices import first_threads
from areal_async.config.engines import EngineMissing, find_engine_python, flag_name
from areal_async.config.job import JobConfig
from areal_async.config.routes import replayed_mixture
from areal_async.models.answers import Detokenizer, end_ids
from areal_async.models.files import Mixture, image_token, placeholder_ids, text_part
from areal_async.models.tokenizer import load_tokenizer
from areal_async.service.context import ServiceContext
from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, GenerateRequest, GenerateResult, Tell, UpdateMode, trim
from rollout_service.engines.devices import own_gpus
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.keyed import VARIABLE as KEY_VARIABLE

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype (in safetensors' notation) and shape of each tensor."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    vocab_size: int
    """Number of rows of the embedding. Ids from this number on may crash a server."""
    positions: int | None
    """Largest number of positions of the model. None: its configuration sets no limit."""
    layers: int = 0
    """Number of blocks of the model. 0: its configuration does not say."""
    image_token: int | None = None
    """Id that stands for a feature of an image. None: the model reads no images."""
    never_sampled: tuple[int, ...] = ()
    """Ids that stand for images, videos and sounds."""
    kind: str = ""
    """Type of the model, such as `qwen3_vl`."""
    window: int | None = None
    """Tokens that a layer with sliding attention sees. None: all layers see all tokens."""
    soft_capped: bool = False
    """Whether attention scores are soft-capped."""


def read_model(folder: Path) -> ModelFacts:
    """Return the facts in `config.json`. Raises `EngineError`."""
    whole = read_config(folder)
    config = text_part(whole)
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise EngineError(f"{folder / 'config.json'} names no vocab_size: it is no model for text")
    positions, layers = config.get("max_position_embeddings"), config.get("num_hidden_layers") or 0
    never = tuple(token for token in placeholder_ids(whole) if token < vocab_size)
    kind = str(whole.get("model_type", ""))
    slides = any("sliding" in each for each in config.get("layer_types") or ["sliding"])
    window = config.get("sliding_window") if slides and config.get("use_sliding_window", True) else None
    capped = config.get("attn_logit_softcapping") is not None
    return ModelFacts(vocab_size, positions, layers, image_token(whole), never, kind, window, capped)


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
    """Return the tensors of all safetensors files. Raises `EngineError`, also for a truncated file."""
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
    """Raise `EngineError` unless a server that serves the tensors `expected` can load `folder`. The folder
    must have a model with the same tensors, shapes and dtypes, in complete files."""
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
"""Value of a flag in rollout.server.arguments."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Rule for giving up a server that may only be slow."""

    misses: int = 3
    """Number of consecutive probes without an answer."""
    span_s: float = 20.0
    """Shortest time in seconds from the start of the first of these probes to the end of the last."""
    pause_s: float = 0.25
    """Seconds between two probes."""

    def is_over(self, misses: int, silent_s: float) -> bool:
        """Return whether to give up a server after `misses` probes without an answer, the first `silent_s`
        seconds ago."""
        return misses >= self.misses and silent_s >= self.span_s


PATIENCE = Patience()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one server. Exactly one of `url` and `python` must be given. Raises `ValueError`
    otherwise."""

    slots: int
    """Largest number of requests computed at once."""
    max_model_len: int
    """Largest number of tokens of prompt and answer together."""
    update_mode: UpdateMode = "recompute"
    device: str = "cpu"
    gpus: tuple[str, ...] = ()
    """Visible GPUs of a server started here, as `CUDA_VISIBLE_DEVICES` names them. Empty: all GPUs that this
    process sees."""
    dtype: str = "float32"
    torch_threads: int = 1
    """CPU threads of a server started here, if that kind of server has a setting for them."""
    activity: str = "rollout"
    """Name under which the engine's busy time is counted."""
    url: str | None = None
    """Address of a running server to attach to."""
    key: str = field(default_factory=lambda: os.environ.get(KEY_VARIABLE, ""), repr=False)
    """API key of the server. If the key is empty, a server started here gets a new key, and an attached
    server is called without one."""
    python: Path | None = None
    """Python interpreter of the environment for a server to start."""
    arguments: Mapping[str, Flag] = field(default_factory=dict)
    """More flags for a server started here."""
    ready_s: float = 900.0
    """Seconds within which the server must be ready."""
    mixture: Mixture | None = None
    """The model's mixture of experts, if the server must report routes."""
    must_route: bool = False
    """Whether an attached server that reports no routes is refused."""
    interface: str = ""
    """Network interface of the process group that a server started here shares with the trainer. Empty: the
    server shares no group with the trainer."""
    log_path: Path = Path("server.log")
    """Log file of a server started here."""
    patience: Patience = PATIENCE
    sleeps: bool = False
    """Whether a server started here must be able to release its memory."""
    pixels: tuple[int | None, int | None] = (None, None)
    """Least and largest number of pixels to which a server started here scales images."""
    held_fds: tuple[int, ...] = ()
    """Descriptors that a server started here inherits. Their locks last at least as long as the server."""

    def __post_init__(self) -> None:
        if (self.url is None) == (self.python is None):
            raise ValueError("give the url of a server, or the python of one to start")


def settings_of(
    job: JobConfig, *, slots: int, activity: str, place: ServiceContext | None, replica: int
) -> ServerSettings:
    """Return the settings of the job's server engine. The arguments are the same as for
    `engines.make_engine`.

    Raises `EngineError` if the server's environment or GPU is missing, or if no URL to attach to is given.
    Raises `EndpointError` if no network interface has this host's address."""
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
        dtype=rollout.resolved_dtype,
        torch_threads=first_threads(rollout.torch_threads),
        activity=activity,
        url=url,
        python=python,
        arguments=rollout.server.arguments,
        ready_s=rollout.server.ready_s,
        mixture=replayed_mixture(job),
        must_route=rollout.routes == "replay",
        interface=interface_of(place.host.address) if place and job.weights.channel == "nccl" else "",
        log_path=logs / f"{owner}-{rollout.engine.rpartition(':')[2]}-{replica}.log",
        sleeps=job.placement.share == "time",
        pixels=rollout.images.pixels,
        held_fds=tuple(place.held_fds) if place is not None else (),
    )


def attached_url(job: JobConfig, place: ServiceContext | None, replica: int) -> str | None:
    """Return the URL of the server to attach to, or None to start a server. Raises `EngineError` if the job
    names too few URLs, or if the worker's name does not select one."""
    urls = job.rollout.server.urls
    if not urls:
        return None
    if place is not None and place.role == "rollout" and place.name != f"rollout-{place.index}":
        # The evaluator's index does not count among the workers: it would swap the weights of another
        # worker's server.
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
"""Environment variables that configure this process's Python and would be wrong for the server's Python."""


@dataclass(frozen=True, slots=True)
class Directory:
    """Place of a snapshot, without its tensors. Reading the tensors would take memory in this process while
    the engine is paused."""

    tag: VersionTag
    path: Path


@dataclass(frozen=True, slots=True)
class Launch:
    """Parameters for the start of a server."""

    settings: ServerSettings
    model: Path
    """Directory of the tokenizer."""
    weights: Directory
    """First weights."""
    max_model_len: int
    """Largest number of tokens of prompt and answer together, limited by the model's positions."""
    port: int = 0
    facts: ModelFacts = ModelFacts(0, None)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A reading of a server's load."""

    waiting: int = 0
    """Requests in the server's queue."""
    kv_used: float = 0.0
    """Used share of the server's KV cache, 0 to 1. If the server has several caches, the share of the fullest
    one."""
    decoded: int = 0
    """Units sampled since the server started, as far as the server counts them before an answer ends."""


class AnswerReader:
    """Reader of a model's answers: their end ids and their text. A server gets the end ids. The text that a
    server returns is not used."""

    def __init__(self, model: Path, vocab_size: int) -> None:
        tokenizer = load_tokenizer(model)
        ends = end_ids(tokenizer, model)
        self._text = Detokenizer(tokenizer, ends)
        self.ends = tuple(token for token in ends if token < vocab_size)

    def text(self, ids: Sequence[int], stop: Sequence[str]) -> str:
        text = self._text.text(ids)
        return trim(text, stop) if stop else text

    def n_until_stop(self, ids: Sequence[int], stop: Sequence[str]) -> int:
        """Return the number of `ids` up to the end of the first stop string. Without a stop string, this is
        the number of all ids. A server may sample more before it finds the stop string."""

        def stopped(n: int) -> bool:
            text = self._text.text(ids[:n])
            return trim(text, stop) != text

        if len(ids) < 2 or not stopped(len(ids) - 1):
            return len(ids)
        return bisect.bisect_left(range(len(ids)), True, key=stopped)


class ServerAdapter(ABC):
    """Communication of one replica with one kind of server. Calls raise `EngineLost` if the server cannot be
    reached, and `EngineError` if it refuses."""

    name: ClassVar[str]
    """Name of the engine in `rollout.engine`."""
    title: ClassVar[str]
    """Name of the server in messages."""
    ready_path: ClassVar[str]
    """Path that answers 200 once a started server can be used."""
    alive_path: ClassVar[str]
    """Path that answers 200 immediately on a live server, even if it is paused."""
    generate_path: ClassVar[str]
    answer_type: ClassVar[type]
    """Type of a decoded answer, or of a part of a streamed answer."""
    watch_s: ClassVar[float]
    """Seconds between two readings of the load."""

    def __init__(self, model: Path, settings: ServerSettings) -> None:
        """`model` provides tokenizer and sizes, and snapshots provide the weights. Raises `EngineError`."""
        self.model = model
        self.settings = settings
        self.facts = read_model(model)
        self.max_model_len = min(settings.max_model_len, self.facts.positions or settings.max_model_len)

    @cached_property
    def reader(self) -> AnswerReader:
        """Reader with the model's tokenizer, loaded once. Raises `TokenizerError`."""
        return AnswerReader(self.model, self.facts.vocab_size)

    @property
    def capacity(self) -> int:
        """Largest number of requests that the server computes at once."""
        return self.settings.slots

    @property
    def image_fix(self) -> str:
        """Advice if the server expands images to another number of tokens than the prompt has."""
        return "expand it with this model's processor, and with the same rollout.images"

    # --- starting ------------------------------------------------------------------------------------

    def first_folder(self, weights: Path) -> Path:
        """Return the folder to start a server from. Snapshots of a model that reads images may lack its
        frozen vision tower; a server then starts from the model's folder, and loads the snapshot. Raises
        `EngineError`."""
        if self.facts.image_token is None or not read_layout(self.model).keys() - read_layout(weights).keys():
            return weights
        return self.model

    @abstractmethod
    def command(self, launch: Launch) -> list[str]:
        """Return the argument vector, `python … -m MODULE …`. Raises `EngineError` for a flag that a job file
        may not set."""

    @abstractmethod
    def environment(self, launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the server's whole environment. `inherited` is the environment of this process."""

    @abstractmethod
    async def open(self, client: ServerClient, weights: Directory) -> str:
        """Check a running server, make it serve `weights`, and return its release. A started server already
        has these weights, unless it was started with those of `first_folder`. An attached server may have
        other weights, and may be paused. Raises `EngineError` with the missing feature."""

    # --- requests ------------------------------------------------------------------------------------

    @abstractmethod
    def body(
        self, rid: str, prompt: list[int], request: GenerateRequest, room: int, tag: VersionTag
    ) -> dict[str, Any]:
        """Return the request body for at most `room` units after `prompt`. Only requests with the same `tag`
        share its prefixes. `rid` is the request's id in the server. Raises `RequestError` for sampling values
        that this kind of server does not support."""

    @abstractmethod
    def heard(self, tell: Tell) -> Any:
        """Return an empty streamed answer. `take(part)` of the result adds the next part and passes the
        part's units to `tell`. It raises `RequestError` or `EngineError` if the server refused. `answer()`
        returns the whole answer, or raises `EngineError`."""

    @abstractmethod
    def parse(self, answer: Any, sampling: Sampling) -> GenerateResult:
        """Return the sampled units, without text. Raises `EngineError` if an answer does not account for each
        unit, and `EngineLost` if it is unknown who loaded the server's weights."""

    @abstractmethod
    def prompt_tokens(self, answer: Any) -> int | None:
        """Return the number of tokens of the prompt that the server computed for a request with images, or
        None if the answer does not say."""

    def expert_ids(self, answer: Any) -> NDArray[np.integer] | None:
        """Return the experts of the tokens from `GenerateRequest.routes_from` on, as integers [tokens, layers
        of the model, experts]. An id below 0 means no expert. None: the answer has no experts. Raises
        `EngineError` for another format."""
        return None

    @abstractmethod
    async def abort(self, client: ServerClient, rid: str) -> None:
        """End a request now. The request then returns its units so far."""

    # --- weights -------------------------------------------------------------------------------------

    @abstractmethod
    async def pause(self, client: ServerClient) -> None:
        """Return when no unit will be sampled until `resume`. Requests in flight are kept as
        `rollout.update_mode` says."""

    @abstractmethod
    async def resume(self, client: ServerClient) -> None: ...

    async def prepare(self, client: ServerClient | None, weights: Directory) -> Directory:
        """Return the directory that the server must load. If this raises `EngineError`, nothing has changed.
        `client` is None before the server is started."""
        return weights

    @abstractmethod
    async def load(self, client: ServerClient, weights: Directory) -> None:
        """Make the paused server serve `weights`, as returned by `prepare`, under their version. After
        `EngineError`, the server's weights are unknown."""

    async def restore(self, client: ServerClient, weights: Directory) -> None:
        """Load the old weights again after a failed load. Raises `EngineError`."""
        raise EngineError(f"{self.title} cannot go back to them")

    # --- sleep -----------------------------------------------------------------------------------------

    async def sleep(self, client: ServerClient) -> None:
        """Make the paused server release KV cache, weights and graphs. It keeps a copy of the weights in host
        memory, and the requests in flight with their units. Raises `EngineError`."""
        raise EngineError(f"{self.title} cannot release its memory")

    async def wake(self, client: ServerClient) -> None:
        """Make the server restore its memory. It samples nothing until `resume`."""
        raise EngineError(f"{self.title} cannot release its memory")

    # --- watching and closing -----------------------------------------------------------------------------

    @abstractmethod
    async def read_load(self, client: ServerClient) -> ServerLoad: ...

    async def close(self) -> None:  # noqa: B027 - there may be nothing
        """Release all resources of this replica besides the server."""


def command_line(
    launch: Launch, start: Sequence[str], flags: Mapping[str, Flag], reserved: Mapping[str, str]
) -> list[str]:
    """Return `start` and the flags. Flags of the job file replace the defaults. `reserved` has the flags
    that a job file may not set, each with the reason or an alternative. Raises `EngineError` for a
    reserved flag."""
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
    """Return `inherited` without variables of our Python and `dropped`, plus variables that every server
    needs. The server sees only the GPUs in its settings. On a GPU, its environment's programs come first, and
    CUDA_HOME is the environment's own compiler unless the user has set another."""
    variables = {
        name: value for name, value in inherited.items() if name not in FOREIGN_VARIABLES | dropped
    } | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if launch.settings.device != "cpu" and launch.settings.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(launch.settings.gpus)
    if launch.settings.device != "cpu" and launch.settings.python is not None:
        programs = launch.settings.python.absolute().parent  # `ninja`, for kernels that are compiled later
        variables["PATH"] = os.pathsep.join([str(programs), variables.get("PATH", os.defpath)])
        toolkit = programs.parent / "cuda"  # engines/cuda_home.sh
        if toolkit.is_dir() and "CUDA_PATH" not in variables:
            variables.setdefault("CUDA_HOME", str(toolkit))
    return variables
