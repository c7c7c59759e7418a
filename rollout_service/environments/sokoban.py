"""`sokoban`: push every box onto a target.

Fields: `#` wall, `-` floor, `.` target, `$` box, `*` box on a target, `@` player, `+` player on a target.
Moves: `L`, `R`, `U`, `D` as in `frozenlake`. A move into a box pushes it if the field behind is free,
else nothing moves. 1 when all boxes are on targets, and it is over; see `Sokoban.Arguments` for more rewards.

A level is made backward from its solution: boxes on targets are pulled about, so it can be solved by the same
moves in reverse. `extra_info.level` of a task (rows joined by newlines) gives the level.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from areal_async.config.base import Section
from areal_async.rpc.schema import Task
from rollout_service.environments.base import EnvironmentFailure, Step, level_seed
from rollout_service.environments.frozenlake import MOVES, Place, move_of

DRAWS = 2_000


@dataclass(frozen=True)
class Level:
    """A position. Rows × columns with an outer wall."""

    walls: frozenset[Place]
    targets: frozenset[Place]
    boxes: frozenset[Place]
    player: Place
    height: int
    width: int

    @property
    def solved(self) -> bool:
        return self.boxes == self.targets

    def text(self) -> str:
        def field(place: Place) -> str:
            target = place in self.targets
            if place in self.walls:
                return "#"
            if place in self.boxes:
                return "*" if target else "$"
            if place == self.player:
                return "+" if target else "@"
            return "." if target else "-"

        return "\n".join("".join(field((r, c)) for c in range(self.width)) for r in range(self.height))

    def pushed(self, move: str) -> Level:
        """After a move; itself when nothing can move."""
        there = _next(self.player, move)
        boxes = self.boxes
        if there in boxes:
            behind = _next(there, move)
            if behind in self.walls or behind in boxes:
                return self
            boxes = boxes - {there} | {behind}
        elif there in self.walls:
            return self
        return Level(self.walls, self.targets, boxes, there, self.height, self.width)

    def pulled(self, move: str, *, take: bool) -> Level | None:
        """The position from which the opposite move leads here: the player steps back, and with `take` the
        box in front of it comes along. None when that is no position."""
        there = _next(self.player, move)
        if there in self.walls or there in self.boxes:
            return None
        boxes = self.boxes
        if take:
            front = _next(self.player, _OPPOSITE[move])
            if front not in boxes:
                return None
            boxes = boxes - {front} | {self.player}
        return Level(self.walls, self.targets, boxes, there, self.height, self.width)


class Sokoban:
    blocking = False

    class Arguments(Section):
        """Push every box onto a target."""

        width: int = Field(default=6, ge=4, le=20)
        """Columns, the outer wall included."""
        height: int = Field(default=6, ge=4, le=20)
        """Rows, the outer wall included."""
        boxes: int = Field(default=1, ge=1, le=5)
        """How many boxes, and targets, there are."""
        walls: float = Field(default=0.1, ge=0, le=0.4)
        """Chance of a wall in an inner field."""
        pulls: int = Field(default=8, ge=1, le=200)
        """Moves of the backward play that makes a level: the more, the harder."""
        max_moves: int = Field(default=64, ge=1)
        """Moves after which it is over."""
        box_reward: float = 0.0
        """Reward of each box pushed onto a target; taken back for one pushed off."""
        move_reward: float = 0.0
        """Reward of every move, below 0 to prefer short ways."""

    def __init__(self, **options: Any) -> None:
        self.options = self.Arguments(**options)
        self.level = Level(frozenset(), frozenset(), frozenset(), (0, 0), 0, 0)
        self._moves = 0

    def reset(self, seed: int, task: Task) -> str:
        given = task.extra_info.get("level")
        self.level = read_level(str(given)) if given else draw_level(level_seed(seed, task), self.options)[0]
        self._moves = 0
        return (
            "Push every box $ onto a target . by walking into it; you are @. Answer with one move: L, R, "
            f"U or D.\n{self.level.text()}\n"
        )

    def state(self) -> str:
        return self.level.text()

    def step(self, action: str) -> Step:
        self._moves += 1
        move = move_of(action)
        before = self.level
        if move is not None:
            self.level = before.pushed(move)
        gained = len(self.level.boxes & self.level.targets) - len(before.boxes & before.targets)
        reward = self.options.move_reward + self.options.box_reward * gained + float(self.level.solved)
        note = "" if move else "Answer L, R, U or D."
        out = self.level.solved or self._moves >= self.options.max_moves
        info = {"solved": self.level.solved} | ({} if move else {"problem": "no move"})
        return Step(f"{note}\n{self.level.text()}\n", reward, out, info)


def draw_level(seed: int, options: Sokoban.Arguments) -> tuple[Level, str]:
    """(a level, moves that solve it); a function of its arguments alone. Raises `EnvironmentFailure` for
    options with which no level is found."""
    rng = random.Random(seed)
    for _ in range(DRAWS):
        level = _solved(rng, options)
        if level is None:
            continue
        way = ""
        for _ in range(options.pulls):
            kinds = [(move, take) for move in MOVES for take in (True, False)]
            # Pulls first, mostly: a walk about the room makes nothing harder.
            rng.shuffle(kinds)
            kinds.sort(key=lambda kind: not kind[1] if rng.random() < 0.7 else kind[1])
            for move, take in kinds:
                before = level.pulled(move, take=take)
                if before is not None:
                    level, way = before, _OPPOSITE[move] + way
                    break
        if not level.boxes & level.targets:
            return level, way
    raise EnvironmentFailure(
        f"sokoban: no level of {options.width}×{options.height} with {options.boxes} boxes was found: make "
        "it larger, or lower boxes or walls, or raise pulls"
    )


def read_level(text: str) -> Level:
    """A level of one's own. Raises `EnvironmentFailure`."""
    rows = [row for row in text.splitlines() if row.strip()]
    places = {(r, c): field for r, row in enumerate(rows) for c, field in enumerate(row)}
    if set(places.values()) - set("#-. $*@+"):
        raise EnvironmentFailure(f"sokoban: the level {text!r:.80} has fields other than # - . $ * @ +")

    def having(fields: str) -> frozenset[Place]:
        return frozenset(place for place, field in places.items() if field in fields)

    players = having("@+")
    if len(players) != 1 or not having("$*") or len(having("$*")) != len(having(".*+")):
        raise EnvironmentFailure(
            "sokoban: a level has one player, and as many boxes as targets (one or more)"
        )
    height, width = len(rows), max(map(len, rows))
    edge = {
        (r, c) for r in range(height) for c in range(width) if r in (0, height - 1) or c in (0, width - 1)
    }
    if not edge <= having("#"):
        raise EnvironmentFailure("sokoban: a level is a rectangle with a wall # all around")
    return Level(having("#"), having(".*+"), having("$*"), next(iter(players)), height, width)


def _solved(rng: random.Random, options: Sokoban.Arguments) -> Level | None:
    """A room with boxes on their targets and a player beside them; None when it is too full."""
    height, width = options.height, options.width
    inner = [(r, c) for r in range(1, height - 1) for c in range(1, width - 1)]
    room = {(r, c) for r in range(height) for c in range(width)}
    walls = (room - set(inner)) | {place for place in inner if rng.random() < options.walls}
    free = [place for place in inner if place not in walls]
    if len(free) < options.boxes + 2:
        return None
    *boxes, player = rng.sample(free, options.boxes + 1)
    targets = frozenset(boxes)
    return Level(frozenset(walls), targets, targets, player, height, width)


_OPPOSITE = {"L": "R", "R": "L", "U": "D", "D": "U"}


def _next(place: Place, move: str) -> Place:
    down, right = MOVES[move]
    return place[0] + down, place[1] + right
