"""A teacher model on servers, which computes its log-probs of the tokens that the policy sampled.

Guarantees: within `trainer.teacher.timeout_s`, a call returns one number for each unit, for exactly that
unit's token, or raises `TeacherError`. If a server is unavailable or busy, the next server is tried, and the
first one again later. An answer for other tokens than the ones sent is never used. Log-probs are at
temperature 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Sequence
from itertools import count, cycle
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from areal_async.base.errors import ArealError
from areal_async.base.retry import pause_s
from areal_async.config.objective import TeacherSection
from trainer_service.data.rows import TrainingRow

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # Pauses before a request is repeated
LONGEST_CONNECT_S = 30.0  # Longest time to connect before another server is asked
PASSING = (408, 425, 429, 500, 502, 503, 504)  # Statuses after which the request is repeated


class TeacherError(ArealError):
    """The teacher did not answer, or gave an unusable answer. The message quotes such an answer."""


class TeacherServers:
    """The servers of a job's teacher. Raises `TeacherError` if their API key is not set."""

    def __init__(self, section: TeacherSection) -> None:
        self._section, self._rng = section, random.Random()
        self._urls = cycle(url.rstrip("/") for url in section.urls)
        key = os.environ.get(section.key_env, "") if section.key_env else ""
        if section.key_env and not key:
            raise TeacherError(
                f"trainer.teacher.key_env: the variable {section.key_env} is not set. Set it to the servers' "
                "key."
            )
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def logprobs(self, rows: Sequence[TrainingRow]) -> NDArray[np.float32]:
        """Return the log-probs of these rows' units, in their order: f32 [U]. This call blocks. Raises
        `TeacherError`."""
        others = [row.temperature[row.temperature != 1] for row in rows]
        if found := next((float(each[0]) for each in others if len(each)), None):
            raise TeacherError(
                f"the teacher's servers score at temperature 1, and a call of the workflow sampled at "
                f"{found:g}. Let it sample at 1, or name the teacher's folder in trainer.teacher.model."
            )
        if any(row.images for row in rows):
            raise TeacherError(
                "the teacher's servers are asked by token ids, and rows have images: name the teacher's "
                "folder in trainer.teacher.model."
            )
        parts = asyncio.run(self._all(rows))
        return np.concatenate([*parts, np.zeros(0, np.float32)])

    async def _all(self, rows: Sequence[TrainingRow]) -> list[NDArray[np.float32]]:
        section = self._section
        free = asyncio.Semaphore(section.max_concurrent)  # kept in pauses, so that retries slow new rows down
        said = ["it did not answer"]

        async def one(session: aiohttp.ClientSession, row: TrainingRow) -> NDArray[np.float32]:
            async with free:
                return await self._one(session, row, said)

        try:
            async with (
                asyncio.timeout(section.timeout_s),
                aiohttp.ClientSession(
                    headers=self._headers,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=LONGEST_CONNECT_S),
                    connector=aiohttp.TCPConnector(limit=0),
                ) as session,
            ):
                return await asyncio.gather(*(one(session, row) for row in rows))
        except TimeoutError:
            raise TeacherError(
                f"the teacher has not scored {len(rows)} rows within trainer.teacher.timeout_s = "
                f"{section.timeout_s:g} s (at last: {said[-1]}). Look at its servers, or raise the limit."
            ) from None

    async def _one(
        self, session: aiohttp.ClientSession, row: TrainingRow, said: list[str]
    ) -> NDArray[np.float32]:
        ask, read = APIS[self._section.api]
        path, body = ask(row.token_ids.tolist(), self._section.name)
        for tries in count(1):
            url = next(self._urls) + path
            try:
                async with session.post(url, json=body, allow_redirects=False) as answer:
                    text = await answer.text(errors="replace")
                    if answer.status == 200:
                        return _units(read, text, row, url)
                    said[-1] = f"{url} answered {answer.status}: {text:.200}"
                    if answer.status not in PASSING:
                        raise TeacherError(f"the teacher refuses: {said[-1]}")
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                said[-1] = f"{url}: {error}"
            await asyncio.sleep(pause_s(tries, self._rng, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S))
        raise AssertionError("unreachable")


def _units(
    read: Callable[[Any, list[int]], list[float]], text: str, row: TrainingRow, url: str
) -> NDArray[np.float32]:
    try:
        found = np.array(read(json.loads(text), row.token_ids.tolist()), np.float32)[row.position - 1]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise TeacherError(
            f"the answer of {url} has no log-probs of the {len(row.token_ids)} tokens that were sent "
            f"({type(error).__name__}: {error}). Check trainer.teacher.api, and that the teacher has the "
            "policy's tokenizer and takes rows of this length."
        ) from error
    if not np.isfinite(found).all():
        raise TeacherError(f"{url} gave a log-prob that is not finite.")
    return found


def _ask_sglang(ids: list[int], name: str) -> tuple[str, dict[str, Any]]:
    how = {"sampling_params": {"max_new_tokens": 0, "temperature": 1.0}, "return_logprob": True}
    return "/generate", {"input_ids": ids, **how, "logprob_start_len": 0}


def _read_sglang(answer: Any, ids: list[int]) -> list[float]:
    """Return [T - 1]: the log-prob of each token except the first."""
    entries = answer["meta_info"]["input_token_logprobs"]
    last = max(ids)  # SGLang reports the vocabulary's last token as 0, but with the right log-prob
    if any(said != i and (said, i) != (0, last) for (_, said, *_), i in zip(entries, ids, strict=True)):
        raise ValueError("it is about other tokens")
    return [float(entry[0]) for entry in entries[1:]]


def _ask_vllm(ids: list[int], name: str) -> tuple[str, dict[str, Any]]:
    body = {"prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    return "/v1/completions", body | ({"model": name} if name else {})


def _read_vllm(answer: Any, ids: list[int]) -> list[float]:
    entries = answer["choices"][0]["prompt_logprobs"]
    if len(entries) != len(ids):
        raise ValueError("it is about other tokens")
    return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries[1:], ids[1:], strict=True)]


APIS: dict[str, tuple[Callable[..., tuple[str, dict[str, Any]]], Callable[[Any, list[int]], list[float]]]] = {
    "sglang": (_ask_sglang, _read_sglang),
    "vllm": (_ask_vllm, _read_vllm),
}
