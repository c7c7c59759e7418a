"""What a client of a reward server shows over ZMQ, before a message of its is taken.

With a token alone: user `reward` and the token as the password (PLAIN). Where the server has a CURVE key as
well: a key pair of which the secret is the SHA-256 of `areal-async reward client ` and the token. The ZMQ of
any language can do both.
"""

from __future__ import annotations

import hashlib

from areal_async.rpc.secret import CurveKeys, Password

USER = b"reward"
SEED = b"areal-async reward client "


def password_of(token: str) -> Password:
    return Password(USER, token.encode())


def client_keys(token: str) -> CurveKeys:
    """The pair of every client that has the token; it trusts nobody yet."""
    return CurveKeys.shared(hashlib.sha256(SEED + token.encode()).digest())
