"""The secret of a run, and the keys of its roles.

A run has 256 random bits in one file that only its owner may read. Only the launcher and the tools of the
same user use that file. The launcher derives `RoleKeys` for each process from it. With its keys a process
proves its own role and recognises other roles, but it cannot impersonate another role.

    secret = RunSecret.make(folder)              the launcher, once per run
    keys = secret.of("rollout")                  keys for a process of that role
    Server(…, access=keys), Client(…, server="buffer", access=keys)

Over a Unix socket a peer sends its role's password in the handshake (PLAIN), which is safe because no process
of another user can listen there. Over TCP both ends prove that they have the keys of their roles (CURVE),
because another process may have taken the port. `permissions.py` lists the requests of each role.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import msgspec
import zmq
import zmq.utils.z85 as z85

from areal_async.base.errors import EndpointError
from areal_async.base.own_files import NotOurs, read_own

FILE = "secret"
SIZE_BYTES = 32
KEYS_BYTES = 1 << 16

KeyRole = Literal["buffer", "trainer", "rollout", "evaluator", "reward", "supervisor", "cli"]
"""Role of a peer. `supervisor` is the process that runs the job, and `cli` is a person's command."""
ROLES: tuple[KeyRole, ...] = get_args(KeyRole)
CHUNKS = "chunks"
"""Name of the key that all servers of snapshot chunks share, because a client does not know which role serves
its chunks."""
CHUNK_SERVERS: frozenset[KeyRole] = frozenset({"trainer", "rollout", "evaluator"})
TOKENS: Mapping[str, frozenset[KeyRole]] = {"redis": frozenset({"buffer", "cli"})}
"""Roles that may use the servers of the run that need a token, by server."""


@dataclass(frozen=True)
class CurveKeys:
    """One side's CURVE key pair (Z85, 40 bytes each) and the keys that it trusts.

    A server's `trusted` are the public keys of accepted clients. A client's `trusted` is exactly the server's
    key.
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
        """Return the key pair that all processes with the 32 bytes of `seed` share. These processes trust
        only each other."""
        secret = z85.encode(seed)
        public = zmq.curve_public(secret)
        return cls(public, secret, (public,))

    def shown(self, endpoint: str, server: str) -> CurveKeys:
        """Return the proof that a client sends at `endpoint`."""
        return self

    def guard(self, endpoint: str, identity: str) -> Guard:
        """Return the guard of a server at `endpoint`."""
        return Guard(self, {z85.decode(key): "" for key in self.trusted}, {})


@dataclass(frozen=True)
class Password:
    """User and password that a client sends unencrypted. They are used only on addresses where no other
    user's process can listen."""

    user: bytes
    word: bytes = field(repr=False)

    def shown(self, endpoint: str, server: str) -> Password:
        return self

    def guard(self, endpoint: str, identity: str) -> Guard:
        return Guard(None, {}, {self.user: _digest(self.word)})


@dataclass(frozen=True)
class Guard:
    """The proof that a server demands: keys if it has any, otherwise passwords."""

    keys: CurveKeys | None
    known: Mapping[bytes, str]
    """Role by public key (32 bytes), or empty if roles are not distinguished."""
    digests: Mapping[bytes, bytes]
    """Digest of the password by user."""

    def role_of(self, mechanism: bytes, shown: list[bytes]) -> str | None:
        """Return the role that the proof belongs to, or None if the proof is not valid.

        The duration of the check does not depend on the password.
        """
        match mechanism, shown:
            case b"CURVE", [key] if self.keys is not None:
                return self.known.get(key)
            case b"PLAIN", [user, word] if self.keys is None:
                expected = self.digests.get(user, bytes(SIZE_BYTES))
                if hmac.compare_digest(_digest(word), expected):
                    return "" if user == b"run" else user.decode()
        return None


