"""Plain data, its one encoding, and the messages of the link.

Null, truth values, integers, floats and texts are encoded as in JSON. Any other value is encoded as a list
that begins with its kind, such as `["tuple", 1, 2]` or `["dict", "key", 1]`. Decoding creates only values of
the types listed in this module. For anything else it raises `Malformed`.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

MAX_DEPTH = 100
MAX_MESSAGE_BYTES = 16 << 20
MAX_INT_BITS = 1 << 22
MAX_ITEMS = 100_000  # most items of an iterator, which is sent as its items
DIGITS_BITS = 13_000
"""Integers of up to this many bits are written in decimal, and larger ones in hexadecimal, because Python
limits the number of decimal digits."""
TYPES = {
    one.__name__: one for one in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
}
"""Type objects that can be sent, by name."""
VIEWS = ("keys", "values", "items")
DATES = ("datetime", "date", "time")
SCALARS = {type(None), bool, int, float, str}
EXACT = {int, bytes, bytearray, list, tuple, set, frozenset, dict, complex, range}


class Unplain(TypeError):
    """A value that is not plain data."""


class Malformed(ValueError):
    """A message of the link that does not encode plain data."""


def encode(value: Any, refer: Callable[[Any, bool], Any], depth: int = 0) -> Any:
    """Return `value` in JSON form. An instance of a subclass of a plain type is read with the methods of the
    plain type.

    `refer(value, last)` returns the encoding of a reference to the value, or None. It is called for every
    value whose class is not one of Python's common plain types, before the content of the value is read. If
    `refer` returns None and the value turns out not to be plain data, `refer` is called again with `last`. If
    it returns None again, `Unplain` is raised.
    """
    kind = type(value)
    if kind in SCALARS and (kind is not int or int.bit_length(value) < DIGITS_BITS):
        return value
    if depth > MAX_DEPTH:
        raise Unplain("a value is nested too deeply, or holds itself")

    def items(iterable: Iterable[Any]) -> list[Any]:
        return [encode(one, refer, depth + 1) for one in iterable]

    if kind not in EXACT and (reference := refer(value, False)) is not None:
        return reference
    for base, written in WRITTEN.items():
        if isinstance(value, base):
            return written(value)
    bases: tuple[Any, ...] = (list, tuple, set, frozenset, _of("collections", "deque"))
    for base in bases:
        if isinstance(value, base):
            return [base.__name__, *items(base.__iter__(value))]
    if isinstance(value, dict):
        names = (name for name in ("OrderedDict", "Counter") if isinstance(value, _of("collections", name)))
        return [next(names, "dict"), *items(part for pair in dict.items(value) for part in pair)]
    rarer = _rarer(value, items) or refer(value, True)
    if rarer is None:
        raise Unplain(f"a {kind.__name__} is no plain data")
    return rarer


def _integer(value: int) -> Any:
    if value.bit_length() > MAX_INT_BITS:
        raise Unplain("an integer is too large")
    return value if value.bit_length() < DIGITS_BITS else ["int", hex(value)]


WRITTEN: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: lambda value: _integer(int.__int__(value)),
    float: float.__float__,
    bytes: lambda value: ["bytes", bytes.hex(value)],
    bytearray: lambda value: ["bytearray", bytearray.hex(value)],
}
"""Encoders of types without items. They also apply to subclasses of these types."""
PARTS: dict[tuple[str, str], Callable[[Any], Iterable[Any]]] = {
    ("builtins", "complex"): lambda value: (value.real, value.imag),
    ("builtins", "range"): lambda value: map(_integer, (value.start, value.stop, value.step)),
    ("decimal", "Decimal"): lambda value: [str(value)],
    ("fractions", "Fraction"): lambda value: map(_integer, (value.numerator, value.denominator)),
    ("datetime", "timedelta"): lambda value: (value.days, value.seconds, value.microseconds),
    **{("datetime", name): lambda value: [value.isoformat()] for name in DATES},
}
"""Functions that return the parts of an encoding, by type. They do not apply to subclasses."""


def _rarer(value: Any, items: Callable[[Iterable[Any]], list[Any]]) -> list[Any] | None:
    kind = type(value)
    for (module, name), parts in PARTS.items():
        if kind is _of(module, name):
            return [name, *parts(value)]
    if kind is type and TYPES.get(name := value.__name__) is value:
        return ["type", name]
    for name in VIEWS:
        if kind is type(getattr({}, name)()):
            return [name, *items((part for pair in value for part in pair) if name == "items" else value)]
    return ["iterator", *items(drained(value))] if hasattr(kind, "__next__") else None


def drained(iterator: Iterator[Any]) -> list[Any]:
    """Return all items of an iterator. Raises `Unplain` if there are too many."""
    found = []
    for one in iterator:
        found.append(one)
        if len(found) > MAX_ITEMS:
            raise Unplain(f"an iterator has not ended after {MAX_ITEMS} items")
    return found


def _of(module: str, name: str) -> Any:
    """Return a type of a module, or `()` if the module is not loaded, because no instance of the type exists
    then."""
    return getattr(sys.modules.get(module), name, ())


def decode(data: Any, refer: Callable[[str, list[Any]], Any], depth: int = 0) -> Any:
    """Return the value of an encoding. Raises `Malformed`.

    `refer` returns the values of references, and raises `Malformed` for invalid ones.
    """
    if type(data) in SCALARS:
        return data
    if depth > MAX_DEPTH + 1 or not isinstance(data, list) or not data or not isinstance(data[0], str):
        raise Malformed("no encoding of plain data")
    kind, content = data[0], data[1:]
    make = GATHERED.get(kind) or RAW.get(kind)
    if make is None:
        return refer(kind, content)
    if kind in GATHERED:
        content = [[decode(one, refer, depth + 1) for one in content]]
    try:
        return make(*content)
    except Exception as error:
        raise Malformed(f"no {kind}") from error


def _library(module: str, name: str) -> Any:
    return getattr(__import__(module), name)


def _pairs(values: list[Any]) -> dict[Any, Any]:
    return dict(zip(values[::2], values[1::2], strict=True))


def _date(kind: str) -> Callable[[str], Any]:
    return lambda text: _library("datetime", kind).fromisoformat(text)


RAW: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda real, imag: complex(float(real), float(imag)),
    "range": range,
    "type": TYPES.__getitem__,
    "Decimal": lambda text: _library("decimal", "Decimal")(str.__str__(text)),  # from a text only
    "Fraction": lambda over, under: _library("fractions", "Fraction")(int(over), int(under)),
    "timedelta": lambda *parts: _library("datetime", "timedelta")(*map(int, parts)),
    **{name: _date(name) for name in DATES},
}
GATHERED: dict[str, Callable[..., Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": _pairs,
    "deque": lambda values: _library("collections", "deque")(values),
    "OrderedDict": lambda values: _library("collections", "OrderedDict")(_pairs(values)),
    "Counter": lambda values: _library("collections", "Counter")(_pairs(values)),
    "iterator": iter,
    "keys": lambda values: dict.fromkeys(values).keys(),
    "values": lambda values: dict(enumerate(values)).values(),
    "items": lambda values: _pairs(values).items(),
}


class LinkEnded(EOFError):
    """The other side has closed the link or sent an invalid message."""


class HarnessLink:
    """A stream of messages. Each message is its length in four bytes, followed by JSON."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, message: Any) -> None:
        """Send a message. Raises `Unplain` for a message that is too long, and `LinkEnded`."""
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise Unplain("a value is too large")
        left = memoryview(len(data).to_bytes(4, "big") + data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            raise LinkEnded from error

    def receive(self) -> dict[str, Any]:
        """Return the next message. Raises `LinkEnded`."""
        size = int.from_bytes(self._read(4), "big")
        if size > MAX_MESSAGE_BYTES:
            raise LinkEnded("a message is too long")
        data = self._read(size)
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise LinkEnded("what came is no message") from error
        if not isinstance(message, dict):
            raise LinkEnded("what came is no message")
        return message

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = os.read(self._fd, min(size - len(data), 1 << 20))
            except OSError as error:
                raise LinkEnded from error
            if not part:
                raise LinkEnded("the other side has ended")
            data += part
        return bytes(data)


def installed_packages() -> list[str]:
    """Return the folders with packages: the folder of the sandbox and the interpreter's own folders.

    The harness needs them, because it starts interpreters without `site`, which normally finds these folders
    but would also run code in them.
    """
    named = os.environ.get("PYTHONPATH", "").split(":")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = (*named, f"{sys.prefix}/lib/{version}/site-packages", f"{sys.prefix}/lib/python3/dist-packages")
    return [folder for folder in found if os.path.isdir(folder)]
