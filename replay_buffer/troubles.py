"""What the buffer's log says of verdicts that were no score: each kind at once, then now and then."""

from __future__ import annotations

from collections.abc import Mapping

from areal_async.runtime.log import NO_SCORES, get_logger
from replay_buffer.ledger.records import Meta, NoScores

REPEAT_MS = 20_000
"""How often one kind is said again while it goes on."""

log = get_logger("buffer")


class NoScoreLog:
    """`look` at the figures of the ledger every second or so. What was there at the first look is old."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[int, int]] | None = None
        """By kind: how many had come when it was said last, and when."""

    def look(self, meta: Meta, now_ms: int) -> None:
        if self._said is None:
            self._said = {kind: (note.count, now_ms - REPEAT_MS) for kind, note in meta.no_scores.items()}
        for kind, note in meta.no_scores.items():
            count, at_ms = self._said.get(kind, (0, now_ms - REPEAT_MS))
            if note.count != count and now_ms - at_ms >= REPEAT_MS:
                self._said[kind] = (note.count, now_ms)
                _say(kind, note)
        self._forget(meta.no_scores)

    def _forget(self, known: Mapping[str, NoScores]) -> None:
        self._said = {kind: said for kind, said in (self._said or {}).items() if kind in known}


def _say(kind: str, note: NoScores) -> None:
    # In this order the line of a terminal ends with the long text.
    log.warning(NO_SCORES, kind=kind, count=note.count, episode_id=note.episode_id, message=note.message)
