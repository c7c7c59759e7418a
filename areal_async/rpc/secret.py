"""The secret of a run: what its processes know and nobody else, and what they make of it.

256 random bits in one file of the run's socket folder, which only its owner may enter and read. Each service
asks for a value of its own that is made of them: whoever learns one (an engine's server has its key in its
environment) learns nothing about the others.

    secret = RunSecret.make(socket_dir)          the supervisor, once per run
    secret = RunSecret.read(socket_dir)          everybody else: services by their context, tools by the run
    secret.token("redis")                        what a client shows, and a server compares

Over a Unix socket a peer shows `password` in the handshake (PLAIN: nobody listens in there); over TCP both
ends prove that they have `keys` (CURVE: the peer may be somebody else who took the port).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import zmq
import zmq.utils.z85 as z85

from areal_async.errors import EndpointError
from areal_async.ownfiles import NotOurs, read_own

FILE = "secret"
SIZE_BYTES = 32


@dataclass(frozen=True)
class CurveKeys:
    """One side's CURVE key pair (Z85, 40 bytes each) and whom it trusts.

    `trusted` of a server are the public keys of the clients it lets in; of a client, exactly the server's.
    """

    public: bytes
    secret: bytes = field(repr=False)
    trusted: tuple[bytes, ...] = ()

    @classmethod
    def generate(cls, trusted: tuple[bytes, ...] = ()) -> CurveKeys:
        public, secret = zmq.curve_keypair()
        return cls(public, secret, trusted)

    @classmethod
    def shared(cls, seed: bytes) -> CurveKeys:
        """The pair of everybody who knows the 32 bytes of `seed`; they trust each other and nobody else."""
        secret = z85.encode(seed)
        public = zmq.curve_public(secret)
        return cls(public, secret, (public,))


@dataclass(frozen=True)
class Password:
    """User and password that a client shows as they are: where nobody else can listen in."""

    user: bytes
    word: bytes = field(repr=False)

    def is_shown(self, user: bytes, word: bytes) -> bool:
        """Takes the same time whatever is shown."""
        return hmac.compare_digest(self.user, user) & hmac.compare_digest(self.word, word)


@dataclass(frozen=True)
class RunSecret:
    """What a run's processes have in common. Two of them are equal when they were read from one file."""

    _bits: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> RunSecret:
        """A new secret, of a run or a server of its own."""
        return cls(secrets.token_bytes(SIZE_BYTES))

    @classmethod
    def make(cls, socket_dir: Path) -> RunSecret:
        """A new secret, written into the run's socket folder. Raises `FileExistsError` where there is one."""
        made = cls.generate()
        fd = os.open(socket_dir / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(made._bits.hex() + "\n")
        return made

    @classmethod
    def read(cls, socket_dir: Path) -> RunSecret:
        """The secret of the run whose sockets are in `socket_dir`. Raises `EndpointError`."""
        path = socket_dir / FILE
        try:
            bits = bytes.fromhex(read_own(path, max_bytes=1024).decode())
        except (OSError, ValueError, NotOurs) as error:
            raise EndpointError(f"the secret of the run cannot be read from {path}: {error}") from error
        if len(bits) != SIZE_BYTES:
            raise EndpointError(
                f"{path} holds no secret of a run: it has {len(bits)} bytes, not {SIZE_BYTES}"
            )
        return cls(bits)

    def token(self, server: Literal["wire", "redis"]) -> str:
        """The 64 hexadecimal digits that clients of `server` show."""
        return self._made_for(f"token {server}").hex()

    @cached_property
    def password(self) -> Password:
        """What its processes show each other over Unix sockets."""
        return Password(b"run", self.token("wire").encode())

    @cached_property
    def keys(self) -> CurveKeys:
        """The CURVE pair that all processes of the run share."""
        return CurveKeys.shared(self._made_for("curve"))

    def _made_for(self, use: str) -> bytes:
        return hashlib.blake2b(use.encode(), key=self._bits, digest_size=32).digest()
