"""Frozen lake: walk over the ice from the start to the goal without falling into a hole.

    workflow_args: {environment: examples/environments/frozenlake.py:FrozenLake, environment_args: {size: 4}}

Fields: `S` start, `F` ice, `H` hole, `G` goal; `A` is the player. Moves: `L`, `R`, `U`, `D`; the last of
these letters in the answer counts, a word (`left`) too. 1 at the goal, 0 otherwise; a hole ends it. Moving
into the edge stays. Slippery ice: the move goes as asked, or to either side of it, with a third each.

`extra_info.map` of a task (rows joined by newlines or `/`) gives the map.
"""

from __future__ import annotations

import random
import re
from collections import deque
from typing import Any

from areal_async import Step, Task

Place = tuple[int, int]

MOVES: dict[str, Place] = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
"""The moves in order around the player: the neighbours of a move in this order are its two sides."""
WORD = re.compile(r"\b(left|right|up|down)\b", re.IGNORECASE)


class FrozenLake:
    blocking = False

    def __init__(
        self,
        size: int = 4,
        holes: float = 0.25,
        slippery: bool = False,
        max_moves: int = 32,
        later: str = "map",
        terse: bool = False,
        invalid: float = 0.0,
    ) -> None:
        """`holes` is the chance of one in a field; `later` says what a move is answered with, the `map` or
        the `position` (row and column as two digits); `terse` leaves every word out; `invalid` is the reward
        of an answer that is no move."""
        if not 2 <= size <= 10 or not 0 <= holes <= 0.6 or later not in ("map", "position"):
            raise ValueError("size is 2 to 10, holes 0 to 0.6, later map or position")
        self.size, self.holes, self.slippery, self.max_moves = size, holes, slippery, max_moves
        self.later, self.terse, self.invalid = later, terse, invalid
        self.rows: list[str] = []
        self.at: Place = (0, 0)
        self._moves = 0
        self._luck = random.Random(0)

    def reset(self, seed: int, task: Task) -> str:
        level = task.extra_info.get("seed", seed)
        given = task.extra_info.get("map")
        self.rows = read_map(given) if given else draw_map(level, self.size, self.holes)
        self.at = next((r, row.index("S")) for r, row in enumerate(self.rows) if "S" in row)
        self._moves = 0
        self._luck = random.Random(f"{seed}/ice")
        if self.terse:
            return self._map("") + ":" + (self._place() if self.later == "position" else "")
        return (
            "You are A on a frozen lake. Reach G without falling into a hole H. Answer with one move: L, R, "
            f"U or D.\n{self._map(chr(10))}\n"
        )

    def state(self) -> str:
        return f"{'/'.join(self.rows)} {self.at}"

    def step(self, action: str) -> Step:
        move = move_of(action)
        self._moves += 1
        if move is None:
            out = self._moves >= self.max_moves
            problem = {"problem": "no move"}
            return Step(self._seen("" if out else "Answer L, R, U or D. "), self.invalid, out, problem)
        if self.slippery:
            order = list(MOVES)
            move = order[(order.index(move) + self._luck.choice((-1, 0, 1))) % 4]
        self.at = moved(self.rows, self.at, move)
        field = self.rows[self.at[0]][self.at[1]]
        if field in "HG":
            return Step(self._seen(), float(field == "G"), True, {"ended_on": field})
        return Step(self._seen(), 0.0, self._moves >= self.max_moves)

    def _seen(self, note: str = "") -> str:
        if self.later == "position":
            return self._place()
        return self._map("") + ":" if self.terse else f"{note}\n{self._map(chr(10))}\n"

    def _place(self) -> str:
        return f"{self.at[0]}{self.at[1]}"

    def _map(self, joint: str) -> str:
        row, column = self.at
        line = self.rows[row]
        shown = [*self.rows[:row], f"{line[:column]}A{line[column + 1 :]}", *self.rows[row + 1 :]]
        return joint.join(shown)


def move_of(text: str) -> str | None:
    """The last move named in a text. Words count before letters, so that `Right` is not its own R alone."""
    if words := WORD.findall(text):
        return str(words[-1][0]).upper()
    return next((letter for letter in reversed(text) if letter in MOVES), None)


def moved(rows: list[str], at: Place, move: str) -> Place:
    """Where a move that does not slip ends."""
    down, right = MOVES[move]
    return min(max(at[0] + down, 0), len(rows) - 1), min(max(at[1] + right, 0), len(rows[0]) - 1)


def distances(rows: list[str]) -> dict[Place, int]:
    """Fewest moves to the goal from every field but holes that can reach it (without slipping)."""
    goal = next((r, row.index("G")) for r, row in enumerate(rows) if "G" in row)
    found, queue = {goal: 0}, deque([goal])
    while queue:
        here = queue.popleft()
        for move in MOVES:
            # Moves are symmetric: what one step from here reaches is one step away.
            there = moved(rows, here, move)
            if there not in found and rows[there[0]][there[1]] != "H":
                found[there] = found[here] + 1
                queue.append(there)
    return found


def draw_map(seed: int, size: int, holes: float) -> list[str]:
    """Rows of a map whose goal can be reached from the start; a function of its arguments alone."""
    rng = random.Random(seed)
    for _ in range(10_000):
        fields = ["H" if rng.random() < holes else "F" for _ in range(size * size)]
        fields[0], fields[-1] = "S", "G"
        rows = ["".join(fields[start : start + size]) for start in range(0, size * size, size)]
        if (0, 0) in distances(rows):
            return rows
    raise ValueError(f"frozenlake: no map with a way was found at holes = {holes}: lower it")


def read_map(given: Any) -> list[str]:
    """A map of one's own. Raises ValueError."""
    rows = str(given).replace("/", "\n").split()
    fields = "".join(rows)
    if set(map(len, rows)) != {len(rows[0])} or fields.count("S") != 1 or fields.count("G") != 1:
        raise ValueError(f"frozenlake: {given!r:.80} is no map: rows of one length, one S and one G")
    if set(fields) - set("SFHG"):
        raise ValueError(f"frozenlake: the map {given!r:.80} has fields other than S, F, H and G")
    return rows
