"""The events of a run of several policies as one of them has them: those of a run of that policy alone, so
that the same checks hold for each.

What ends for the policy has ended, whatever the others still do with the group. A group that the policy has
no part in is not there. Attempts for fewer than all policies lose the names behind their numbers: of one
policy no two attempts have the same number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.chaos.fold import Event

SUFFIX = re.compile(r"(#\d+)(?::([a-z0-9_+-]+))?(\.\d+)?$")
OVER = ("COMMITTED", "DROPPED")
PLACE = ("v_train", "trainer_epoch", "checkpoint")


def of_policy(events: Iterable[Event], policy: str) -> Iterator[Event]:
    """The events of `policy`, in their order."""
    trainer_epoch = 0
    passed_over = 0  # Tasks that were taken for other policies alone: this one had trained all its steps
    for event in events:
        match event["event"]:
            case "loaded":
                groups = {
                    _plain(id_): held
                    for id_, held in _own(event["groups"], policy).items()
                    if held[0] not in OVER
                }
                yield event | _place(event, policy, passed_over) | {"groups": groups}
            case "decided":
                passed_over += _passed_over(event, policy)
                own = event | _place(event, policy, passed_over) | _decided(event, policy)
                if own["trainer_epoch"] == trainer_epoch and own["command"] == "OpenedWith":
                    own["command"] = "the trainer of another policy"
                trainer_epoch = own["trainer_epoch"]
                yield own
            case "put" | "put_acked":
                if _has_part(event["group_id"], policy):
                    yield event | {"group_id": _plain(event["group_id"])}
            case "batched":
                if event["policy"] == policy:
                    episodes = [[_plain(episode_id), version] for episode_id, version in event["episodes"]]
                    yield event | {"groups": [*map(_plain, event["groups"])], "episodes": episodes}
            case _:
                if event.get("policy", policy) == policy or event["event"] == "leased":
                    yield event


def _decided(event: Event, policy: str) -> Event:
    moved, committed = {}, 0
    for group_id, (was, becomes, step) in _own(event.get("moved", {}), policy).items():
        if was in OVER:
            continue
        committed += becomes == "COMMITTED" or (was == "TRAINED" and becomes == "")
        moved[_plain(group_id)] = [was, "" if becomes in OVER else becomes, step]
    counts: dict[str, int] = {}
    for reason, times in event.get("counts", {}).items():
        name = reason.removesuffix("_for_one").removesuffix(":for_one")
        if name.partition(":")[0] != "committed":
            counts[name] = counts.get(name, 0) + times
    said = event.get("stored", [])
    own = _own({name: rest for name, *rest in said}, policy)
    episodes = dict.fromkeys(name.partition("/")[2] for name, *_ in said)
    return {
        "moved": moved,
        "counts": counts | ({"committed": committed} if committed else {}),
        "stored": [[_plain(id_), *own.get(id_, (-1, -1, -1))] for id_ in episodes if _has_part(id_, policy)],
        "unstored": [_plain(id_) for id_ in event.get("unstored", []) if _has_part(id_, policy)],
        "batches": {
            step: groups and [*map(_plain, groups)]
            for step, groups in _own(event.get("batches", {}), policy).items()
        },
    }


def _passed_over(event: Event, policy: str) -> int:
    """How many tasks were taken without the policy."""
    new = {name.partition("/")[2] for name, (was, *_) in event.get("moved", {}).items() if was == ""}
    return sum(not _has_part(id_, policy) for id_ in new if "#0" in id_)


def _place(event: Event, policy: str, passed_over: int) -> dict[str, Any]:
    place = {name: event["policies"][policy][name] for name in PLACE}
    return place | {"position": event["position"] - passed_over}


def _own(named: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """What is written `<policy>/<name>`, by its name."""
    return {
        name.removeprefix(f"{policy}/"): what for name, what in named.items() if name.startswith(f"{policy}/")
    }


def _has_part(id_: str, policy: str) -> bool:
    found = SUFFIX.search(id_)
    return found is None or found[2] is None or policy in found[2].split("+")


def _plain(id_: str) -> str:
    return SUFFIX.sub(r"\1\3", id_)
