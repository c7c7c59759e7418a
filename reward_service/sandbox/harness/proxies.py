"""Objects of the program in the hands of the tests: the weaker form, where a task's tests cannot do without.

An object answers what its class is there to answer: its attributes, calls, items, length and truth. It never
equals plain data. One whose class derives from a plain type is called and has attributes, but is not asked
what it is: for every question of the tests its content is fetched anew, and that answers.
"""

from __future__ import annotations

from .examiner import Reference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


class Proxy(Reference):
    """An object of the program: a class, an instance, a closure, an iterator."""

    __slots__ = ()
    __hash__ = object.__hash__

    def _ask(self, do: str, *arguments: Any) -> Any:
        self._examiner.used_live = True
        return self._examiner.ask(do, self, arguments)

    def _in_place(self, *arguments: Any, **named: Any) -> Any:
        return self._examiner.ask("call", self, arguments, named, back=True)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._examiner.ask("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __iter__(self) -> Iterator[Any]:
        return self._ask("iter")

    def __next__(self) -> Any:
        return self._ask("next")

    def __len__(self) -> int:
        return self._ask("len")

    def __bool__(self) -> bool:
        return self._ask("bool") is True

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", key, value)

    def __contains__(self, key: Any) -> bool:
        return self._ask("contains", key) is True

    def __str__(self) -> str:
        return self._ask("str")

    def __repr__(self) -> str:
        return self._ask("repr")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proxy) and self._ask("equal", other) is True

    def __lt__(self, other: object) -> bool:
        return self._ask("less", other) is True if isinstance(other, Proxy) else NotImplemented


class PlainProxy(Proxy):
    """One whose class derives from a plain type."""

    __slots__ = ()
    __hash__ = object.__hash__

    def _plain(self) -> Any:
        return self._ask("plain")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._plain())

    def __len__(self) -> int:
        return len(self._plain())

    def __bool__(self) -> bool:
        return bool(self._plain())

    def __getitem__(self, key: Any) -> Any:
        return self._plain()[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._plain()

    def __str__(self) -> str:
        return str(self._plain())

    def __repr__(self) -> str:
        return repr(self._plain())

    def __eq__(self, other: object) -> bool:
        return self._plain() == content_of(other)

    def __lt__(self, other: Any) -> bool:
        return self._plain() < content_of(other)

    def __le__(self, other: Any) -> bool:
        return self._plain() <= content_of(other)

    def __gt__(self, other: Any) -> bool:
        return self._plain() > content_of(other)

    def __ge__(self, other: Any) -> bool:
        return self._plain() >= content_of(other)


def content_of(value: Any) -> Any:
    return value._plain() if isinstance(value, PlainProxy) else value
