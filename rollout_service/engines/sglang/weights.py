"""New weights for a running SGLang server: from a snapshot's directory, or from process to process.

The second way is the channel `nccl`. `areal_async/weights/channels/tensor_sender.py` is the trainer's side.
After an engine has paused its server, it asks the trainer for the new version's tensors. Then each request
makes the server take one bucket of tensors from the process group shared with the trainer. The server answers
only when the tensors have arrived. Before each bucket, the engine asks the trainer, which agrees when all
members are ready.

Promises:

- The last bucket names the new version, after everything before it was loaded. So a server that has loaded
  only a part of an update never reports the new version.
- After any failure, the server loads the snapshot's directory. If that fails too, the server is lost. A group
  with a failure is never used again, and the next group has another name. The trainer is told about failures
  here, so that no other engine waits for this one.
- Every wait has a limit. It is `ASK_S` for the trainer's answer. For a bucket, it is the trainer's limit plus
  the receiver's grace.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_async.base.errors import ArealError, RpcTimeout, error_message
from areal_async.base.log import get_logger
from areal_async.rpc.client import Client
from areal_async.rpc.schema import R, Request
from areal_async.rpc.weights_messages import (
    JOIN,
    AskBuild,
    AskTensors,
    BreakGroup,
    NoNews,
    SendsNothing,
    SendsTensors,
    TakeBucket,
    TensorBucket,
    TorchBuild,
)
from areal_async.weights import metrics
from areal_async.weights.layout import TORCH_BYTES
from rollout_service.engines.base import EngineError, EngineLost
from rollout_service.engines.http.adapter import Directory
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.sglang.messages import ModelInfo

ASK_S = 5.0  # Limit for the trainer's answer while the engine is paused
STEP_MS = 1000
"""Longest time that the trainer lets an engine wait for others before the engine asks again. Without this
limit, the engine would not notice that the trainer is dead."""
GRACE_S = 10.0
"""Seconds by which a wait here exceeds the trainer's limit. The trainer closes the group at its limit, so
that the server can report the failure. A server that still does not answer after this grace hangs inside the
group."""
RANK_S = 1.0
"""Additional grace for each rank before the engine's rank. With gloo, members pass bytes only to higher
ranks. So a rank that hangs must give up before the higher ranks that wait for it; its end releases them."""
ONE_WIRE = frozenset({"2.13", "2.14"})
"""Release lines of torch whose members find each other in one process group. Both directions were tried with
gloo. How they do it is internal to torch, so another line joins only its own."""
LONGEST_BREAK = 63
"""Largest number of updates taken from the directory after repeated failures, before a group is tried
again."""

FLUSH_ATTEMPTS = 20
FLUSH_PAUSE_S = 0.05

log = get_logger("engine")


class Parallel(msgspec.Struct):
    """Part of `/server_info` with the number of processes of a model."""

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1


class Answered(msgspec.Struct):
    """Server's answer to a change of its weights."""

    success: bool = False
    message: str = ""


async def load_directory(client: ServerClient, snapshot: Directory, *, flush: bool, timeout_s: float) -> None:
    """Make the paused server load `snapshot.path` and serve it under its tag. With `flush`, its cache keeps
    no KV of other weights. After `EngineError`, the server's weights are unknown."""
    tag = snapshot.tag.label
    body = {
        "model_path": str(snapshot.path),
        "weight_version": tag,
        # A flush is refused while requests have KV, as after a pause in place. The new weights would then be
        # loaded under the old version's name. So a flush is requested only if no request has KV.
        "flush_cache": flush,
        "abort_all_requests": False,
        "load_format": "safetensors",
    }
    for attempt in range(1, FLUSH_ATTEMPTS + 1):
        status, content = await client.request("POST", "/update_weights_from_disk", body, timeout_s=timeout_s)
        answered = _answered(content)
        if status == 200 and answered.success:
            break
        if "cache was not flushed" not in answered.message or attempt == FLUSH_ATTEMPTS:
            raise EngineError(f"{client.name} did not load {snapshot.path}: {answered.message}")
        # A request was still leaving the batch. Loading the same weights again is harmless, and sets the
        # version.
        await asyncio.sleep(FLUSH_PAUSE_S)
    await _check_named(client, tag)


