"""An answer's text as it grows: only what can no longer turn out to be something else is let out.

Held back are half a character, what may be the beginning of a stop text or of a tool call, and everything
from a tool call on. What was let out is a beginning of the finished answer's content.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout_service.gateway.requests import Ids
from rollout_service.gateway.template import ChatTemplate

_HALF = "\N{REPLACEMENT CHARACTER}"


class StreamedText:
    """Lets out the text of one answer."""

    def __init__(self, template: ChatTemplate, stop: Sequence[str], markers: Sequence[str]) -> None:
        self._template = template
        self._ends = (*stop, *markers)
        self._ids: list[int] = []
        self._settled = 0
        """Ids whose text is in `_text`."""
        self._context = 0
        """Where decoding starts, so that a tokenizer's treatment of a text's beginning falls on known ids."""
        self._text = ""
        self._given = ""
        self._over = False

    def grow(self, ids: Sequence[int] | Ids) -> str:
        """Take further ids; returns the content that is certain now and was not before."""
        if self._over:
            return ""
        marker = self._template.marker_at(ids)
        self._ids += [int(i) for i in ids[:marker]]
        known = self._template.decode(self._ids[self._context : self._settled], special=False)
        now = self._template.decode(self._ids[self._context :], special=False)
        if now.endswith(_HALF) or len(now) <= len(known):
            self._over = marker < len(ids)
            return ""
        self._text += now[len(known) :]
        self._context, self._settled = self._settled, len(self._ids)
        certain = self._text[: self._certain()]
        self._over = self._over or marker < len(ids)
        # White space alone may be what stands before a tool call, which then has no content.
        if not certain.strip() or not certain.startswith(self._given):
            return ""
        new, self._given = certain[len(self._given) :], certain
        return new

    def rest(self, content: str) -> str:
        """What is left to be said of the finished answer's content."""
        self._over = True
        return content[len(self._given) :] if content.startswith(self._given) else ""

    def _certain(self) -> int:
        """How much of the text cannot belong to a stop text or a tool call."""
        starts = [at for end in self._ends if (at := self._text.find(end)) >= 0]
        if starts:
            self._over = True
            return min(starts)
        return len(self._text) - self._doubtful()

    def _doubtful(self) -> int:
        longest = max((len(end) for end in self._ends), default=1) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            tail = self._text[-size:]
            if any(end.startswith(tail) for end in self._ends):
                return size
        return 0
