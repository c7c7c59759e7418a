"""Which role may make which request: all of it in one table, for whoever wants to know what a stolen key
opens.

A server whose access are the keys of a role (`RoleKeys`) asks here for each request, with the role that the
asker has proven in the handshake. What is not in the table nobody may ask.
"""

from __future__ import annotations

from collections.abc import Mapping

from areal_async.rpc import control_messages, gateway_messages, home_messages, messages, weights_messages
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
    messages.Lease: ROLLOUT,
    messages.Heartbeat: ROLLOUT,
    messages.Release: ROLLOUT,
    messages.PutEpisodes: ROLLOUT,
    messages.Drain: PEOPLE | ROLLOUT,  # a worker that ends drains itself
    messages.Claim: REWARD,
    messages.PutVerdicts: REWARD,
    messages.OpenTrainer: TRAINER,
    messages.NextBatch: TRAINER,
    messages.Fetch: TRAINER | PEOPLE,
    messages.Commit: TRAINER,
    messages.ExportLedger: TRAINER,
    messages.Checkpointed: TRAINER,
    messages.Stats: PEOPLE | TRAINER,
    messages.SeeLedger: PEOPLE,
    messages.SeeTasks: PEOPLE | TRAINER,
    # to the trainer's publisher, and to whoever has chunks of a snapshot
    weights_messages.WaitSnapshot: GENERATORS,
    weights_messages.AckSnapshot: GENERATORS,
    weights_messages.FindSources: GENERATORS,
    weights_messages.GetChunk: GENERATORS,
    weights_messages.AskTensors: ROLLOUT,
    weights_messages.TakeBucket: ROLLOUT,
    weights_messages.BreakGroup: ROLLOUT,
    # between a worker and its gateway
    gateway_messages.OpenSession: GENERATORS,
    gateway_messages.ServeAgents: GENERATORS,
    gateway_messages.EndSession: GENERATORS,
    gateway_messages.Sample: GENERATORS,
    gateway_messages.TakePieces: GENERATORS,
    gateway_messages.RecordCall: GENERATORS,
    gateway_messages.DropCall: GENERATORS,
    gateway_messages.CountCalls: GENERATORS,
    # to every service, and to the supervisor
    control_messages.Status: PEOPLE,
    control_messages.ReadMetrics: frozenset({"supervisor"}),
    control_messages.WriteRecord: SERVICES,
    control_messages.WriteSamples: SERVICES,
    control_messages.ReadRecords: SERVICES | PEOPLE,
    home_messages.ListHome: SERVICES,
    home_messages.ReadHome: SERVICES,
    home_messages.WriteHome: TRAINER,
    home_messages.RemoveHome: TRAINER,
    control_messages.ScaleWorkers: PEOPLE,
    control_messages.DrainWorker: PEOPLE,
}


def may_ask(role: str, request: type) -> bool:
    """Whether a peer of this role may make a request of this type."""
    return role in CALLERS.get(request, frozenset())
