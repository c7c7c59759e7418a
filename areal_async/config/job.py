"""A job file: one YAML document, one model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from areal_async.config.base import Section
from areal_async.config.buffer import BufferSection
from areal_async.config.reward import RewardSection
from areal_async.config.rollout import RolloutSection, SamplingSection
from areal_async.config.run import (
    CheckpointSection,
    EvaluationSection,
    ObserveSection,
    SupervisorSection,
    WeightsSection,
)
from areal_async.config.trainer import SftSection, TrainerSection
from areal_async.rpc.schema import POLICY, POLICY_NAME


class TasksSection(Section):
    """Parquet or jsonl files with the columns `data_source, prompt, ability, reward_model, extra_info`."""

    train: Path
    """Tasks to train on."""
    evaluation: Path | None = None
    """Held-out tasks; none means that accuracy is not measured."""
    shuffle: bool = True
    """Draw a new order for each pass from `seed`; off means file order."""
    passes: int | None = Field(default=None, ge=1)
    """How often the training file is gone through; none means as often as the steps need."""


class JobConfig(Section):
    """The whole of one training job. Relative paths are relative to the job file."""

    job: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,47}$")
    """Name of the job and of its folder: lower-case letters, digits, `-` and `_`, at most 48."""
    kind: Literal["rl", "sft"] = "rl"
    """`rl`: all services, rewards; `sft`: the trainer alone, on the tasks' ground truth."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Decides task order and sampling."""
    run_dir: Path = Path("runs")
    """Folder of run folders: the run's own is `<run_dir>/<job>`."""
    policy: str = Field(default=POLICY, pattern=rf"^{POLICY_NAME}$")
    """Name of the policy that is trained; `policies: {name: {model, trainer, rollout}}` gives it too."""
    model: Path
    """Hugging Face directory of a causal language model (safetensors) with its tokenizer."""
    tasks: TasksSection
    rollout: RolloutSection = RolloutSection()
    buffer: BufferSection = BufferSection()
    reward: RewardSection = RewardSection()
    trainer: TrainerSection = TrainerSection()
    sft: SftSection = SftSection()
    weights: WeightsSection = WeightsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    observe: ObserveSection = ObserveSection()
    supervisor: SupervisorSection = SupervisorSection()

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> "JobConfig":
        """The checked job of a job file; `overrides` are `key=value`. Raises `ConfigError`."""
        from areal_async.config.load import load_job  # which reads this module

        return load_job(Path(path), overrides)

    @property
    def evaluation_sampling(self) -> SamplingSection:
        """What the evaluation samples with: its section, and of the rollout's what that leaves open."""
        section = self.evaluation.sampling.model_dump()
        section["max_new_tokens"] = section["max_new_tokens"] or self.rollout.sampling.max_new_tokens
        return SamplingSection(**section)
