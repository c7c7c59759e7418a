"""Calls a second through the gateway, and the CPU that a call costs the gateway and its worker.

    python benchmarks/gateway.py [--agents 32] [--turns 4] [--seconds 10] [--repeats 3] [--stream]
        [--json FILE]

A worker, as a job has it but for its engine, which gives the same short answer at once; its gateway; and the
agents in one more process, which send bodies made beforehand over connections that stay open, and do nothing
with a reply but look for its end. Each agent works through episodes of `turns` calls, every call with the
whole conversation so far. CPU seconds are user and system, all threads, of the worker (its engine and its
episodes are part of it) and of everything that it has started; the agents' are apart.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

SYSTEM = (
    "You are a careful assistant. You answer in one short sentence, and say so when you do not know. " * 3
)
ASKED = "Here is what the tool said: the sum is 42 and the search has three results. What follows from it?"
SAID = "The sum is 42, so the answer is 42."
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GROUP = 8  # Episodes that begin with the same prompt
WARM_S = 2.0


def conversation(turn: int, group: str) -> list[dict[str, str]]:
    """What an agent sends in its call number `turn`, from 0."""
    messages = [{"role": "system", "content": f"Task {group}. {SYSTEM}"}]
    for _ in range(turn):
        messages += [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}]
    return [*messages, {"role": "user", "content": ASKED}]


def bodies_of(group: str, options: argparse.Namespace) -> list[bytes]:
    """The calls of an episode of this group."""
    asked = {"model": "m", "stream": options.stream}
    turns = range(options.turns)
    return [json.dumps(asked | {"messages": conversation(turn, group)}).encode() for turn in turns]


# --- the worker --------------------------------------------------------------------------------------


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    """A byte-level tokenizer with the words of the conversation, as a Hugging Face directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|im_end|>", "<|im_start|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([SYSTEM, ASKED, SAID] * 4, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    ).save_pretrained(folder)


async def work(folder: Path, port: socket.socket) -> None:
    """Open an episode for each agent that connects to `port`, one after another, until all have gone."""
    from transformers import AutoTokenizer

    from areal_async.base.versions import VersionTag
    from areal_async.config.rollout import GatewaySection
    from areal_async.launch.one_host import make_host
    from areal_async.rpc.secret import RunSecret
    from areal_async.trajectory import EpisodeBuilder, Sampling
    from rollout_service.engines.base import EngineStats, GenerateRequest, GenerateResult
    from rollout_service.gateway import Gateway
    from rollout_service.gateway.access import GatewaySetup, ServedModel
    from rollout_service.workflows import Context, PolicyEngine, Renderer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = np.asarray([*tokenizer(SAID)["input_ids"], tokenizer.eos_token_id], np.int32)
    zeros = np.zeros(len(ids), np.int32)
    said = GenerateResult(ids, zeros.astype(np.float32) - 1, zeros, zeros, "stop", SAID)

    class Same:
        version = VersionTag("policy", 0, 0)

        def stats(self) -> EngineStats:
            return EngineStats(0, 0, 1, 0.0, 0, 0, 0.0)

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            await asyncio.sleep(0)
            return said

    host = make_host("local", run_dir=folder, socket_dir=folder, shm_dir=folder)
    keys = RunSecret.generate().of("rollout")
    models = {"policy": ServedModel(str(folder), 1 << 16)}
    section = GatewaySection().model_dump(mode="json")
    gateway = Gateway(GatewaySetup("bench", "w", host, keys, section, models))
    render, engine, recorded = Renderer(tokenizer), Same(), 0

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await episodes(reader, writer)
        gone.release()

    async def episodes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal recorded
        for number in itertools.count():
            builder = EpisodeBuilder("bench", "t", f"t#{number}", 0)
            voice = PolicyEngine(engine, render, Sampling(max_new_tokens=64))  # type: ignore[arg-type]
            ctx = Context({"policy": voice}, builder, episode_id=f"t#{number}.0", seed=number, agents=gateway)
            async with ctx.gateway() as session:
                writer.write(f"{session.origin} {session.api_key}\n".encode())
                if not await reader.readline():
                    break
            recorded += session.calls
            if session.calls:
                roots = builder.build().header.metadata["roots"]
                assert roots == 1, f"the conversation was cut into {roots}"

    gone = asyncio.Semaphore(0)
    server = await asyncio.start_unix_server(agent, sock=port)
    for _ in range(int(os.environ["AGENTS"])):
        await gone.acquire()
    server.close()
    await gateway.close()
    print(json.dumps({"recorded": recorded}), flush=True)


