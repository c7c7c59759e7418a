"""Programs in a response: its fenced blocks."""

from __future__ import annotations

import re
from typing import NamedTuple

OPENING = re.compile(r"^[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([A-Za-z0-9_+#.-]*+)[^<`\n]*+$", re.MULTILINE)
"""Possessive throughout: what one part has taken no other tries again, so a line is read once."""
LONGEST = 200_000
"""Characters of a response that are looked at, from its end."""


class Block(NamedTuple):
    language: str
    """As the fence says, in small letters; empty where it says nothing."""
    text: str


def blocks(response: str) -> list[Block]:
    """The fenced blocks in their order. A block that is never closed goes to the end: a response cut at its
    length limit often ends so."""
    response = response[-LONGEST:].replace("\r\n", "\n")
    found = []
    at = 0
    while (opening := OPENING.search(response, at)) is not None:
        fence = opening.group(1)
        closing = re.compile(rf"^[ \t]*+{re.escape(fence[0])}{{{len(fence)},}}+[ \t]*+$", re.MULTILINE)
        end = closing.search(response, opening.end())
        text = response[opening.end() + 1 : end.start() if end else len(response)]
        found.append(Block(opening.group(2).lower(), text))
        at = end.end() if end else len(response)
    return found


def program_of(response: str, *, extract: str) -> Block | None:
    """The program: the last fenced block that is not empty, or with `extract` `whole` all of the response."""
    if extract == "whole":
        return Block("", response) if response.strip() else None
    return next((block for block in reversed(blocks(response)) if block.text.strip()), None)
