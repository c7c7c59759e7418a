"""Sokoban: push every box onto a target.

    workflow_args: {environment: examples/environments/sokoban.py:Sokoban, environment_args: {boxes: 2}}

Fields: `#` wall, `-` floor, `.` target, `$` box, `*` box on a target, `@` player, `+` player on a target.
Moves: `L`, `R`, `U`, `D`; the last of these letters in the answer counts. A move into a box pushes it if
the field behind is free, else nothing moves. 1 when all boxes are on targets, and it is over.

A level is made backward from its solution: boxes on targets are pulled about, so it can be solved by the same
moves in reverse. `extra_info.seed` of a task decides its level.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from areal_async import Step, Task

Place = tuple[int, int]
MOVES: dict[str, Place] = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}


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

    def __init__(
        self,
        width: int = 6,
        height: int = 6,
        boxes: int = 1,
        walls: float = 0.1,
        pulls: int = 8,
        max_moves: int = 64,
    ) -> None:
        """`walls` is the chance of one in an inner field; the more `pulls` of the backward play, the harder a
        level is."""
        self.options = {"width": width, "height": height, "boxes": boxes, "walls": walls, "pulls": pulls}
        self.max_moves = max_moves
        self.level = Level(frozenset(), frozenset(), frozenset(), (0, 0), 0, 0)
        self._moves = 0

    def reset(self, seed: int, task: Task) -> str:
        self.level = draw_level(task.extra_info.get("seed", seed), **self.options)[0]
        self._moves = 0
        return (
            "Push every box $ onto a target . by walking into it; you are @. Answer with one move: L, R, "
            f"U or D.\n{self.level.text()}\n"
        )

    def state(self) -> str:
        return self.level.text()

    def step(self, action: str) -> Step:
        self._moves += 1
        move = next((letter for letter in reversed(action) if letter in MOVES), None)
        if move is not None:
            self.level = self.level.pushed(move)
        note = "" if move else "Answer L, R, U or D."
        out = self.level.solved or self._moves >= self.max_moves
        return Step(
            f"{note}\n{self.level.text()}\n", float(self.level.solved), out, {"solved": self.level.solved}
        )


def draw_level(
    seed: int, *, width: int, height: int, boxes: int, walls: float, pulls: int
) -> tuple[Level, str]:
    """(a level, moves that solve it); a function of its arguments alone. Raises ValueError where no
    level is found."""
    rng = random.Random(seed)
    for _ in range(2_000):
        level = _solved(rng, height, width, boxes, walls)
        if level is None:
            continue
        way = ""
        for _ in range(pulls):
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
    raise ValueError(
        f"no level of {width}×{height} with {boxes} boxes was found: make it larger, or raise pulls"
    )


def _solved(rng: random.Random, height: int, width: int, n_boxes: int, share: float) -> Level | None:
    """A room with boxes on their targets and a player beside them; None when it is too full."""
    inner = [(r, c) for r in range(1, height - 1) for c in range(1, width - 1)]
    room = {(r, c) for r in range(height) for c in range(width)}
    walls = (room - set(inner)) | {place for place in inner if rng.random() < share}
    free = [place for place in inner if place not in walls]
    if len(free) < n_boxes + 2:
        return None
    *boxes, player = rng.sample(free, n_boxes + 1)
    targets = frozenset(boxes)
    return Level(frozenset(walls), targets, targets, player, height, width)


_OPPOSITE = {"L": "R", "R": "L", "U": "D", "D": "U"}


def _next(place: Place, move: str) -> Place:
    down, right = MOVES[move]
    return place[0] + down, place[1] + right
