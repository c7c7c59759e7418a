"""Structure of a pack for a single attention call over ragged sequences.

A branch of a tree (`prefixes.py`) is a sequence. Its queries are its own tokens. Its keys are the tokens of
its path, in order, so they end with its own tokens. The keys of a pack with shared prefixes are *joined*: a
key is copied once for each branch that attends to it. In the backward pass, the gradients of the copies are
summed in fp32, always in the same order.

Every size is rounded up, so that few different shapes occur: the number of tokens by a last row without units
(`MicroBatch.padded`), the number of sequences by empty sequences, the number of joined keys by keys that
belong to no sequence. The structure is computed on the host and copied to the device at once, without waiting
for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_service.data.prefixes import paths_of
from trainer_service.transfer import on_device

LEAST_TOKENS, LEAST_SEQUENCES, LEAST_LENGTH = 128, 8, 2048
"""Smallest sizes of a pack. `LEAST_LENGTH` is for its longest sequence."""


@dataclass(frozen=True)
class Ragged:
    """N sequences of a pack of T tokens, with K joined keys."""

    ends_q: Tensor
    """i32 [N + 1]: 0, and the end of each sequence's queries in the pack."""
    ends_k: Tensor
    """i32 [N + 1]: 0, and the end of each sequence's keys among the joined keys."""
    longest: int
    """Upper bound of the number of keys, and thus of queries, of a sequence."""
    keys: Tensor | None = None
    """i32 [K]: place in the pack of each joined key. None if the pack itself is the keys."""
    order: Tensor | None = None
    """i32 [K]: the joined keys, sorted by their place in the pack. Keys that belong to no sequence are not in
    it; the rest of it has no meaning."""
    copies: Tensor | None = None
    """i32 [T + 1]: 0, and the end of each token's copies in `order`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Everything that distinguishes the shapes of two attention calls, apart from T."""
        return len(self.ends_q), self.longest, 0 if self.keys is None else len(self.keys)


def rounded_tokens(tokens: int) -> int:
    """Return the number of tokens in a padded pack: the next multiple of an eighth of the power of two below
    it."""
    step = max(LEAST_TOKENS, _power(tokens, 2) // 16)
    return -(-tokens // step) * step


def ragged_of(position: NDArray[np.int64], device: torch.device | str) -> Ragged:
    """Return the structure of a pack from the positions i64 [T] of its tokens."""
    n_tokens = len(position)
    starts = np.flatnonzero(np.diff(position, prepend=-2) != 1)
    ends = np.append(starts[1:], n_tokens)
    count = _power(len(starts), 2, LEAST_SEQUENCES)
    if not position[starts].any():
        lengths = ends - starts
        ends_q = _i32(device, ends_q=_filled(ends, count))["ends_q"]
        return Ragged(ends_q, ends_q, _power(int(lengths.max()), 16, LEAST_LENGTH))
    paths = paths_of(position, starts.tolist(), ends.tolist())
    pieces = np.array([piece for path in paths for piece in path])
    sizes = pieces[:, 1] - pieces[:, 0]
    keys = np.arange(sizes.sum()) + np.repeat(pieces[:, 0] - (np.cumsum(sizes) - sizes), sizes)
    lengths = np.array([sum(last - first for first, last in path) for path in paths])
    room = next(size for size in _rooms(n_tokens) if size >= len(keys))
    unused = np.zeros(room - len(keys), np.int64)
    parts = _i32(
        device,
        ends_q=_filled(ends, count),
        ends_k=_filled(np.cumsum(lengths), count),
        keys=np.append(keys, unused),
        order=np.append(np.argsort(keys, kind="stable"), unused),
        copies=np.append(0, np.cumsum(np.bincount(keys, minlength=n_tokens))),
    )
    return Ragged(**parts, longest=_power(int(lengths.max()), 16, LEAST_LENGTH))


class JoinedKeys(torch.autograd.Function):
    """Copies of keys and values, one for each branch that attends to them."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, keys: Tensor, order: Tensor, copies: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return [K, H_kv, D] from key and value [T, H_kv, D], each."""
        ctx.save_for_backward(order, copies)
        return key.index_select(0, keys), value.index_select(0, keys)

    @staticmethod
    def backward(ctx: Any, of_key: Tensor, of_value: Tensor) -> tuple[Tensor | None, ...]:
        order, copies = ctx.saved_tensors
        each = torch.cat([of_key, of_value], 1)
        wide = each.index_select(0, order).to(torch.promote_types(each.dtype, torch.float32))
        # One thread sums the copies of an element in order: no atomics, so the result repeats bit for bit.
        whole = torch.segment_reduce(wide, "sum", offsets=copies, axis=0, unsafe=True, initial=0)
        grads = whole.to(each.dtype).split([of_key.shape[1], of_value.shape[1]], 1)
        return grads[0], grads[1], None, None, None


def _power(size: int, base: int, least: int = 1) -> int:
    """Return the smallest of `least`, `least · base`, `least · base²` … that is at least `size`."""
    while least < size:
        least *= base
    return least


def _rooms(n_tokens: int) -> Iterator[int]:
    """Yield the numbers of joined keys that a pack may have: 1.5 times, 2 times, 4 times … its tokens."""
    yield n_tokens * 3 // 2
    while True:
        n_tokens *= 2
        yield n_tokens


def _filled(ends: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return [count + 1]: 0 and the ends, followed by those of empty sequences."""
    return np.concatenate([[0], ends, np.full(count - len(ends), ends[-1])])


def _i32(device: torch.device | str, **parts: NDArray[np.int64]) -> dict[str, Tensor]:
    """Return the parts as i32 on the device, after one copy for which the host does not wait."""
    return on_device({name: part.astype(np.int32) for name, part in parts.items()}, device)