@dataclass(frozen=True)
class RunSecret:
    """All keys of a run. Two objects are equal if they contain the same secret.

    A server or client may use it as `access`. It then does not distinguish roles, which suits a server and a
    client in one process.
    """

    _bits: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> RunSecret:
        """Return a new secret, of a run or of a separate server."""
        return cls(secrets.token_bytes(SIZE_BYTES))

    @classmethod
    def make(cls, folder: Path) -> RunSecret:
        """Write a new secret into a folder of the run. Raises `FileExistsError` if the folder already has
        one."""
        made = cls.generate()
        write_private(folder / FILE, made._bits.hex().encode() + b"\n")
        return made

    @classmethod
    def read(cls, folder: Path) -> RunSecret:
        """Return the secret in the run's folder. Raises `EndpointError`."""
        path = folder / FILE
        try:
            bits = bytes.fromhex(read_own(path, max_bytes=1024).decode())
        except (OSError, ValueError, NotOurs) as error:
            raise EndpointError(f"the secret of the run cannot be read from {path}: {error}") from error
        if (size := len(bits)) != SIZE_BYTES:
            raise EndpointError(f"{path} holds no secret of a run: it has {size} bytes, not {SIZE_BYTES}")
        return cls(bits)

    def of(self, role: KeyRole) -> RoleKeys:
        """Return the keys for a process of this role."""
        own = [role, *([CHUNKS] if role in CHUNK_SERVERS else [])]
        return RoleKeys(
            role,
            secrets={name: self._pair(name).secret.decode() for name in own},
            publics={name: self._pair(name).public.decode() for name in (*ROLES, CHUNKS)},
            word=self._word(role).decode(),
            digests={other: _digest(self._word(other)).hex() for other in ROLES},
            tokens={name: self.token(name) for name, roles in TOKENS.items() if role in roles},
        )

    def token(self, server: str) -> str:
        """Return the token of 64 hexadecimal digits for clients of `server`."""
        return self._made_for(f"token {server}").hex()

    def shown(self, endpoint: str, server: str) -> CurveKeys | Password:
        return self._keys if is_tcp(endpoint) else self._password

    def guard(self, endpoint: str, identity: str) -> Guard:
        if is_tcp(endpoint):
            return self._keys.guard(endpoint, identity)
        roles = {role.encode(): _digest(self._word(role)) for role in ROLES}
        return Guard(None, {}, {**roles, self._password.user: _digest(self._password.word)})

    @cached_property
    def _password(self) -> Password:
        return Password(b"run", self.token("wire").encode())

    @cached_property
    def _keys(self) -> CurveKeys:
        return CurveKeys.shared(self._made_for("curve"))

    def _pair(self, name: str) -> CurveKeys:
        return CurveKeys.shared(self._made_for(f"curve {name}"))

    def _word(self, role: str) -> bytes:
        return self.token(f"word {role}").encode()

    def _made_for(self, use: str) -> bytes:
        return hashlib.blake2b(use.encode(), key=self._bits, digest_size=32).digest()


class RoleKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of a process of one role: its own secrets, and the public keys of other roles."""

    role: KeyRole
    secrets: dict[str, str]
    """Secret CURVE keys (Z85) of this process, by the name of the key: its role, or a server name."""
    publics: dict[str, str]
    """Public CURVE keys (Z85) of all names of keys."""
    word: str
    digests: dict[str, str]
    """Digests of the roles' passwords (hexadecimal)."""
    tokens: dict[str, str]

    def __repr__(self) -> str:
        return f"RoleKeys(role={self.role!r})"

    @classmethod
    def read(cls, path: Path) -> RoleKeys:
        """Return the keys in a file that `write` made. Raises `EndpointError`."""
        try:
            return msgspec.json.decode(read_own(path, max_bytes=KEYS_BYTES), type=cls)
        except (OSError, NotOurs, msgspec.DecodeError) as error:
            raise EndpointError(f"the keys of this process cannot be read from {path}: {error}") from error

    def of(self, role: KeyRole) -> RoleKeys:
        """Return these keys, like `RunSecret.of`, if they belong to `role`. Raises `EndpointError` for
        another role."""
        if role != self.role:
            raise EndpointError(f"a process of role {self.role} has no keys of role {role}")
        return self

    def write(self, path: Path) -> None:
        """Write the keys for this user alone. Raises `FileExistsError` if the file exists."""
        write_private(path, msgspec.json.encode(self))

    def token(self, server: str) -> str:
        """Return the token as `RunSecret.token` does. Raises `EndpointError` if this role may not use the
        server."""
        try:
            return self.tokens[server]
        except KeyError:
            raise EndpointError(f"a process of role {self.role} has no token for {server}") from None

    def shown(self, endpoint: str, server: str) -> CurveKeys | Password:
        """Return the proof that a client sends. Over TCP, `server` is the name of the key that the other end
        must have."""
        if not is_tcp(endpoint):
            return Password(self.role.encode(), self.word.encode())
        if server not in self.publics:
            raise EndpointError(f"nobody of this run serves as {server!r}: its key is not known")
        own = self._own(self.role)
        return CurveKeys(own.public, own.secret, (self.publics[server].encode(),))

    def guard(self, endpoint: str, identity: str) -> Guard:
        """Return the guard of a server with the key `identity`, by default its role's key."""
        digests = {role.encode(): bytes.fromhex(digest) for role, digest in self.digests.items()}
        if not is_tcp(endpoint):
            return Guard(None, {}, digests)
        known = {z85.decode(self.publics[role].encode()): role for role in ROLES}
        return Guard(self._own(identity or self.role), known, digests)

    def _own(self, name: str) -> CurveKeys:
        return CurveKeys(self.publics[name].encode(), self.secrets[name].encode())


RunAccess = RunSecret | RoleKeys
"""Keys of a process of a run: its role's keys, or all of the run's keys in tests."""
Access = RunAccess | CurveKeys | Password
"""Keys of one end of a connection: `RunAccess`, or a separate key pair or password."""


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner may read, for any umask. Raises `FileExistsError`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def is_tcp(endpoint: str) -> bool:
    """Return whether every process that reaches this host can connect."""
    return endpoint.startswith("tcp://")


def _digest(word: bytes) -> bytes:
    return hashlib.blake2b(word, digest_size=SIZE_BYTES).digest()
