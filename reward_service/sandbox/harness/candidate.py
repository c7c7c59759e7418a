"""The program's side of the link: it runs the program and then executes the examiner's requests until the
examiner ends.

The examiner does not trust this side, because the program runs in the same process and may change everything
in it. Instances of the program's class `Solution` stay in this process, and the examiner gets a number for
each.
"""

from __future__ import annotations

import builtins
import os
import sys

from .plain import HarnessLink, LinkEnded, Malformed, Unplain, decode, encode, installed_packages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LINK = 3
RECURSION = 20_000
CHANGEABLE = ("list", "dict", "set", "bytearray", "deque", "OrderedDict", "Counter")
"""Types of arguments that a function can change for its caller."""
OF_SOLUTION = "Solution()."


class Candidate:
    def __init__(self, link: HarnessLink) -> None:
        self.link = link
        self.held: list[Any] = []
        self.names: dict[str, Any] = {}

    def load(self) -> str:
        """Run the program. Return the reason if it fails, or an empty text."""
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
        if message["do"] == "method":
            target = getattr(target, message["name"])
        result = target(*arguments, **named)
        reply = {"value": self.keep(result) if message["do"] == "new" else self.encoded(result)}
        if message["back"]:
            reply["changed"] = [self.changed(one) for one in (*arguments, *named.values())]
        return reply

    def changed(self, argument: Any) -> Any:
        """Return the present value of the argument, if its type is one that a function can change for its
        caller."""
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
        if last and kind.__module__ == "numpy" and hasattr(value, "tolist"):
            return self.encoded(value.tolist())
        return None

    def keep(self, value: Any) -> list[Any]:
        self.held.append(value)
        return ["held", len(self.held) - 1]

    def value(self, data: Any) -> Any:
        return decode(data, self.referred)

    def referred(self, kind: str, content: list[Any]) -> Any:
        made: dict[str, Any] = {
            "entry": self.entry,
            "held": self.held.__getitem__,
            "builtin": lambda name: getattr(builtins, name),
            "callback": lambda number: Callback(self, number),
        }
        if kind not in made:
            raise Malformed(f"nothing is of the kind {kind!r}")
        return made[kind](content[0])

    def entry(self, name: str) -> Any:
        """Return the program's function of this name, or the method of this name of its class `Solution`."""
        method = name.removeprefix(OF_SOLUTION)
        if method == name and name in self.names:
            return self.names[name]
        if hasattr(self.names.get("Solution"), method):
            return getattr(self.names["Solution"](), method)
        raise NameError(f"the program defines no {name!r}")


class Callback:
    """A function of the tests that the program may call."""

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


def raised(error: BaseException) -> dict[str, Any]:
    """Return the nearest base class among Python's own exceptions, because no other exceptions exist on the
    examiner's side."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    try:
        arguments = encode(list(error.args), lambda _, __: None)
    except BaseException:
        arguments = ["list", str(error)[:300]]
    return {"raised": kind, "args": arguments}


def main() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    sys.setrecursionlimit(RECURSION)
    # The module `site` would set these, but this interpreter starts without it.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    sys.path += installed_packages()
    try:
        Candidate(HarnessLink(LINK)).serve()
    except (LinkEnded, OSError):
        return
    finally:
        os._exit(0)
