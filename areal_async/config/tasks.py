"""`tasks`: what the policy is trained and evaluated on."""

from pathlib import Path

from pydantic import Field

from areal_async.config.base import Section


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
