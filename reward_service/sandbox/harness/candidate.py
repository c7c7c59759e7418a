"""The program's side: runs the program, then does what the examiner asks, until it is gone.

Nothing here is trusted by the examiner: the program shares this process and may change all of it. Where the
task is open to live objects (`live`), objects that are no plain data stay here under a number, which the
examiner is given.
"""

from __future__ import annotations

import builtins
import os
import sys

from .plain import PLAIN_TYPES, HarnessLink, LinkEnded, Malformed, Unplain, decode, encode, installed_packages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LINK = 3
RECURSION = 20_000
"""Depth that programs may recurse to."""
PLAIN: tuple[type, ...] = tuple(getattr(builtins, name) for name in PLAIN_TYPES)
CHANGEABLE = ("list", "dict", "set", "bytearray", "deque", "OrderedDict", "Counter")
"""What a function may change for its caller to see."""
OF_SOLUTION = "Solution()."


class Candidate:
    def __init__(self, link: HarnessLink) -> None:
        self.link = link
        self.live = False
        self.held: list[Any] = []
        self.names: dict[str, Any] = {}

    def load(self) -> str:
        """Run the program; why it failed, if it did."""
        module = sys.modules["solution"] = type(sys)("solution")
        self.names = module.__dict__
        try:
            with open("solution.py", encoding="utf-8") as file:
                exec(compile(file.read(), "solution.py", "exec"), self.names)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"[:300]
        return ""

    def serve(self) -> None:
        broken = self.load()
        self.live = bool(self.link.receive()["live"])
        self.link.send({"broken": broken} if broken else {"ready": True})
        while not broken:
            self.act(self.link.receive())

    def act(self, message: dict[str, Any]) -> None:
        try:
            self.link.send(self.done(message))
        except LinkEnded:
            raise
        except BaseException as error:
            self.link.send(raised(error))

    def done(self, message: dict[str, Any]) -> dict[str, Any]:
        target = self.value(message["on"])
        arguments = [self.value(one) for one in message["args"]]
        named = {name: self.value(one) for name, one in message["named"].items()}
        match message["do"]:
            case "call":
                reply = {"value": self.encoded(target(*arguments, **named))}
            case "new":
                reply = {"value": self.keep(target(*arguments, **named))}
            case "method":
                reply = {"value": self.encoded(getattr(target, message["name"])(*arguments, **named))}
            case "plain":
                reply = {"value": encode(target, self.refer_within(target))}
            case "next":
                try:
                    reply = {"value": self.encoded(next(target))}
                except StopIteration:
                    reply = {"end": True}
            case other:
                reply = {"value": self.encoded(ASKED[other](target, *arguments))}
        if message["back"]:
            reply["changed"] = [self.changed(one) for one in (*arguments, *named.values())]
        return reply

    def changed(self, argument: Any) -> Any:
        """The argument as it is now, where a caller can see a change."""
        if type(argument).__name__ not in CHANGEABLE:
            return None
        try:
            return self.encoded(argument)
        except Unplain:
            return None

    def encoded(self, value: Any) -> Any:
        return encode(value, self.refer)

    def refer(self, value: Any, last: bool) -> Any:
        kind = type(value)
        if isinstance(value, Callback):
            return ["callback", value.number]
        if self.live and (last or hasattr(kind, "__next__") or of_the_program(kind)):
            return self.keep(value)
        if last and kind.__module__ == "numpy" and hasattr(value, "tolist"):
            return self.encoded(value.tolist())
        return None

    def refer_within(self, content: Any) -> Callable[[Any, bool], Any]:
        """A `refer` that gives no reference to `content` itself, whose content is wanted."""
        return lambda value, last: None if value is content else self.refer(value, last)

    def keep(self, value: Any) -> list[Any]:
        self.held.append(value)
        return ["held", len(self.held) - 1, isinstance(value, PLAIN)]

    def value(self, data: Any) -> Any:
        return decode(data, self.referred)

    def referred(self, kind: str, content: list[Any]) -> Any:
        match kind:
            case "entry":
                return self.entry(content[0])
            case "held":
                return self.held[content[0]]
            case "builtin":
                return getattr(builtins, content[0])
            case "callback":
                return Callback(self, content[0])
        raise Malformed(f"nothing is of the kind {kind!r}")

    def entry(self, name: str) -> Any:
        """What the program has under this name; also a method of its class `Solution`."""
        method = name.removeprefix(OF_SOLUTION)
        if method == name and name in self.names:
            return self.names[name]
        if hasattr(self.names.get("Solution"), method):
            return getattr(self.names["Solution"](), method)
        raise NameError(f"the program defines no {name!r}")


class Callback:
    """A function of the tests."""

    def __init__(self, candidate: Candidate, number: int) -> None:
        self.candidate = candidate
        self.number = number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        side = self.candidate
        positional = [side.encoded(one) for one in arguments]
        keywords = {name: side.encoded(one) for name, one in named.items()}
        side.link.send({"callback": self.number, "args": positional, "named": keywords})
        while True:
            message = side.link.receive()
            if "answer" in message:
                return side.value(message["answer"])
            if "raised" in message:
                raise getattr(builtins, message["raised"])(*side.value(message["args"]))
            side.act(message)


def of_the_program(kind: type) -> bool:
    """Whether it is a class that the program has written; its named tuples are tuples."""
    return kind.__module__ == "solution" and not hasattr(kind, "_fields")


def raised(error: BaseException) -> dict[str, Any]:
    """The nearest of Python's own exceptions, which is what tests know."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    try:
        arguments = encode(list(error.args), lambda _, __: None)
    except BaseException:
        arguments = ["list", str(error)[:300]]
    return {"raised": kind, "args": arguments}


ASKED: dict[str, Any] = {
    "getattr": getattr,
    "setattr": setattr,
    "iter": iter,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "getitem": lambda one, key: one[key],
    "setitem": lambda one, key, value: one.__setitem__(key, value),
    "contains": lambda one, key: key in one,
    "equal": lambda one, other: bool(one == other),
    "less": lambda one, other: bool(one < other),
    "isinstance": isinstance,
}
"""What objects of the program answer themselves, where the task is open to it."""


def main() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    sys.setrecursionlimit(RECURSION)
    # What `site` would have set, which this interpreter starts without.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    sys.path += installed_packages()
    try:
        Candidate(HarnessLink(LINK)).serve()
    except (LinkEnded, OSError):
        return
    finally:
        os._exit(0)
