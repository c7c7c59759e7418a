"""A question of one of the data sets of `reasoning_gym`, and that library's scorer for the answer. One turn.

Needs the extra `environments`. The question is drawn by the seed; a task with `extra_info.index` names entry
`index` of the data set that `extra_info.seed` makes. The built-in reward `reasoning_gym` judges the answer.
"""

from __future__ import annotations

import importlib
from typing import Any

from pydantic import Field

from areal_async import EnvironmentFailure, RewardInput, Section, Step, Task, level_seed, load_reward

SEEDS = 2**31


class ReasoningGym:
    """Calls run in a thread: how long they take is the library's business."""

    class Arguments(Section):
        """A data set of `reasoning_gym`: a question, and its scorer for the answer."""

        dataset: str
        """Name of the data set in the library, for example `chain_sum`."""
        dataset_args: dict[str, Any] = Field(default_factory=dict)
        """Settings of the data set (difficulty), without `seed` and `size`."""

    def __init__(self, **options: Any) -> None:
        self.options = self.Arguments(**options)
        try:
            self._library: Any = importlib.import_module("reasoning_gym")
        except ImportError:
            raise EnvironmentFailure(
                "the environment `reasoning_gym` needs that library: pip install areal-async[environments]"
            ) from None
        self._dataset = self._make(seed=0, size=1)
        self._entry: Any = None
        self._judge: Any = load_reward("reasoning_gym")

    def reset(self, seed: int, task: Task) -> str:
        index = int(task.extra_info.get("index", 0))
        self._dataset = self._make(seed=level_seed(seed, task) % SEEDS, size=index + 1)
        self._entry = self._dataset[index]
        return f"{self._entry['question']}\n"

    def state(self) -> str:
        return str(self._entry["question"])

    def step(self, action: str) -> Step:
        # Not the library's scorer itself: some of them evaluate the answer as Python.
        given = RewardInput(response=action, extra_info={"entry": self._entry})
        judged = self._judge(given, dataset=self.options.dataset, dataset_args=self.options.dataset_args)
        return Step("", judged.components["library"], True)

    def _make(self, *, seed: int, size: int) -> Any:
        name, arguments = self.options.dataset, self.options.dataset_args
        try:
            return self._library.create_dataset(name, seed=seed, size=size, **arguments)
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise EnvironmentFailure(
                f"reasoning_gym cannot make {name!r} with {arguments}: {error}"
            ) from error