@dataclass(eq=False)
class TensorReceiver:
    """Transfer of updates' tensors into one engine's server. Belongs to one event loop."""

    trainer: Client
    name: str  # Unique name of this engine in the job
    grace_s: float = GRACE_S
    _connected: bool = False
    _ranks: int = 1
    _group: str = ""  # Group of the server and the trainer, without a failure so far
    _failures: int = 0
    _break: int = 0  # Updates still taken from the directory before the next try

    async def opened(self, client: ServerClient, python: Path | None) -> None:
        """Check a started server. `python` is its environment's interpreter, or None for an attached server.
        Raises `EngineError` if the server cannot receive tensors."""
        sizes = await client.get("/server_info", Parallel)
        for flag, size in (("pp-size", sizes.pp_size), ("dp-size", sizes.dp_size)):
            if size > 1:
                raise EngineError(
                    f"{client.name} runs with --{flag} {size}, and takes tensors only with 1: remove it from "
                    "rollout.server.arguments, or set weights.channel to auto"
                )
        self._ranks, self._group = sizes.tp_size, ""
        if python is not None:
            # If the trainer is restarting, nothing is checked, and a group with another NCCL does not form.
            with suppress(RpcTimeout):
                check_builds(await self._ask(AskBuild()), await build_of(python))
        else:
            # An earlier client may have left an update open. If none is open, the server refuses, which is
            # fine.
            await client.request("POST", "/end_weight_update", {})

    async def load(self, client: ServerClient, snapshot: Directory, *, flush: bool, timeout_s: float) -> None:
        """Make the paused server serve `snapshot`, from its tensors if possible, else from its directory.

        After `EngineError`, the server's weights are unknown."""
        if self._break:
            self._break -= 1
        else:
            begun_s = time.monotonic()
            try:
                if await self._take(client, snapshot, flush):
                    self._failures = 0
                    return
            except EngineLost:
                raise
            except ArealError as error:
                self._break = min(2**self._failures - 1, LONGEST_BREAK)
                self._failures += 1
                log.warning(
                    "the trainer's tensors did not come; the snapshot is loaded",
                    version=snapshot.tag.version,
                    after_s=round(time.monotonic() - begun_s, 2),
                    updates_until_next_try=self._break,
                    error=str(error),
                )
        await load_directory(client, snapshot, flush=flush, timeout_s=timeout_s)

    async def close(self) -> None:
        await self.trainer.close()

    async def _take(self, client: ServerClient, snapshot: Directory, flush: bool) -> bool:
        """Return whether the trainer had the tensors. After an error, the server has its old weights or a
        mixture, the group is gone and no session is open."""
        answer = await self._ask(AskTensors(self.name, self._group, snapshot.tag, self._ranks))
        if isinstance(answer, SendsNothing):
            log.info("snapshot is loaded", version=snapshot.tag.version, reason=answer.reason)
            return False
        timeout_s = answer.limit_ms / 1000 + self.grace_s + (answer.rank_offset - 1) * RANK_S
        # After any other end than success, the group must not be used again.
        joined, self._group = self._group, ""
        try:
            if answer.group != joined:
                await self._leave(client, joined)
                await self._in_step(answer, snapshot, JOIN)
                body = {
                    "master_address": answer.host,
                    "master_port": answer.port,
                    "rank_offset": answer.rank_offset,
                    "world_size": answer.world_size,
                    "group_name": answer.group,
                    "backend": answer.backend,
                }
                await _post(client, "/init_weights_update_group", body, timeout_s)
            await self._receive(client, answer, snapshot, flush, timeout_s)
        except ArealError as error:
            # a trainer that did not answer would not receive this either
            if not isinstance(error, RpcTimeout):
                with suppress(ArealError):
                    why = BreakGroup(self.name, answer.group, str(error))
                    await self.trainer.call(why, timeout_s=ASK_S)
            if isinstance(error, EngineLost):
                raise
            # If none was open, the server refuses, which is fine.
            await client.request("POST", "/end_weight_update", {}, timeout_s=timeout_s)
            await self._leave(client, answer.group)
            raise
        # The version is complete. The trainer says whether the group still works.
        with suppress(ArealError):
            await self._in_step(answer, snapshot, len(answer.buckets))
            self._group = answer.group
        return True

    async def _ask(self, question: Request[R]) -> R:
        if not self._connected:
            await self.trainer.connect(ASK_S)
            self._connected = True
        return await self.trainer.call(question, timeout_s=ASK_S)

    async def _in_step(self, plan: SendsTensors, snapshot: Directory, number: int) -> None:
        """Return when bucket `number` may be taken. `JOIN` stands for joining the group. Raises `EngineError`
        if the group is broken."""
        question = TakeBucket(self.name, plan.group, snapshot.tag, number, STEP_MS)
        until_s = time.monotonic() + plan.limit_ms / 1000 + ASK_S
        while isinstance(answer := await self.trainer.call(question, timeout_s=ASK_S), NoNews):
            if time.monotonic() > until_s:
                raise EngineError(f"bucket {number} did not come within {plan.limit_ms / 1000:g} s")
        if isinstance(answer, SendsNothing):
            raise EngineError(f"the group broke: {answer.reason}")

    async def _leave(self, client: ServerClient, group: str) -> None:
        if group:
            # Refused if the group was never formed.
            await client.request("POST", "/destroy_weights_update_group", {"group_name": group})

    async def _receive(
        self, client: ServerClient, plan: SendsTensors, snapshot: Directory, flush: bool, timeout_s: float
    ) -> None:
        tag = snapshot.tag.label
        await _post(client, "/begin_weight_update", {}, timeout_s)
        for number, bucket in enumerate(plan.buckets):
            last = number == len(plan.buckets) - 1
            await self._in_step(plan, snapshot, number)
            body = {
                "names": bucket.names,
                "dtypes": bucket.dtypes,
                "shapes": bucket.shapes,
                "group_name": plan.group,
                "load_format": "flattened_bucket",
                "abort_all_requests": False,
                # Flush and set the version only after a complete update.
                "flush_cache": flush and last,
                "weight_version": tag if last else None,
            }
            await _post(client, "/update_weights_from_distributed", body, timeout_s)
        await _post(client, "/end_weight_update", {}, timeout_s)
        await _check_named(client, tag)
        metrics.RECEIVED.labels("nccl", "publisher").inc(sum(map(bytes_of, plan.buckets)))


