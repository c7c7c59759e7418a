"""Requests that each role may send, in one table. The table also shows what the holder of a stolen key could
do.

A server with keys of roles (`RoleKeys`) checks each request against the role that the peer proved in the
handshake. Requests that are not in the table are refused for every role.
"""

from __future__ import annotations

from collections.abc import Mapping

from areal_async.rpc import control_messages as control
from areal_async.rpc import gateway_messages as gateway
from areal_async.rpc import home_messages as home
from areal_async.rpc import messages
from areal_async.rpc import weights_messages as weights
from areal_async.rpc.secret import ROLES, KeyRole

Roles = frozenset[KeyRole]

ALL: Roles = frozenset(ROLES)
GENERATORS: Roles = frozenset({"rollout", "evaluator"})
PEOPLE: Roles = frozenset({"supervisor", "cli"})
SERVICES: Roles = ALL - PEOPLE
ROLLOUT: Roles = frozenset({"rollout"})
REWARD: Roles = frozenset({"reward"})
TRAINER: Roles = frozenset({"trainer"})

CALLERS: Mapping[type, Roles] = {
    # to the buffer
    messages.Arrived: ROLLOUT | REWARD,
    **dict.fromkeys((messages.Lease, messages.Heartbeat, messages.Release, messages.PutEpisodes), ROLLOUT),
    messages.Drain: PEOPLE | ROLLOUT,  # a worker that ends drains itself
    messages.Claim: REWARD,
    messages.PutVerdicts: REWARD,
    **dict.fromkeys((messages.OpenTrainer, messages.NextBatch, messages.Commit), TRAINER),
    **dict.fromkeys(
        (messages.ExportLedger, messages.Checkpointed, messages.Fetch, messages.SeeTasks), TRAINER
    ),
    messages.FetchMedia: ROLLOUT | REWARD | TRAINER,
    messages.Stats: PEOPLE | TRAINER,
    # to the trainer's publisher, and to every server of snapshot chunks
    **dict.fromkeys((weights.WaitSnapshot, weights.AckSnapshot), GENERATORS),
    **dict.fromkeys((weights.FindSources, weights.GetChunk), GENERATORS),
    **dict.fromkeys((weights.AskTensors, weights.TakeBucket, weights.BreakGroup), ROLLOUT),
    weights.AskBuild: ROLLOUT,
    # between a worker and its gateway
    **dict.fromkeys((gateway.OpenSession, gateway.ServeAgents, gateway.EndSession), GENERATORS),
    **dict.fromkeys((gateway.Sample, gateway.RecordCalls, gateway.DropCall), GENERATORS),
    # to every service, and to the supervisor
    **dict.fromkeys((control.Status, control.ScaleWorkers, control.DrainWorker), PEOPLE),
    control.ReadMetrics: frozenset({"supervisor"}),
    **dict.fromkeys((control.WriteRecord, control.WriteSamples, home.ListHome, home.ReadHome), SERVICES),
    control.ReadRecords: SERVICES | PEOPLE,
    **dict.fromkeys((home.WriteHome, home.RemoveHome), TRAINER),
}


def may_ask(role: str, request: type) -> bool:
    """Return whether a peer of this role may send a request of this type."""
    return role in CALLERS.get(request, frozenset())
