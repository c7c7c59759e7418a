"""Search for fenced blocks in a response, and the choice of the program among them.

All rewards for programs share this module. It is pure, and its cost is linear in the length of the response.
Blocks are parsed as in CommonMark, including blocks in lists and quotes. Blocks in thoughts do not count (see
`answers.py`).
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Collection, Sequence
from typing import NamedTuple

from areal_async.models.answers import spoken
from reward_service.verifiers.cases import DEFINITIONS

CONTAINER = r"(?P<before>[ \t]*+(?:(?:>|(?:[-*+]|\d{1,9}[.)])[ \t])[ \t]*+)*+)"
"""Pattern for white space and for markers of lists and quotes before a fence."""
OPENING = re.compile(
    rf"^{CONTAINER}(?P<fence>`{{3,}}+|~{{3,}}+)[ \t]*+(?P<tag>[A-Za-z0-9_+#.-]*+)[^<`\n]*+$", re.MULTILINE
)
"""Pattern for an opening fence. All quantifiers are possessive, so that a line is read only once."""
IN_LINE = re.compile(r"(?<=\S)[ \t]++(```[A-Za-z0-9_+#.-]++)$", re.MULTILINE)
"""Pattern for a fence after other text on its line, as some models write it."""
LONGEST = 200_000  # characters at the end of a response that are searched for blocks
DEEPER = 3  # columns by which a closing fence may be indented deeper than the opening one
QUOTED = re.compile(r"^[ \t]*+>[ \t]?", re.MULTILINE)
CONSOLE = re.compile(r"\s*(?:>>>|\$|In ?\[\d*\]:)(?:\s|$)")
"""Pattern for the beginning of a console session, which shows how a program is used but is not a program."""
PYTHON = re.compile(r"(?:.*\.)?(?:python|py|pypy|cpython)(?:[-_.]?\d[\d.]*)?")
"""Pattern for the tag of a Python program, possibly with a version or as a file name."""
LOOKS_LIKE = re.compile(r"[\w\])]\s*\(|\b(?:def|class|import|lambda)\b")
"""Pattern for text that is in every Python program, but rarely in an example of output."""
ACTIVE = (*DEFINITIONS, ast.Call, ast.Lambda)


class Block(NamedTuple):
    """A fenced block of a response."""

    language: str
    """Tag of the fence in lower case, or empty."""
    text: str


def blocks(response: str) -> list[Block]:
    """Return the fenced blocks in order, without the indentation and marks of lists or quotes around them.

    A block without an end extends to the end of the text, because responses are often cut at their length
    limit.
    """
    response = spoken(response)[-LONGEST:].replace("\r\n", "\n")
    if not any(opening["tag"] for opening in OPENING.finditer(response)):
        response = IN_LINE.sub(r"\n\1", response)
    found = []
    at = 0
    while (opening := OPENING.search(response, at)) is not None:
        fence, before = opening["fence"], opening["before"]
        closing = rf"{re.escape(fence[0])}{{{len(fence)},}}+[ \t]*+$"
        margin = r"[ \t>]*+" if ">" in before else rf"[ \t]{{0,{len(before) + DEEPER}}}+"
        # A deeper fence belongs to the program, for example to a docstring, unless it is the only one.
        end = re.compile(f"^{margin}{closing}", re.MULTILINE).search(response, opening.end())
        at = end.end() if end else len(response)
        end = end or re.compile(rf"[ \t]*+{closing}", re.MULTILINE).search(response, opening.end())
        text = response[opening.end() + 1 : end.start() if end else len(response)]
        found.append(Block(opening["tag"].lower(), _outside_of(before, text)))
    return found


def _outside_of(container: str, text: str) -> str:
    """Return the text of a block without the marks of the surrounding quote and the indentation of the
    surrounding list."""
    if not container:
        return text
    if ">" in container:
        text = QUOTED.sub("", text)
    dedented = textwrap.dedent(text)
    if dedented != text or ">" in container:
        return dedented
    return re.sub(rf"^[ \t]{{0,{len(container)}}}+", "", text, flags=re.MULTILINE)


def program_of(response: str | Sequence[Block], *, defines: Collection[str] = ()) -> Block | None:
    """Return the Python program in a response or its blocks.

    Blocks are chosen in this order:

    - a block with a tag of Python: the one that defines most of the names `defines`; among equals, one that
      calls or defines anything; among equals, the last
    - the last block without a tag that looks like a Python program
    - the last block with another tag that looks like a Python program
    - the last block without a tag

    Console sessions and empty blocks are never programs. The `language` of the result is `python` if the
    block has a tag of Python, and otherwise empty.
    """
    found = blocks(response) if isinstance(response, str) else response
    latest = [one for one in reversed(found) if one.text.strip() and not CONSOLE.match(one.text)]
    fitting = [one.text for one in latest if PYTHON.fullmatch(one.language)]
    if fitting:
        best = max(fitting, key=lambda text: (_defined(text, defines), LOOKS_LIKE.search(text) is not None))
        return Block("python", best)
    untagged = [one for one in latest if not one.language]
    others = [one for one in latest if one.language]
    likely = (one.text for one in (*untagged, *others) if looks_like_python(one.text))
    text = next(likely, untagged[0].text if untagged else None)
    return None if text is None else Block("", text)


def _defined(text: str, names: Collection[str]) -> int:
    """Return how many of `names` a Python program defines."""
    name = f"({'|'.join(map(re.escape, names)) or '(?!)'})"
    definition = rf"^[ \t]*+(?:(?:async[ \t]+)?(?:def|class)[ \t]+{name}\b|{name}[ \t]*[:=])"
    return len({one or two for one, two in re.findall(definition, text, re.MULTILINE)})


def looks_like_python(text: str) -> bool:
    """Return whether a text may be a Python program, rather than the output or the start command of a
    program."""
    if LOOKS_LIKE.search(text) is None:
        return False
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ACTIVE) for node in ast.walk(tree))
