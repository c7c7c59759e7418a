"""The tests' side: runs the tests, asks the program over the link, and says what passed.

Standard input is one object of JSON; see `Examination`. Standard output is a line of JSON for each test:
`passed`, `why` not, and by then whether the program was `ready` to be asked, was `asked` anything, and
whether `live` objects of it were used.
"""

from __future__ import annotations

import builtins
import json
import os
import sys

from .plain import HarnessLink, LinkEnded, Malformed, decode, encode, installed_packages
from .same import same_result

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypedDict

    class Examination(TypedDict):
        entries: dict[str, str]
        """Name in the tests → name in the program."""
        setup: list[str]
        """Code that goes before the tests."""
        tests: list[dict[str, Any]]
        """`{"code": text}`, or `{"call": name, "args": …, "expected": …, "wrapped": …}`, values encoded."""
        live: bool
        tolerance: float


LINK = 3
WHY = 300
IN_PLACE = "__in_place__"
"""What a call that is a statement of its own is handed through: `__in_place__(f)(x)`."""
FOR_ITERATION = (StopIteration, StopAsyncIteration, GeneratorExit)
"""Raised by a program, these would end a loop of the tests early instead of failing it."""


class Spoiled(BaseException):
    """The test has failed, whatever it catches."""


class Examiner:
    """Asks the program. What comes back is plain data, a reference, or an exception of Python's own."""

    def __init__(self, link: HarnessLink, *, live: bool) -> None:
        self.link = link
        self.live = live
        self.ready = False
        self.asked = False
        self.used_live = False
        self.broken = ""
        """Why no later test can pass."""
        self.failed = ""
        """Why the present test cannot pass, whatever becomes of it."""
        self.callbacks: list[Any] = []

    def begin(self) -> str:
        """Why the program cannot be tested, if so."""
        self.link.send({"live": self.live})
        opening = self.link.receive()
        self.ready = opening.get("ready") is True
        return "" if self.ready else str(opening.get("broken"))[:WHY]

    def ask(
        self,
        do: str,
        on: Reference,
        arguments: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
        *,
        name: str = "",
        back: bool = False,
    ) -> Any:
        """What `do` gives, done with `on` on the program's side. `back`: its changes to the arguments are
        made here too."""
        if self.broken:
            raise Spoiled(self.broken)
        given = [*arguments, *(named or {}).values()]
        message = {
            "do": do,
            "on": on._reference,
            "name": name,
            "args": [self.encoded(one) for one in arguments],
            "named": {key: self.encoded(one) for key, one in (named or {}).items()},
            "back": back,
        }
        self.asked = True
        try:
            self.link.send(message)
            while "callback" in (reply := self.link.receive()):
                self.call_back(reply)
            if "raised" in reply:
                raise exception(reply["raised"], self.value(reply.get("args")))
            if do == "next" and reply.get("end") is True:
                raise StopIteration
            if do == "new":
                return Instance(self, reference_of(reply.get("value")))
            value = self.value(["list", reply.get("value")])[0]
            if back:
                self.bring_back(given, reply.get("changed"))
            return value
        except (LinkEnded, Malformed) as error:
            self.broken = f"the program does not answer: {error}"
            raise Spoiled(self.broken) from error

    def bring_back(self, arguments: list[Any], changed: Any) -> None:
        if not isinstance(changed, list) or len(changed) != len(arguments):
            raise Malformed("not the arguments")
        for mine, theirs in zip(arguments, changed, strict=True):
            if theirs is not None:
                become(mine, self.value(theirs))

    def call_back(self, message: dict[str, Any]) -> None:
        """The program calls a function that tests have handed it."""
        number, arguments, named = message["callback"], message.get("args"), message.get("named")
        if number not in range(len(self.callbacks)) or type(named) is not dict or type(arguments) is not list:
            raise Malformed("no such function")
        given = self.value(["list", *arguments])
        keywords = {name: self.value(one) for name, one in named.items()}
        try:
            answer = {"answer": self.encoded(self.callbacks[number](*given, **keywords))}
        except Exception as error:
            if isinstance(error, AssertionError):
                self.failed = str(error) or "an assertion failed"  # the program may catch it
            known = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
            answer = {"raised": known, "args": ["list", str(error)[:WHY]]}
        self.link.send(answer)

    def encoded(self, value: Any) -> Any:
        return encode(value, self.refer)

    def refer(self, value: Any, last: bool) -> Any:
        if isinstance(value, Reference):
            return value._reference
        if not last or not callable(value):
            return None
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return ["builtin", name]
        self.callbacks.append(value)
        return ["callback", len(self.callbacks) - 1]

    def value(self, data: Any) -> Any:
        return decode(data, self.referred)

    def referred(self, kind: str, content: list[Any]) -> Any:
        if kind == "callback" and len(content) == 1 and content[0] in range(len(self.callbacks)):
            return self.callbacks[content[0]]
        if kind == "held" and self.live:
            from .proxies import PlainProxy, Proxy

            self.used_live = True
            reference = reference_of([kind, *content])
            return (PlainProxy if reference[2] else Proxy)(self, reference)
        raise Malformed(f"nothing is of the kind {kind!r}")


