"""A job file: one YAML document, one model or several."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from areal_async.base.mistakes import ConfigError, Mistake, in_words
from areal_async.base.processes import RestartPolicy
from areal_async.base.versions import POLICY, POLICY_NAME
from areal_async.config.base import Overrides, Section
from areal_async.config.objective import ObjectiveSection, ReferenceSection, TeacherSection
from areal_async.config.parallel import ParallelSection
from areal_async.config.reward import RewardSection
from areal_async.config.rollout import RolloutSection, SamplingSection, ServerSection, StopText
from areal_async.config.trainings import FileTraining, PreferenceSection, RewardModelSection, SftSection
from areal_async.data.examples import Kind
from areal_async.storage.urls import FETCHED, StoreUrl

NODE_ID = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
Beta = Annotated[float, Field(ge=0, lt=1)]
NumberOrAuto = Annotated[int, Field(ge=1, le=1_000_000_000)] | Literal["auto"]


class TasksSection(Section):
    """Parquet or jsonl files, of tasks (columns `data_source, prompt, ability, reward_model, extra_info`) or,
    for other kinds than `rl`, of examples (see docs/other-trainings.md)."""

    train: Annotated[Path, *FETCHED]
    """Tasks to train on: a path, or the URL of a file in a store (see docs/storage.md)."""
    evaluation: Annotated[Path | None, *FETCHED] = None
    """Held-out tasks, likewise; none means that accuracy is not measured."""
    shuffle: bool = True
    """Draw a new order for each pass from `seed`; off means file order."""
    passes: int | None = Field(default=None, ge=1)
    """How often the training file is gone through; none means as often as the steps need."""


class WeightsSection(Section):
    """The way of new weights from the trainer to the engines."""

    channel: str = "auto"
    """How new weights reach the engines: `shm` is shared memory on one host; `zmq` sends them to other hosts
    in chunks, which receivers hand on to each other; `auto` is `shm` where one host has all of the job and
    `zmq` elsewhere; `disk` is a directory that all hosts see; `nccl` is as `auto`, and the trainer sends the
    tensors from its own device to SGLang servers that serve already. A channel of another package is named by
    its entry point, one of your own as `path.py:name`."""
    channel_args: dict[str, Any] = Field(default_factory=dict)
    """What the channel takes, by name (see docs/weights.md#choose-a-channel)."""
    codec: Literal["auto", "full", "delta"] = "auto"
    """What travels: whole snapshots (`full`), or for receivers that hold the version before what changed
    (`delta`, lossless). `auto` is `delta` on `zmq`, and on `nccl` between hosts, and `full` elsewhere, where
    receivers read the files that the trainer wrote."""
    delta_below: float = Field(default=0.5, gt=0, le=1)
    """A delta is offered where it is smaller than this share of the full snapshot."""
    keep: int = Field(default=1, ge=1, le=10_000)
    """Newest snapshots kept. Shared memory holds one more, which is being written; and as long as they need
    them those that a worker has not acknowledged, that an evaluation waits for (at most two, beside version 0
    and the last), and that a delta is made of."""


class ShapeSection(Section):
    """What each process of one role is given on a cluster. What is left out follows from its threads and
    devices."""

    cpus: float | None = Field(default=None, ge=0)
    """Cores that are reserved for it; parts of one may be given."""
    gpus: float | None = Field(default=None, ge=0)
    """GPUs that it sees; a part of one shares it."""
    memory_gb: float | None = Field(default=None, gt=0)
    """GiB of memory that are reserved for it."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Custom resources of the cluster that it takes, by name."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels that its node must have, such as `ray.io/accelerator-type: H100`."""


class PlacementSection(Section):
    """Where the processes of the job run. On one machine everything but `pretend` is without effect."""

    buffer: ShapeSection = ShapeSection()
    trainer: ShapeSection = ShapeSection()
    rollout: ShapeSection = ShapeSection()
    reward: ShapeSection = ShapeSection()
    evaluator: ShapeSection = ShapeSection()

    pretend: dict[str, Annotated[str, Field(pattern=NODE_ID)]] = Field(default_factory=dict)
    """On one machine: processes that take themselves for those of another host of that name, such as
    `rollout-0: host-1`. They share no memory with the rest and talk to it as hosts do, over loopback: to try
    what is meant for several hosts."""


class CheckpointSection(Section):
    """Weights, optimizer and the buffer's ledger, together on disk and, where one is named, in a store."""

    every_steps: NumberOrAuto = "auto"
    """Steps between two checkpoints; the last step always makes one. Episodes are kept until then. `auto`:
    as often as it takes at most 1 % of the trainer's time, and at least every 50 steps or as many as
    the buffer can hold."""
    in_memory: bool = True
    """Whether the trainer also leaves its state in shared memory, so that its death costs no more than the
    step it was in. Takes twice the size of a checkpoint there, and is left out where that is not free."""
    keep: int = Field(default=2, ge=1, le=10_000)
    """Newest checkpoints kept."""
    keep_best: int = Field(default=0, ge=0, le=10_000)
    """Checkpoints kept beside those, the best by held-out accuracy of the evaluation of the same version; of
    equal ones the newer."""
    store: StoreUrl | None = None
    """URL of a folder in a store, such as `s3://bucket/checkpoints`: each checkpoint is written to `<job>` in
    it too, and counts only once it is there; the trained model is put there at the end. None means
    `run_dir` where that is a URL, and otherwise the run's folder alone."""


class EvaluationSamplingSection(Section):
    """Sampling parameters of the evaluation; greedy unless told otherwise."""

    temperature: float = Field(default=0.0, ge=0)
    """Temperature of sampling; 0 means greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens of this total probability; 1 means from all."""
    top_k: int = Field(default=0, ge=0)
    """Sample from so many most likely tokens; 0 means from all."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one response; null means as many as `rollout.sampling.max_new_tokens`."""
    stop: tuple[StopText, ...] = ()
    """Texts that end a response (beside the model's end-of-sequence token)."""


class EvaluationSection(Section):
    """Held-out accuracy, measured beside training by an engine of its own (needs `tasks.evaluation`)."""

    every_steps: int = Field(default=25, ge=1)
    """Steps between two evaluations; version 0 and the final one are always evaluated."""
    engine: str = "same"
    """What answers: an engine of its own of the rollout's kind (`same`), or of another kind, named as in
    `rollout.engine`."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that engine; left out, one of the rollout's kind has `rollout.engine_args`."""
    device: str | None = Field(default=None, pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """Where the evaluation's engine computes: `cpu`, `cuda` (the GPU after the rollout's, or the first again)
    or `cuda:N`; none means as `rollout.device`."""
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


class LoggerSection(Section):
    """A logger of the run; its name alone may stand for it."""

    name: str
    """`tensorboard`, `wandb`, `mlflow` (see docs/watching.md#loggers), `path.py:name` of one of your own, or the name
    of one in an installed package (entry point group `areal_async.loggers`)."""
    args: dict[str, Any] = Field(default_factory=dict)
    """What the logger takes, by name."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


class ObserveSection(Section):
    """Metrics and logs."""

    metrics_port: int = Field(default=0, ge=0, le=65_000)
    """First of the consecutive ports that the services serve Prometheus metrics on; 0: free ones, so that
    jobs beside each other do not want the same."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe events that the services log."""
    event_log: bool = False
    """Every process appends what it knows to have happened to `events/` in the run folder, for tests that
    look for what was lost or done twice. It costs time and disk."""
    stall_s: float = Field(default=30.0, gt=0)
    """A trainer that has waited for a batch so many seconds is reported, with the edge that starves."""
    samples_every_steps: int = Field(default=10, ge=0)
    """Of every so many steps, and of every evaluation, some decoded episodes are kept in `samples/` of the
    run folder; 0 keeps none, where prompts or answers must not be on disk as text."""
    samples: int = Field(default=4, ge=0, le=256)
    """How many episodes at most of each."""
    loggers: tuple[LoggerSection, ...] = ()
    """What the run's figures and samples are told to beside its own records: each by its name, or by
    `{name: …, args: {…}}`."""


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
    """Seconds before a service is started again that died within 10 s of serving, doubled with each such
    death in a row. One that had served longer is started again at once."""
    longest_pause_s: float = Field(default=30.0, ge=0)
    """Longest pause before a service is started again, in seconds."""
    hang_s: float = Field(default=60.0, ge=5)
    """A process that gives no sign of life for so many seconds (it is stopped, or in a call into a driver
    that does not return) is killed and started again. The sign comes from a thread of its own every second,
    however long an answer, a reward or a step takes."""
    spare_after_s: float | None = Field(default=30.0, ge=0)
    """Once all services have served so many seconds a process is prepared, one for each rank of the trainer,
    that stands in at once for a trainer, worker or evaluator that dies: about 0.4 GB of memory each. null
    prepares none."""

    def restart_policy(self) -> RestartPolicy:
        """Return the policy under which a service is restarted."""
        return RestartPolicy(self.restarts, self.window_s, self.first_pause_s, self.longest_pause_s)


class OvertakenSection(Section):
    """What step `v` does about a group with a live lease and minimum version `v - max_staleness`."""

    policy: Literal["wait", "drop", "mask"] = "wait"
    """What a step does about a group too old for the next: `wait` for it and take it in, `drop` it at once,
    counted, or `mask`: leave it to be trained later without its tokens that are too old by then."""
    limit_s: float = Field(default=60.0, gt=0)
    """Longest wait for overtaken groups, in seconds; then they are dropped, counted."""


class RedisLoginSection(Section):
    """How to log in to a Redis given by URL. The user's name is in the URL; passwords are never in a job
    file, which is copied into the run folder."""

    password_env: str = ""
    """Environment variable that holds the password."""
    password_file: Path | None = None
    """File that holds the password and nothing else. It is read at each connection, so it may change."""


class RedisTlsSection(Section):
    """Certificates for `rediss://`. The server's certificate is always checked."""

    ca_file: Path | None = None
    """PEM file of the authority that signed the server's certificate; the system's authorities without."""
    cert_file: Path | None = None
    """PEM file of the client certificate, where the server asks for one."""
    key_file: Path | None = None
    """PEM file of the client certificate's key, without a passphrase."""
    check_hostname: bool = True
    """Whether the certificate must be for the host in the URL."""


class GroupSection(Section):
    """What becomes of a group of which not all samples have come."""

    policy: Literal["complete", "deadline_drop", "deadline_partial"] = "complete"
    """What becomes of a group that is not whole: `complete` waits for it; `deadline_drop` drops it at the
    deadline, counted; `deadline_partial` trains what has come by then and gives up the rest."""
    deadline_s: float | None = Field(default=None, gt=0)
    """Seconds from the group's first lease until its deadline."""
    min_samples: int = Field(default=1, ge=1)
    """Under `deadline_partial`, a group with fewer samples at the deadline is dropped, counted."""


class BufferSection(Section):
    redis: str = "embedded"
    """`embedded` starts a redis-server of the job's own; else a URL: `redis://`, `rediss://` (TLS) or
    `unix://` (see docs/buffer.md#use-your-own-redis)."""
    redis_login: RedisLoginSection = RedisLoginSection()
    redis_tls: RedisTlsSection = RedisTlsSection()
    durability: Literal["memory", "everysec", "always"] = "everysec"
    """What an acknowledged episode survives: the death of every process but Redis (`memory`); of Redis too,
    where a machine that fails may lose two seconds (`everysec`); of the machine as well (`always`)."""
    max_staleness: int = Field(default=4, ge=0, le=10_000)
    """η: no token whose weights were more than so many steps older than the step's is ever in a gradient;
    0 is synchronous training."""
    batch_groups: int = Field(default=16, ge=1, le=1_000_000)
    """B: groups in one step."""
    pacing: Literal["fresh", "full"] = "fresh"
    """How many groups are generated ahead within η: as few as keep the trainer from waiting (`fresh`), found
    anew with every step; or all that η allows (`full`)."""
    sampling: Literal["fifo", "freshest", "priority"] = "fifo"
    """Which scored groups a step takes: those of the oldest version (`fifo`), of the newest (`freshest`), or
    of the highest `priority`. Under each, what would otherwise become too old goes first."""
    priority: Literal["reward_variance", "advantage"] = "reward_variance"
    """What `sampling: priority` goes by: the variance of the group's rewards, or the mean size of their
    differences from the group's mean."""
    max_reuse: int = Field(default=1, ge=1, le=10_000)
    """Most steps that one group is trained in. Above 1, groups trained before fill the places of a step that
    new ones leave free, while they are young enough."""
    on_overtaken: OvertakenSection = OvertakenSection()
    on_abandoned: Literal["train", "drop"] = "train"
    """What is done with groups sampled from versions that a trainer which came back did not make again bit by
    bit, as on GPUs: `train` them by the log-probs they were sampled with, their age counted from the last
    version that both trainers have in common, or `drop` them, counted. With `on_overtaken: mask` they are
    dropped."""
    group: GroupSection = GroupSection()
    dynamic_filtering: bool = False
    """Drop a group whose rewards are all equal, counted, and generate another: it has no advantage to learn
    from."""
    lease_s: float = Field(default=30.0, gt=0)
    """A worker not heard of for so many seconds loses its groups; another generates what is missing."""
    max_groups: int = Field(default=4096, ge=1, le=100_000_000)
    """Most groups held at once, from their first lease to the checkpoint that holds them."""
    max_bytes: int = Field(default=1 << 30, ge=1 << 20, le=1 << 50)
    """Most bytes of episodes held at once."""


class OptimizerSection(Section):
    """AdamW."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Number that is added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer updates over which the rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the rate does after the warm-up, down to `final_lr_share` at the last update."""
    final_lr_share: float = Field(default=0.0, ge=0, le=1)
    """Share of `lr` that is left at the end of a `linear` or `cosine` schedule."""
    clip_grad_norm: float = Field(default=1.0, gt=0)
    """Largest gradient norm of an update; larger ones are scaled down to it."""


class CriticOptimizerSection(OptimizerSection):
    """AdamW."""

    lr: float = Field(default=1e-5, gt=0)
    """Learning rate."""


class CriticSection(Section):
    """The model that says what is still to be earned, for an advantage such as `gae` that needs one."""

    kind: Literal["model", "head"] = "model"
    """`model`: one of its own; `head`: a further output of the policy, trained with it."""
    model: Annotated[Path | None, *FETCHED] = None
    """Hugging Face directory of a `model`: a causal language model, which gets a new output, or a sequence
    classifier with one label, such as a reward model. None means the job's own model."""
    optimizer: CriticOptimizerSection = CriticOptimizerSection()
    """How a `model` is trained."""
    coefficient: float = Field(default=0.5, gt=0)
    """Weight of the value loss beside that of the policy, for a `head`."""
    clip: float | None = Field(default=0.2, gt=0)
    """A value counts as moved by at most this in one step; none sets no limit."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the beginning in which the critic alone is trained."""


class ProcessRewardSection(Section):
    """The process reward model of the advantage `prime`: a language model, whose log-probs less those of the
    reference are the rewards of tokens. It is trained beside the policy, on what episodes earn."""

    model: Annotated[Path | None, *FETCHED] = None
    """Hugging Face directory that it begins with; none means the job's own model."""
    optimizer: OptimizerSection = OptimizerSection()
    """How it is trained, with one update in each step."""
    beta: float = Field(default=0.05, gt=0)
    """What the difference of log-probs is multiplied by when it is trained; `prime` has a `beta` of its own
    for the policy."""
    balanced: bool = True
    """Whether what earned its reward and what did not weigh the same in each step, however many there are of
    each; false is the loss of the paper."""


class LoraSection(Section):
    """Low-rank adapters (LoRA), trained and published in place of the weights (see docs/trainer.md)."""

    rank: int = Field(default=0, ge=0, le=4096)
    """Rows of the adapters' inner matrices; 0 trains the weights themselves, without adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """An adapter's product is scaled by alpha / rank."""
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Layers that get an adapter, by the last part of their name, such as `q_proj`; none means every linear
    layer but the output layer."""


class SelfCheckSection(Section):
    """Recomputing the engine's log-probs before the first gradient (see docs/trainer.md)."""

    bound: float | None = Field(default=None, gt=0)
    """Most nats of the 99.9 % quantile of the difference of a log-prob; the other bounds follow from it, the
    mean with a twentieth. None means the table's row for engine, dtype and kind of model."""
    action: Literal["stop", "warn"] = "stop"
    """What happens above a bound: the job stops, or goes on with a warning. Where the table has no row, it
    goes on with a warning."""


class TrainerSection(Section):
    backend: str = Field(default="fsdp", min_length=1)
    """What holds and updates the weights: `fsdp` is torch FSDP2, `megatron` Megatron-Core; or one of an
    installed package, or `path.py:name` of your own."""
    backend_args: dict[str, Any] = Field(default_factory=dict)
    """What the back end takes, by name: `fsdp` takes `recompute` and `offload_optimizer`, `megatron`
    `recompute` and `virtual_stages`."""
    ranks: int = Field(default=1, ge=1, le=65_536)
    """Training processes, over which the model is spread; on `cuda` each has a GPU of its own. They start,
    end and are started again together."""
    parallel: ParallelSection = ParallelSection()
    hang_s: float | None = Field(default=None, ge=5)
    """`supervisor.hang_s` of the processes of this trainer; none means the same."""
    collective_s: float = Field(default=600.0, ge=5)
    """A training process that has waited for another so many seconds gives up: the trainer is started again
    from its checkpoint, and the one that did not come is named."""
    steps: int = Field(default=100, ge=1, le=100_000_000)
    """Steps of the job: batches trained and versions published."""
    minibatches: int = Field(default=1, ge=1, le=1_000_000)
    """Optimizer updates in one step; groups are dealt to them whole."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Most tokens in one packed forward pass. A longer episode gets a pass of its own; the passes of other
    training processes, which wait for it, may then hold as many tokens."""
    optimizer: OptimizerSection = OptimizerSection()
    lora: LoraSection = LoraSection()
    objective: ObjectiveSection = ObjectiveSection()
    reference: ReferenceSection = ReferenceSection()
    critic: CriticSection = CriticSection()
    teacher: TeacherSection = TeacherSection()
    process_reward: ProcessRewardSection = ProcessRewardSection()
    self_check: SelfCheckSection = SelfCheckSection()
    record_batches: bool = False
    """Keep the episodes, manifest and losses of every step under `batches/` in the run's folder."""
    torch_threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """CPU threads of torch in each rank of the trainer; `auto`: as many as pay, of the cores that the engines
    leave, measured while the job runs. A number makes a step that is done again the same to the last bit."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """Where the trainer computes: `cpu`; `cuda`, its ranks on the GPUs from 0 on; or `cuda:N`, from N on."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number type of the computation and of the published weights."""


class JobConfig(Section):
    """The whole of one training job. Relative paths are relative to the job file."""

    job: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,47}$")
    """Name of the job and of its folder: lower-case letters, digits, `-` and `_`, at most 48."""
    kind: Kind = "rl"
    """`rl`: all services, rewards; the others are the trainer alone, on examples in files: `sft` on answers,
    `preference` on preferred ones, `reward_model` makes a model that scores."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Decides task order and sampling."""
    run_dir: Annotated[Path, *FETCHED] = Path("runs")
    """Folder of run folders: the run's own is `<run_dir>/<job>`. Under a URL the run works in a local copy,
    which is mirrored there while it runs (see docs/storage.md)."""
    policy: str = Field(default=POLICY, pattern=rf"^{POLICY_NAME}$")
    """Name of the policy that is trained; `policies: {name: {model, trainer, rollout}}` gives it too."""
    policies: dict[str, dict[str, Any]] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """Several policies, trained side by side, each with what it has of its own; the rest is the job's (see
    docs/agents.md#train-several-policies)."""
    model: Annotated[Path, *FETCHED]
    """Hugging Face directory of a causal language model (safetensors) with its tokenizer, or its URL."""
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
            fix = "Write Job(job=…, model=…, tasks=…), or Job.load(path or mapping)"
            raise ConfigError("Job", [Mistake("job", f"{given[0]!r:.80} has no field's name before it", fix)])
        return super().__new__(cls)

    @model_validator(mode="wrap")
    @classmethod
    def _in_words(cls, content: Any, handler: ModelWrapValidatorHandler["JobConfig"]) -> "JobConfig":
        """Raises `ConfigError`, with pydantic's error as its cause."""
        from areal_async.config.fields import explain, numbers_or_words  # which read this module

        try:
            return handler(content)
        except ValidationError as error:
            details = numbers_or_words(error.errors(include_url=False))
            raise ConfigError("the job", in_words(details, explain)) from error

    @classmethod
    def load(
        cls, path: str | Path | Mapping[str, Any], overrides: Overrides = (), **others: Any
    ) -> "JobConfig":
        """Return the checked job of a job file, or of the fields of one as a mapping, whose relative paths
        begin at the working directory. `overrides` are a `key=value`, several, or `{"a.b": value}`. Raises
        `ConfigError`."""
        from areal_async.config.load import job_of, overrides_of  # which read this module

        return job_of(path, overrides_of(overrides, others))[1]

    def changed(self, overrides: Overrides = (), **others: Any) -> "JobConfig":
        """Return a copy with these fields changed, as `load` takes them, and checked. Relative paths are
        relative to the working directory. Raises `ConfigError`."""
        from areal_async.config.load import job_from_mapping, overrides_of  # which read this module

        content, changes = self.model_dump(mode="json"), overrides_of(overrides, others)
        return job_from_mapping(content, changes, source=f"job {self.job}", base=Path.cwd())

    def of(self, policy: str) -> "JobConfig":
        """The job as the trainer and the engines of one of its policies see it: a job of that policy alone.
        Held-out tasks are the first policy's. Raises KeyError for another name."""
        if not self.policies and policy == self.policy:
            return self
        flat = merged(self.model_dump(exclude={"policies"}), self.policies[policy]) | {"policy": policy}
        if flat["rollout"]["routes"] == "auto":  # an episode has room for the routes of one model
            flat["rollout"] |= {"routes": "off"}
        if policy != self.policy:
            flat["tasks"] |= {"evaluation": None}
            flat["checkpoint"] |= {"keep_best": 0}
        return JobConfig.model_validate(flat)

    @property
    def views(self) -> "dict[str, JobConfig]":
        """What `of` gives, for each policy of the job."""
        return {name: self.of(name) for name in self.policies or (self.policy,)}

    @property
    def training(self) -> FileTraining:
        """The section of the job's kind, which is not `rl`."""
        found: FileTraining = getattr(self, self.kind)
        return found

    @property
    def evaluation_sampling(self) -> SamplingSection:
        """What the evaluation samples with: its section, and of the rollout's what that leaves open."""
        section = self.evaluation.sampling.model_dump()
        section["max_new_tokens"] = section["max_new_tokens"] or self.rollout.sampling.max_new_tokens
        return SamplingSection(**section)


def merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with what `own` says in its place, section by section; arguments of a part go as a whole."""
    result = dict(base)
    for key, value in own.items():
        before = result.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping) and not key.endswith("_args"):
            value = merged(before, value)
        result[key] = value
    return result
