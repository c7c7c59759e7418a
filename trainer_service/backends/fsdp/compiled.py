"""Compilation of a model's blocks by `torch.compile`.

The forward pass of each block is compiled as one graph, inside FSDP's hooks and together with its
recomputation. Equal blocks share a compilation, in which the sizes of a pack are dynamic. There is a
compilation for each kind of block, with and without gradients, for plain rows and for rows that share
prefixes; with frozen weights, also for a first block, whose input has no gradient.
`compile_blocks` makes all of them before the first step, so a model whose blocks cannot be compiled runs
eagerly from the beginning. Attention must be over ragged rows: the other path depends on lists of lengths,
and each new list would be a new compilation. On a GPU, the compiler needs Triton.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor

from areal_async.base.log import get_logger
from trainer_service.backends.fsdp.recompute import blocks_of
from trainer_service.data.ragged import Ragged
from trainer_service.errors import ModelError
from trainer_service.ranks import Ranks

log = get_logger("trainer")

Compile = Literal["auto", "on", "off"]
COMPILER = "inductor"
REASON = 200
"""Largest number of characters of the compiler's error in a message."""
KINDS = 64
"""Largest number of compilations of a function. One is needed for each kind of block and of pass."""
SIZES = r".*\.ragged\.longest"
"""Pattern of the compiler's name of an integer that is dynamic."""


def compile_blocks(name: str, model: Any, how: Compile, ranks: Ranks, try_passes: Callable[[], None]) -> None:
    """Compile every block of the sharded model `name`. All ranks call it.

    `auto` does nothing if attention is not over ragged rows. `try_passes` runs passes of all kinds. If they
    fail, `auto` logs a warning and lets the blocks run eagerly. `on` raises `ModelError` in both cases."""
    if how == "off" or (how == "auto" and not model.ragged):
        return
    if not model.ragged:
        raise ModelError(
            f"trainer.backend_args.compile: the attention of the model {name!r} is not one call for all "
            "rows, as the log says, so its blocks would be compiled in every step. Set it to auto or off."
        )
    eager: list[tuple[Any, Callable[..., Any]]] = [(block, block.forward) for block in blocks_of(model)]
    torch._dynamo.config.recompile_limit = max(KINDS, torch._dynamo.config.recompile_limit)
    torch.compiler.config.dynamic_sources = SIZES
    for block, forward in eager:
        block.forward = _of_any_size(torch.compile(forward, fullgraph=True, backend=COMPILER))
    begun_s = time.monotonic()
    error: Exception | None = None
    try:
        try_passes()
    except (torch.OutOfMemoryError, torch.distributed.DistError):
        raise
    except Exception as found:
        error = found
    if not ranks.largest(0 if error is None else 1):
        log.info("blocks compiled", model=name, blocks=len(eager), seconds=round(time.monotonic() - begun_s))
        return
    for block, forward in eager:
        block.forward = forward
    family, reason = model.config.get_text_config().model_type, "another rank cannot compile them"
    if error is not None:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:REASON]}"
    if how == "on":
        raise ModelError(
            f"trainer.backend_args.compile: the blocks of the model {name!r}, a {family}, cannot be compiled "
            f"({reason}). Set it to auto or off."
        ) from error
    log.warning("blocks cannot be compiled and run eagerly", model=name, family=family, reason=reason)


def _of_any_size(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the sizes of a pack as dynamic before each call. With `dynamic=True` instead, the compiler would
    make every size dynamic and take twice as long."""

    @wraps(forward)
    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        for each in _tensors([hidden, args, kwargs]):
            if each.shape[:2] == hidden.shape[:2]:
                torch._dynamo.mark_dynamic(each, 1)
        for value in kwargs.values():
            ragged = getattr(value, "ragged", None)
            if isinstance(ragged, Ragged):
                for each in _tensors([getattr(ragged, field.name) for field in fields(ragged)]):
                    torch._dynamo.mark_dynamic(each, 0)
        return forward(hidden, *args, **kwargs)

    return run


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested sequences and mappings."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors([*values.values()])
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _tensors(each)