# --- the agents --------------------------------------------------------------------------------------


async def talk(
    path: str, agent: int, done: list[int], ending: asyncio.Event, options: argparse.Namespace
) -> None:
    """One agent: episode after episode, until `ending`."""
    told, says = await asyncio.open_unix_connection(path)
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None
    for episode in itertools.count():
        if ending.is_set():
            break
        if episode % GROUP == 0:
            bodies = bodies_of(f"{agent}-{episode}", options)
        origin, key = (await told.readline()).decode().split()
        if reader is None or writer is None:
            host, _, port = origin.removeprefix("http://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
        for body in bodies:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            writer.write(head.encode() + b"Content-Type: application/json\r\nContent-Length: ")
            writer.write(b"%d\r\n\r\n%s" % (len(body), body))
            seen = await reader.readuntil(b"\r\n\r\n")
            assert seen.startswith(b"HTTP/1.1 200"), seen + await reader.read(1000)
            if b"chunked" in seen:
                await reader.readuntil(b"0\r\n\r\n")
            else:
                length = seen.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
            done[0] += 1
        says.write(b"\n")
    says.close()


async def drive(path: str, worker: psutil.Process, options: argparse.Namespace) -> dict[str, Any]:
    done, ending = [0], asyncio.Event()
    agents = [
        asyncio.ensure_future(talk(path, agent, done, ending, options)) for agent in range(options.agents)
    ]
    while not done[0]:
        await asyncio.wait(agents, timeout=0.1, return_when="FIRST_EXCEPTION")
        for agent in agents:
            if agent.done():
                agent.result()
    await asyncio.wait(agents, timeout=WARM_S, return_when="FIRST_EXCEPTION")
    begun_s, calls, cpu = time.monotonic(), done[0], cpu_s(worker)
    await asyncio.sleep(options.seconds)
    wall_s, calls = time.monotonic() - begun_s, done[0] - calls
    spent = {name: 1000 * (after - cpu[name]) / calls for name, after in cpu_s(worker).items()}
    ending.set()
    await asyncio.gather(*agents)
    return {
        "calls_per_s": round(calls / wall_s),
        "worker_ms": round(spent["worker"], 3),
        "gateway_ms": round(spent["gateway"], 3),
        "total_ms": round(spent["worker"] + spent["gateway"], 3),
        "calls": done[0],
    }


def cpu_s(worker: psutil.Process) -> dict[str, float]:
    def of(process: psutil.Process) -> float:
        times = process.cpu_times()
        return times.user + times.system

    return {"worker": of(worker), "gateway": sum(map(of, worker.children(recursive=True)))}


def one(options: argparse.Namespace) -> dict[str, Any]:
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        write_tokenizer(Path(scratch))
        port = stack.enter_context(socket.socket(socket.AF_UNIX))
        port.bind(path := f"{scratch}/agents")
        port.listen(256)
        command = [sys.executable, __file__, "--work", scratch, "--port", str(port.fileno())]
        environment = os.environ | {"AGENTS": str(options.agents), "TOKENIZERS_PARALLELISM": "false"}
        worker = subprocess.Popen(
            command, pass_fds=[port.fileno()], env=environment, stdout=subprocess.PIPE, text=True
        )
        try:
            row = asyncio.run(drive(path, psutil.Process(worker.pid), options))
            recorded = json.loads(worker.communicate(timeout=60)[0].splitlines()[-1])["recorded"]
        finally:
            worker.kill()
        assert recorded == row["calls"], f"{row['calls']} answers were sent and {recorded} recorded"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--agents", type=int, default=32)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        asyncio.run(work(options.work, socket.socket(fileno=options.port)))
        return
    rows = []
    for _ in range(options.repeats):
        rows.append(one(options))
        print(json.dumps(rows[-1]), flush=True)
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    result = {
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
        "agents": options.agents,
        "turns": options.turns,
        "stream": options.stream,
        "seconds": options.seconds,
        "median": median,
        "runs": rows,
    }
    print(json.dumps(median))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
