"""Loading of a Hugging Face directory as a sharded model.

Each rank reads its own rows of each tensor from the files (safetensors only) into its shards. Host memory
therefore never has more than these shards and one tensor. Modules are created on the meta device and get
memory after sharding. Tensors that no file contains, such as the `inv_freq` of a rotary embedding, are
computed by each rank's module. A value layer that no file contains starts with zeros.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForSequenceClassification

from areal_async.config.job import LoraSection
from areal_async.models.classes import (
    attention_by_part,
    auto_class,
    freeze_other_parts,
    is_multimodal,
    names_of_other_parts,
)
from areal_async.weights.names import NamesMismatch, Storage, storage_of, tied_in_files
from areal_async.weights.pieces import TensorPiece
from trainer_service.backends.base import ModelHead
from trainer_service.backends.common import FLOATS, loaded_on_all, open_tensors
from trainer_service.backends.fsdp.attention import PACKED_ATTENTION
from trainer_service.backends.fsdp.lora import (
    BASE,
    add_adapters,
    first_value,
    is_adapter,
    published,
)
from trainer_service.backends.fsdp.shards import row_range
from trainer_service.backends.probe import with_short_windows
from trainer_service.ranks import Ranks

Vision = Literal["frozen", "trained"]
VALUE_LAYER = "score.weight"
"""[1, H]: name of the value layer in modules and files of sequence classifiers."""
OUTPUT_LAYER = re.compile(r"(^|\.)(lm_head|embed_out)\.(weight|bias)$")
"""Names of output layers in the files of causal language models."""


@dataclass(frozen=True)
class LoadPlan:
    """Options for loading a model."""

    head: ModelHead = "tokens"
    held: torch.dtype = torch.float32
    """Dtype of the parameters."""
    lora: LoraSection | None = None
    """Adapters in fp32, which are trained alone; None for none."""
    vision: Vision = "frozen"
    """Whether the parts of a multimodal model besides its language model are trained."""
    seed: int = 0
    """Seed of the adapters' initial values."""

    def plain(self, config: Any) -> Any:
        """Return the module as its files describe it."""
        kind = auto_class(config)
        if self.head == "value":
            kind, config.num_labels = AutoModelForSequenceClassification, 1
        try:
            with torch.device("meta"):
                attention = attention_by_part(config, PACKED_ATTENTION)
                model: Any = kind.from_config(config, dtype=self.held, attn_implementation=attention)
        except KeyError as error:
            if PACKED_ATTENTION not in error.args:
                raise
            raise ValueError(
                "its attention is of classes of its own, which packed rows cannot use"
            ) from error
        model.tie_weights()  # early versions of transformers 5 only tie weights while loading them
        if self.freezes(config):
            freeze_other_parts(model)
        return model

    def freezes(self, config: Any) -> bool:
        """Return whether parts of the model besides its language model are frozen."""
        return is_multimodal(config) and self.vision == "frozen"

    def complete(self, model: Any) -> Sequence[str]:
        """Add adapters and a second head, if requested. Return the names of the layers with an adapter."""
        adapted = add_adapters(model, self.lora) if self.lora is not None else ()
        if self.head == "both":
            with torch.device("meta"):
                width = model.config.get_text_config().hidden_size
                model.score = nn.Linear(width, 1, bias=False, dtype=torch.float32)
        return adapted


