"""The mapping between the tensors of a model's files and the parameters of its module.

In memory, transformers may store weights in another form than in the files. For example, a name may differ,
or one parameter may contain all experts of a layer while the files have separate tensors for each expert.
This module runs the conversion of transformers (`transformers.core_model_loading`) once for each kind of
parameter, on tensors with consecutive numbers instead of weights. From the positions of these numbers in the
result follows which view of the parameter corresponds to each tensor of the files.

Loading writes to these views and publishing reads them, one tensor at a time. A published snapshot therefore
has the names and shapes of the files that the model was loaded from. A process that holds some experts of a
layer loads and publishes only the tensors of those experts.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from areal_async.base.errors import ArealError
from areal_async.weights.pieces import TensorPiece

Shape = tuple[int, ...]
MOST_NAMED = 5  # Largest number of tensors that an error names


class NamesMismatch(ArealError):
    """The tensors of the files do not match the model. The message has the form `lacks …`."""


@dataclass(frozen=True)
class BoxOfFile:
    """A parameter that is one box of the tensor `name`.

    `shape` is the shape of the whole tensor, and `offset` is the start of the box. In most models each
    parameter is one whole tensor.
    """

    name: str
    shape: Shape
    offset: Shape
    by_row = True

    def pieces(self, rows: Tensor, first: int) -> Iterator[TensorPiece]:
        """See `Storage.pieces`."""
        if rows.numel():
            offset = (self.offset[0] + first, *self.offset[1:]) if self.offset else ()
            yield TensorPiece(self.name, self.shape, offset, rows)


@dataclass(frozen=True)
class View:
    """A whole tensor of the files as a view of one unit of a parameter.

    `shape` is the shape within the unit. The strides and the start are in elements of the unit, which is
    contiguous.
    """

    shape: Shape
    stride: Shape
    start: int


@dataclass(frozen=True)
class ViewsOfUnits:
    """A parameter that consists of several tensors. Each of its units has the same `views`.

    `names` are the names of the tensors, by unit and view. A unit is one row (an expert), or the whole
    parameter if `by_row` is false.
    """

    names: Sequence[tuple[str, ...]]
    views: tuple[View, ...]
    by_row: bool

    def pieces(self, rows: Tensor, first: int) -> Iterator[TensorPiece]:
        """See `Storage.pieces`."""
        for number, unit in enumerate(rows if self.by_row else rows[None], first):
            for name, view in zip(self.names[number], self.views, strict=True):
                start = unit.storage_offset() + view.start
                tensor = unit.as_strided(view.shape, view.stride, start)
                yield TensorPiece(name, view.shape, (0,) * len(view.shape), tensor)


Storage = BoxOfFile | ViewsOfUnits
"""The form in which the files store a parameter.

