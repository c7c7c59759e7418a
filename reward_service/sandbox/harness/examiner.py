"""The tests' side of the link: it runs the tests, sends their calls to the program, and reports which tests
pass.

Standard input is one JSON object (see `Examination`). Standard output has one JSON line per test, with the
fields `passed`, `why` (the reason of a failure), `ready` (whether the program could be tested), and `asked`
(whether the test used the program).
"""

from __future__ import annotations

import builtins
import json
import os
import sys

from .plain import HarnessLink, LinkEnded, Malformed, decode, encode, installed_packages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypedDict

    class Examination(TypedDict):
        entries: dict[str, str]
        """Name in the program, by the name that the tests use."""
        setup: list[str]
        """Code that runs before the tests."""
        tests: list[dict[str, Any]]
        """`{"code": text}`, or `{"call": name, "args": …, "expected": …, "wrapped": …}` with encoded
        values."""
        tolerance: float


LINK = 3
WHY = 300
VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
IN_PLACE = "__in_place__"
"""Name of the function that marks a call that forms a statement of its own: `__in_place__(f)(x)`."""
FOR_ITERATION = (StopIteration, StopAsyncIteration, GeneratorExit)
"""Exceptions that would silently end a loop of the tests early instead of making the test fail."""


class Spoiled(BaseException):
    """The test has failed. The failure counts even if the test's code catches this exception."""


class Examiner:
    """The tests' access to the program. A request returns plain data or a reference, or raises one of
    Python's own exceptions."""

    def __init__(self, link: HarnessLink) -> None:
        self.link = link
        self.ready = False
        self.asked = False
        self.broken = ""  # reason why no later test can pass
        self.failed = ""  # reason why the present test cannot pass any more
        self.callbacks: list[Any] = []

    def begin(self) -> str:
        """Return the reason why the program cannot be tested, or an empty text."""
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
        """Return the result of the request `do` for the object `on` on the program's side.

        With `back`, changes that the program makes to the arguments are copied back.
        """
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
        """Handle the program's call of a function of the tests."""
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
        raise Malformed(f"nothing is of the kind {kind!r}")


class Reference:
    """An object on the program's side. It has no visible content and equals only itself."""

    __slots__ = ("_examiner", "_reference")
    _examiner: Examiner
    _reference: list[Any]

    def __init__(self, examiner: Examiner, reference: list[Any]) -> None:
        self._examiner = examiner
        self._reference = reference

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __bool__(self) -> bool:
        raise TypeError("an object of the program's is neither true nor false")


class Entry(Reference):
    """A callable of the program: a function, a method of one of its objects, or its class `Solution`.

    `do` is the request that a call sends.
    """

    __slots__ = ("_do", "_name")

    def __init__(self, examiner: Examiner, reference: list[Any], do: str = "call", name: str = "") -> None:
        super().__init__(examiner, reference)
        self._do, self._name = do, name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._examiner.ask(self._do, self, arguments, named, name=self._name)

    def _in_place(self, *arguments: Any, **named: Any) -> Any:
        return self._examiner.ask(self._do, self, arguments, named, name=self._name, back=self._do != "new")


