"""`weights`, `checkpoint`, `evaluation`, `observe`, `supervisor`: what surrounds the four services."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from areal_async.config.base import Section
from areal_async.config.rollout import ServerSection

NODE_ID = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"


class WeightsSection(Section):
    """The way of new weights from the trainer to the engines."""

    channel: str = "shm"
    """How new weights reach the engines: `shm` is shared memory on one host; `zmq` sends them to other hosts
    in chunks, which receivers hand on to each other; `disk` is a directory that all hosts see; `nccl` is
    `shm`, and the trainer sends the tensors from its own device to SGLang servers that serve already. A
    channel of another package is named by its entry point, one of your own as `path.py:name`."""
    channel_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a channel that is not built in; the others have the fields of this section."""
    codec: Literal["auto", "full", "delta"] = "auto"
    """What travels: whole snapshots (`full`), or for receivers that hold the version before what changed
    (`delta`, lossless). `auto` is `delta` on `zmq` and `full` elsewhere, where receivers read the files that
    the trainer wrote."""
    delta_below: float = Field(default=0.5, gt=0, le=1)
    """A delta is offered where it is smaller than this share of the full snapshot."""
    keep: int = Field(default=2, ge=2, le=10_000)
    """Newest snapshots kept beside those that an evaluation still needs."""
    node_id: str = Field(default="local", pattern=NODE_ID)
    """Name of the trainer's host, and of every process that neither `nodes` nor its environment variable
    `AREAL_ASYNC_NODE_ID` puts elsewhere. Processes of one name share memory; nothing else decides that."""
    nodes: dict[str, Annotated[str, Field(pattern=NODE_ID)]] = Field(default_factory=dict)
    """Host of a process by the name of the process, such as `rollout-0: gpu-7`."""
    addresses: dict[str, str] = Field(default_factory=dict)
    """IP address by host on which its weights sockets listen for others; 127.0.0.1 where none is named."""
    key_file: Path | None = None
    """CURVE keys of the job's hosts (`python -m areal_async.weights.keys FILE`), the same file on
    each. Needed for every address beyond loopback."""
    relay_fan_out: int = Field(default=1, ge=0)
    """Receivers that one receiver hands chunks on to: 1 is a chain, 0 has all fetch from the trainer."""
    patience_s: float = Field(default=5.0, gt=0)
    """A source that has not sent a chunk so many seconds after it was asked for is left for another."""
    give_up_s: float = Field(default=60.0, gt=0)
    """A fetch that has received nothing for so many seconds fails; what is verified is kept for the next.
    For `nccl`, the longest that a group may take to form, or 512 MB to be taken; then the engine loads the
    snapshot."""
    directory: Path | None = None
    """Used by `disk`: a directory that all hosts share. Snapshots lie in `<directory>/<job>`."""


class CheckpointSection(Section):
    """Weights, optimizer and the buffer's ledger, together on disk."""

    every_steps: int = Field(default=50, ge=1)
    """Steps between two checkpoints; the last step always makes one. Episodes are kept until then."""
    keep: int = Field(default=2, ge=1, le=10_000)
    """Newest checkpoints kept."""


class EvaluationSamplingSection(Section):
    """Sampling parameters of the evaluation; greedy unless told otherwise."""

    temperature: float = Field(default=0.0, ge=0)
    """0 means greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens of this total probability; 1 means from all."""
    top_k: int = Field(default=0, ge=0)
    """Sample from so many most likely tokens; 0 means from all."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one response; null means as many as `rollout.sampling.max_new_tokens`."""
    stop: tuple[str, ...] = ()
    """Texts that end a response (beside the model's end-of-sequence token)."""


class EvaluationSection(Section):
    """Held-out accuracy, measured beside training by an engine of its own (needs `tasks.evaluation`)."""

    every_steps: int = Field(default=25, ge=1)
    """Steps between two evaluations; version 0 and the final one are always evaluated."""
    engine: str = "same"
    """What answers: an engine of its own of the rollout's kind (`same`), or of another kind, named as in
    `rollout.engine`."""
    device: str | None = Field(default=None, pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """Where that engine computes: `cpu`, `cuda` (the GPU after the rollout's, or the first again) or
    `cuda:N`; none means as `rollout.device`."""
    server: ServerSection = ServerSection()
    """The server of that engine, where it is one: `urls` lends it one that runs already. As a whole it
    replaces `rollout.server`; left out, that one's settings but its `urls` are used."""
    samples: int = Field(default=1, ge=1)
    """Answers to each task: gives mean@n, best@n and maj@n. Above 1 it needs a temperature."""
    sampling: EvaluationSamplingSection = EvaluationSamplingSection()
    max_concurrent: int = Field(default=128, ge=1)
    """Most answers in the engine at once."""
    torch_threads: int = Field(default=1, ge=1)
    """CPU threads of the evaluator's torch."""


class ObserveSection(Section):
    """Metrics and logs."""

    metrics_port: int = Field(default=9470, ge=0, le=65_000)
    """First of the consecutive ports that the services serve Prometheus metrics on; 0 picks free ones."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe events that the services log."""
    event_log: bool = False
    """Every process appends what it knows to have happened to `events/` in the run folder, for tests that
    look for what was lost or done twice. It costs time and disk."""
    stall_s: float = Field(default=30.0, gt=0)
    """A trainer that has waited for a batch so many seconds is reported, with the edge that starves."""


class SupervisorSection(Section):
    """Starting and stopping the services."""

    ready_s: float = Field(default=300.0, gt=0)
    """Longest time from starting a service until it serves, in seconds; loading a large model takes long.
    `rollout.server.ready_s` comes on top of it where the engine is a server."""
    restarts: int = Field(default=5, ge=0, le=1_000_000)
    """Deaths of one service within `window_s` that are survived by starting it again; one more ends the job,
    which can be resumed. 0 ends it at the first."""
    window_s: float = Field(default=300.0, gt=0)
    """Deaths longer ago than so many seconds are forgotten."""
    first_pause_s: float = Field(default=0.5, ge=0)
    """Pause before a service is started again that died within 10 s of serving, doubled with each such death
    in a row. One that had served longer is started again at once."""
    longest_pause_s: float = Field(default=30.0, ge=0)
    """The pause is doubled up to here."""
