"""`weights`, `checkpoint`, `evaluation`, `observe`, `supervisor`: what surrounds the four services."""

from typing import Literal

from pydantic import Field

from areal_async.config.base import Section
from areal_async.config.rollout import SamplingSection


class WeightsSection(Section):
    channel: Literal["shm"] = "shm"
    keep: int = Field(default=2, ge=2)
    """Newest snapshots kept beside the pinned ones."""


class CheckpointSection(Section):
    every_steps: int = Field(default=50, ge=1)
    keep: int = Field(default=2, ge=1)


class EvaluationSection(Section):
    every_steps: int = Field(default=25, ge=1)
    """Version 0 and the final one are always evaluated."""
    sampling: SamplingSection = SamplingSection(temperature=0.0)
    max_concurrent: int = Field(default=128, ge=1)
    torch_threads: int = Field(default=1, ge=1)


class ObserveSection(Section):
    metrics_port: int = Field(default=9470, ge=0, le=65_000)
    """First of the consecutive ports that the services serve Prometheus metrics on; 0 picks free ones."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class SupervisorSection(Section):
    ready_s: float = Field(default=300.0, gt=0)
    """Longest time from starting a service until it serves, in seconds; loading a large model takes long."""
