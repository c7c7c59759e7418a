"""Compilation of a model's blocks by `torch.compile`.

The forward pass of each block is compiled as one graph, inside FSDP's hooks and together with its
recomputation. Equal blocks share a compilation, and all sizes in it are dynamic. There is a compilation for
each kind of block, with and without gradients, for plain rows and for rows that share prefixes.
`compile_blocks` makes all of them before the first step, so a model whose blocks cannot be compiled runs
eagerly from the beginning. Attention must be over ragged rows: the other path depends on lists of lengths,
and each new list would be a new compilation. On a GPU, the compiler needs Triton.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from areal_async.base.log import get_logger
from trainer_service.backends.fsdp.recompute import blocks_of
from trainer_service.errors import ModelError
from trainer_service.ranks import Ranks

log = get_logger("trainer")

Compile = Literal["auto", "on", "off"]
COMPILER = "inductor"
REASON = 200
"""Largest number of characters of the compiler's error in a message."""
KINDS = 64
"""Largest number of compilations of a function. One is needed for each kind of block and of pass."""


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
    for block, forward in eager:
        block.forward = torch.compile(forward, fullgraph=True, dynamic=True, backend=COMPILER)
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
