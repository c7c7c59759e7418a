"""The fields of a job file, as one model per section."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from areal_async.base.mistakes import ConfigError, Mistake, in_words
from areal_async.base.processes import RestartPolicy
from areal_async.base.versions import POLICY, POLICY_NAME
from areal_async.config.base import Dtype, Section, dtype_on
from areal_async.config.fields import Field as LeafField
from areal_async.config.fields import explain, fields_of, numbers_or_words
from areal_async.config.objective import ObjectiveSection, ReferenceSection, TeacherSection
from areal_async.config.reward import RewardSection
from areal_async.config.rollout import RolloutSection, SamplingSection, ServerSection
from areal_async.config.trainings import FileTraining, PreferenceSection, RewardModelSection, SftSection
from areal_async.data.examples import Kind
from areal_async.storage.urls import FETCHED, StoreUrl

NODE_ID = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
Beta = Annotated[float, Field(ge=0, lt=1)]
Size = Annotated[int, Field(ge=1, le=65_536)]
NumberOrAuto = Annotated[int, Field(ge=1, le=1_000_000_000)] | Literal["auto"]


class TasksSection(Section):
    """Task files, Parquet or jsonl, with columns `data_source, prompt, ability, reward_model, extra_info`.
    Kinds other than `rl` read files of examples (see docs/other-trainings.md)."""

    train: Annotated[Path, *FETCHED]
    """Path or URL of the training tasks (see docs/storage.md)."""
    evaluation: Annotated[Path | None, *FETCHED] = None
    """Path or URL of the held-out tasks; null disables the evaluation."""
    shuffle: bool = True
    """Draw a new order for each pass."""
    passes: int | None = Field(default=None, ge=1)
    """Passes over the training file; null means no limit."""


class WeightsSection(Section):
    """Transfer of new weights from the trainer to the engines."""

    channel: str = "auto"
    """Transport of weights: `shm` (shared memory), `zmq` (network), `disk` (shared directory), `nccl` (device
    to running SGLang servers), or your own. `auto` is `shm` on one host, else `zmq`."""
    channel_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the channel (see docs/weights.md#choose-a-channel)."""
    codec: Literal["auto", "full", "delta"] = "auto"
    """Full snapshots, or lossless deltas. `auto` is `delta` on `zmq`, and on `nccl` between hosts; otherwise
    `full`."""
    delta_below: float = Field(default=0.5, gt=0, le=1)
    """Maximum size of a delta, as a share of the full snapshot."""
    keep: int = Field(default=1, ge=1, le=10_000)
    """Number of newest snapshots to keep, in addition to all that are still needed."""


class ShapeSection(Section):
    """Cluster resources of each process of one role. Unset fields follow from its threads and devices."""

    cpus: float | None = Field(default=None, ge=0)
    """Cores to reserve."""
    gpus: float | None = Field(default=None, ge=0)
    """GPUs to reserve; a fraction shares a GPU."""
    memory_gb: float | None = Field(default=None, gt=0)
    """GiB of memory to reserve."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Custom cluster resources to reserve."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Node labels, such as `ray.io/accelerator-type: H100`."""


class PlacementSection(Section):
    """Placement of the job's processes. On one machine only `pretend` and `share` have an effect."""

    buffer: ShapeSection = ShapeSection()
    trainer: ShapeSection = ShapeSection()
    rollout: ShapeSection = ShapeSection()
    reward: ShapeSection = ShapeSection()
    evaluator: ShapeSection = ShapeSection()

    share: Literal["time"] | None = None
    """`time` if trainer and engine take turns on one device: the engine sleeps while the trainer steps, and
    also does the evaluations. Null keeps both on their devices all the time."""
    pretend: dict[str, Annotated[str, Field(pattern=NODE_ID)]] = Field(default_factory=dict)
    """Simulated hosts on one machine, such as `rollout-0: host-1`, without shared memory between them."""


class CheckpointSection(Section):
    """Checkpoints of weights, optimizer and the buffer's ledger, on disk and optionally in a store."""

    every_steps: NumberOrAuto = "auto"
    """Steps between checkpoints. The last step writes a checkpoint too. `auto` spends at most 1 % of the
    trainer's time, with at most 50 steps between two checkpoints."""
    in_memory: bool = True
    """Also keep the state in shared memory, if there is room for two copies. A crash of the trainer then
    loses only one step."""
    keep: int = Field(default=2, ge=1, le=10_000)
    """Number of newest checkpoints to keep."""
    keep_best: int = Field(default=0, ge=0, le=10_000)
    """Number of further checkpoints to keep: those with the best held-out accuracy."""
    store: StoreUrl | None = None
    """URL of a store folder that also gets checkpoints and the model, under `<job>`. Null means `run_dir` if
    `run_dir` is a URL."""


