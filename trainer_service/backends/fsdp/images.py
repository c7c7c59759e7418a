"""Images in the passes of a transformers model.

The vision tower computes the features of each image of a pack once. They are then copied to the image's
tokens, which may be at several places. Positions of tokens come from the model's own function
(`get_rope_index`), which gets one row at a time.

The tower is sharded, so all ranks must run its blocks equally often. If any rank has images in a pass, the
others compute the features of an image that none of their tokens stands for (`PackedImages`). Its features
are part of the computation, and their gradient is exactly 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from msgspec.structs import replace as changed
from numpy.typing import NDArray
from torch import Tensor

from areal_async.models.vision import NoImages
from trainer_service.backends.fsdp.sequence import SequencePart
from trainer_service.data.images import SPARE_SIDE, ImageReader, PackedImages, joined_inputs
from trainer_service.data.microbatch import MicroBatch
from trainer_service.data.prefixes import rows_of
from trainer_service.data.rows import RowImage, TrainingRow, row_of
from trainer_service.errors import BatchError
from trainer_service.ranks import Ranks
from trainer_service.transfer import on_device

NOT_A_TOKEN = -1
KINDS = ("mm_token_type_ids", "token_type_ids")
"""Names of the argument of a model's forward pass that marks the tokens of images with 1."""
ACCEPTED = "mm_encoder_outputs"
"""Argument of a model's forward pass with the features of images."""


