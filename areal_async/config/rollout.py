"""`rollout`: how episodes are generated."""

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from areal_async.config.base import Section

StopText = Annotated[str, Field(min_length=1)]
"""An empty one would end every response before its first token."""


class SamplingSection(Section):
    """Sampling parameters of one generation call, in the engines' common terms."""

    temperature: float = Field(default=1.0, ge=0)
    """Temperature of sampling; 0 means greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens of this total probability; 1 means from all."""
    top_k: int = Field(default=0, ge=0)
    """Sample from so many most likely tokens; 0 means from all."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Most tokens of one response."""
    stop: tuple[StopText, ...] = ()
    """Texts that end a response (beside the model's end-of-sequence token)."""


class ServerSection(Section):
    """The server of an engine that is not `local`."""

    urls: tuple[str, ...] = ()
    """Attach to servers that run already (`http://host:port`, one for each replica of each worker) instead of
    starting them. They must see the snapshots' folder."""
    environment: Path | None = None
    """Virtual environment with the server in it; by default `$AREAL_ASYNC_ENGINES/<engine>`, or what `make
    engines` made."""
    arguments: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    """Further flags of the server, without the leading dashes: `{mem-fraction-static: 0.8}`. true gives the
    flag alone, false and null leave one out that is given otherwise."""
    ready_s: float = Field(default=900.0, gt=0)
    """Seconds that a server may take from its start until it serves."""


class GatewaySection(Section):
    """Used by workflows that open `ctx.gateway()`; nothing listens before the first of them does."""

    host: str = "loopback"
    """Where agents reach it: `loopback`, from the worker's host alone; `host`, at the address by which the
    run's hosts reach each other, so that agents in sandboxes elsewhere do; or an IP address of the worker's
    host. Whoever asks must show the key of an episode that is open. What is said is not encrypted."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first worker; the next ones take the next ports. 0 picks free ones."""
    sampling: Literal["agent", "job"] = "agent"
    """Whose temperature, top_p and top_k count. `agent`: those a call names, and a call that names some which
    cannot be trained on (greedy, truncated) is refused. `job`: those of `rollout.sampling`, always."""
    tool_format: Literal["auto", "hermes", "xml", "mistral", "llama", "none"] = "auto"
    """How the model writes tool calls; `auto` reads it off the chat template."""
    max_calls: int = Field(default=32, ge=1, le=65_536)
    """Most answers in the making at once in one session; more are refused (429)."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024, le=1 << 31)
    """Most bytes of a request; a longer one is refused (413)."""
    call_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one call, in seconds; past it the call is aborted (504)."""

    @field_validator("host")
    @classmethod
    def _an_interface(cls, host: str) -> str:
        if host not in ("loopback", "host"):
            try:
                usable = not ipaddress.ip_address(host).is_unspecified
            except ValueError:
                usable = False
            if not usable:
                raise ValueError(
                    f"agents could not be sent to {host!r}: use loopback, host, or an IP address of the host"
                )
        return host


class AutoscaleSection(Section):
    """Workers join and leave by who waits, trainer or workers, between two limits."""

    max: int = Field(default=0, ge=0, le=1024)
    """Most workers of a run whose number follows who waits, trainer or workers; 0 leaves the number alone."""
    min: int = Field(default=1, ge=1, le=1024)
    """Fewest workers of such a run."""
    every_s: float = Field(default=30.0, gt=0)
    """Measurement window and shortest time between two changes, in seconds; at least ten steps long."""
    retry_s: float = Field(default=300.0, gt=0)
    """A change that did not pay, and a worker for which there was no room, is not tried again for so many
    seconds, then for twice as many, up to an hour."""
    wait_share: float = Field(default=0.1, gt=0, lt=1)
    """Workers are added while the trainer waits for batches more than this share of the time, and taken away
    only while it waits less than half as much."""
    busy_share: float = Field(default=0.8, gt=0, le=1)
    """Workers that compute for this share of the time have no room for more; some are taken away only where
    those that stay would compute less."""
    drain_s: float = Field(default=60.0, ge=0)
    """Seconds in which a worker that is taken away may finish what it has."""


class RolloutSection(Section):
    engine: str = "local"
    """What generates: `local` is torch in the worker's own process; `sglang` and `vllm` are servers in an
    environment of their own (`make engines`); any other is `path.py:name`, or of an installed package."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """What the engine takes, by name; the built-in ones take nothing but the fields of `rollout`."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Worker processes, each with engines of its own; with `autoscale.max` those to begin with."""
    autoscale: AutoscaleSection = AutoscaleSection()
    replicas: int = Field(default=1, ge=1, le=64)
    """Engines of one worker. A group's requests stay with the one that holds their prefix."""
    group_size: int = Field(default=8, ge=1, le=65_536)
    """Episodes sampled from one task (the `n` of a group)."""
    greedy_baseline: bool = False
    """Let the first of a group's episodes be answered greedily: its reward is the baseline that an advantage
    such as `remax` compares the others with. It is scored, and not trained."""
    max_concurrent: int = Field(default=64, ge=1, le=1_000_000)
    """Most episodes in one engine at once; at least `group_size`."""
    concurrency: Literal["adaptive", "fixed"] = "adaptive"
    """`adaptive` runs as many episodes as the engine takes without a queue or a full KV cache, between
    `group_size` and `max_concurrent` for each engine; `fixed` always runs `max_concurrent`."""
    episode_timeout_s: float | None = Field(default=None, gt=0)
    """Longest that one episode may take, tools and all, in seconds; then it is aborted and its sample handed
    back (in evaluation: unscored). null sets no limit."""
    stuck_s: float = Field(default=300.0, gt=0)
    """An engine that has requests and samples no token for so many seconds is taken for dead, the
    evaluation's too. SGLang does not count a step of 2 s or more: where one takes so long, set it above the
    time of the longest answer."""
    max_model_len: int = Field(default=2048, ge=2, le=100_000_000)
    """Most tokens of prompt and response together."""
    workflow: str = "single_turn"
    """How an episode is made: `single_turn`, `multi_turn`, `tool_use`, `agent`, one of an installed
    package, or `path.py:name` of an `async def workflow(ctx, task)`."""
    workflow_args: dict[str, Any] = Field(default_factory=dict)
    """What the workflow takes, by name; for one of your own, its keyword arguments."""
    gateway: GatewaySection = GatewaySection()
    update_mode: Literal["recompute", "keep", "session"] = "recompute"
    """What a weight update does to KV that is there: rebuild it (exact), let requests in flight keep theirs
    (approximate), or let episodes keep their prefix cache over all turns (approximate; SGLang and vLLM)."""
    routes: Literal["auto", "replay", "off"] = "auto"
    """Of a mixture of experts, whether the trainer sends each token to the experts that the engine sent it to
    (`replay`) or lets its own routers choose (`off`), which choose otherwise where two experts are nearly
    alike. `auto` replays where engine and trainer can (docs/trainer.md, Mixtures of experts)."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """What the chat template is given beside the messages, such as `{enable_thinking: false}`, wherever it is
    applied: in generation, evaluation and checks, and for the examples of other trainings."""
    sampling: SamplingSection = SamplingSection()
    torch_threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """CPU threads of each engine's torch; `auto`: as `trainer.torch_threads`, and 1 for a server."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """Where the engines compute: `cpu`; `cuda`, each engine on GPUs of its own, in the order of their
    numbers; or `cuda:N`, all on that one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights and of the computation."""
    server: ServerSection = ServerSection()

    @property
    def greedy_sample(self) -> int | None:
        """The number in its group of the episode that is answered greedily; None where none is."""
        return 0 if self.greedy_baseline else None
