"""Registries of the parts that a job file names: engines, back ends, losses, workflows, rewards …

A part has one of three kinds of names:

- the name of a built-in part;
- `path.py:name`, an object in a user's file;
- the name of an entry point, which another installed package declares in the group of the kind,
  `areal_async.<kind>s`:

    [project.entry-points."areal_async.rewards"]
    politeness = "my_rewards.politeness:politeness"

The owner of each kind keeps the table of its built-in parts, `{name: "module:attribute"}`. Each part declares
its own arguments. If the part has a `Section` called `Arguments`, the fields of the section are the
arguments. Otherwise they are the annotated parameters after the first `leading` parameters.

A part may define `check_job(job, arguments, field)`, which yields the `Mistake`s of a job that gives the part
these arguments in `field`. Parts of some kinds have more hooks, such as `check_files(arguments, field)`. No
other module depends on a part, so a new part needs no change to an existing file. The other fields of the job
file apply to every part of the kind (`rollout.device`, `weights.codec`). Some fields apply only to parts that
declare support for them (`rollout.server`, for an engine with `is_server`).

Reading a job file imports built-in parts and installed packages. It reads a user's file only as a syntax
tree. Before a job starts, a separate process runs the user's files and checks their parts
(`areal_async.launch.preflight`). The service that uses a part checks it again
(`areal_async.config.parts.load_part`)."""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from inspect import Parameter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from areal_async.base.errors import ArealError
from areal_async.base.mistakes import ADD_IT, Mistake, blank_after_colon, in_words, value_in_words
from areal_async.base.own_files import read_regular
from areal_async.base.secrecy import is_secret
from areal_async.config.base import Section
from areal_async.config.user_file import run_user_file


class PartError(ArealError):
    """A named part cannot be found or loaded. The text names the part, the problem and a fix."""

    restart_helps = False


