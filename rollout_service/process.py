"""Set-up that the processes of worker and evaluator share: threads, tokenizer, sampling parameters,
connection to the publisher.

Torch is imported only if the engine computes in this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from areal_async.base.errors import RpcTimeout
from areal_async.base.log import get_logger
from areal_async.config.files import json_in
from areal_async.config.job import JobConfig
from areal_async.config.rollout import SamplingSection
from areal_async.models.answers import end_ids
from areal_async.models.files import reads_images
from areal_async.models.prompts import with_template_args
from areal_async.models.tokenizer import load_tokenizer
from areal_async.rpc.board import board
from areal_async.service.context import ServiceContext
from areal_async.trajectory import Sampling
from areal_async.weights.receiver import Receiver
from rollout_service.gateway import Gateway
from rollout_service.gateway.access import GatewaySetup, ServedModel
from rollout_service.workflows import Renderer
from rollout_service.workflows.images import processor_of

T = TypeVar("T")
log = get_logger("rollout")

CONNECT_WAIT_S = 15.0


def prepare(torch_threads: int, *, computes: bool) -> None:
    """Set the number of native threads, and keep progress bars out of the log. `computes` means that the
    engine runs torch in this process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not computes:
        return
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(torch_threads)
    transformers_logging.disable_progress_bar()


def make_renderer(
    model: Path,
    template_args: Mapping[str, Any] | None = None,
    *,
    pixels: tuple[int | None, int | None] = (None, None),
) -> Renderer:
    """Return a renderer of prompts with the tokenizer of the job's model. The chat template gets
    `template_args`. The renderer knows the end ids of the model's answers, and scales images to between
    `pixels` pixels. Raises `TokenizerError`."""
    tokenizer = with_template_args(load_tokenizer(model), template_args or {})
    return Renderer(tokenizer, end_ids(tokenizer, model), processor=processor_of(model, pixels))


def make_renderers(job: JobConfig) -> dict[str, Renderer]:
    """Return a renderer for each policy of the job. Policies with the same tokenizer, chat template and image
    processor share a renderer, so they can also share paths. Raises `TokenizerError`."""
    renderers: dict[str, Renderer] = {}
    known: dict[str, tuple[Any, ...]] = {}
    for policy, view in job.views.items():
        made = make_renderer(view.model, view.rollout.template_args, pixels=view.rollout.images.pixels)
        known[policy] = _tokens(made), _image_files(view.model)
        alike = (renderers[other] for other in renderers if known[other] == known[policy])
        renderers[policy] = next(alike, made)
    return renderers


def _image_files(model: Path) -> tuple[Any, ...]:
    """Return the content of the files of a model that say how its images become tokens."""
    names = ("preprocessor_config.json", "processor_config.json")
    return reads_images(model), *(json_in(model / name) for name in names)


def _tokens(renderer: Renderer) -> tuple[Any, ...]:
    """Return the parts of a tokenizer that convert text to ids, for comparing tokenizers. A tokenizer that
    does not provide them equals no other."""
    tokenizer: Any = renderer.tokenizer
    whole = getattr(tokenizer, "backend_tokenizer", None)
    given = getattr(tokenizer.apply_chat_template, "keywords", None)
    text = whole.to_str() if whole is not None else id(renderer)
    return text, getattr(tokenizer, "chat_template", None), given, renderer.ends


def sampling_of(section: SamplingSection) -> Sampling:
    """Return a section's sampling parameters. The seed is set for each call."""
    limits = section.max_new_tokens, tuple(section.stop)
    return Sampling(section.temperature, section.top_p, section.top_k, *limits)


def speakers_of(job: JobConfig) -> dict[str, Any]:
    """Return the policies and agents for an episode's builder. If there are several policies, each has an
    agent of the same name."""
    if not job.policies:
        return {"policies": (job.policy,)}
    return {"policies": tuple(job.policies), "agents": [(name, i) for i, name in enumerate(job.policies)]}


def make_gateway(ctx: ServiceContext, *, trains: bool) -> Gateway:
    """Return the gateway for this process's policies. The gateway's process starts when an episode first
    opens the gateway. A configured port is the port of the first worker, and further workers count up from
    it. An evaluation uses a free port."""
    job = ctx.job
    port = job.rollout.gateway.port
    section = job.rollout.gateway.model_copy(update={"port": port + ctx.index if port and trains else 0})
    setup = GatewaySetup(
        job.job,
        ctx.name,
        ctx.host,
        ctx.keys.of("rollout" if ctx.role == "rollout" else "evaluator"),
        section.model_dump(mode="json"),
        {
            name: ServedModel(
                str(view.model),
                view.rollout.max_model_len,
                view.rollout.template_args,
                view.rollout.images.pixels,
            )
            for name, view in job.views.items()
        },
        trains,
    )
    return Gateway(setup, restarts=job.supervisor.restart_policy())


async def connect(receiver: Receiver) -> None:
    """Connect to the weights publisher. Waits until the trainer has started, however long that takes, unless
    a stop is requested."""
    while True:
        try:
            await receiver.connect(CONNECT_WAIT_S)
        except RpcTimeout as error:
            log.info("waiting for the trainer's first snapshot", error=str(error))
            board.waits("trainer", "the trainer's first snapshot")
        else:
            board.waits("trainer", "")
            return


async def unless_stopped(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Return the result of `work`. If `stop` is set first, cancel `work` and return None."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, stopping):
            each.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)
