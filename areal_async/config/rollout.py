"""`rollout`: how episodes are generated."""

from typing import Literal

from pydantic import Field

from areal_async.config.base import Section

BUILT_IN_WORKFLOWS = ("single_turn",)
"""Names of the workflows in `rollout_service/workflows`."""


class SamplingSection(Section):
    """Sampling parameters of one generation call, in the engines' common terms."""

    temperature: float = Field(default=1.0, ge=0)
    """0 means greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 means no limit."""
    max_new_tokens: int = Field(default=256, ge=1)
    stop: tuple[str, ...] = ()


class RolloutSection(Section):
    engine: Literal["local"] = "local"
    workers: int = Field(default=1, ge=1)
    group_size: int = Field(default=8, ge=1)
    """Episodes sampled from one task (the `n` of a group)."""
    max_concurrent: int = Field(default=64, ge=1)
    """Episodes in one engine at once."""
    max_model_len: int = Field(default=2048, ge=2)
    """Prompt and response together, in tokens."""
    workflow: str = "single_turn"
    """A built-in name, or `path.py:name` of an `async def workflow(ctx, task)`."""
    update_mode: Literal["recompute", "keep"] = "recompute"
    """What a weight update does to requests in flight: rebuild their KV (exact) or keep it (approximate)."""
    sampling: SamplingSection = SamplingSection()
    torch_threads: int = Field(default=1, ge=1)
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """`cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
