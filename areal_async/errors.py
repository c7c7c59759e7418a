"""One exception hierarchy.

    ArealError ├── WireError                everything that can go wrong between two processes │   ├──
    EndpointError        an address cannot be served: busy, too long, not loopback and no keys │   ├──
    ProtocolError        bytes that are not a message of ours │   │   └── MessageTooLarge  a message beyond
    the limits, found before it is sent │   ├── RpcTimeout           no answer within the caller's deadline │
    ├── PeerGone             the connection was closed under the call │   └── FaultError           the
    service answered, with a `Fault` ├── InfrastructureFault      an agent, environment or workflow was let
    down by something else than the answer └── SnapshotError            a snapshot that is torn, mixed,
    corrupt or not there

A package that has more to say derives its own from `ArealError`. The text of every error is one
paragraph that a person can act on: it is what a service prints before it ends with status 1.
"""

from __future__ import annotations

from areal_async.rpc.schema import Fault, FaultKind


class ArealError(Exception):
    """Base of every error this project raises on purpose."""

    restart_helps: bool | None = None
    """Whether a service that ends with this error may do better when started again. None: if it has served
    before, for then its configuration was right."""

    exit_status = 1
    """Status with which a command ends that raises it (docs/cli.md)."""


class InfrastructureFault(ArealError):
    """An episode cannot go on, and its answers are not to blame: a service that an agent needs is away.
    Raised by an agent, environment or workflow, it leaves the episode without a score, to be tried again."""


class WireError(ArealError):
    """Base of everything that can go wrong between two processes."""

    restart_helps: bool | None = True


class EndpointError(WireError):
    """An address cannot be served or reached as configured."""

    restart_helps = None


class ProtocolError(WireError):
    """Bytes arrived that are not a message of ours."""


class MessageTooLarge(ProtocolError):
    """A message exceeds the limits of the wire; raised by the sender, before anything is sent."""


class RpcTimeout(WireError):
    """No answer within the deadline. `last_fault` is the last `busy` or `unavailable` on the way, if any."""

    def __init__(self, message: str, last_fault: Fault | None = None) -> None:
        super().__init__(message)
        self.last_fault = last_fault


class PeerGone(WireError):
    """The client was closed while the call was under way, or never connected."""


class FaultError(WireError):
    """A service's typed refusal. Handlers raise it to answer a `Fault`; clients raise it on receiving one."""

    def __init__(self, kind: FaultKind, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind: FaultKind = kind
        self.message = message
        if kind in ("schema", "invalid", "forbidden", "stale"):
            self.restart_helps = None
        elif kind == "failed":
            self.restart_helps = False
        self.retry_after_ms = retry_after_ms

    @classmethod
    def of(cls, fault: Fault) -> FaultError:
        return cls(fault.kind, fault.message, fault.retry_after_ms)

    def fault(self) -> Fault:
        return Fault(self.kind, self.message, self.retry_after_ms)


class SnapshotError(ArealError):
    """A snapshot that is torn, mixed, corrupt or missing: it must not be served."""


class WrongBase(SnapshotError):
    """A delta whose base is not the snapshot at hand: the full snapshot is needed."""


class RunError(ArealError):
    """Base of everything that keeps a run from starting or from finishing."""


class RunFolderError(RunError):
    """The run folder cannot be used: busy, finished before, or not ours."""


class RunFailed(RunError):
    """A service did not start, or ended before the job was done."""


class RunInterrupted(RunError):
    """A person or the system asked the run to stop."""