`pieces(rows, first)` returns the boxes of the files' tensors that make up the rows of the parameter from
`first` on. The boxes are views of `rows`, which must be contiguous. Loading writes to the views, and
publishing reads them. If `by_row` is false, `rows` must be all rows of the parameter.
"""


def storage_of(model: Any, shapes: Mapping[str, Shape]) -> dict[str, Storage]:
    """Return the storage of the parameters and persistent buffers of a transformers `model`.

    `shapes` are the names and shapes of the tensors in the files. The model may be on the meta device. For
    tied names, the result has only the first of the names that occurs in the files. Tensors that transformers
    ignores for this architecture are not in the result. Raises `NamesMismatch` for tensors that are missing,
    unknown or of another shape.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    transforms = get_model_conversion_mapping(model)
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    prefix = model.base_model_prefix
    sources: defaultdict[str, defaultdict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    foreign = []
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target in state:
            sources[target][pattern].append(name)
        elif not _is_left_out(model, target):
            foreign.append(name)
    if foreign:
        raise NamesMismatch(f"has tensors that the model has not: {_listed(foreign)}")
    # Early versions of transformers 5 do not record the conversions that they used, and reverse all of them.
    model._weight_conversions = [
        entry for entry in transforms if not hasattr(entry, "was_used") or entry.was_used()
    ]
    tracer = _Tracer(model, shapes, {p: entry for entry in converters for p in entry.source_patterns})
    found: dict[str, Storage] = {}
    for target, by_pattern in sources.items():
        if None in by_pattern:
            found[target] = _box(target, by_pattern[None], shapes, tuple(state[target].shape))
        else:
            found |= tracer.trace(target, {str(p): names for p, names in by_pattern.items()}, state)
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        names[id(tensor)].append(name)
    stored = {name for tied in names.values() for name in [n for n in tied if n in found][:1]}
    if missing := [tied[0] for tied in names.values() if not stored.intersection(tied)]:
        absent = [name for key in missing for name in names_in_files(model, {key: state[key]})]
        raise NamesMismatch(f"lacks {_listed(absent)}")
    return {name: storage for name, storage in found.items() if name in stored}


def tied_in_files(model: Any, storage: Mapping[str, Storage]) -> dict[str, str]:
    """Return the name in the files for each alias of a parameter of `model` that has several names."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    aliases: dict[str, str] = {}
    for tied in names.values():
        kept = next(name for name in tied if name in storage)
        held = storage[kept]
        in_files = held.name if isinstance(held, BoxOfFile) else kept
        aliases |= dict.fromkeys((alias for alias in tied if alias != kept), in_files)
    return aliases


class _Tracer:
    """Finds where transformers' converters place elements, once for each kind of parameter."""

    def __init__(
        self, model: Any, shapes: Mapping[str, Shape], converters: Mapping[str, WeightConverter]
    ) -> None:
        self._model, self._shapes, self._converters = model, shapes, converters
        self._known: dict[Any, tuple[tuple[View, ...], bool]] = {}

    def trace(
        self, target: str, names: Mapping[str, list[str]], state: Mapping[str, Tensor]
    ) -> dict[str, Storage]:
        """Return the storage of `target` and of all other parameters that are made from the tensors `names`.

        `names` are the names in the files, by the pattern that they matched.
        """
        want = tuple(state[target].shape)
        self._check(target, names, state)
        first = {pattern: group[0] for pattern, group in names.items()}
        kind = (tuple((p, self._shapes[first[p]], len(group)) for p, group in names.items()), want)
        if kind in self._known:
            views, by_row = self._known[kind]
        else:
            by_row = want[:1] == (len(names[next(iter(names))]),)
            made = self._converted(target, {p: [name] for p, name in first.items()}) if by_row else {}
            by_row = {key: tuple(value.shape) for key, value in made.items()} == {target: (1, *want[1:])}
            made = made if by_row else self._converted(target, names)
            if len(made) > 1:
                return self._boxes(names, made, state)
            used = [*first.values()] if by_row else [name for group in names.values() for name in group]
            views = self._views(target, made.get(target), used, 1 if by_row else want[0])
            self._known[kind] = views, by_row
        if by_row:
            return {target: ViewsOfUnits(list(zip(*names.values(), strict=True)), views, True)}
        return {target: ViewsOfUnits([tuple(n for group in names.values() for n in group)], views, False)}

    def _check(self, target: str, names: Mapping[str, list[str]], state: Mapping[str, Tensor]) -> None:
        """Raise `NamesMismatch` unless the names are the names that transformers would write."""
        if len(self._converters[next(iter(names))].target_patterns) > 1:
            return  # the conversion would need the other parameters made of these tensors, too
        wanted = names_in_files(self._model, {target: state[target]})
        given = [name for group in names.values() for name in group]
        if set(given) <= wanted.keys():
            if lacking := sorted(wanted.keys() - set(given), key=dot_natural_key):
                raise NamesMismatch(f"lacks {_listed(lacking)}")
            for name in given:
                if self._shapes[name] != wanted[name]:
                    raise NamesMismatch(_other_shape(name, self._shapes[name], wanted[name]))

    def _converted(self, target: str, names: Mapping[str, list[str]]) -> dict[str, Tensor]:
        """Return the result of transformers' conversion. Each element of the input is its own index."""
        converter = deepcopy(self._converters[next(iter(names))])
        start = 0
        for pattern, group in names.items():
            for name in group:
                end = start + math.prod(self._shapes[name])
                numbers = torch.arange(start, end).view(self._shapes[name])
                converter.add_tensor(target, name, pattern, numbers)
                start = end
        try:
            made = converter.convert(target, model=self._model, config=self._model.config)
        except Exception as error:  # the operations raise any error that torch raises
            listed = _listed([name for group in names.values() for name in group])
            raise NamesMismatch(
                f"has {listed}, of which transformers cannot make {target}: {error}"
            ) from error
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}

    def _views(self, target: str, made: Tensor | None, names: Sequence[str], rows: int) -> tuple[View, ...]:
        count = sum(math.prod(self._shapes[name]) for name in names)
        if made is None or made.numel() != count or made.shape[0] != rows:
            raise NamesMismatch(f"has {_listed(names)}, which are not all of {target}")
        at = torch.empty(count, dtype=torch.int64)
        at[made.flatten()] = torch.arange(count)
        views, start = [], 0
        for name in names:
            shape = self._shapes[name]
            part = at[start : start + math.prod(shape)].view(shape)
            start += part.numel()
            begin = int(part.flatten()[0])
            corner = [tuple(int(d == dim) for d in range(len(shape))) for dim in range(len(shape))]
            stride = tuple(int(part[c]) - begin if shape[d] > 1 else 0 for d, c in enumerate(corner))
            if not torch.equal(part, torch.arange(count).as_strided(shape, stride, begin)):
                raise NamesMismatch(f"has {name}, which is no view of {target}: it could not be written back")
            views.append(View(shape, stride, begin))
        return tuple(views)

    def _boxes(
        self, names: Mapping[str, list[str]], made: Mapping[str, Tensor], state: Mapping[str, Tensor]
    ) -> dict[str, Storage]:
        """Return the boxes of several parameters that share one tensor of the files."""
        (name,) = names[next(iter(names))]
        shape = self._shapes[name]
        numbers = torch.arange(math.prod(shape)).view(shape)
        boxes: dict[str, Storage] = {}
        for target, part in made.items():
            offset = tuple(int(i) for i in torch.unravel_index(part.flatten()[0], shape))
            box = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            if target not in state or not torch.equal(numbers[box], part):
                raise NamesMismatch(f"has {name}, of which {target} is no box: it could not be written back")
            boxes[target] = BoxOfFile(name, shape, offset)
        return boxes


def _box(target: str, names: Sequence[str], shapes: Mapping[str, Shape], want: Shape) -> BoxOfFile:
    if len(names) > 1:
        raise NamesMismatch(f"has {target} more than once: {_listed(names)}")
    if shapes[names[0]] != want:
        raise NamesMismatch(_other_shape(names[0], shapes[names[0]], want))
    return BoxOfFile(names[0], want, (0,) * len(want))


def names_in_files(model: Any, state: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Return the names and shapes under which transformers would write these tensors of the model."""
    meta = {name: torch.empty(tensor.shape, device="meta") for name, tensor in state.items()}
    return {name: tuple(t.shape) for name, t in revert_weight_conversion(model, meta).items()}


def _is_left_out(model: Any, name: str) -> bool:
    """Return whether transformers ignores this name on purpose.

    Examples are a layer for other uses of the model, or a buffer of rotary positions in old files.
    """
    patterns = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"}
    return any(re.search(pattern, name) for pattern in patterns)


def _other_shape(name: str, have: Shape, want: Shape) -> str:
    return f"has {name} of shape {have}, the model {want}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