@dataclass(eq=False)
class Registry:
    """All parts of one kind, such as `Registry("tool", "rollout_service.workflows.tools:BUILT_IN")`."""

    kind: str
    table: str
    """`module:attribute` of the owner's table. It is imported when a part is requested."""
    leading: int = 0
    """Number of positional parameters of a part that the caller fills."""
    filled: tuple[str, ...] = ()
    """Keyword parameters of a part that the caller fills."""
    coroutine: bool = False
    """True if a function must be an `async def`."""
    _own_parts: dict[str, Any] = field(default_factory=dict)
    _running: threading.RLock = field(default_factory=threading.RLock)
    """Lock held while a file runs. Services that share a process must not run the same file twice."""

    def __post_init__(self) -> None:
        self.group = f"areal_async.{self.kind}{'es' if self.kind.endswith('s') else 's'}"

    @cached_property
    def built_in(self) -> Mapping[str, str]:
        """Return the owner's table: name → `module:attribute`."""
        found: Mapping[str, str] = resolve_name(self.table)
        return found

    @cached_property
    def installed(self) -> Mapping[str, EntryPoint]:
        """Parts of other installed packages by name. A built-in part of the same name takes precedence."""
        return {point.name: point for point in entry_points(group=self.group)}

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that needs no path: built-in parts in the order of their table, then installed parts."""
        return (*self.built_in, *sorted(set(self.installed) - set(self.built_in)))

    def find(self, name: str) -> Any:
        """Load the part called `name`. If the name is a path, run the file's code, once per process. Raises
        `PartError` if there is no such part or its module cannot be imported."""
        if name in self.built_in:
            return resolve_name(self.built_in[name])
        if name in self.installed:
            try:
                return self.installed[name].load()
            except Exception as error:  # Another package's code may raise anything
                value = self.installed[name].value
                raise PartError(
                    f"the {self.kind} {name!r} is {value} of an installed package, which cannot be imported: "
                    f"{type(error).__name__}: {error}"
                ) from error
        with self._running:
            if name not in self._own_parts:
                self._own_parts[name] = self._own_part(name)
            return self._own_parts[name]

    def _own_part(self, name: str) -> Any:
        if (place := _own_place(name)) is None:
            raise PartError(f"{self._unknown(name)}. {self._choice}.")
        module = run_user_file(place[0], kind=self.kind, name=name, error=PartError)
        if not hasattr(module, place[1]):
            fix = _meant(place[1], [key for key in vars(module) if not key.startswith("_")])
            raise PartError(f"the {self.kind} {name!r}: {place[0]} defines no {place[1]!r}. {fix}")
        return getattr(module, place[1])

    def known(self, name: str) -> Any:
        """Return the part called `name`. Return None if it cannot be loaded, or is in a file that has not
        been run yet."""
        try:
            return self.find(name) if name in self.names else self._own_parts.get(name)
        except PartError:
            return None

    def arguments_of(self, name: str) -> type[Section]:
        """Return the `Arguments` of a known part, or an empty section."""
        return getattr(self.known(name), "Arguments", None) or Section

    def _unknown(self, name: str) -> str:
        return f"there is no {self.kind} {name!r}, built in or installed"

    @property
    def _choice(self) -> str:
        own = "`path.py:name` of one of your own"
        return f"Use {', '.join(self.names)}, or {own}" if self.names else f"Use {own}"

    def mistakes(
        self,
        name: str,
        arguments: Mapping[str, Any] | None,
        *,
        field: str,
        args_field: str,
        run_own: bool = False,
    ) -> Iterator[Mistake]:
        """Yield the mistakes in `name` and its `arguments`, which the job has in `field` and `args_field`.
        `arguments` is None if parts of this kind have no arguments in a job file.

        A user's file is run only with `run_own`; otherwise its text must define the name. The part's
        `check_job` yields mistakes that depend on the rest of the job."""
        if name not in self.names:
            if (place := _own_place(name)) is None:
                yield Mistake(field, self._unknown(name), _half_named(name) or self._choice)
                return
            if not run_own:
                yield from self._mistakes_of_file(*place, field)
                return
        try:
            part = self.find(name)
        except PartError as error:
            fix = "Mend it (reinstall its package), or name another part"
            yield Mistake(field, str(error).rstrip("."), fix)
            return
        section = getattr(part, "Arguments", None)
        if arguments is not None and section is not None:
            yield from section_mistakes(args_field, section, arguments, name)
        elif arguments is not None and callable(part):
            yield from function_mistakes(name, part, arguments, args_field, self.leading, self.filled)

    def _mistakes_of_file(self, path: Path, attribute: str, field: str) -> Iterator[Mistake]:
        try:
            tree = ast.parse(read_regular(path))
        except OSError as error:
            problem = f"{path} cannot be read: {error.strerror or error}"
            yield Mistake(field, problem, "Check the path; it is relative to the job file")
            return
        except (SyntaxError, ValueError) as error:
            yield Mistake(field, f"{path} is not Python that can be read: {error}", "Mend the file")
            return
        node = _defined(tree).get(attribute)
        if node is None:
            yield Mistake(field, f"{path} defines no {attribute!r}", _meant(attribute, _defined(tree)))
        elif self.coroutine and isinstance(node, ast.FunctionDef):
            yield Mistake(field, f"{attribute} in {path} is not a coroutine", "Write it as `async def`")


def function_mistakes(
    name: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    field: str,
    leading: int = 1,
    filled: Collection[str] = (),
) -> Iterator[Mistake]:
    """Yield the mistakes in the `arguments` of a function, by its signature.

    Its first `leading` parameters and those in `filled` come from elsewhere."""
    parameters = list(inspect.signature(function).parameters.values())
    scope = vars(sys.modules.get(inspect.unwrap(function).__module__, inspect))
    taken = _taken(parameters, leading, filled)
    typed = [each.replace(annotation=_type_of(each, scope)) for each in taken]
    yield from _keyword_mistakes(name, arguments, parameters, typed, field)


def _own_place(name: str) -> tuple[Path, str] | None:
    """Return the path and the object's name in `path.py:name`, or None if `name` does not have this form."""
    path, _, attribute = name.rpartition(":")
    return (Path(path), attribute) if path.endswith(".py") and attribute.isidentifier() else None


