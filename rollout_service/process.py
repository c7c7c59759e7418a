"""What the worker's process and the evaluator's have in common: torch, the tokenizer, the first snapshot."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from areal_async.errors import ArealError, RpcTimeout
from areal_async.observe.log import get_logger
from areal_async.weights.receiver import Receiver
from rollout_service.workflows import Renderer

log = get_logger("rollout")
T = TypeVar("T")

CONNECT_WAIT_S = 15.0


class ModelFilesError(ArealError):
    """The job's model directory cannot be used."""


def prepare(torch_threads: int) -> None:
    """Native threads as the job says, and no progress bars in the log."""
    torch.set_num_threads(torch_threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers_logging.disable_progress_bar()


def make_renderer(model: Path) -> Renderer:
    """Prompts as the tokenizer of the job's model renders them. Raises `ModelFilesError`."""
    try:
        return Renderer(AutoTokenizer.from_pretrained(model, local_files_only=True))
    except (OSError, ValueError, KeyError) as error:
        raise ModelFilesError(
            f"{model} has no usable tokenizer: {error}. `model` must name a Hugging Face directory with its "
            "tokenizer files."
        ) from error


async def connect(receiver: Receiver) -> None:
    """Reach the weights publisher, however long the trainer takes to come up; a stop cancels this."""
    while True:
        try:
            await receiver.connect(CONNECT_WAIT_S)
        except RpcTimeout as error:
            log.info("waiting for the trainer's first snapshot", error=str(error))
        else:
            return


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when `stop` came first; `work` is cancelled then."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, stopping):
            each.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)
