"""The rule for secrets in every log, error, page, report and logger.

A job file has no secrets by design, and it is recorded and shown. Possible secrets are still removed from
everything that other people see. A list of names of secrets is never complete, so all texts in certain places
are hidden, such as texts in arguments of parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

HIDDEN = "…"
"""Text that replaces a possible secret."""
_SECRET_NAME = re.compile(
    r"secret|passw|passphrase|credential|cookie|bearer|signature|session|private|token(?!s)|apikey|"
    r"(?<![a-z])(auth[a-z]*|pass|pwd|pat|dsn|sig|keys?|certs?|otp|pin|logins?|headers?|env)(?![a-z])",
    re.IGNORECASE,
)
_SECRET_TEXT = re.compile(
    r"-----BEGIN|\b(bearer|basic)\s+\S{8}|\beyJ[\w-]{8,}\.|"
    r"(?<![\w/.+-])(?=[\w+=-]*[0-9])(?=[\w+=-]*[A-Za-z])[\w+=-]{32,}(?![\w/.+-])",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"(?<=://)[^/?#\s\"]*@")  # up to the last @, because a password may contain one
_IN_QUERY = re.compile(r"(?<=[?&])([\w.-]+)=([^&#\s\"]+)")


def is_secret(name: str, value: object) -> bool:
    """Return whether a value may be a secret, by its name or by its form. Numbers are never secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return isinstance(value, str) and bool(_SECRET_NAME.search(words) or _SECRET_TEXT.search(value))


def without_logins(text: str) -> str:
    """Return the text without user, password and other possible secrets in its URLs."""
    if "://" not in text:
        return text
    text = _LOGIN.sub(f"{HIDDEN}@", text) if "@" in text else text
    return _IN_QUERY.sub(lambda each: f"{each[1]}={HIDDEN}" if is_secret(each[1], each[2]) else each[0], text)


def shown(content: Mapping[str, Any], section: Any) -> dict[str, Any]:
    """Return a section's values for people other than the author, without texts that may be secrets.

    `section` is the configuration section that declares the fields. Declared fields have no secret by design
    and are shown unless `is_secret` returns True. A text in a mapping with free content, such as the
    arguments of a part, is never shown. `section` is None for such a mapping. Numbers, switches and nulls are
    always shown.
    """
    found: dict[str, Any] = {}
    for name, value in content.items():
        info = section.model_fields.get(name) if section is not None else None
        kinds = types_of(info.annotation) if info is not None else ()
        inner = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
        declared = info is not None and not {dict, Any} & {*kinds}
        if section is not None and name == "policies" and isinstance(value, Mapping):
            found[name] = {policy: shown(own, section) for policy, own in value.items()}
        else:
            found[name] = _shown(name, value, inner, declared)
    return found


def _shown(name: str, value: Any, inner: Any, declared: bool) -> Any:
    if isinstance(value, Mapping):
        return shown(value, inner)
    if isinstance(value, list | tuple):
        return [_shown(name, each, inner, declared) for each in value]
    if not isinstance(value, str) or not value:
        return value
    return without_logins(value) if declared and not is_secret(name, value) else HIDDEN


def types_of(annotation: Any) -> tuple[Any, ...]:
    """Return the types within an annotation."""
    return (annotation, *(each for inner in get_args(annotation) for each in types_of(inner)))