def _taken(parameters: list[Parameter], leading: int, filled: Collection[str]) -> list[Parameter]:
    """Return the parameters that the arguments in a job file may set."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    positional = [each for each in parameters if each.kind in kinds]
    keywords = [each for each in parameters if each.kind is Parameter.KEYWORD_ONLY]
    return [each for each in (*positional[leading:], *keywords) if each.name not in filled]


def _defined(tree: ast.Module) -> dict[str, ast.AST]:
    """Return the definitions, assignments and imports at the top level of a file, by name."""
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def _meant(attribute: str, defined: Collection[str]) -> str:
    """Return a hint with the closest name in a file, or with all names if none is close."""
    if close := difflib.get_close_matches(attribute, defined, n=1):
        return f"Did you mean {close[0]!r}?"
    return f"It defines {', '.join(defined) or 'nothing'}."


def section_mistakes(
    field: str, section: type[Section], given: Mapping[str, Any], owner: str
) -> Iterator[Mistake]:
    """Yield the mistakes in `given`, the mapping in `field`, which must fit `section`. `owner` names its
    reader."""
    takes = {info.alias or name: info.description or "" for name, info in section.model_fields.items()}
    try:
        section.model_validate(dict(given))
    except ValidationError as error:
        yield from _argument_mistakes(field, error, owner, takes, ", ".join(takes) or "nothing")


def _argument_mistakes(
    field: str, error: ValidationError, owner: str, about: Mapping[str, str], takes: str
) -> Iterator[Mistake]:
    details = sorted(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
    # If a value is refused because it holds a password, neither it nor a value that contains it is shown.
    hidden = any("holds a password" in detail["msg"] for detail in details)

    def explain(detail: Mapping[str, Any]) -> Mistake:
        name, found = ".".join(str(part) for part in detail["loc"]), detail.get("input")
        where = f"{field}.{name}" if name else field
        if detail["type"] == "extra_forbidden":
            fix = blank_after_colon(str(detail["loc"][-1])) or f"It takes {takes}"
            return Mistake(where, f"{owner} has no argument {name!r}", fix)
        if detail["type"] == "missing":
            fix = " ".join(f"{ADD_IT}. {about.get(name, '')}".split()).rstrip(". ")
            return Mistake(where, f"{owner} needs {name!r}, and it is missing", fix)
        if (words := value_in_words(detail)) is not None and not hidden:
            return Mistake(where, f"{found!r:.80} {words[0]}", words[1])
        message = str(detail["msg"]).removeprefix("Value error, ").rstrip(".")
        shown = "" if hidden or is_secret(name, found) else f" = {found!r:.80}"
        return Mistake(where, f"{owner} cannot take {name}{shown}: {message}", "Correct it")

    yield from in_words(details, explain, field)


def _type_of(parameter: Parameter, scope: dict[str, Any]) -> Any:
    """Return the type that a parameter's annotation means; `scope` resolves its names. Return Any if no
    annotation restricts the values."""
    annotation = parameter.annotation
    try:
        kind = eval(annotation, scope) if isinstance(annotation, str) else annotation
        TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))
    except Exception:  # A name for type checkers alone, or a type with its own schema
        return Any
    return Any if annotation is parameter.empty else kind


def _keyword_mistakes(
    owner: str, given: Mapping[str, Any], parameters: list[Parameter], taken: list[Parameter], field: str
) -> Iterator[Mistake]:
    """Yield the mistakes in arguments of a function with these parameters. A function receives the values
    unchanged, so no value is converted. A value equal to the default is always correct."""
    known, empty = {each.name: each for each in taken}, Parameter.empty
    kinds = {name: Any if each.annotation is empty else each.annotation for name, each in known.items()}
    needed = {name for name, each in known.items() if each.default is empty}
    shape = {name: kind if name in needed else NotRequired[kind] for name, kind in kinds.items()}
    arguments = TypedDict("arguments", shape)  # type: ignore[misc]
    free = any(each.kind is Parameter.VAR_KEYWORD for each in parameters)
    extra: Literal["allow", "forbid"] = "allow" if free else "forbid"
    config = ConfigDict(extra=extra, allow_inf_nan=False)
    arguments.__pydantic_config__ = config  # type: ignore[attr-defined]
    values = {
        name: None if kinds.get(name, Any) is Any else value
        for name, value in given.items()
        if name not in known or value != known[name].default
    }
    takes = ", ".join(shape) or "none: arguments are keyword-only parameters"
    try:
        TypeAdapter(arguments).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        yield from _argument_mistakes(field, error, owner, {}, takes)


def _half_named(name: str) -> str:
    """Return the fix for a name without an object after `FILE.py:`, or without the ending `.py`. Return ""
    for any other name."""
    stem, colon, attribute = name.partition(":")
    if name.endswith(".py"):
        return f"Name what it defines, too: `{name}:NAME`"
    return f"Name the file with its ending: `{stem}.py:{attribute}`" if stem and colon and attribute else ""


ENGINES = Registry("engine", "rollout_service.engines:BUILT_IN")
WORKFLOWS = Registry("workflow", "rollout_service.workflows:BUILT_IN", leading=2, coroutine=True)
ENVIRONMENTS = Registry("environment", "rollout_service.environments:BUILT_IN")
TOOLS = Registry("tool", "rollout_service.workflows.tools:BUILT_IN")
REWARDS = Registry("reward", "reward_service.sdk:BUILT_IN", leading=1)
ADVANTAGES = Registry("advantage", "trainer_service.algorithms:ADVANTAGES", leading=1)
LOSSES = Registry("loss", "trainer_service.algorithms:LOSSES", leading=2)
CORRECTIONS = Registry("correction", "trainer_service.algorithms:CORRECTIONS", leading=2)
NORMALISERS = Registry("normaliser", "trainer_service.algorithms:NORMALISERS", leading=2)
BACKENDS = Registry("backend", "trainer_service.backends:BUILT_IN", leading=2, filled=("dtype",))
CHANNELS = Registry("channel", "areal_async.weights:CHANNELS")
LOGGERS = Registry("logger", "areal_async.show.loggers:BUILT_IN", leading=1)


def forget_own_parts() -> None:
    """Forget parts of users' files, which may have changed. The next request runs the files again."""
    for found in globals().values():
        if isinstance(found, Registry):
            found._own_parts.clear()
