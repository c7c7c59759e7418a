"""Memory that a rank of the FSDP2 back end needs, from a model's dimensions alone. The module is pure and
does not import torch.

In the formulas, P is the number of parameters, and S is the number of ranks that share them. Each tensor is
cut along its first dimension and padded. The bytes of a number in `trainer.dtype` are c. All figures are in
bytes.

The following state is always in memory:

- Parameters 4 P / S, gradients 4 P / S, AdamW's moments 8 P / S. They are fp32 and sharded alike (ZeRO stage
  3, arXiv:1910.02054 section 5.3; `fully_shard` of torch). Offloaded moments are in host memory.
- With adapters (LoRA): c P / S for the frozen model, and the line above for the adapters alone. The adapters
  are A [r, in] and B [out, r] of each adapted layer [out, in]. Frozen parameters have no gradients in a pass.
- A vision tower that is not trained: 4 P / S, or c P / S with adapters. Its passes are not counted. They run
  without gradients, before the language model's.
- Each further model adds the same. A frozen model takes c P / S, or 4 P / S if it follows another. The state
  of all models is in memory during the passes of one (`planned`).

A pass adds the following at its worst moment (`_moments`):

- Working parameters: FSDP2 gathers one block's parameters (c P_block) before it computes with them. On more
  than one rank it also gathers the next block's. Parameters outside blocks (the root: embedding, last norm,
  output layer) stay gathered for the whole pass.
- Unreduced gradients: c P_block during a block's backward pass. Then 4 P_block and 4 P_block / S for input
  and output of the reduce-scatter (`foreach_reduce`); the input is kept until the next block's. The root's
  gradients, c P_root, exist from the output layer's backward pass to the end.
- Activations: the tensors that autograd keeps of each linear layer, norm, rotation, attention and activation
  function in transformers (`block_activations`). The method is from Korthikanti et al. (arXiv:2205.05198
  section 4), who count a block with dropout and GeLU. With recomputation a block keeps its input, c h per
  token, and with `selective` also the results of matrix products and attention. Its other activations exist
  for one block at a time (Chen et al., arXiv:1604.06174).
- Sequence parallelism: a rank has 1 / `sequence` of a micro-batch's tokens, and all figures are for these
  tokens. In attention, a rank has some heads of all tokens, which is the same amount of data. Keys and values
  that are sent several times are the exception (`exchange.py`).
- Head: log-probs are computed from a tile of the vocabulary at a time (`head.py`). The buffers of a tile
  together have `logits_bytes`. If the dtype is smaller than fp32, the gradient of the hidden states is summed
  in an fp32 buffer, and each summand is in memory next to it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import gcd, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from areal_async.base.gpus import EXACT_PINNED_MB
from areal_async.config.parallel import RankGrid
from trainer_service.backends.base import TRAINED_MODEL, ModelHead, ModelUse

if TYPE_CHECKING:
    from areal_async.config.job import TrainerSection

Shape = tuple[int, ...]
ReadShapes = Callable[[Path], tuple[Mapping[str, Any], Mapping[str, Shape]]]
"""Function that returns the `config.json` of a folder and the shapes of its tensors."""
Recompute = Literal["none", "selective", "full"]
ALONE = RankGrid()
FLOAT32_BYTES = 4
LOGITS_PARTS = 32
LEAST_LOGITS_BYTES = 1 << 25
"""Smallest tile of logits; smaller tiles would only be slower."""
STREAMED_BYTES = 1 << 28
"""Largest number of bytes of offloaded moments on the device during an update."""

BLOCK = re.compile(r"^.*\blayers\.(\d+)\.(.+)$")
TOWER = re.compile(r"(^|\.)(visual|(vision|audio)_\w+|multi_modal_projector|mm_projector)\.")
"""Tensors of a multimodal model outside its language model."""
EXPERT = re.compile(r"experts\.\d+\.")
COUNTED = re.compile(r"(^|\.)([qkvo]_proj|gate_proj|up_proj|down_proj|gate|shared_expert_gate)\.weight$")
"""Matrices of a block whose activations `block_activations` counts."""


def logits_bytes(units: int, vocabulary: int) -> int:
    """Return the bytes for a tile of the logits of `units` tokens, over all tensors of its size together. The
    result is a 32nd of the bytes of all logits in fp32, and at least 32 MiB."""
    return max(LEAST_LOGITS_BYTES, FLOAT32_BYTES * units * vocabulary // LOGITS_PARTS)


def pinned_bytes(n_bytes: int) -> int:
    """Return the bytes that one pinned host tensor takes. Torch's allocator rounds them up to a power of two,
    up to the size that `models/accelerator.py` sets."""
    return n_bytes if n_bytes > EXACT_PINNED_MB << 20 or n_bytes < 1 else 1 << (n_bytes - 1).bit_length()


@dataclass(frozen=True)
class DecoderBlock:
    """One decoder block: its parameters in FSDP's layout."""

    parameters: Mapping[str, Shape]
    """Shapes by name within the block. The experts of one projection are one tensor [experts, out, in]."""
    experts_per_token: int
    heads: int

    @property
    def size(self) -> int:
        return sum(map(prod, self.parameters.values()))

    def adapters(self, rank: int, targets: Collection[str]) -> list[Shape]:
        """Return the shapes of A and B of each adapted linear layer: layers whose name is in `targets`, or
        all. Fused experts and their router are no linear layers."""
        found: list[Shape] = []
        for name, shape in self.parameters.items():
            layer = name.split(".")[-2:-1]
            if len(shape) == 2 and layer != ["gate"] and (not targets or layer[0] in targets):
                found += [(rank, shape[1]), (shape[0], rank)]
        return found

    @property
    def kv_heads(self) -> int:
        queries, keys = self.width("q_proj.weight"), self.width("k_proj.weight")
        return max(1, self.heads * keys // max(1, queries))

    def width(self, name: str) -> int:
        """Return the number of rows of the linear layer with this name; 0 if the block has none."""
        return next((shape[-2] for key, shape in self.parameters.items() if key.endswith(name)), 0)


@dataclass(frozen=True)
class ModelShape:
    """A causal language model, described by the shapes of its tensors."""

    blocks: tuple[DecoderBlock, ...]
    root: Mapping[str, Shape]
    """Parameters outside blocks, without a tied output layer."""
    hidden: int
    vocabulary: int
    tower: Mapping[str, Shape] = field(default_factory=dict)
    """Parameters of a vision tower and its projector."""

    @property
    def tied(self) -> bool:
        return not any("lm_head" in name for name in self.root)

    @property
    def size(self) -> int:
        tower = sum(map(prod, self.tower.values()))
        return self.root_size + tower + sum(block.size for block in self.blocks)

    @property
    def root_size(self) -> int:
        return sum(map(prod, self.root.values()))

    @property
    def uncounted(self) -> list[str]:
        """Matrices of blocks whose activations the formulas do not count. A pass then needs more memory than
        `rank_memory` reports."""
        shapes = {name: shape for block in self.blocks for name, shape in block.parameters.items()}
        unknown = (name for name, shape in shapes.items() if len(shape) > 1 and not COUNTED.search(name))
        return sorted({name.removesuffix(".weight") for name in unknown})

    @property
    def largest(self) -> DecoderBlock:
        return max(self.blocks, key=lambda block: block.size)


def shape_of(
    config: Mapping[str, Any], tensors: Mapping[str, Shape], head: ModelHead = "tokens"
) -> ModelShape:
    """Return the shape of a model with `head`, from its `config.json` and the shapes of its tensors by name.

    Without an output layer its vocabulary is 0. Raises `ValueError` if it has no decoder blocks
    (`…layers.N.…`) or its config lacks a dimension."""
    text = config.get("text_config", config)
    named = ("num_attention_heads", "hidden_size", "vocab_size")
    try:
        heads, hidden, vocabulary = (int(text[key]) for key in named)
    except KeyError as error:
        raise ValueError(f"config.json has no {error}") from None
    top_k = int(text.get("num_experts_per_tok") or text.get("moe_top_k") or 1)
    blocks: dict[int, dict[str, list[Shape]]] = {}
    root, tower = {}, {}
    for name, shape in tensors.items():
        if text is not config and TOWER.search(name):
            tower[name] = shape
        elif match := BLOCK.match(name):
            inner = blocks.setdefault(int(match[1]), {})
            inner.setdefault(EXPERT.sub("experts.", match[2]), []).append(shape)
        elif not (name.startswith("lm_head") and (text.get("tie_word_embeddings", False) or head == "value")):
            root[name] = shape
    if head != "tokens":
        root["score.weight"] = (1, hidden)
    if not blocks:
        raise ValueError("its tensors are not those of a decoder: none is called …layers.N.…")
    return ModelShape(
        blocks=tuple(
            DecoderBlock({name: _stacked(shapes) for name, shapes in blocks[index].items()}, top_k, heads)
            for index in sorted(blocks)
        ),
        root=root,
        hidden=hidden,
        vocabulary=vocabulary if head != "value" else 0,
        tower=tower,
    )


def _stacked(shapes: list[Shape]) -> Shape:
    return shapes[0] if len(shapes) == 1 else (len(shapes), *shapes[0])


@dataclass(frozen=True)
class MemoryOptions:
    """Options of a job that affect the memory of one of its models."""

    grid: RankGrid = ALONE
    virtual_stages: int = 1
    """Number of stages on each pipeline rank of Megatron-Core."""
    compute_bytes: int = 4
    """Bytes of a number in `trainer.dtype`."""
    recompute: Recompute = "none"
    offload_optimizer: bool = False
    on_host: bool = False
    """Whether the rank's device is the CPU, so that offloaded moments need no copies."""
    lora_rank: int = 0
    """Rank of the trained adapters; 0 if the model itself is trained."""
    lora_targets: tuple[str, ...] = ()
    """Layers with adapters, by the last part of their names; empty for all layers."""
    trains_vision: bool = False
    """Whether the vision tower is trained with the language model."""
    frozen: bool = False
    """Whether no part of the model is trained."""
    follows: bool = False
    """Whether it is frozen and follows another model."""

    @property
    def shards(self) -> int:
        """Number of FSDP2 ranks that share a copy of the model."""
        return self.grid.shard * self.grid.sequence

    def of(self, name: str, use: ModelUse) -> MemoryOptions:
        """Return the options of one model. Only the policy has adapters."""
        return replace(
            self,
            lora_rank=self.lora_rank if name == TRAINED_MODEL else 0,
            trains_vision=self.trains_vision and name == TRAINED_MODEL,
            frozen=use.optimizer is None,
            follows=use.follows,
        )

    def trained(self, block: DecoderBlock) -> int:
        """Return the number of a block's parameters that have gradients."""
        if self.lora_rank:
            return sum(map(prod, block.adapters(self.lora_rank, self.lora_targets)))
        return block.size


def options_of(trainer: TrainerSection) -> MemoryOptions:
    """Return the options of a job's `trainer` section."""
    arguments = trainer.backend_args
    return MemoryOptions(
        RankGrid.of(trainer),
        arguments.get("virtual_stages", 1),
        compute_bytes=2 if trainer.resolved_dtype == "bfloat16" else 4,
        recompute=arguments.get("recompute", "none"),
        offload_optimizer=arguments.get("offload_optimizer", False),
        on_host=trainer.device == "cpu",
        lora_rank=trainer.lora.rank,
        lora_targets=trainer.lora.targets,
        trains_vision=arguments.get("vision") == "trained",
    )


@dataclass(frozen=True)
class Moment:
    """Memory at one moment of a step, in addition to the state."""

    fixed: float
    per_token: float = 0.0
    per_unit: float = 0.0
    vocabulary: int = 0
    """Number of logits per unit in memory at this moment."""
    logit_bytes: int = 0
    """Bytes of one logit, in all its copies."""

    def bytes(self, tokens: int, units: int) -> float:
        everything = self.logit_bytes * units * self.vocabulary
        logits = min(everything, logits_bytes(units, self.vocabulary))
        return self.fixed + self.per_token * tokens + self.per_unit * units + logits


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of one rank, in bytes."""

    parameters: int
    gradients: int = 0
    saved: int = 0
    """Copy for a checkpoint, in host memory."""
    optimizer: int = 0
    """Moments on the rank's device."""
    host_optimizer: int = 0
    """Moments in host memory."""
    working: int = 0
    """Gathered parameters of the root and the largest block. On more than one rank, the parameters of the
    next block are gathered, too."""
    unreduced: int = 0
    """Gradients of the root and the largest block before their reduction, and the reduction's buffers."""
    head: int
    activations_per_token: int
    """Activations that all blocks keep until the backward pass."""
    passing_per_token: int
    """Gradients within a block during its backward pass, and its recomputed activations."""
    moments: tuple[Moment, ...]
    """Candidates for the worst moment of a step."""
    exchanged: int = 0
    """Bytes that the rank receives in a pass: each parameter is gathered forward and backward, and its
    gradient is reduced in fp32."""
    sequence: int = 1
    """Number of ranks that share each micro-batch. Figures per token are for the tokens of one rank."""

    @property
    def state(self) -> int:
        """Memory between steps, including gradients."""
        return self.parameters + self.gradients + self.optimizer

    def peak(self, tokens: int, units: int | None = None) -> int:
        """Return the largest number of bytes on the device in a pass of `tokens` with `units` sampled ones
        (default: all).

        If ranks share the pass, each has its part of the tokens and, in the worst case, all units among
        them."""
        tokens = -(-tokens // self.sequence)
        units = tokens if units is None else units if self.sequence == 1 else min(units, tokens)
        return self.state + round(max(moment.bytes(tokens, units) for moment in self.moments))

    def tokens_that_fit(self, memory_bytes: int) -> int:
        """Return the largest number of tokens in one micro-batch, all of them sampled; 0 if the model itself
        does not fit."""
        most = max(0, int((memory_bytes - self.state) / self.activations_per_token)) * self.sequence
        return bisect_right(range(1, most + 1), memory_bytes, key=self.peak)


def rank_memory(model: ModelShape, options: MemoryOptions) -> RankMemory:
    """Compute the memory that each rank needs. The module docstring has the formulas."""
    if options.frozen:
        return _frozen_memory(model, options)
    tensors = [*model.root.values(), *(s for block in model.blocks for s in block.parameters.values())]
    c, block, root = options.compute_bytes, options.trained(model.largest), _trained_root(model, options)
    tower = [*model.tower.values()]
    frozen = 0 if options.trains_vision else FLOAT32_BYTES * _sharded(tower, options)
    tensors += tower if options.trains_vision else []
    if options.lora_rank:
        frozen = c * _sharded([*tensors, *tower], options)
        blocks = model.blocks
        tensors = [s for each in blocks for s in each.adapters(options.lora_rank, options.lora_targets)]
    shard = FLOAT32_BYTES * _sharded(tensors, options)
    moments, copied = 2 * shard, _on_host(tensors, options)
    return RankMemory(
        parameters=frozen + shard,
        gradients=shard,
        saved=3 * copied,
        optimizer=0 if options.offload_optimizer else moments,
        host_optimizer=2 * copied if options.offload_optimizer else 0,
        working=_gathered(model, options),
        unreduced=round((c + _reduction(options)) * block) + c * root,
        head=_tile(model) + (c * model.vocabulary * model.hidden if root else 0),
        activations_per_token=sum(kept_per_token(each, model.hidden, options) for each in model.blocks)
        + _outside(model, c),
        passing_per_token=max(passing_per_token(each, model.hidden, options) for each in model.blocks),
        moments=tuple(_moments(model, options)),
        exchanged=round((1 - 1 / options.shards) * (2 * c * model.size + shard * options.shards)),
        sequence=options.grid.sequence,
    )


def _frozen_memory(model: ModelShape, options: MemoryOptions) -> RankMemory:
    """Compute the memory of a model that only has passes without gradients.

    Per token, a block needs its input, and sums and norms of the same width. The widest part of the block
    also needs the activated gate, the up-projection and their product."""
    tensors = [*model.root.values(), *(s for block in model.blocks for s in block.parameters.values())]
    tensors += model.tower.values()
    c, working = options.compute_bytes, _gathered(model, options)
    numbers = _sharded(tensors, options)
    plain, hidden = replace(options, recompute="none"), c * model.hidden
    passing = 2 * hidden + max(
        passing_per_token(each, model.hidden, plain) + c * each.width("mlp.gate_proj.weight")
        for each in model.blocks
    )
    return RankMemory(
        parameters=(FLOAT32_BYTES if options.follows else c) * numbers,
        saved=_on_host(tensors, options) if options.follows else 0,
        working=working,
        head=_tile(model),
        activations_per_token=hidden,
        passing_per_token=passing,
        moments=(
            Moment(working, passing),
            Moment(working, hidden, hidden, model.vocabulary, wide_bytes(c)),
        ),
        exchanged=round((1 - 1 / options.shards) * c * model.size),
        sequence=options.grid.sequence,
    )


SUMMED = ("parameters", "gradients", "saved", "optimizer", "host_optimizer", "exchanged")
LARGEST = ("working", "unreduced", "head", "activations_per_token", "passing_per_token", "sequence")


def planned(
    trainer: TrainerSection,
    models: Mapping[str, ModelUse],
    read: ReadShapes,
    memory_of: Callable[[ModelShape, MemoryOptions], RankMemory],
) -> tuple[dict[str, ModelShape], RankMemory]:
    """Return the models of a job by name, and their memory on one rank. This memory is the state of all
    models plus the largest pass of any of them. Raises `ValueError` if a model has no decoder blocks."""
    options = options_of(trainer)
    shapes = {name: shape_of(*read(use.folder), use.head) for name, use in models.items()}
    each = [memory_of(shapes[name], options.of(name, use)) for name, use in models.items()]
    return shapes, RankMemory(
        **{name: sum(getattr(one, name) for one in each) for name in SUMMED},
        **{name: max(getattr(one, name) for one in each) for name in LARGEST},
        moments=tuple(moment for one in each for moment in one.moments),
    )


def _tile(model: ModelShape) -> int:
    return LEAST_LOGITS_BYTES if model.vocabulary else 0


def _sharded(tensors: Collection[Shape], options: MemoryOptions) -> int:
    """Return how many numbers of these tensors a rank has."""
    return sum(_shares(tensors, options))


def _shares(tensors: Collection[Shape], options: MemoryOptions) -> Iterator[int]:
    return (-(-shape[0] // options.shards) * prod(shape[1:]) for shape in tensors)


def _on_host(tensors: Collection[Shape], options: MemoryOptions) -> int:
    """Return the bytes of fp32 copies of these tensors in host memory, which is pinned beside a GPU."""
    taken = int if options.on_host else pinned_bytes
    return sum(taken(FLOAT32_BYTES * numbers) for numbers in _shares(tensors, options))


def _trained_root(model: ModelShape, options: MemoryOptions) -> int:
    return 0 if options.lora_rank else model.root_size


def _gathered(model: ModelShape, options: MemoryOptions) -> int:
    beside = 2 if options.shards > 1 else 1
    block = model.largest.size + (options.trained(model.largest) if options.lora_rank else 0)
    return options.compute_bytes * (model.root_size + beside * block)


def _reduction(options: MemoryOptions) -> float:
    """Return the bytes per parameter of a reduce-scatter's input and output."""
    return FLOAT32_BYTES * (1 + 1 / options.shards)


def wide_bytes(c: int) -> int:
    """Return the bytes of a number in `trainer.dtype`, plus its fp32 copy if the dtype is not fp32."""
    return FLOAT32_BYTES if c == FLOAT32_BYTES else FLOAT32_BYTES + c


def _moments(model: ModelShape, options: MemoryOptions) -> Iterator[Moment]:
    c, root, block = options.compute_bytes, _trained_root(model, options), options.trained(model.largest)
    gathered, reduction, outside = _gathered(model, options), _reduction(options), _outside(model, c)
    kept = [kept_per_token(each, model.hidden, options) for each in model.blocks]
    passing = [passing_per_token(each, model.hidden, options) for each in model.blocks]
    table = c * model.vocabulary * model.hidden if root else 0  # the output layer's gradient
    # Output layer's backward: all activations are kept, plus the units' hidden states and their gradients.
    yield Moment(
        fixed=gathered + table,
        per_token=sum(kept) + outside,
        per_unit=(c + wide_bytes(c)) * model.hidden,
        vocabulary=model.vocabulary,
        logit_bytes=wide_bytes(c),
    )
    # Each block's backward, from the last to the first, plus the input of the previous reduction.
    for done in range(len(kept)):
        fixed = gathered + table + c * block + (FLOAT32_BYTES * block if done else 0)
        remaining = kept[: len(kept) - done]
        per_token = sum(remaining) + passing[len(remaining) - 1] + (0 if done else outside)
        yield Moment(fixed, per_token)
    # The embedding's gradient (a tied output layer's is added to it), then the reduction of the root.
    second = table if model.tied else 0
    yield Moment(c * (model.root_size + root) + second + FLOAT32_BYTES * block, c * model.hidden)
    yield Moment((c + reduction) * root + FLOAT32_BYTES * block)
    if options.offload_optimizer and not options.on_host:
        yield Moment(STREAMED_BYTES)


def _outside(model: ModelShape, c: int) -> int:
    """Return the bytes per token kept outside blocks: the last norm's input and output, sines and cosines,
    ids."""
    return (FLOAT32_BYTES + 2 * c) * model.hidden + 2 * FLOAT32_BYTES * 8


def kept_per_token(block: DecoderBlock, hidden: int, options: MemoryOptions) -> int:
    c = options.compute_bytes
    if options.recompute == "none":
        return block_activations(block, hidden, options)
    return c * hidden + (_block_products(block, hidden, c) if options.recompute == "selective" else 0)


def passing_per_token(block: DecoderBlock, hidden: int, options: MemoryOptions) -> int:
    """Return the bytes per token of a block's backward: the gradients of its input and of the two products in
    its widest part. With recomputation, its recomputed activations are added."""
    c, wide = options.compute_bytes, 2 * block.width("mlp.gate_proj.weight")
    if routed := block.width("experts.gate_proj.weight"):
        wide += block.experts_per_token * (2 * routed + 2 * hidden)
    transient = c * (wide + 2 * hidden)
    again = 0 if options.recompute == "none" else block_activations(block, hidden, options)
    return transient + max(0, again - (kept_per_token(block, hidden, options) - c * hidden))


def _block_products(block: DecoderBlock, hidden: int, c: int) -> int:
    """Return the bytes per token of the results of a block's matrix products and attention."""
    size = c * block.width("q_proj.weight") + FLOAT32_BYTES * block.heads  # of the attention
    for name, shape in block.parameters.items():
        if name.endswith("proj.weight") or name.endswith("gate.weight"):
            size += c * shape[-2] * (block.experts_per_token if len(shape) == 3 else 1)
    return size


def block_activations(block: DecoderBlock, hidden: int, options: MemoryOptions) -> int:
    """Return the bytes per token that autograd keeps of one block.

    - A norm of n numbers keeps its input in fp32 and the normalised numbers. The linear layers after it share
      one input.
    - Attention keeps queries, keys and values (after the rotation, whose factors need no gradient) and a
      log-sum per head. Attention keeps its output twice: as computed, and packed again for the next layer.
    - A gated layer of width w keeps gate, up, the activated gate and their product.
    - An expert adds its input and its output, because the router's weight multiplies the output.
    - A frozen norm keeps only its input. An adapter keeps the output of A."""
    c = options.compute_bytes
    queries, keys = block.width("q_proj.weight"), block.width("k_proj.weight")
    size = 2 * _norm(hidden, c) + 2 * c * hidden
    ranks = options.grid.sequence
    sent = keys * ranks // gcd(block.kv_heads, ranks)
    size += c * (3 * queries + 2 * sent) + FLOAT32_BYTES * block.heads
    if "self_attn.q_norm.weight" in block.parameters:
        size += _norm(queries, c) + _norm(keys, c)
    for name, shape in block.parameters.items():
        if not name.endswith("gate_proj.weight"):
            continue
        wide = 4 * c * shape[-2]
        if len(shape) == 3:  # experts
            size += block.experts_per_token * (wide + 2 * c * hidden) + 2 * FLOAT32_BYTES * shape[0]
        else:
            size += wide
    if options.lora_rank:
        size -= 2 * c * hidden
        size += c * options.lora_rank * len(block.adapters(options.lora_rank, options.lora_targets)) // 2
    return size


def _norm(numbers: int, c: int) -> int:
    return (FLOAT32_BYTES + c) * numbers
