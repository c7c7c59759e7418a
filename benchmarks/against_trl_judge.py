"""The job's reward, called directly: what every system of `against_trl.py` but ours scores an answer with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_async.models.prompts import prompt_text
from reward_service.sdk import RewardInput, load_reward


class Judge:
    """The job's reward of one answer."""

    def __init__(self, tokenizer: Any, name: str, args: Mapping[str, Any]) -> None:
        self._tokenizer, self._reward, self._args = tokenizer, load_reward(name), args

    def __call__(self, prompt: str | Sequence[Mapping[str, Any]], response: str, truth: Any) -> float:
        given = RewardInput(
            prompt=prompt_text(self._tokenizer, prompt),
            is_chat=not isinstance(prompt, str),
            response=response,
            ground_truth=truth,
        )
        value: Any = self._reward(given, **self._args)
        return float(value)
