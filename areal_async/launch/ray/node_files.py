"""Files of a run that are copied home from the nodes of its Ray cluster (`buffer_files.py`).

At an orderly end, these are the files of the buffer. If the supervisor was killed, a resume first copies the
files that the run left on its nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from areal_async.base.errors import RunError
from areal_async.base.log import get_logger
from areal_async.base.own_files import NotBeneath
from areal_async.base.topology import Topology
from areal_async.launch.buffer_files import (
    BufferNode,
    Part,
    append_rest,
    expect_loss,
    fetch_buffer,
    lie_at_home,
)
from areal_async.launch.ray.actor import answer_of, call, new_actor
from areal_async.launch.ray.orders import FileNews

HOME = "home"
"""Node id of the supervisor's host. No process of the run shares its memory."""
KEEP_S = 40.0  # Longest time to copy the buffer's files home; later they stay on their node for a resume
PIECE_S = 120.0  # Longest wait for one piece of a file that a run left on a node
REMOVE_S = 8.0

log = get_logger("launcher")


class NodeFiles:
    """Copies files home: `recover` before a run is placed, `keep` at its end.

    `tell` shows a line of text to the user. `may_carry` raises `RunError` if Ray must not transport the run's
    data between this host and an address."""

    def __init__(self, run_dir: Path, tell: Callable[[str], None], may_carry: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._tell = tell
        self._may_carry = may_carry

    def keep(self, actor: Any) -> bool:
        """Copy the files of the buffer home from its actor, and return whether this succeeded."""
        deadline_s = time.monotonic() + KEEP_S

        def pull(have: dict[str, int]) -> list[FileNews]:
            return _pieces(call(actor, "kept", have), max(0.0, deadline_s - time.monotonic()))

        try:
            fetch_buffer(self._run_dir, pull)
        except (RayError, RunError, OSError, ValueError) as error:
            log.warning("the files of the buffer stay on their node for a resume", error=str(error))
            return False
        return True

    def recover(self, topology: Path | None) -> None:
        """Copy the files home that the earlier life of the run left on its nodes, after its supervisor was
        killed.

        These are the files of its buffer and, if its topology is given, the end of its event logs. Raises
        `RunError`."""
        node = BufferNode.read(self._run_dir)
        if (
            node is not None
            and not lie_at_home(self._run_dir)
            and not self._take(node.node_id, node.address, node.folder, "buffer")
        ):
            expect_loss(self._run_dir, node)
            self._tell(
                f"the buffer's files are in {node.folder} of {node.address}, which this cluster does not "
                "reach: what was acknowledged since the newest checkpoint is done again, and counted as lost"
            )
        if topology is not None and topology.exists():
            before = msgspec.json.decode(topology.read_bytes(), type=Topology)
            for host in before.hosts.values() if before.home == HOME else ():
                if host.node_id != HOME:
                    self._take(host.node_id, host.address, host.run_dir, "events")

    def _take(self, node_id: str, address: str, folder: str, part: Part) -> bool:
        """Copy the files of a part home from a node. Return whether there were any.

        A node that was restarted has another id and the same address."""
        alive = alive_nodes()
        there = [each for each in alive if each["NodeID"].startswith(node_id)] or [
            each for each in alive if each["NodeManagerAddress"] == address
        ]
        if not there:
            return False
        self._may_carry(there[0]["NodeManagerAddress"])
        on_it = NodeAffinitySchedulingStrategy(there[0]["NodeID"], soft=False)
        actor = new_actor(f"left.{part}.{node_id}", {"num_cpus": 0, "scheduling_strategy": on_it})

        def pull(have: dict[str, int]) -> list[FileNews]:
            return _pieces(call(actor, "left", folder, part, have), PIECE_S)

        try:
            if part == "events":
                return append_rest(self._run_dir, part, pull)
            if found := fetch_buffer(self._run_dir, pull):
                self._tell(f"the buffer's files came from {address}, where the run before had left them")
                ray.get(call(actor, "remove_left"), timeout=REMOVE_S)
            return found
        except (RayError, NotBeneath) as error:
            problem = f"{part} in {folder} of {address} did not come: {first_line(error)}"
            raise RunError(f"{problem}. Resume again once that host answers") from error
        finally:
            ray.kill(actor)


def alive_nodes() -> list[Mapping[str, Any]]:
    """Return the nodes that Ray considers alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _pieces(asked: Any, limit_s: float) -> list[FileNews]:
    return answer_of(ray.get(asked, timeout=limit_s), list[FileNews])
