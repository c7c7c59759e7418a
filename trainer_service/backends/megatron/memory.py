"""Memory that a rank of the Megatron-Core back end needs, from a model's dimensions alone, without torch.

The figures are for the worst rank, which is on the first or the last stage. In the formulas, t is the number
of tensor ranks, e of expert ranks, d of data ranks, p of stages, and v of interleaved stages on each rank.
The bytes of a number in `trainer.dtype` are c.

- P is the number of parameters of L / p layers, divided by t. Experts are also divided by e. The first stage
  adds the embedding, and the last one the output layer, both divided by t. Parameters take c P, and summed
  gradients 4 P. If c is 2, main copies take 4 P / d, or 4 P / (d / e) for experts. AdamW's moments take twice
  as much as main copies.
- Activations of a layer are those on one rank (`fsdp/memory.py`), divided by t: sequence parallelism divides
  the activations that tensor parallelism does not (Korthikanti et al., arXiv:2205.05198 section 4.2). The
  first of p stages keeps the activations of its L / p layers for p micro-batches at once. With interleaving,
  it keeps them for p (1 + (p - 1) / (p v)) micro-batches (Narayanan et al., arXiv:2104.04473 section 2.2).
- The head is on the last stage. It has tiles of logits and the gradient of the output layer, c V H / t. It
  also has the hidden states of all tokens of all tensor ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from trainer_service.backends.fsdp.memory import (
    FLOAT32_BYTES,
    LEAST_LOGITS_BYTES,
    DecoderBlock,
    MemoryOptions,
    ModelShape,
    Moment,
    RankMemory,
    Recompute,
    block_activations,
    kept_per_token,
    passing_per_token,
    wide_bytes,
)


def stage_memory(model: ModelShape, options: MemoryOptions) -> RankMemory:
    """Compute the memory that the worst rank needs. The module docstring has the formulas."""
    grid, c = options.grid, options.compute_bytes
    layers = [*model.blocks][: max(1, len(model.blocks) // grid.pipeline)]
    dense = sum(_numbers(block, experts=False) for block in layers) / grid.tensor
    experts = sum(_numbers(block, experts=True) for block in layers) / (grid.tensor * grid.expert)
    table = model.vocabulary * model.hidden / grid.tensor
    dense += table if grid.pipeline > 1 or model.tied else 2 * table
    shared = dense / grid.data_ranks + experts * grid.expert / grid.data_ranks
    trained = not options.frozen
    main = FLOAT32_BYTES * shared if trained and c < FLOAT32_BYTES else 0
    followed = FLOAT32_BYTES * (dense + experts) if options.follows else 0
    moments = 2 * FLOAT32_BYTES * shared if trained else 0
    saved = moments + FLOAT32_BYTES * shared if trained else followed
    kept = sum(_kept(block, model.hidden, options) for block in layers) / grid.tensor if trained else 0
    recompute: Recompute = "full" if options.recompute == "full" else "none"
    passed = replace(options, recompute=recompute)
    passing = max(passing_per_token(block, model.hidden, passed) for block in layers) / grid.tensor
    return RankMemory(
        parameters=round(c * (dense + experts) + main + followed),
        gradients=round(FLOAT32_BYTES * (dense + experts)) if trained else 0,
        saved=round(saved),
        optimizer=round(moments),
        head=LEAST_LOGITS_BYTES + round(c * table if trained else 0) if model.vocabulary else 0,
        activations_per_token=max(1, round(kept * _in_flight(options))),
        passing_per_token=round(passing),
        moments=tuple(_moments(model, options, kept, passing, table)),
    )


def _moments(
    model: ModelShape, options: MemoryOptions, kept: float, passing: float, table: float
) -> Iterator[Moment]:
    grid, c = options.grid, options.compute_bytes
    wide = wide_bytes(c)
    yield Moment(0, kept * _in_flight(options) + passing)
    # The head is on the last stage, which runs one micro-batch at a time, before its layers' backward.
    own = _in_flight(options) if grid.pipeline == 1 else 1
    whole = c * model.hidden * (1 if grid.tensor == 1 else 2)
    yield Moment(
        fixed=0 if options.frozen else c * table,
        per_token=kept * own + whole,
        per_unit=(c + wide) * model.hidden,
        vocabulary=-(-model.vocabulary // grid.tensor),
        logit_bytes=wide,
    )


def _in_flight(options: MemoryOptions) -> float:
    """Return the number of micro-batches whose activations the first stage keeps at once."""
    stages, virtual = options.grid.pipeline, options.virtual_stages
    return stages * (1 + (stages - 1) / (stages * virtual)) if virtual > 1 else stages


def _numbers(block: DecoderBlock, *, experts: bool) -> int:
    shapes = (shape for shape in block.parameters.values() if (len(shape) == 3) == experts)
    return sum(map(prod, shapes))


def _kept(block: DecoderBlock, hidden: int, options: MemoryOptions) -> int:
    if options.recompute != "selective":
        return kept_per_token(block, hidden, options)
    # Attention keeps only its inputs: no rotated queries and keys, no output and no log-sums.
    queries, keys = block.width("q_proj.weight"), block.width("k_proj.weight")
    spared = options.compute_bytes * (queries + keys) + FLOAT32_BYTES * block.heads
    return block_activations(block, hidden, replace(options, recompute="none")) - spared