@dataclass(frozen=True)
class LoadedModel:
    """A sharded model, and the layout of its tensors in its files."""

    module: nn.Module
    storage: Mapping[str, Storage]
    """Place of each parameter and persistent buffer in the files. Tied tensors have one place, under the name
    in the files."""
    tied: Mapping[str, str]
    """Alias -> name in the files."""
    plan: LoadPlan
    adapted: Sequence[str] = ()
    """Names of the layers with an adapter. If there are any, only the adapters are trained."""
    frozen: frozenset[str] = frozenset()
    """Names of the tensors of a frozen vision tower, and of other parts besides the language model."""

    def in_fp32(self, ranks: Ranks) -> Any:
        """Return a second module with the same weights that computes in fp32.

        The probe uses this module. It has short attention windows, a value layer without zeros, and no
        dropout. It shares the weights, and needs more memory for only one block at a time."""
        model = self.plan.plain(with_short_windows(self.module.config))
        self.plan.complete(model)
        _shard(model, ranks, torch.float32)
        mine = _tensors(self.module)
        made: dict[int, nn.Parameter] = {}
        for name in _tensors(model):
            owner, _, last = name.rpartition(".")
            module = model.get_submodule(owner)
            tensor = mine[name]
            if last in module._parameters:
                if name == VALUE_LAYER:
                    # Different values, none of them 0.
                    tensor = tensor.detach().clone()
                    _begin(tensor, torch.linspace(0.5, 1.5, tensor.shape[1])[None])
                if id(tensor) not in made:
                    made[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=False)
                tensor = module._parameters[last] = made[id(tensor)]
            elif name in self.storage:
                module._buffers[last] = tensor
            else:
                module._buffers[last] = torch.empty_like(module._buffers[last], device=ranks.device)
                continue
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        _compute_rest(model, self.storage)
        return model.eval()

    def pieces(
        self, ranks: Ranks, dtype: torch.dtype, *, gather: bool, whole: bool = True
    ) -> Iterator[TensorPiece]:
        """Yield this rank's pieces of the files' tensors, with parameters in `dtype`.

        The pieces are the rank's own rows, or with `gather` everything on rank 0, one parameter at a time.
        Without `whole`, a frozen vision tower is left out. All ranks must iterate to the end together."""
        tensors = _tensors(self.module)
        left_out = self.frozen if not whole else frozenset()
        chosen = _adapters(tensors, self.storage) if self.adapted else self.storage
        for name, storage in chosen.items():
            if name in left_out:
                continue
            rows, first, gives = tensors[name], 0, ranks.first
            if isinstance(rows, DTensor):
                if ranks.world == 1:
                    rows = local_part(rows)
                elif storage.by_row and not gather:
                    first, _, gives = local_rows(rows)
                    rows = local_part(rows)
                else:
                    with torch.no_grad():
                        rows = rows.full_tensor()
                rows = rows.to(dtype)
            rows = rows.detach()
            if gives:
                yield from storage.pieces(rows.contiguous(), first)


def load_sharded(folder: Path, ranks: Ranks, dtype: torch.dtype, plan: LoadPlan | None = None) -> LoadedModel:
    """Load the model in `folder`, sharded over `ranks`. It computes in `dtype`. If one rank cannot read it,
    all ranks raise `ModelError`."""
    plan = plan or LoadPlan()
    kind = "causal-LM or one-label classifier" if plan.head == "value" else "causal-LM"
    fix = f" It must be a Hugging Face {kind} directory with config.json and safetensors weights."
    return loaded_on_all(folder, ranks, lambda: _load(folder, ranks, dtype, plan), fix)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, in the same memory."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local()


def local_rows(tensor: DTensor) -> tuple[int, int, bool]:
    """Return [first, end) of this rank's rows, and whether it is the first rank that has them."""
    start, end, first = 0, tensor.shape[0], True
    for dim, placement in enumerate(tensor.placements):
        index = tensor.device_mesh.get_local_rank(dim)
        if isinstance(placement, Shard):
            start, end = row_range(tensor.shape[0], tensor.device_mesh.size(dim), index)
        else:
            first = first and index == 0
    return start, end, first


def _load(folder: Path, ranks: Ranks, dtype: torch.dtype, plan: LoadPlan) -> LoadedModel:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    model = plan.plain(config)
    with ExitStack() as stack:
        files = open_tensors(folder, stack)
        shapes = {name: tuple(view.get_shape()) for name, view in files.items()}
        if plan.head == "value":
            shapes = _with_value_layer(model, shapes)
        storage = storage_of(model, shapes)
        tied = tied_in_files(model, storage)
        frozen = frozenset(names_of_other_parts(model) if plan.freezes(config) else ())
        adapted = plan.complete(model)
        if plan.lora is not None:
            tied = {}
            now = {name.replace(BASE, "."): name for name in _tensors(model)}
            storage = {now[before]: stored for before, stored in storage.items()}
        _shard(model, ranks, dtype)
        model.to_empty(device=ranks.device)
        model.tie_weights()
        tensors = _tensors(model)
        if VALUE_LAYER in tensors:
            _begin(tensors[VALUE_LAYER], torch.zeros(tensors[VALUE_LAYER].shape))
        for name, stored in storage.items():
            _fill(tensors[name], stored, files)
            # With this mark, `initialize_weights` does not overwrite the tensor.
            tensors[name]._is_hf_initialized = True  # type: ignore[attr-defined]
    for name in _adapters(tensors, storage):
        _begin(tensors[name], first_value(name, tensors[name].shape, plan.seed))
    _compute_rest(model, storage)
    model.train()
    return LoadedModel(model, storage, tied, plan, adapted, frozen)


