"""Routing of tasks to rewards, and the check that modules imported by tests of tasks exist."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import msgspec

from areal_async.config.reward import RewardSection, RouteSection, Scope
from areal_async.config.rewardcheck import part_of, with_those_inside


class RewardSpec(msgspec.Struct, frozen=True, dict=True):
    """A reward with its settings in a job. Two specs with equal content are the same reward."""

    name: str
    """A built-in name, or `path.py:function`."""
    args: dict[str, Any] = {}
    scope: Scope = "episode"
    timeout_s: float = 10.0

    @cached_property
    def key(self) -> str:
        """Text that identifies the reward."""
        return msgspec.json.encode(self, order="deterministic").decode()

    @cached_property
    def longest_s(self) -> float:
        """Longest duration of a call in seconds: the call's timeout, plus the longest time for which a remote
        scorer may be unreachable."""
        patience_s = getattr(part_of(self.name), "patience_s", None)
        return self.timeout_s + (patience_s(self.args, self.timeout_s) if patience_s is not None else 0.0)

    @property
    def label(self) -> str:
        """Name of the reward in metrics. A file is named without its folders."""
        return self.name.rpartition("/")[2]


class Routing:
    """Routing table of a job. `Routing(job.reward).of(task)` is the reward of a task."""

    def __init__(self, section: RewardSection) -> None:
        self._routes = [(route, _spec(route, section)) for route in section.routes]
        self.default = _spec(section, section)

    @property
    def specs(self) -> list[RewardSpec]:
        """All rewards of the job without duplicates. The default is the last."""
        return list({spec.key: spec for spec in [*(spec for _, spec in self._routes), self.default]}.values())

    def of(self, task: Any) -> RewardSpec:
        if not self._routes:  # The usual case, executed for each episode
            return self.default
        return next((spec for route, spec in self._routes if matches(route, task)), self.default)


def matches(route: RouteSection, task: Any) -> bool:
    """Return whether every pattern of `route` matches a task or a reward's input. Upper and lower case
    differ."""
    tags = task.extra_info.get("tag", ())
    tags = [tags] if isinstance(tags, str) else [tag for tag in tags or () if isinstance(tag, str)]
    return (
        fnmatchcase(task.data_source, route.data_source)
        and fnmatchcase(task.ability, route.ability)
        and (route.tag is None or any(fnmatchcase(tag, route.tag) for tag in tags))
    )


def _spec(asked: RewardSection | RouteSection, section: RewardSection) -> RewardSpec:
    return RewardSpec(asked.name, dict(asked.args), asked.scope, asked.timeout_s or section.timeout_s)


class ImportedModules:
    """The modules that tests of tasks import, by the reward that runs the tests. Call `note` for each task,
    then `missing`.

    A part that runs programs has two methods. `modules_of(truth)` returns the modules that a task's tests
    import. `modules_away(names, arguments)` returns the modules among `names` that the part's programs cannot
    import."""

    def __init__(self, reward: RewardSection) -> None:
        self._routing = Routing(reward)
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._programs: dict[str, list[tuple[str, Mapping[str, Any], Any]]] = {}
        for spec in self._routing.specs:
            inside = [
                (name, args, part_of(name)) for _, name, args in with_those_inside("", spec.name, spec.args)
            ]
            self._programs[spec.key] = [each for each in inside if hasattr(each[2], "modules_of")]

    def note(self, task: Any, truth: Any) -> None:
        key = self._routing.of(task).key
        for _, _, part in self._programs[key][:1]:
            self._counts[key].update(part.modules_of(truth))

    def missing(self) -> list[str]:
        """Return a sentence for each missing module. This runs a program for each reward."""
        return [
            f"Tests import {module!r} (tasks: {counts[module]}), which programs of `{name}` do not have. "
            "Name a Python environment with it: `environment` in the reward's arguments (docs/sandbox.md)."
            for key, counts in self._counts.items()
            for name, args, part in self._programs[key]
            for module in part.modules_away(sorted(counts), args)
        ]
