"""`weights`, `checkpoint`, `evaluation`, `observe`, `supervisor`: what surrounds the four services."""

from typing import Literal

from pydantic import Field

from areal_async.config.base import Section
from areal_async.config.rollout import SamplingSection


class WeightsSection(Section):
    """The way of new weights from the trainer to the engines."""

    channel: Literal["shm"] = "shm"
    """How new weights reach the engines: `shm` is shared memory on one host."""
    keep: int = Field(default=2, ge=2)
    """Newest snapshots kept beside those that an evaluation still needs."""


class CheckpointSection(Section):
    """Weights, optimizer and the buffer's ledger, together on disk."""

    every_steps: int = Field(default=50, ge=1)
    """Steps between two checkpoints; the last step always makes one. Episodes are kept until then."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""


class EvaluationSection(Section):
    """Held-out accuracy, measured beside training by an engine of its own (needs `tasks.evaluation`)."""

    every_steps: int = Field(default=25, ge=1)
    """Steps between two evaluations; version 0 and the final one are always evaluated."""
    sampling: SamplingSection = SamplingSection(temperature=0.0)
    max_concurrent: int = Field(default=128, ge=1)
    """Most held-out tasks in the engine at once."""
    torch_threads: int = Field(default=1, ge=1)
    """CPU threads of the evaluator's torch."""


class ObserveSection(Section):
    """Metrics and logs."""

    metrics_port: int = Field(default=9470, ge=0, le=65_000)
    """First of the consecutive ports that the services serve Prometheus metrics on; 0 picks free ones."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe events that the services log."""


class SupervisorSection(Section):
    """Starting and stopping the services."""

    ready_s: float = Field(default=300.0, gt=0)
    """Longest time from starting a service until it serves, in seconds; loading a large model takes long."""