class Reference:
    """Something on the program's side. It says nothing about itself: it equals itself alone."""

    __slots__ = ("_examiner", "_reference")
    _examiner: Examiner
    _reference: list[Any]

    def __init__(self, examiner: Examiner, reference: list[Any]) -> None:
        object.__setattr__(self, "_examiner", examiner)  # a proxy sets attributes elsewhere
        object.__setattr__(self, "_reference", reference)

    def __instancecheck__(self, instance: Any) -> bool:
        live = self._examiner.live and isinstance(instance, Reference)
        return live and self._examiner.ask("isinstance", instance, (self,)) is True

    def __bool__(self) -> bool:
        raise TypeError("an object of the program's is neither true nor false")


class EntryPoint(Reference):
    """A function of the program, by its name."""

    __slots__ = ()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._examiner.ask("call", self, arguments, named)

    def _in_place(self, *arguments: Any, **named: Any) -> Any:
        return self._examiner.ask("call", self, arguments, named, back=True)


class SolutionClass(Reference):
    """The class `Solution` of the program, whose methods are what is tested."""

    __slots__ = ()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._examiner.ask("new", self, arguments, named)


class Instance(Reference):
    """An object of that class: it has methods and nothing else."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return Method(self, name)


class Method(Reference):
    __slots__ = ("_name",)

    def __init__(self, instance: Reference, name: str) -> None:
        super().__init__(instance._examiner, instance._reference)
        self._name = name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._examiner.ask("method", self, arguments, named, name=self._name)

    def _in_place(self, *arguments: Any, **named: Any) -> Any:
        return self._examiner.ask("method", self, arguments, named, name=self._name, back=True)


def in_place(function: Any) -> Any:
    """The function as a statement calls it: for what it does to its arguments. Where its result is used, the
    arguments stay as the tests have them: `assert f(x) == sum(x)` is not to be met by emptying `x`."""
    return function._in_place if hasattr(type(function), "_in_place") else function


def reference_of(data: Any) -> list[Any]:
    """Raises Malformed unless it is a reference to an object that the program holds."""
    if type(data) is list and [type(one) for one in data] == [str, int, bool] and data[0] == "held":
        return data
    raise Malformed("no reference")


def become(mine: Any, theirs: Any) -> Any:
    """Give `mine` the content of `theirs`, if it can be changed and they are of a kind; what `mine` is then,
    or else `theirs`."""
    if type(mine) is not type(theirs):
        return theirs
    if isinstance(mine, list):
        mine[:] = [*map(become, mine, theirs), *theirs[len(mine) :]]
    elif isinstance(mine, dict):
        content = {key: become(mine[key], one) if key in mine else one for key, one in theirs.items()}
        mine.clear()
        mine.update(content)
    elif hasattr(mine, "clear"):
        mine.clear()
        (mine.update if hasattr(mine, "update") else mine.extend)(theirs)
    else:
        return theirs
    return mine


def exception(name: Any, arguments: Any) -> BaseException:
    """Python's own exception of that name, to be raised here."""
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or not issubclass(kind, BaseException) or not isinstance(arguments, list):
        raise Malformed("no exception of Python's")
    if issubclass(kind, FOR_ITERATION):
        return RuntimeError(f"the program raised {name}")
    try:
        return kind(*arguments)
    except Exception:
        return RuntimeError(f"the program raised {name}")


def run(examiner: Examiner, test: dict[str, Any], space: dict[str, Any], tolerance: float) -> str:
    """Why the test failed; empty when it passed."""
    examiner.failed = ""
    try:
        if "call" in test:
            got = EntryPoint(examiner, ["entry", test["call"]])(*examiner.value(test["args"]))
            same = same_result(got, examiner.value(test["expected"]), tolerance, wrapped=test["wrapped"])
            why = "" if same else "wrong result"
        else:
            why = execute(test["code"], space)
    except BaseException as error:
        why = described(error)
    return examiner.broken or examiner.failed or why


def execute(code: str, space: dict[str, Any]) -> str:
    exec(compile(code, "tests", "exec"), space)
    return ""


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:WHY]


def results(task: Examination, examiner: Examiner) -> Any:
    """Why each test failed, one by one as they have run."""
    space: dict[str, Any] = {"__name__": "tests", IN_PLACE: in_place}
    for name, target in task["entries"].items():
        space[name] = entry(examiner, target)
    try:
        broken = examiner.begin()
        for code in task["setup"] if not broken else ():
            execute(code, space)
        broken = broken or examiner.broken or examiner.failed
    except BaseException as error:
        broken = described(error)
    for test in task["tests"]:
        yield broken or run(examiner, test, space, task["tolerance"])


def entry(examiner: Examiner, target: str) -> Reference:
    reference = ["entry", target]
    if examiner.live:
        from .proxies import Proxy

        return Proxy(examiner, reference)
    return (SolutionClass if target == "Solution" else EntryPoint)(examiner, reference)


def main() -> None:
    task = json.load(sys.stdin)
    answers = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)  # what tests print is no answer
    sys.path += installed_packages()
    examiner = Examiner(HarnessLink(LINK), live=task["live"])
    for why in results(task, examiner):
        by_then = {"ready": examiner.ready, "asked": examiner.asked, "live": examiner.used_live}
        line = {"passed": not why, "why": why, **by_then}
        os.write(answers, json.dumps(line).encode() + b"\n")
    os._exit(0)
