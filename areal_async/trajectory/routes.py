"""Routes: the experts of a mixture-of-experts model to which the engine sent each unit.

An episode stores the routes in the optional column `routes`, u8 or u16 [T, L * K]. The column has the ids of
K experts for each of L expert layers, in the order of the layers. The largest value of the dtype means "no
route". It marks a unit that was not fed to the model, a unit without reported routes, and an omitted expert.

Routes are far larger than the rest of an episode: with 48 layers and 8 experts per token, they take 384 bytes
a unit, compared with 13 for the rest. Only the trainer reads them, so the blob does not include them.
`pack_routes` writes them to separate bytes, which are sent beside the blob. `with_routes` adds them to the
episode again.

The packed bytes are little-endian: magic `ARTE`, u16 1, u16 bytes of a value, u32 units, u32 width, u32
CRC-32 of the episode's token ids, u32 CRC-32 of the values, and then the values."""

from __future__ import annotations

import struct
import zlib
from copy import copy

import numpy as np
from numpy.typing import NDArray

from areal_async.trajectory.episode import Episode
from areal_async.trajectory.layout import COLUMN_DTYPES, ROUTES, CodecError, Units

ROUTES_MAGIC = b"ARTE"
_HEAD = struct.Struct("<4sHHIIII")
_TYPES = {dtype.itemsize: dtype for dtype in (COLUMN_DTYPES["u8"], COLUMN_DTYPES["u16"])}

Routes = NDArray[np.uint8] | NDArray[np.uint16]


def route_type(experts: int) -> np.dtype:
    """Return the smallest dtype that holds the ids of `experts` experts and the value for "no route"."""
    return COLUMN_DTYPES["u8" if experts < 256 else "u16"]


def no_route(dtype: np.dtype) -> int:
    """Return the value of this dtype that means "no route"."""
    return int(np.iinfo(dtype).max)


def stored_routes(ids: NDArray, experts: int) -> Routes:
    """Return expert ids [T, L, K] of any integer type as routes [T, L * K]. A value that is not the id of an
    expert becomes the value for "no route"."""
    dtype = route_type(experts)
    flat = ids.reshape(len(ids), -1)
    found: Routes = np.where((flat >= 0) & (flat < experts), flat, no_route(dtype)).astype(dtype)
    return found


def pack_routes(episode: Episode) -> bytes | None:
    """Return the routes of an episode as separate bytes, or None if it has no routes."""
    routes = episode.units.columns.get(ROUTES)
    if routes is None:
        return None
    values = routes.tobytes()
    head = _HEAD.pack(ROUTES_MAGIC, 1, routes.itemsize, *routes.shape, _crc_of(episode), zlib.crc32(values))
    return b"".join((head, values))


def with_routes(episode: Episode, packed: memoryview | bytes) -> Episode:
    """Return the episode with the routes in `packed`, which `pack_routes` wrote. Raises `CodecError` if they
    are not routes of this episode."""
    view = memoryview(packed)
    if len(view) < _HEAD.size:
        raise CodecError(f"{len(view)} bytes are no routes")
    magic, schema, size, n_units, width, crc_of_ids, crc = _HEAD.unpack_from(view)
    dtype = _TYPES.get(size)
    if magic != ROUTES_MAGIC or schema != 1 or dtype is None:
        raise CodecError("the bytes are no routes that this process reads")
    if n_units != episode.n_units or crc_of_ids != _crc_of(episode):
        raise CodecError(f"the routes are of another episode than {episode.episode_id}")
    body = view[_HEAD.size :]
    if len(body) != n_units * width * size or zlib.crc32(body) != crc:
        raise CodecError(f"the routes of episode {episode.episode_id} were cut or altered")
    held = episode.units
    columns = {**held.columns, ROUTES: np.frombuffer(body, dtype).reshape(n_units, width)}
    found = copy(episode)
    found.units = Units(held.token_id, held.mask, held.logprob, held.version, columns)
    return found


def _crc_of(episode: Episode) -> int:
    return zlib.crc32(episode.units.token_id.tobytes())
