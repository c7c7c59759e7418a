"""`rollout`: the generation of episodes."""

import ipaddress
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from areal_async.config.base import Dtype, Section, dtype_on

StopText = Annotated[str, Field(min_length=1)]
"""A stop text. An empty text would end every response before its first token."""


class SamplingSection(Section):
    """Sampling parameters of one generation call."""

    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass of the tokens to sample from."""
    top_k: int = Field(default=0, ge=0)
    """Number of most likely tokens to sample from; 0 allows all."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum tokens per response."""
    stop: tuple[StopText, ...] = ()
    """Texts that end a response."""


class ServerSection(Section):
    """Server of an engine other than `local`."""

    urls: tuple[str, ...] = ()
    """Running servers (`http://host:port`), one per replica of each worker. They must be able to read the
    run's weight snapshots."""
    environment: Path | None = None
    """Virtual environment of the server. The default is `$AREAL_ASYNC_ENGINES/<engine>`, or the environment
    of `make engines-gpu` (on a CPU: `make engines`)."""
    arguments: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    """Flags of the server without their leading dashes: `{mem-fraction-static: 0.8}`. true passes the flag
    without a value; false and null remove a default."""
    ready_s: float = Field(default=900.0, gt=0)
    """Maximum startup time, in seconds."""


class GatewaySection(Section):
    """Gateway of workflows that open `ctx.gateway()`. It listens from the first such call on."""

    host: str = "loopback"
    """Address for agents: `loopback`, `host` (for agents on other hosts) or an IP address. Calls need the API
    key of their episode. Traffic is unencrypted."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first worker. Further workers use the next ports. 0 picks free ports."""
    sampling: Literal["agent", "job"] = "agent"
    """Source of temperature, top_p and top_k: the `agent`'s call, or the `job` (`rollout.sampling`). With
    `agent`, calls with values that training does not allow are refused."""
    tool_format: Literal["auto", "hermes", "xml", "llama", "none"] = "auto"
    """Format of tool calls; `auto` reads the chat template."""
    max_calls: int = Field(default=32, ge=1, le=65_536)
    """Maximum calls in flight per episode. Further calls are refused (429)."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024, le=1 << 31)
    """Maximum bytes of a request. Longer requests are refused (413)."""
    call_timeout_s: float = Field(default=600.0, gt=0)
    """Timeout of a call (504), in seconds."""

    @field_validator("host")
    @classmethod
    def _an_interface(cls, host: str) -> str:
        usable = host in ("loopback", "host")
        with suppress(ValueError):
            usable = usable or not ipaddress.ip_address(host).is_unspecified
        if not usable:
            use = "use loopback, host, or an IP address of the host"
            raise ValueError(f"agents could not be sent to {host!r}: {use}")
        return host


class ImagesSection(Section):
    """Sizes to which images of prompts and results are scaled, if the model accepts a range. A larger image
    has more tokens. Engines and trainer use the same sizes."""

    min_pixels: int | None = Field(default=None, ge=1)
    """Minimum pixels of an image; smaller images are enlarged. The default is the model's own."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Maximum pixels of an image; larger images are reduced. The default is the model's own."""

    @property
    def pixels(self) -> tuple[int | None, int | None]:
        """Minimum and maximum."""
        return self.min_pixels, self.max_pixels

    @model_validator(mode="after")
    def _a_range(self) -> "ImagesSection":
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is more than max_pixels {self.max_pixels}")
        return self


class RolloutSection(Section):
    engine: str = "local"
    """`local` (torch), `sglang` or `vllm` (installed by `make engines-gpu`, on a CPU by `make engines`), an
    installed engine, or `path.py:name`."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the engine; built-in engines have none."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Worker processes. `areal-async scale` changes their number during a run."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Engines per worker."""
    group_size: int = Field(default=8, ge=1, le=65_536)
    """Episodes per task."""
    greedy_baseline: bool = False
    """Sample each group's first episode greedily. It is the baseline of the advantage `remax` and is not
    trained."""
    max_concurrent: int = Field(default=64, ge=1, le=1_000_000)
    """Maximum episodes in flight per engine. It must be at least `group_size`."""
    episode_timeout_s: float | None = Field(default=None, gt=0)
    """Timeout of an episode, in seconds. Then the worker returns the sample to the buffer; an evaluation
    counts it as unscored."""
    stuck_s: float = Field(default=300.0, gt=0)
    """Seconds without a token after which an engine with requests counts as dead (see docs/engines.md for
    SGLang)."""
    max_model_len: int = Field(default=2048, ge=2, le=100_000_000)
    """Maximum tokens of prompt and response together."""
    workflow: str = "single_turn"
    """`single_turn`, `multi_turn`, `tool_use`, `agent`, an installed workflow, or `path.py:name` of an `async
    def workflow(ctx, task)`."""
    workflow_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the workflow."""
    gateway: GatewaySection = GatewaySection()
    update_mode: Literal["recompute", "keep", "session"] = "recompute"
    """KV cache at a weight update: `recompute` it (exact), `keep` it until the request ends, or keep it until
    the episode ends (`session`, servers only). The last two are approximate."""
    routes: Literal["auto", "replay", "off"] = "auto"
    """Expert routing in the trainer: `replay` the engine's routes, or `off`. `auto` replays them if possible
    (see docs/trainer.md#mixtures-of-experts)."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, such as `{enable_thinking: false}`."""
    sampling: SamplingSection = SamplingSection()
    torch_threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """CPU threads of torch per engine. `auto` is 1 for a server; see `trainer.torch_threads`."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """`cpu`, `cuda` (separate GPUs) or `cuda:N` (one GPU for all engines)."""
    dtype: Dtype = "auto"
    """Number type of the weights and the computation. `auto` is `bfloat16` on a GPU and `float32` on a
    CPU."""
    images: ImagesSection = ImagesSection()
    server: ServerSection = ServerSection()

    @property
    def resolved_dtype(self) -> str:
        """The number type: `dtype`, or the one that `auto` stands for on this section's device."""
        return dtype_on(self.device, self.dtype)

    @property
    def greedy_sample(self) -> int | None:
        """Index of the greedily sampled episode in its group, or None."""
        return 0 if self.greedy_baseline else None
