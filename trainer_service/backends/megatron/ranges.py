"""Checkpoint files that consist of ranges of parameters, so that any grid of ranks can read them.

For each of its parameters, a rank writes the range of elements that it updates. The key of a range contains
the parameter's tensor rank, the number of tensor ranks, and the beginning of the range. A reader joins the
ranges of a parameter, for any number of data ranks, and cuts the parameter into boxes (`names.boxes_of`).
Then it copies the overlap with its own boxes. With another number of tensor ranks, stages or expert ranks,
only the boxes of the reader differ.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_async.weights.pieces import TensorPiece
from trainer_service.backends.megatron.config import Dimensions
from trainer_service.backends.megatron.names import StagePlace, boxes_of
from trainer_service.errors import CheckpointError

if TYPE_CHECKING:
    from trainer_service.backends.megatron.stages import StageParameter, Stages

KEY = re.compile(r"^(.+)@(\d+)/(\d+):([\d,]+):(\d+)$")


def key_of(parameter: StageParameter, start: int) -> str:
    """Return the key in a file for the elements from `start` on of a rank's parameter."""
    place = parameter.place
    shape = ",".join(map(str, parameter.tensor.shape))
    return f"{parameter.name}@{place.tensor}/{place.tensors}:{shape}:{start}"


@torch.no_grad()
def read_whole(folder: Path, kind: str, stages: Stages) -> dict[str, Tensor]:
    """Return f32 of each parameter of the rank's stages, by name, from the files of `kind`.

    Raises `CheckpointError` if the files lack an element or contain another model."""
    found = {one.name: torch.zeros(one.tensor.shape) for one in stages.parameters()}
    boxes = [box for one in stages.parameters() for box in stages.boxes(one, found[one.name])]
    read_boxes(folder, kind, boxes, stages.dimensions)
    return found


@torch.no_grad()
def read_boxes(folder: Path, kind: str, boxes: Sequence[TensorPiece], model: Dimensions) -> None:
    """Fill boxes of the tensors of `model` from the files of `kind`. Raises `CheckpointError` like
    `read_whole`."""
    wanted: dict[str, list[TensorPiece]] = defaultdict(list)
    for box in boxes:
        wanted[box.name].append(box)
    lacking = {name: sum(box.tensor.numel() for box in each) for name, each in wanted.items()}
    try:
        with ExitStack() as stack:
            for (name, place, shape), ranges in _parameters(folder, kind, stack).items():
                shaped = torch.empty(shape, device="meta")
                if not {box.name for box in boxes_of(name, shaped, place, model)} & wanted.keys():
                    continue
                for box in boxes_of(name, _joined(name, shape, ranges), place, model):
                    for target in wanted.get(box.name, ()):
                        lacking[box.name] -= _copy_overlap(box, target)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder}: {kind} files cannot be read: {error}") from error
    for name, elements in lacking.items():
        if elements:
            raise CheckpointError(
                f"checkpoint {folder}: its {kind} files lack {elements} elements of {name} that this rank "
                "needs: it is of another model, or not whole"
            )


Held = tuple[str, StagePlace, tuple[int, ...]]
"""Name, place and shape of a tensor rank's parameter."""
Range = tuple[int, Any, str]
"""First element of a range, with its file and key."""


def _parameters(folder: Path, kind: str, stack: ExitStack) -> dict[Held, list[Range]]:
    """Return the ranges of each parameter of each tensor rank that wrote the files. The files stay open as
    long as `stack`. Raises `ValueError` for an invalid key."""
    found: dict[Held, list[Range]] = defaultdict(list)
    for path in sorted(folder.glob(f"{kind}-ranges-?????.safetensors")):
        file = stack.enter_context(safe_open(path, framework="pt"))
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            if (parts := KEY.match(key)) is None:
                raise ValueError(f"{key} is no range")
            name, tensor, tensors, shape, start = parts.groups()
            sizes = tuple(map(int, shape.split(",")))
            found[name, StagePlace(int(tensor), int(tensors)), sizes].append((int(start), file, key))
    return found


def _joined(name: str, shape: tuple[int, ...], ranges: list[Range]) -> Tensor:
    """Return a whole parameter of a tensor rank. Raises `ValueError` if the ranges leave a gap."""
    parts: list[Tensor] = []
    at = 0
    for start, file, key in sorted(ranges, key=lambda each: each[0]):
        if start != at:
            raise ValueError(f"{name} lacks elements from {at} on")
        parts.append(file.get_tensor(key).float())
        at += parts[-1].numel()
    if at != math.prod(shape):
        raise ValueError(f"{name} lacks elements from {at} on")
    return torch.cat(parts).reshape(shape)


def _copy_overlap(source: TensorPiece, target: TensorPiece) -> int:
    """Copy the common elements of two boxes of one tensor. Returns their number."""
    if source.shape != target.shape:
        raise ValueError(f"{source.name} has the shape {source.shape}, and the model's {target.shape}")
    into, out = [], []
    for first, n, theirs, m in zip(
        target.offset, target.tensor.shape, source.offset, source.tensor.shape, strict=True
    ):
        low, high = max(first, theirs), min(first + n, theirs + m)
        if low >= high:
            return 0
        into.append(slice(low - first, high - first))
        out.append(slice(low - theirs, high - theirs))
    part = source.tensor[tuple(out)]
    target.tensor[tuple(into)].copy_(part)
    return part.numel()