def _with_value_layer(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's tensors for a model with a value layer, which causal language models
    lack. Raises `ValueError` if the model's classifier is of another kind."""
    layer = getattr(model, "score", None)
    if not isinstance(layer, nn.Linear) or layer.bias is not None:
        raise ValueError(f"{type(model).__name__} has no linear layer called score")
    found = {name: shape for name, shape in shapes.items() if not OUTPUT_LAYER.search(name)}
    return {VALUE_LAYER: tuple(layer.weight.shape), **found}


@torch.no_grad()
def _fill(tensor: Tensor, storage: Storage, files: Mapping[str, Any]) -> None:
    """Read this rank's rows of a parameter, or a whole buffer."""
    if not isinstance(tensor, DTensor):
        rows, first, end = tensor, 0, 0
    else:
        rows = tensor.to_local()
        first, end, _ = local_rows(tensor)
    whole = torch.empty(tensor.shape) if isinstance(tensor, DTensor) and not storage.by_row else None
    for piece in storage.pieces(rows, first) if whole is None else storage.pieces(whole, 0):
        if piece.name == VALUE_LAYER and piece.name not in files:
            continue
        view = files[piece.name]
        if tensor.is_floating_point() and view.get_dtype() not in FLOATS:
            raise NamesMismatch(
                f"has {piece.name} in {view.get_dtype()}: what is quantised cannot be trained"
            )
        piece.tensor.copy_(view[piece.box or ...])
    if whole is not None:
        rows.copy_(whole[first:end])


def _adapters(tensors: Mapping[str, Tensor], storage: Mapping[str, Storage]) -> dict[str, Storage]:
    """Return the parameters of adapters with their places in peft's files."""
    return {
        name: published(name, tensor.shape, storage) for name, tensor in tensors.items() if is_adapter(name)
    }


@torch.no_grad()
def _begin(tensor: Tensor, value: Tensor) -> None:
    """Set this rank's rows of a sharded parameter to those of `value`. It then counts as initialised."""
    assert isinstance(tensor, DTensor)
    first, end, _ = local_rows(tensor)
    tensor.to_local().copy_(value[first:end])
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def _compute_rest(model: Any, stored: Collection[str]) -> None:
    """Let transformers compute the buffers that no file contains. Raises `ValueError` if a buffer has no
    values after that."""
    buffers = model.named_buffers()
    rest = {name for name, buffer in buffers if name not in stored and buffer.is_floating_point()}
    for name in rest:
        model.get_buffer(name).fill_(torch.nan)
    # The class that FSDP makes is not one of transformers, which would skip modules without own tensors. Only
    # modules that have nothing but loaded tensors may be skipped, and must be: some set a row of them to 0.
    model.is_custom_code = lambda: False
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and all(getattr(tensor, "_is_hf_initialized", False) for tensor in own):
            module._is_hf_initialized = True
    tensors = {name: tensor for name, tensor in _tensors(model).items() if name in stored}
    before = {name: _changes(tensor) for name, tensor in tensors.items()}
    try:
        model.initialize_weights()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        why = next(iter(str(error).splitlines()), "")
        raise ValueError(f"transformers does not compute the buffers that no file has: {why}") from error
    if changed := [name for name, tensor in tensors.items() if _changes(tensor) != before[name]]:
        raise ValueError(f"transformers would overwrite {changed[0]}, which was read from its files")
    if left := [name for name, each in model.named_buffers() if name in rest and bool(each.isnan().any())]:
        raise ValueError(
            f"{left[0]} is in no file, and transformers does not compute it when it loads a model"
        )


def _changes(tensor: Tensor) -> tuple[int, int]:
    """Return the numbers of in-place changes of a tensor, and of this rank's part of it."""
    return tensor._version, (tensor.to_local() if isinstance(tensor, DTensor) else tensor)._version


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers under all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _shard(model: nn.Module, ranks: Ranks, dtype: torch.dtype) -> None:
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in [m for m in model.modules() if type(m).__name__ in blocks]:
        fully_shard(module, mesh=ranks.mesh, mp_policy=policy)
    # The root also frees its gathered parameters after a forward, so none is stale without a backward.
    fully_shard(model, mesh=ranks.mesh, mp_policy=policy, reshard_after_forward=True)