class ModelImages:
    """Images of a model, which `reader` prepares. With `trained`, its vision tower has gradients."""

    def __init__(self, reader: ImageReader, *, trained: bool) -> None:
        self._reader, self.trained = reader, trained
        self._spare = reader.made()[1]

    @staticmethod
    def require_known(model: Any) -> None:
        """Raise `NoImages` unless the model takes features of images in its forward pass."""
        inner, needed = model.base_model, ("get_image_features", "get_placeholder_mask")
        accepts = inspect.signature(type(inner).forward).parameters
        if ACCEPTED not in accepts or not all(hasattr(inner, name) for name in needed):
            name, version = type(model).__name__.removeprefix("FSDP"), transformers.__version__
            raise NoImages(f"{name} of transformers {version} takes no features of images")

    def agreed(self, model: Any, batches: Sequence[MicroBatch], ranks: Ranks) -> list[MicroBatch]:
        """Return the micro-batches, in which all ranks run the vision tower equally often. All images are
        read. All ranks call it, and each raises an error if one of them raises `BatchError`."""
        has = torch.tensor([batch.images is not None for batch in batches], dtype=torch.int64)
        if batches:
            ranks.max(has)
        runs = has.bool().tolist()

        def prepare() -> None:
            for batch in batches:
                if batch.images is not None:
                    self._prepared(model, batch.images, batch.n_tokens)

        if any(runs):
            ranks.together(prepare)
        return [
            replace(batch, images=PackedImages()) if run and batch.images is None else batch
            for batch, run in zip(batches, runs, strict=True)
        ]

    @contextmanager
    def given(self, model: Any, batch: MicroBatch, part: SequencePart | None) -> Iterator[dict[str, Any]]:
        """Yield the arguments of the model's forward pass for the images of a micro-batch, to be used in the
        block. With a `part`, they are for its tokens. There are none in a pass without images."""
        if batch.images is None:
            yield {}
            return
        index, positions = self._prepared(model, batch.images, batch.n_tokens)
        if model.side_by_side:
            places = rows_of(batch.position)[0]
            index, positions = index[places], None if positions is None else positions[:, places]
        else:
            own = slice(None) if part is None else part.own
            index, positions = index[None, own], None if positions is None else positions[:, None, own]
        images = batch.images.distinct or [self._spare]
        inputs = joined_inputs(image.inputs for image in self._reader.read(images))
        arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        token = model.config.image_token_id
        more = {"at": index[index >= 0], "tokens": np.where(index >= 0, token, NOT_A_TOKEN)}
        if positions is not None:
            more["positions"] = positions
        there = on_device(
            {**arrays, **{f"own.{name}": each for name, each in more.items()}}, batch.input_ids.device
        )
        features = self._features(model, {name: there[name] for name in inputs}, there["own.at"])
        arguments: dict[str, Any] = {ACCEPTED: {"image": features}}
        if positions is not None:
            arguments["position_ids"] = there["own.positions"]
        with _placed_at(model.base_model, there["own.tokens"]):
            yield arguments

    def _features(self, model: Any, inputs: dict[str, Tensor], at: Tensor) -> Any:
        """Return the output of the vision tower with the features `at` these indices."""
        with torch.set_grad_enabled(self.trained and torch.is_grad_enabled()):
            found = model.base_model.get_image_features(**inputs, return_dict=True)
        found.pooler_output = _taken(found.pooler_output, at)
        if (deep := getattr(found, "deepstack_features", None)) is not None:
            found.deepstack_features = [_taken(each, at) for each in deep]
        return found

    def _prepared(self, model: Any, images: PackedImages, n_tokens: int) -> _Prepared:
        """Return the value of `_prepare` for a pack of `n_tokens`. Tokens that were added at its end are a
        row of copies of its last token."""
        if self._reader not in images.prepared:
            images.prepared[self._reader] = self._prepare(model, images)
        index, positions = images.prepared[self._reader]
        if lacking := n_tokens - len(index):
            index = np.append(index, np.full(lacking, index[-1] if len(index) else NOT_A_TOKEN))
            if positions is not None:
                more = np.broadcast_to(np.arange(lacking), (len(positions), lacking))
                positions = np.concatenate([positions, more], 1)
        return index, positions

    def _prepare(self, model: Any, images: PackedImages) -> _Prepared:
        """Return the index i64 [T] of the features of each token of a pack, -1 for tokens that stand for no
        image. Also return the positions i64 [3, T]; None if they are the positions in the rows."""
        distinct, first, total = images.distinct, dict[str, int](), 0
        read = dict(zip((image.digest for image in distinct), self._reader.read(distinct), strict=True))
        for digest, each in read.items():
            first[digest], total = total, total + each.n_tokens
        sizes = [row.packed_length - row.shared for row in images.rows]
        index = np.full(sum(sizes), NOT_A_TOKEN, np.int64)
        for place, tokens, image in images.own:
            at = np.flatnonzero(tokens == self._reader.placeholder_id)
            if len(at) != (count := read[image.digest].n_tokens):
                raise BatchError(
                    f"the image {image.digest} has {count} tokens, but its row has {len(at)} for it: workers "
                    "and trainer must scale images alike, by the same model files"
                )
            index[place + at] = first[image.digest] + np.arange(count)
        if not images.rows or not hasattr(model.base_model, "get_rope_index"):
            return index, None
        parts = [self._positions(model, row)[:, row.shared :] for row in images.rows]
        return index, np.concatenate(parts, 1)

    def _positions(self, model: Any, row: TrainingRow) -> NDArray[np.int64]:
        """Return the positions i64 [3, L] of the input tokens of a row."""
        if not row.fed_images:
            return np.broadcast_to(np.arange(row.packed_length), (3, row.packed_length))
        compute = model.base_model.get_rope_index
        known = inspect.signature(compute).parameters
        inputs = joined_inputs(each.inputs for each in self._reader.read(row.fed_images))
        more = {name: value for name, value in inputs.items() if name in known}
        ids = torch.from_numpy(row.fed.astype(np.int64))[None]
        found: Tensor = compute(ids, mm_token_type_ids=self._kinds(row), **more)[0]
        return found[:, 0].numpy()

    def _kinds(self, row: TrainingRow) -> Tensor:
        """Return i32 [1, L]: 1 for the input tokens of a row that stand for images, else 0."""
        found = np.zeros((1, row.packed_length), np.int32)
        for image in row.fed_images:
            span = slice(image.first, image.first + image.count)
            found[0, span] = row.token_ids[span] == self._reader.placeholder_id
        return torch.from_numpy(found)

    def own_arguments(self, model: Any, row: TrainingRow, device: torch.device) -> dict[str, Tensor]:
        """Return the arguments of the model's own forward pass for the images of one row, all of whose tokens
        are its input."""
        if not row.images:
            return {}
        row = changed(row, feeds_last=True)
        found = joined_inputs(each.inputs for each in self._reader.read(row.images))
        accepted = inspect.signature(type(model).forward).parameters
        found |= {name: self._kinds(row) for name in KINDS if name in accepted}
        return {name: value.to(device) for name, value in found.items()}

    def probe_rows(self, plain: Sequence[TrainingRow]) -> list[TrainingRow]:
        """Return rows with images between the tokens of `plain` rows: a row with two images, a row that
        shares the first of them, and a row without images."""
        (ids_a, a), (ids_b, b) = self._reader.made(), self._reader.made(3 * SPARE_SIDE // 2, seed=1)
        one, other, last = (row.token_ids for row in plain[1:4])
        begin, shared = one[:4], len(ids_a) + 6
        first = (begin, ids_a, one[4:7], ids_b, one[7:])
        second = (begin, ids_a, one[4:6], other)
        at_b = len(begin) + len(ids_a) + 3
        placed = [changed(a, first=a.first + len(begin)), changed(b, first=b.first + at_b)]
        rows = [_probe_row(first, placed), _probe_row(second, placed[:1]), _probe_row((last,), ())]
        return [rows[0], changed(rows[1], shared=shared), rows[2]]


_Prepared = tuple[NDArray[np.int64], NDArray[np.int64] | None]


def _probe_row(parts: Sequence[Any], images: Sequence[RowImage]) -> TrainingRow:
    """Return a row whose units are all tokens except the first one and those of images."""
    ids = np.concatenate(parts).astype(np.int32)
    mask = np.arange(len(ids)) > 0
    for image in images:
        mask[image.first : image.first + image.count] = False
    zeros = np.zeros(len(ids), np.int32)
    row = row_of(0, ids, mask.astype(np.uint8), zeros.astype(np.float32), zeros)
    assert row is not None
    return changed(row, images=tuple(images))


def _taken(features: Any, at: Tensor) -> Any:
    """Return the features [P, H] at indices [P], in the form of `features`: the features of all images in one
    tensor, or one tensor for each image.

    The lookup is an embedding, because its gradient is summed in a fixed order."""
    if isinstance(features, Tensor):
        return F.embedding(at, features.flatten(0, -2))
    return (F.embedding(at, torch.cat(tuple(features))),)


@contextmanager
def _placed_at(inner: Any, tokens: Tensor) -> Iterator[None]:
    """Make a model put features in the places where `tokens` has its placeholder token, and nowhere else.

    By itself, the model would also look for features of placeholder tokens that belong to no image."""
    find: Callable[..., Any] = inner.get_placeholder_mask
    inner.get_placeholder_mask = lambda input_ids, *args, **kwargs: find(tokens, *args, **kwargs)
    try:
        yield
    finally:
        del inner.get_placeholder_mask
