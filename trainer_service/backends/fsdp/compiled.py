"""Compilation of the blocks of a language model by `torch.compile`.

The forward pass of each block is compiled as one graph, inside FSDP's hooks and together with its
recomputation. Equal blocks share a compilation, in which the sizes of a pack are dynamic. There is a
compilation for each kind of block, with and without gradients, for plain rows and for rows that share
prefixes; with frozen weights, also for a first block, whose input has no gradient.
`compile_blocks` makes all of them before the first step, so a model whose blocks cannot be compiled runs
eagerly from the beginning.

Attention must be over ragged rows: the other path depends on lists of lengths, and each new list would be a
new compilation. On a GPU, the compiler needs Triton.

If blocks cannot be compiled on one rank, they run eagerly on all ranks. While passes are tried, a block whose
forward pass fails runs eagerly, and so do the later blocks of its rank. The rank thus takes part in all
collectives of the passes, and the ranks compare their results afterwards. This covers the compilation of
backward passes, which is part of the forward pass.

Two failures on one rank cannot be agreed on: a backward pass is compiled and then fails when it runs, or
ranks share rows and a forward pass fails after its first exchange of heads. The other ranks then wait in a
collective until its limit, and the log names the operation (`collectives.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from areal_async.base.log import get_logger
from areal_async.models.classes import language_part
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
FATAL = (torch.OutOfMemoryError, torch.distributed.DistError)
"""Errors that say nothing about the compiler."""
SIZES = r".*\.ragged\.longest"
"""Pattern of the compiler's name of an integer that is dynamic."""


def compile_blocks(name: str, model: Any, how: Compile, ranks: Ranks, try_passes: Callable[[], None]) -> None:
    """Compile every block of the sharded model `name`. All ranks call it.

    `auto` does nothing if attention is not over ragged rows. `try_passes` runs passes of all kinds. If a
    block fails in them on any rank, `auto` logs a warning and lets the blocks run eagerly. `on` raises
    `ModelError` in both cases."""
    if how == "off" or (how == "auto" and not model.ragged):
        return
    if not model.ragged:
        raise ModelError(
            f"trainer.backend_args.compile: the attention of the model {name!r} is not one call for all "
            "rows, as the log says, so its blocks would be compiled in every step. Set it to auto or off."
        )
    torch._dynamo.config.recompile_limit = max(KINDS, torch._dynamo.config.recompile_limit)
    _add_dynamic_sources(SIZES)
    errors: list[Exception] = []
    eager: list[tuple[Any, Callable[..., Any]]] = [
        (block, block.forward) for block in blocks_of(language_part(model))
    ]
    compiled = [_of_any_size(torch.compile(each, fullgraph=True, backend=COMPILER)) for _, each in eager]
    for (block, forward), each in zip(eager, compiled, strict=True):
        block.forward = _tried(each, forward, errors)
    begun_s = time.monotonic()
    try:
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            try_passes()
    except FATAL:
        raise
    except Exception as found:
        errors.append(found)
    failed = ranks.largest(ranks.rank + 1 if errors else 0)
    for (block, forward), each in zip(eager, compiled, strict=True):
        block.forward = forward if failed else each
    if not failed:
        log.info("blocks compiled", model=name, blocks=len(eager), seconds=round(time.monotonic() - begun_s))
        return
    family = model.config.get_text_config().model_type
    reason, error = f"rank {failed - 1} cannot compile them, as its log says", next(iter(errors), None)
    if error is not None:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:REASON]}"
    if how == "on":
        raise ModelError(
            f"trainer.backend_args.compile: the blocks of the model {name!r}, a {family}, cannot be compiled "
            f"({reason}). Set it to auto or off."
        ) from error
    log.warning("blocks cannot be compiled and run eagerly", model=name, family=family, reason=reason)


def _add_dynamic_sources(sources: str) -> None:
    """Make `sources` dynamic too, besides those that the user has set."""
    others = [each for each in torch.compiler.config.dynamic_sources.split(",") if each not in ("", sources)]
    torch.compiler.config.dynamic_sources = ",".join([*others, sources])


def _tried(
    compiled: Callable[..., Any], eager: Callable[..., Any], errors: list[Exception]
) -> Callable[..., Any]:
    """Return a forward pass that is eager once `compiled` has failed. It appends the error to `errors`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not errors:
            try:
                return compiled(*args, **kwargs)
            except FATAL:
                raise
            except Exception as error:
                errors.append(error)
        return eager(*args, **kwargs)

    return run


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
