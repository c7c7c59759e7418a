"""One model of the back end on a rank: its module and the changes to it.

A trained model has AdamW on the rank's own shards, with its own schedule and clipping. The shards of a model
that follows another are moved towards the shards of the other model. The weights of a frozen model never
change and have the dtype of the computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from areal_async.base.log import get_logger
from areal_async.config.job import LoraSection
from areal_async.models.accelerator import with_exact_rotations
from areal_async.models.classes import is_multimodal
from areal_async.models.files import looks_beyond_tokens
from areal_async.models.vision import NoImages
from trainer_service.backends.base import TRAINED_MODEL, ModelUse
from trainer_service.backends.common import ChangingModel
from trainer_service.backends.fsdp.attention import takes_ragged
from trainer_service.backends.fsdp.compiled import Compile, compile_blocks
from trainer_service.backends.fsdp.forward import (
    fitted,
    packed_columns,
    probe_images,
    probe_packing,
    require_packable,
)
from trainer_service.backends.fsdp.images import ModelImages
from trainer_service.backends.fsdp.loading import Vision, load_sharded, local_part
from trainer_service.backends.fsdp.optimizer import MOMENTS, ShardedAdamW
from trainer_service.backends.fsdp.recompute import recompute_blocks
from trainer_service.backends.fsdp.routing import RouteReplay
from trainer_service.backends.fsdp.sequence import SequenceRanks
from trainer_service.backends.fsdp.shards import read_shard, write_shard
from trainer_service.backends.probe import PROBED, probe_rows
from trainer_service.data.images import reader_of
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.durable_files import FileEntry
from trainer_service.errors import ModelError, UnfitModel
from trainer_service.ranks import Ranks

log = get_logger("trainer")

Kinds = dict[str, Mapping[str, Tensor]]
"""Tensors of a rank by kind and by parameter. Kinds name the files of a checkpoint."""


@dataclass(frozen=True)
class FsdpOptions:
    """Options of a back end: `Fsdp.Arguments`, and the adapters of the policy."""

    dtype: torch.dtype
    recompute: str = "none"
    offload_optimizer: bool = False
    compile: Compile = "off"
    vision: Vision = "frozen"
    min_pixels: int | None = None
    max_pixels: int | None = None
    """Bounds of an image's pixels, as in `ImageProcessor`."""
    lora: LoraSection | None = None
    seed: int = 0
    """Seed of the adapters' initial values."""


