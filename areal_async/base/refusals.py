"""Errors in the answers of HTTP servers."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

MOST_SHOWN = 500  # Most characters of an answer in an error


def error_message(content: bytes) -> str:
    """Return the message in a server's error body, or else the body's beginning."""
    text = content.decode(errors="replace")
    value: Any = None
    with suppress(ValueError, RecursionError):
        value = json.loads(content)
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    return (value if isinstance(value, str) else text)[:MOST_SHOWN]