class Instance(Reference):
    """An instance of the program's class `Solution`. It has methods and nothing else."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return Entry(self._examiner, self._reference, "method", name)


def in_place(function: Any) -> Any:
    """Return the function for a call that is a statement of its own, so that changes to the arguments are
    copied back.

    In all other calls, the arguments keep the tests' values. Otherwise a program could pass `assert f(x) ==
    sum(x)` by emptying `x`.
    """
    return function._in_place if hasattr(type(function), "_in_place") else function


def reference_of(data: Any) -> list[Any]:
    """Return the reference in `data`. Raises `Malformed` unless it refers to an object of the program."""
    if type(data) is list and [type(one) for one in data] == [str, int] and data[0] == "held":
        return data
    raise Malformed("no reference")


def become(mine: Any, theirs: Any) -> Any:
    """Give `mine` the content of `theirs` and return `mine`, if its type allows this. Otherwise return
    `theirs`."""
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
    """Return Python's own exception of this name, so that it can be raised on the tests' side."""
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or not issubclass(kind, BaseException) or not isinstance(arguments, list):
        raise Malformed("no exception of Python's")
    if issubclass(kind, FOR_ITERATION):
        return RuntimeError(f"the program raised {name}")
    try:
        return kind(*arguments)
    except Exception:
        return RuntimeError(f"the program raised {name}")


def same_result(got: Any, expected: Any, tolerance: float, *, wrapped: bool) -> bool:
    """Return whether the plain value `got` is the expected result.

    Lazy values (an iterator, the keys of a dictionary) are compared as lists. `wrapped` means that the data
    set wraps every result in a list with one item. A program may return the result without that list.
    """
    if hasattr(type(got), "__next__") or isinstance(got, VIEWS):
        got = list(got)
    wanted = [expected[0], expected] if wrapped else [expected]
    return any(same_value(got, one, tolerance) for one in wanted)


def same_value(got: Any, expected: Any, tolerance: float) -> bool:
    """Return whether content and type agree.

    `expected` comes from JSON, which has no tuples, so tuples count as lists. An integer and a decimal can be
    equal. No other types are mixed: True is not 1, and keys of a dictionary keep their types. An expected
    integer must be matched exactly. For an expected decimal, the difference may be up to `tolerance`,
    relative or absolute.
    """
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    if isinstance(got, int | float) and isinstance(expected, int | float):
        return _same_number(got, expected, tolerance)
    if isinstance(expected, list):
        return (
            isinstance(got, list | tuple)
            and len(got) == len(expected)
            and all(same_value(one, two, tolerance) for one, two in zip(got, expected, strict=True))
        )
    if isinstance(expected, dict) and isinstance(got, dict):
        # Keys include their types, because Python treats True and 1.0 as 1.
        typed, wanted = ({(type(key), key): one for key, one in d.items()} for d in (got, expected))
        return typed.keys() == wanted.keys() and all(
            same_value(typed[key], wanted[key], tolerance) for key in wanted
        )
    return type(got) is type(expected) and bool(got == expected)


def _same_number(got: float, expected: float, tolerance: float) -> bool:
    if got == expected or (got != got and expected != expected):
        return True
    if isinstance(expected, int):
        return False
    try:
        error = abs(float(got) - expected)
        return error <= tolerance * max(1.0, abs(float(got)), abs(expected)) < float("inf")
    except OverflowError:  # an integer above every float
        return False


def run(examiner: Examiner, test: dict[str, Any], space: dict[str, Any], tolerance: float) -> str:
    """Return the reason why the test failed, or an empty text."""
    examiner.failed = ""
    try:
        if "call" in test:
            got = Entry(examiner, ["entry", test["call"]])(*examiner.value(test["args"]))
            same = same_result(got, examiner.value(test["expected"]), tolerance, wrapped=test["wrapped"])
            why = "" if same else "wrong result"
        else:
            exec(compile(test["code"], "tests", "exec"), space)
            why = ""
    except BaseException as error:
        why = described(error)
    return examiner.broken or examiner.failed or why


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:WHY]


def results(task: Examination, examiner: Examiner) -> Any:
    """Yield the reason why each test failed, or an empty text, in order."""
    space: dict[str, Any] = {"__name__": "tests", IN_PLACE: in_place}
    for name, target in task["entries"].items():
        space[name] = Entry(examiner, ["entry", target], "new" if target == "Solution" else "call")
    try:
        broken = examiner.begin()
        for code in task["setup"] if not broken else ():
            exec(compile(code, "tests", "exec"), space)
        broken = broken or examiner.broken or examiner.failed
    except BaseException as error:
        broken = described(error)
    for test in task["tests"]:
        yield broken or run(examiner, test, space, task["tolerance"])


def main() -> None:
    task = json.load(sys.stdin)
    answers = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)  # output of the tests must not mix with the answers
    sys.path += installed_packages()
    examiner = Examiner(HarnessLink(LINK))
    for why in results(task, examiner):
        line = {"passed": not why, "why": why, "ready": examiner.ready, "asked": examiner.asked}
        os.write(answers, json.dumps(line).encode() + b"\n")
    os._exit(0)
