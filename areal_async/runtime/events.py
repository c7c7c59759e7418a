"""The event log: what each process of a run knows to have happened, for a checker that reads it afterwards.

Off unless `observe.event_log` is set. Then every process appends to `run_dir/events/<process>-<pid>.jsonl`,
one JSON object per line and one `write` per event, before it goes on: a line written survives SIGKILL of its
process. A last line without its newline was cut off by the kill and is to be ignored.

Every event has
    event    its kind, below            process  name of the process, e.g. "rollout-0"
    n        0, 1, 2, … in this file    pid      its process id
    time_s   unix time                  mono_s   CLOCK_MONOTONIC: comparable between processes of one host
Ids are those of the wire: group "<task_id>#<attempt>", episode "<group_id>.<sample>". A version is written as
two fields, `epoch` (the trainer's) and `version`.

buffer (file "buffer-<pid>")
    loaded     a front has taken over the ledger: front_epoch, revision, trainer_epoch, v_train, checkpoint,
               position, idle_ms, lost_writes, groups {group_id: [STATE, step, [stored samples]]}. This is the
               whole truth of that moment. `revision` counts the writes.
    decided    written BEFORE the write is sent to Redis: front_epoch, revision (the one it was decided at),
               command, v_train, trainer_epoch, checkpoint, position (each as after it), and where not empty
               moved     {group_id: [FROM, TO, step]}; FROM "" for a new group, TO "" for a group that ended:
                         as COMMITTED when FROM is TRAINED (BATCHED where an older ledger
                         met a checkpoint that covers it) and `counts` has "committed", else as DROPPED
               stored    [[episode_id, min_epoch, min_version, max_version], …] newly acknowledged episodes
               unstored  [episode_id, …] stored before, missing after (masked, or abandoned by a copy)
               batches   {step: [group_id, …]}, or null for a step forgotten by the redo log
               counts    {reason: how many} transitions of this decision
               A decision is true iff `confirmed` names a later revision under the same front_epoch, or the
               next `loaded` (of a higher front_epoch) has a revision above it. All else never happened.
    confirmed  front_epoch, revision: Redis has confirmed every write before this revision. Written before any
               reply that depends on it is sent.
rollout-<i>
    served     replica, epoch, version: this engine of the worker's serves these weights from now on; written
               when they are loaded and before the first unit is sampled from them
    leased     lease_id, group_id, missing [samples], epoch, version (as served when the lease was asked for)
    put        lease_id, group_id, samples: about to be sent (again)
    put_acked  lease_id, group_id, stored [samples], refused [[item, reason], …], durability. From here on no
               stored episode may be lost.
    lease_lost lease_id, reason
reward
    claimed         claims [[episode_id, claim_id], …]
    verdicts        items [[episode_id, claim_id, kind, value or null], …]: about to be sent (again)
    verdicts_acked  items [[episode_id, claim_id], …] taken, refused [[item, reason], …]
trainer
    restored      step, folder: the checkpoint it goes on from; not written when it begins at version 0
    opened        epoch, step
    batched       epoch, step, groups [group_id, …], episodes [[episode_id, min_version], …], in their order
    trained       epoch, step: the optimizer has used exactly the batch of the last `batched` of this step
    published     epoch, version, manifest_hash, final, same_as [earlier epochs that had the same weights as
                  this version: what was sampled from theirs stays true]
    committed     epoch, step: acknowledged by the buffer
    saved         epoch, step: the checkpoint after `step` steps is complete on disk
    checkpointed  epoch, step: acknowledged by the buffer
    finished      epoch, step: the final model is written
evaluator
    evaluated  epoch, version, accuracy
supervisor
    started    service, service_pid      ready   service, service_pid
    ended      service, service_pid, status (negative: killed by that signal)
    restart    service, deaths (within the window), pause_s
    joined     service                  leaving service, limit_s: it is to end within so long
    left       service, status: it has ended and is forgotten
    ending     kind, culprit
any process
    failpoint  name, hit: it kills itself now (see `failpoint.py`)
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

FOLDER = "events"


class EventLog:
    """Appends events to one file. `write` may be called from any thread."""

    def __init__(self, run_dir: Path, process: str) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{process}-{os.getpid()}.jsonl"
        self._head = {"process": process, "pid": os.getpid()}
        self._n = 0
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, event: str, fields: dict[str, Any]) -> None:
        n, self._n = self._n, self._n + 1
        times = {"time_s": time.time(), "mono_s": time.monotonic()}
        line = json.dumps({"event": event, "n": n} | self._head | times | fields, separators=(",", ":"))
        os.write(self._fd, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._fd)


_log: EventLog | None = None


def open_events(run_dir: Path, process: str) -> None:
    """Let `record` of this process write from now on."""
    global _log
    close_events()
    _log = EventLog(run_dir, process)


def close_events() -> None:
    global _log
    log, _log = _log, None
    if log is not None:
        log.close()


def recording() -> bool:
    """Whether events are written: to be asked before fields are put together at some cost."""
    return _log is not None


def record(event: str, **fields: Any) -> None:
    """Append one event; nothing happens where the log is off."""
    if _log is not None:
        _log.write(event, fields)


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Every whole event of a run, ordered by `mono_s`; the order within a process is kept."""
    events = []
    for path in sorted((run_dir / FOLDER).glob("*.jsonl")):
        *lines, _ = path.read_bytes().split(b"\n")
        events += [json.loads(line) for line in lines]
    return sorted(events, key=lambda event: event["mono_s"])