def check_builds(trainer: TorchBuild, server: TorchBuild) -> None:
    """Raise `EngineError` unless both can join one process group.

    NCCL itself refuses members of another NCCL version (`initTransportsRank` in its `init.cc`). The major
    versions of CUDA must agree too, and the way in which torch's members find each other (`ONE_WIRE`)."""
    lines = {line_of(trainer.torch), line_of(server.torch)}
    wrong = [] if len(lines) == 1 or lines <= ONE_WIRE else [f"torch {trainer.torch} and {server.torch}"]
    if trainer.nccl:
        if trainer.nccl != server.nccl:
            wrong.append(f"NCCL {trainer.nccl} and {server.nccl or 'none'}")
        if trainer.cuda.partition(".")[0] != server.cuda.partition(".")[0]:
            wrong.append(f"CUDA {trainer.cuda} and {server.cuda or 'none'}")
    if wrong:
        raise EngineError(
            f"weights.channel nccl cannot join the trainer and the server, which have {', '.join(wrong)}: "
            "install both with `make install-gpu` and `make engines-gpu`, or set weights.channel to auto"
        )


def line_of(version: str) -> str:
    """Return the release line of a version, such as 2.14 of `2.14.1+cu130`."""
    return ".".join(version.split(".")[:2])


async def build_of(python: Path) -> TorchBuild:
    """Return the build of torch in the environment of `python`. Raises `EngineError`."""
    asked = (
        "import json, torch; cuda = torch.version.cuda or ''; "
        "nccl = torch.cuda.nccl.version() if cuda else (); "
        "print(json.dumps([torch.__version__, cuda, '.'.join(map(str, nccl))]))"
    )
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        python, "-P", "-c", asked, stdin=nothing, stdout=pipe, stderr=pipe
    )
    out, err = await process.communicate()
    if process.returncode != 0:
        raise EngineError(f"{python} does not say which torch it has: {error_message(err)}")
    return TorchBuild(*msgspec.json.decode(out.splitlines()[-1], type=tuple[str, str, str]))


def bytes_of(bucket: TensorBucket) -> int:
    pairs = zip(bucket.dtypes, bucket.shapes, strict=True)
    return sum(math.prod(shape) * TORCH_BYTES[dtype] for dtype, shape in pairs)


async def _post(client: ServerClient, path: str, body: object, timeout_s: float) -> None:
    status, content = await client.request("POST", path, body, timeout_s=timeout_s)
    answered = _answered(content)
    if status != 200 or not answered.success:
        raise EngineError(f"{client.name} refused {path}: {answered.message}")


def _answered(content: bytes) -> Answered:
    try:
        return msgspec.json.decode(content, type=Answered)
    except (ValueError, RecursionError):
        return Answered(message=error_message(content))


async def _check_named(client: ServerClient, tag: str) -> None:
    info = await client.get("/model_info", ModelInfo)
    if info.weight_version != tag:
        raise EngineError(f"{client.name} was given {tag}, but says that it serves {info.weight_version}")