class EvaluationSamplingSection(SamplingSection):
    """Sampling parameters of the evaluation; greedy by default."""

    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    max_new_tokens: int | None = Field(default=None, ge=1)  # type: ignore[assignment]
    """Maximum tokens per response; null means `rollout.sampling.max_new_tokens`."""


class EvaluationSection(Section):
    """Held-out accuracy, measured during training by a separate engine (needs `tasks.evaluation`)."""

    every_steps: int = Field(default=25, ge=1)
    """Steps between evaluations. The first and the last version are always evaluated."""
    engine: str = "same"
    """Kind of engine, as in `rollout.engine`; `same` takes the rollout's kind."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the engine. If its kind is the rollout's, the default is `rollout.engine_args`."""
    device: str | None = Field(default=None, pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """`cpu`, `cuda` (the GPU after the rollout's) or `cuda:N`; null means `rollout.device`."""
    server: ServerSection = ServerSection()
    """Server of the engine. If unset, `rollout.server` applies without its `urls`."""
    samples: int = Field(default=1, ge=1)
    """Answers per task; more than 1 needs a temperature."""
    sampling: EvaluationSamplingSection = EvaluationSamplingSection()
    max_concurrent: int = Field(default=128, ge=1)
    """Maximum answers in flight."""
    torch_threads: int = Field(default=1, ge=1)
    """CPU threads of torch."""


class LoggerSection(Section):
    """A logger of the run. A name alone may replace the section."""

    name: str
    """`tensorboard`, `wandb`, `mlflow` (see docs/watching.md#loggers), an entry point in
    `areal_async.loggers`, or `path.py:name`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the logger."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


class ObserveSection(Section):
    """Metrics and logs."""

    metrics_port: int = Field(default=0, ge=0, le=65_000)
    """First of consecutive Prometheus ports; 0 picks free ports."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity to log."""
    event_log: bool = False
    """Append all events to `events/`, for tests (slow)."""
    stall_s: float = Field(default=30.0, gt=0)
    """Seconds without a batch until a stall is reported."""
    samples_every_steps: int = Field(default=10, ge=0)
    """Steps between saved episodes in `samples/`. Evaluations save some too. 0 saves none."""
    samples: int = Field(default=4, ge=0, le=256)
    """Maximum episodes to save at a time."""
    loggers: tuple[LoggerSection, ...] = ()
    """Loggers, each a name or `{name: …, args: {…}}`."""


class SupervisorSection(Section):
    """Start and restart of the services."""

    ready_s: float = Field(default=300.0, gt=0)
    """Maximum startup time of a service, in seconds. For a server, `rollout.server.ready_s` is added."""
    restarts: int = Field(default=5, ge=0, le=1_000_000)
    """Maximum restarts of a service within `window_s`. One more exit ends the job, which can be resumed."""
    window_s: float = Field(default=300.0, gt=0)
    """Seconds after which an exit no longer counts."""
    first_pause_s: float = Field(default=0.5, ge=0)
    """Seconds before restarting a service that served less than 10 s. The pause doubles with each consecutive
    restart."""
    longest_pause_s: float = Field(default=30.0, ge=0)
    """Maximum pause before a restart, in seconds."""
    hang_s: float = Field(default=60.0, ge=5)
    """Seconds without a heartbeat until a process is killed and restarted."""

    def restart_policy(self) -> RestartPolicy:
        """Return the restart policy of the services."""
        return RestartPolicy(self.restarts, self.window_s, self.first_pause_s, self.longest_pause_s)


class OvertakenSection(Section):
    """Handling of a group that is still being generated at the last step, `v`, at which it is not too stale:
    its minimum version is `v - max_staleness`."""

    policy: Literal["wait", "drop", "mask"] = "wait"
    """Handling of unfinished groups that would be too stale one step later: `wait` delays the step for them,
    `drop` drops them, and `mask` trains them later without their stale tokens."""
    limit_s: float = Field(default=60.0, gt=0)
    """Maximum wait, in seconds. Then the groups are dropped."""


class RedisLoginSection(Section):
    """Login to a Redis given by URL. The URL has the user name. Job files never contain passwords."""

    password_env: str = ""
    """Environment variable with the password."""
    password_file: Path | None = None
    """File that contains only the password. It is read at each connection."""


class RedisTlsSection(Section):
    """Certificates for `rediss://`. The server's certificate is always checked."""

    ca_file: Path | None = None
    """PEM file of the certificate authority; null means the system's authorities."""
    cert_file: Path | None = None
    """PEM file of the client certificate."""
    key_file: Path | None = None
    """PEM file of the client key, without a passphrase."""
    check_hostname: bool = True
    """Require a certificate for the URL's host."""


class GroupSection(Section):
    """Handling of a group with missing samples."""

    policy: Literal["complete", "deadline_drop", "deadline_partial"] = "complete"
    """Handling of an incomplete group: `complete` waits for it; `deadline_drop` drops it at the deadline;
    `deadline_partial` trains its finished samples."""
    deadline_s: float | None = Field(default=None, gt=0)
    """Deadline, in seconds after the group's first lease."""
    min_samples: int = Field(default=1, ge=1)
    """Minimum number of samples to train under `deadline_partial`. Smaller groups are dropped."""


class BufferSection(Section):
    redis: str = "embedded"
    """`embedded` starts a Redis server. Another Redis is given by a `redis://`, `rediss://` (TLS) or
    `unix://` URL (see docs/buffer.md#use-your-own-redis)."""
    redis_login: RedisLoginSection = RedisLoginSection()
    redis_tls: RedisTlsSection = RedisTlsSection()
    durability: Literal["memory", "everysec", "always"] = "everysec"
    """Protection of stored episodes: none beyond Redis's memory (`memory`), or a sync to disk every second
    (`everysec`) or at each write (`always`). See docs/buffer.md#durability."""
    max_staleness: int = Field(default=4, ge=0, le=10_000)
    """η: maximum age, in steps, of the weights that sampled a trained token; 0 is synchronous."""
    batch_groups: int = Field(default=16, ge=1, le=1_000_000)
    """B: groups per step."""
    pacing: Literal["fresh", "full"] = "fresh"
    """Number of groups generated ahead: enough for the trainer (`fresh`), or all that η allows (`full`)."""
    sampling: Literal["fifo", "freshest", "priority"] = "fifo"
    """Order of training: oldest group first (`fifo`), `freshest` first, or highest `priority` first. Groups
    that are about to become too stale always come first."""
    priority: Literal["reward_variance", "advantage"] = "reward_variance"
    """Priority of a group: variance (`reward_variance`) or mean absolute deviation (`advantage`) of its
    rewards."""
    max_reuse: int = Field(default=1, ge=1, le=10_000)
    """Maximum number of steps that use the same group."""
    on_overtaken: OvertakenSection = OvertakenSection()
    on_abandoned: Literal["train", "drop"] = "train"
    """Handling of groups sampled before, if a restarted trainer repeats steps and gets different weights (see
    docs/recovery.md#steps-that-are-trained-again)."""
    group: GroupSection = GroupSection()
    dynamic_filtering: bool = False
    """Replace groups in which all rewards are equal."""
    lease_s: float = Field(default=30.0, gt=0)
    """Seconds without a heartbeat until a worker loses its leases."""
    max_groups: int = Field(default=4096, ge=1, le=100_000_000)
    """Maximum groups in the buffer, where a group stays from its first lease to a checkpoint."""
    max_bytes: int = Field(default=1 << 30, ge=1 << 20, le=1 << 50)
    """Maximum bytes of episodes in the buffer."""


class OptimizerSection(Section):
    """AdamW."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the gradient's two running moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Constant added to the second moment's square root."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer updates of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    final_lr_share: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of `linear` and `cosine`, as a share of `lr`."""
    clip_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm to clip at."""


class CriticOptimizerSection(OptimizerSection):
    """AdamW."""

    lr: float = Field(default=1e-5, gt=0)
    """Learning rate."""


class CriticSection(Section):
    """Value model for advantages such as `gae`."""

    kind: Literal["model", "head"] = "model"
    """A separate `model`, or a `head` of the policy."""
    model: Annotated[Path | None, *FETCHED] = None
    """Hugging Face directory of a causal language model or one-label sequence classifier; null means the
    job's model."""
    optimizer: CriticOptimizerSection = CriticOptimizerSection()
    """Optimizer of the critic if `kind` is `model`."""
    coefficient: float = Field(default=0.5, gt=0)
    """Weight of the value loss if `kind` is `head`."""
    clip: float | None = Field(default=0.2, gt=0)
    """Maximum change of a predicted value per step; null means no limit."""
    warmup_steps: int = Field(default=0, ge=0)
    """Initial steps that train only the critic."""


class ProcessRewardSection(Section):
    """Process reward model of the advantage `prime`: a language model, trained beside the policy on outcome
    rewards. A token's reward is its log-prob minus the reference's log-prob."""

    model: Annotated[Path | None, *FETCHED] = None
    """Hugging Face directory; null means the job's model."""
    optimizer: OptimizerSection = OptimizerSection()
    """Optimizer, with one update per step."""
    beta: float = Field(default=0.05, gt=0)
    """Factor of the log-prob difference from the reference in the loss."""
    balanced: bool = True
    """Give successes and failures equal weight in each step."""


class LoraSection(Section):
    """Low-rank adapters (LoRA), trained and published instead of the weights (see docs/trainer.md)."""

    rank: int = Field(default=0, ge=0, le=4096)
    """Rank of the adapters; 0 trains all weights instead."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: the adapters' output is multiplied by `alpha` / `rank`."""
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Layers to adapt, such as `q_proj`. Empty means all linear layers except the output."""


class SelfCheckSection(Section):
    """Comparison of the engine's log-probs with the trainer's before the first gradient (see
    docs/trainer.md)."""

    bound: float | None = Field(default=None, gt=0)
    """Limit, in nats, on the 99.9 % quantile of the log-prob differences between engine and trainer. The
    other limits scale with it. Null means the table in docs/trainer.md#self-check."""
    action: Literal["stop", "warn"] = "stop"
    """Action if a quantile exceeds its limit. For an engine or dtype that the table lacks, the action is
    always `warn`, unless `bound` is set."""


class ParallelSection(Section):
    """Sizes of the axes. Their product is `trainer.ranks`; by default `shard` takes the remaining ranks."""

    data: Size = 1
    """Copies of the model."""
    shard: Size | None = None
    """Ranks that share one copy; null means all remaining ranks."""
    sequence: Size = 1
    """Ranks that split each row's tokens."""
    tensor: Size = 1
    """Ranks that split each matrix."""
    pipeline: Size = 1
    """Stages of neighbouring layers."""
    expert: Size = 1
    """Ranks over which a mixture's experts are spread; a divisor of `data` × `shard`."""


class TrainerSection(Section):
    backend: str = Field(default="fsdp", min_length=1)
    """`fsdp` (torch FSDP2), `megatron` (Megatron-Core), an installed back end, or `path.py:name`."""
    backend_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the back end: `recompute`, `offload_optimizer`, `compile`, `vision` (`fsdp`),
    `virtual_stages` (`megatron`)."""
    ranks: int = Field(default=1, ge=1, le=65_536)
    """Training processes, on `cuda` one per GPU. They restart together."""
    parallel: ParallelSection = ParallelSection()
    hang_s: float | None = Field(default=None, ge=5)
    """Replacement for `supervisor.hang_s` in the trainer's processes."""
    collective_s: float = Field(default=600.0, ge=5)
    """Maximum wait of ranks for each other, in seconds. Then the trainer restarts from its checkpoint."""
    steps: int = Field(default=100, ge=1, le=100_000_000)
    """Number of steps. Each step trains one batch and publishes one version."""
    minibatches: int = Field(default=1, ge=1, le=1_000_000)
    """Optimizer updates per step. No group is split between updates."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Maximum tokens of one packed forward pass. A longer episode runs alone."""
    optimizer: OptimizerSection = OptimizerSection()
    lora: LoraSection = LoraSection()
    objective: ObjectiveSection = ObjectiveSection()
    reference: ReferenceSection = ReferenceSection()
    critic: CriticSection = CriticSection()
    teacher: TeacherSection = TeacherSection()
    process_reward: ProcessRewardSection = ProcessRewardSection()
    self_check: SelfCheckSection = SelfCheckSection()
    record_batches: bool = False
    """Save each step's episodes, manifest and losses in `batches/`."""
    torch_threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """CPU threads of torch per rank. `auto` begins with a number by the FLOPs of training and generation, and
    then keeps what measures better. A fixed number makes repeated steps bitwise identical."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """`cpu`, `cuda` (GPUs from 0) or `cuda:N` (GPUs from N)."""
    dtype: Dtype = "auto"
    """Number type of the computation and the published weights. `auto` is `bfloat16` on a GPU and `float32`
    on a CPU."""

    @property
    def resolved_dtype(self) -> str:
        """The number type: `dtype`, or the one that `auto` stands for on this section's device."""
        return dtype_on(self.device, self.dtype)


class JobConfig(Section):
    """A training job. Relative paths are relative to the job file."""

    job: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,47}$")
    """Name of the job and its folder: at most 48 lower-case letters, digits, `-` and `_`."""
    kind: Kind = "rl"
    """`rl` trains on rewards, `sft` on answers, `preference` on preferred answers. `reward_model` trains a
    model that scores answers."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of task order and sampling."""
    run_dir: Annotated[Path, *FETCHED] = Path("runs")
    """Parent of the run folder `<run_dir>/<job>`. If it is a URL, the run uses a local folder that is
    mirrored to the URL (see docs/storage.md)."""
    policy: str = Field(default=POLICY, pattern=rf"^{POLICY_NAME}$")
    """Name of the trained policy."""
    policies: dict[str, dict[str, Any]] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """Policies with their own fields (see docs/agents.md#train-several-policies)."""
    model: Annotated[Path, *FETCHED]
    """Hugging Face directory or URL of a causal language model (safetensors) with its tokenizer."""
    tasks: TasksSection
    rollout: RolloutSection = RolloutSection()
    buffer: BufferSection = BufferSection()
    reward: RewardSection = RewardSection()
    trainer: TrainerSection = TrainerSection()
    sft: SftSection = SftSection()
    preference: PreferenceSection = PreferenceSection()
    reward_model: RewardModelSection = RewardModelSection()
    weights: WeightsSection = WeightsSection()
    placement: PlacementSection = PlacementSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    observe: ObserveSection = ObserveSection()
    supervisor: SupervisorSection = SupervisorSection()

    def __new__(cls, *given: Any, **fields: Any) -> "JobConfig":
        if given:
            fix = "Write Job(job=…, model=…, tasks=…), or load_job(path or mapping)"
            raise ConfigError("Job", [Mistake("job", f"{given[0]!r:.80} has no field's name before it", fix)])
        return super().__new__(cls)

    @model_validator(mode="wrap")
    @classmethod
    def _in_words(cls, content: Any, handler: ModelWrapValidatorHandler["JobConfig"]) -> "JobConfig":
        """Validate the job. Raise `ConfigError`, with pydantic's error as its cause."""
        try:
            return handler(content)
        except ValidationError as error:
            details = numbers_or_words(error.errors(include_url=False))
            raise ConfigError("the job", in_words(details, partial(explain, cls))) from error

    def of(self, policy: str) -> "JobConfig":
        """Return the job of one of its policies, for the trainer and the engines of that policy. Only the
        first policy has held-out tasks. Raises KeyError for another name."""
        if not self.policies and policy == self.policy:
            return self
        flat = policy_alone(self.model_dump(), policy, self.policies[policy])
        if flat["rollout"]["routes"] == "auto":  # An episode has room for the routes of one model
            flat["rollout"] |= {"routes": "off"}
        if policy != self.policy:
            flat["tasks"] |= {"evaluation": None}
            flat["checkpoint"] |= {"keep_best": 0}
        return JobConfig.model_validate(flat)

    @property
    def views(self) -> "dict[str, JobConfig]":
        """The job of each policy, by the policy's name."""
        return {name: self.of(name) for name in self.policies or (self.policy,)}

    @property
    def training(self) -> FileTraining:
        """The section of the job's kind. The kind must not be `rl`."""
        found: FileTraining = getattr(self, self.kind)
        return found

    @property
    def evaluation_sampling(self) -> SamplingSection:
        """The sampling parameters of the evaluation. Unset parameters have the rollout's values."""
        section = self.evaluation.sampling.model_dump()
        section["max_new_tokens"] = section["max_new_tokens"] or self.rollout.sampling.max_new_tokens
        return SamplingSection(**section)


def policy_alone(content: Mapping[str, Any], policy: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job that has one policy. `own` are the policy's fields in `policies`."""
    rest = {key: value for key, value in content.items() if key != "policies"}
    return merged(rest, own) | ({"policy": policy} if policy else {})


def job_fields() -> dict[str, LeafField]:
    """Return every leaf field of a job file by its dotted path, in file order."""
    return fields_of(JobConfig)


def merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with the fields of `own`, section by section. Arguments of a part are replaced as
    a whole."""
    result = dict(base)
    for key, value in own.items():
        before = result.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping) and not key.endswith("_args"):
            value = merged(before, value)
        result[key] = value
    return result