class HeldModel(ChangingModel):
    """See `ChangingModel`."""

    def __init__(
        self,
        name: str,
        use: ModelUse,
        ranks: Ranks,
        options: FsdpOptions,
        *,
        shards_count: int,
        shared: SequenceRanks | None = None,
    ) -> None:
        """See `FsdpBackend`. Raises `ModelError`."""
        super().__init__(name, use)
        self._ranks, self._is_first_copy = ranks, ranks.rank < shards_count
        self._place = ranks.rank % shards_count, shards_count
        lora, dtype = options.lora if name == TRAINED_MODEL else None, options.dtype
        held = torch.float32 if use.follows or (use.optimizer is not None and lora is None) else dtype
        require_packable(name, use.folder)
        vision = options.vision if name == TRAINED_MODEL else "frozen"
        how = {"held": held, "head": use.head, "lora": lora, "vision": vision, "seed": options.seed}
        self.loaded = load_sharded(use.folder, ranks, dtype, **how)
        self.module = self.loaded.module
        with_exact_rotations(self.module)
        if use.optimizer is None:
            self.module.requires_grad_(False)
        self.sequence = shared
        if shared is not None:
            _check_sequence(self.module, shared, name)
        has_sinks = any(each.endswith(".sinks") for each, _ in self.module.named_parameters())
        ragged = takes_ragged(name, self.module.config, ranks, dtype, has_sinks=has_sinks)
        self.side_by_side = probe_packing(name, self.loaded, ranks, use.head, self.sequence, ragged=ragged)
        self._images, self._no_images = self._images_of(use, options, vision)
        # The first pass of FSDP may move the local shards, so the optimizer gets them after it.
        parameters = self.module.named_parameters()
        changing = {name: each for name, each in parameters if each.requires_grad or use.follows}
        self.shards = {name: nn.Parameter(local_part(parameter)) for name, parameter in changing.items()}
        self.rows = {name: parameter.shape[0] for name, parameter in changing.items()}
        self._adamw: ShardedAdamW | None = None
        if use.optimizer is not None:
            recompute_blocks(self.module, options.recompute)
            self._adamw = ShardedAdamW(self.shards, use.optimizer, offload=options.offload_optimizer)
        self._replay: RouteReplay | None = None
        compile_blocks(name, self.module, options.compile, ranks, self._try_passes)

    def _images_of(
        self, use: ModelUse, options: FsdpOptions, vision: Vision
    ) -> tuple[ModelImages | None, str]:
        """Return the images of the model; None with the reason if it cannot be used for images. Raises
        `ModelError` if its vision tower is to be trained, but cannot."""
        name, model, ranks = self.name, self.module, self._ranks
        images, reason = None, ""
        try:
            if use.head == "value":
                raise NoImages("it has a value layer in place of its output layer")
            ModelImages.require_known(model)
            reader = reader_of(use.folder, options.min_pixels, options.max_pixels)
            images = ModelImages(reader, trained=vision == "trained")
        except NoImages as error:
            reason = str(error)
        if failed := ranks.largest(ranks.rank + 1 if reason else 0):
            images, reason = None, reason or f"rank {failed - 1} cannot read images, as its log says"
        if images is not None:
            try:
                probe_images(name, self.loaded, ranks, images, self.sequence)
            except UnfitModel as error:
                images, reason = None, str(error)
        if reason and vision == "trained":
            raise ModelError(f"trainer.backend_args.vision: {reason}. Set it to frozen.")
        if reason and is_multimodal(model.config):
            log.warning("the model is trained on text alone", model=name, reason=reason)
        return images, reason

    def _try_passes(self) -> None:
        """Run a pass of each kind over plain rows and over rows that share a prefix."""
        rows = probe_rows(self.module.config)
        try:
            for chosen in (rows[2:], rows):
                batch = self.fitted(build_micro_batch(chosen, device=self._ranks.device))
                for trains in (False, True) if self._adamw is not None else (False,):
                    self.module.train(trains)
                    with torch.set_grad_enabled(trains):
                        columns = packed_columns(self.module, batch, PROBED[self.use.head], self.sequence)
                        if trains:
                            torch.stack([column.sum() for column in columns.values()]).sum().backward()
        finally:
            self.discard()

    def fitted(self, batch: MicroBatch) -> MicroBatch:
        return fitted(self.module, batch, self.sequence)

    def ready(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches, each as a pass of the model needs it. All ranks call it. Raises
        `ModelError` for images that the model cannot be used for."""
        if self._images is not None:
            batches = self._images.agreed(self.module, batches, self._ranks)
        elif any(batch.images is not None for batch in batches):
            raise ModelError(
                f"the data has images, and the model {self.name!r} cannot be trained on them: "
                f"{self._no_images}"
            )
        yield from map(self.fitted, batches)

    @contextmanager
    def routed(self, batch: MicroBatch) -> Iterator[None]:
        """Replay the routes of a batch in the passes over it, if this is the policy. In other models the
        routers choose. Blocks run uncompiled meanwhile, because their graphs were made without routes. Raises
        `ModelError`."""
        if batch.routes is None or self.name != TRAINED_MODEL:
            yield
            return
        if self._replay is None:
            self._replay = RouteReplay(self.module)
        routes = batch.routes
        if self.side_by_side:
            routes = routes[:, batch.rows[0].flatten()]
        replay = self._replay.using(routes if self.sequence is None else self.sequence.stretch(routes))
        with torch.compiler.set_stance("force_eager"), replay:
            yield

    @property
    def memory(self) -> Kinds:
        """Tensors with the kinds, shapes and dtypes that `state` has after an update."""
        moments = dict.fromkeys(MOMENTS if self._adamw is not None else (), self.shards)
        return self._kinds(moments) if self._is_first_copy else {}

    @property
    def state(self) -> Kinds:
        """This rank's tensors for a checkpoint. All copies of a shard are equal, so only ranks of the first
        copy return tensors."""
        moments = self._adamw.moments() if self._adamw is not None else {}
        return self._kinds(moments) if self._is_first_copy else {}

    def on_device(self) -> Iterator[Tensor]:
        """Yield all tensors of this rank that take memory on its device between two steps."""
        for held in (*self.module.parameters(), *self.module.buffers()):
            yield local_part(held) if isinstance(held, DTensor) else held.detach()
        yield from (shard.detach() for shard in self.shards.values())
        if self._adamw is not None and not self._adamw.offload:
            yield from (each for values in self._adamw.moments().values() for each in values.values())

    def write(self, folder: Path, kind: str, values: Mapping[str, Tensor]) -> dict[str, FileEntry]:
        return write_shard(folder, kind, values, self.rows, *self._place)

    def load(self, folder: Path, updates: Mapping[str, int]) -> None:
        """See `TrainingBackend.load`."""
        if not self.begin_at(folder, updates):
            return
        kinds = self._kinds(self._adamw.restart(self.updates) if self._adamw is not None else {})
        for kind, values in kinds.items():
            read_shard(folder, kind, values, self.rows, *self._place)

    def _norm_of_gradient(self) -> float:
        for name, parameter in self.module.named_parameters():
            if (shard := self.shards.get(name)) is not None:
                if parameter.grad is not None:
                    shard.grad, parameter.grad = local_part(parameter.grad), None
                elif shard.grad is None:  # every shard has moments, even if no loss used it
                    shard.grad = torch.zeros_like(shard)
        return self._norm(self._gradients)

    def _update(self, norm: float, rate: float) -> float:
        assert self._adamw is not None
        scale = min(1.0, self._trained().clip_grad_norm / (norm + 1e-6))
        if scale < 1:
            torch._foreach_mul_(self._gradients, scale)
        self._adamw.step(rate)
        return self._norm([shard.detach() for shard in self.shards.values()])

    def discard(self) -> None:
        """See `TrainingBackend.discard`."""
        # A pass that failed leaves FSDP in its middle: whole parameters hide their shards, and may have
        # gradients that would be added to those of the next pass.
        root: Any = self.module
        whole = [*self.module.parameters()]
        root.reset_iter_state()
        for parameter in (*whole, *self.module.parameters(), *self.shards.values()):
            parameter.grad = None

    def _move(self, source: HeldModel, share: float) -> None:
        theirs = {name: local_part(parameter) for name, parameter in source.module.named_parameters()}
        for name, shard in self.shards.items():
            shard.lerp_(self.found_in(source, name, theirs.get(name), shard.shape).float(), share)

    def _kinds(self, moments: Mapping[str, Mapping[str, Tensor]]) -> Kinds:
        found: Kinds = {f"{self.name}.{moment}": values for moment, values in moments.items()}
        return {self.name: self.shards, **found} if self.shards else {}

    @property
    def _gradients(self) -> list[Tensor]:
        return [shard.grad for shard in self.shards.values() if shard.grad is not None]

    def _norm(self, parts: list[Tensor]) -> float:
        """Return the 2-norm over the shards of one copy, summed in f64.

        A sum of a million squares in f32 on a CPU has an error of 1e-5, which depends on the number of
        ranks."""
        norms = torch._foreach_norm(parts, 2, torch.float64)
        squared = torch.stack(norms).square().sum().cpu() * self._is_first_copy
        self._ranks.sum(squared)
        return float(squared.sqrt())


def _check_sequence(module: Any, shared: SequenceRanks, name: str) -> None:
    """Raise `ModelError` if ranks cannot share the rows of a model."""
    config = module.config.get_text_config()
    if why := looks_beyond_tokens(config.to_dict()):
        raise ModelError(f"trainer.parallel.sequence: the model {name!r} {why}. Set it to 1.")
    if (heads := config.num_attention_heads) % shared.size:
        raise ModelError(
            f"trainer.parallel.sequence: the model {name!r} has {heads} attention heads. Set a divisor of it."
        )
