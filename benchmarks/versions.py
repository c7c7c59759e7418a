"""Is every unit's version true while weights change under running requests?

    python benchmarks/versions.py [MODEL] [--engines local,sglang,vllm] [--episodes 200] [--update-s 1]
                                  [--mode recompute] [--streamed]

Requests of long-tailed lengths run while the weights are exchanged again and again, each time for ones unlike
any before. Afterwards every unit is recomputed by a plain fp32 forward pass with the snapshot that its tag
names. Mode `recompute`: within 1e-4. Mode `keep`: what follows an update is approximate, and only its size is
told. No request may be lost, and each ends as it would have without updates: by an end of sequence, or at the
length that it asked for. With `--streamed` all requests are streams, and what was told on the way must be the
beginning of the answer. Exits with status 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from agreement import Reference, Snapshots, job_for, logprobs, one_thread, write_sharp_model

from areal_async.base.versions import VersionTag
from areal_async.trajectory import Sampling
from areal_async.weights.snapshot import Snapshot
from rollout_service.engines import make_engine
from rollout_service.engines.base import Engine, GenerateRequest, GenerateResult, Piece

BOUND = 1e-4
PROMPT_TOKENS = 8
EPOCH = 3


@dataclass
class Versions:
    """What became of the requests of one engine. Differences in nats, times in seconds."""

    engine: str
    mode: str
    requests: int = 0
    units: int = 0
    updates: int = 0
    served: int = 0
    """Versions that sampled at least one unit."""
    spanning: float = 0.0
    """Share of requests whose units are of more than one version."""
    most_versions: int = 0
    """Of one request."""
    max: float = 0.0
    max_own: float = 0.0
    """Of units of the version that their request was called under: exact in every mode. With `keep`, a
    request that the server begins only after an update may find KV of the version it was called under."""
    foreign: float = 0.0
    """Median difference of units recomputed with the version served before: that a wrong tag would show."""
    pieces: int = 0
    """What streams told on the way."""
    stall_s: float = 0.0
    """Mean time of pause, load and resume."""
    wall_s: float = 0.0
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    request: GenerateRequest
    prompt: list[int]


def make_requests(count: int, vocabulary: int, longest: int, *, seed: int = 0) -> list[Asked]:
    """Lengths from a log-normal distribution, cut at `longest`: a few take many times the median."""
    rng = np.random.default_rng(seed)
    asked = []
    for number in range(count):
        length = int(min(longest, max(2, rng.lognormal(np.log(longest / 4), 0.8))))
        prompt = rng.integers(3, vocabulary, PROMPT_TOKENS).tolist()
        how = Sampling(temperature=1.0, max_new_tokens=length, seed=number)
        asked.append(Asked(GenerateRequest(str(number), prompt, how), prompt))
    return asked


async def streamed(engine: Engine, one: Asked, found: Versions) -> GenerateResult:
    """The result of a stream, held against the pieces that came before it."""
    told: list[Piece] = []
    result = await engine.generate(one.request, told.append)
    ids = [int(i) for piece in told for i in piece]
    if ids != result.token_ids[: len(ids)].tolist():
        found.failed.append(f"request {one.request.request_id} was told other ids than it was given")
    found.pieces += len(told)
    return result


async def generate_under_updates(
    engine: Engine,
    snapshots: Snapshots,
    asked: Sequence[Asked],
    update_s: float,
    found: Versions,
    most_updates: int | None = None,
    streams: bool = False,
) -> list[GenerateResult | BaseException]:
    """Answers in the order asked. Each update is prepared beside the engine, as in a job."""

    async def answer(one: Asked) -> GenerateResult:
        return await (streamed(engine, one, found) if streams else engine.generate(one.request))

    async def written(version: int) -> Snapshot:
        return await asyncio.to_thread(snapshots.write, VersionTag("policy", EPOCH, version))

    await engine.start(await written(0))
    version, stalls = 1, 0.0
    prepared = asyncio.ensure_future(written(version))
    await prepared  # the first update is not to come when short requests have ended
    began_s = time.monotonic()
    calls = [asyncio.ensure_future(answer(one)) for one in asked]
    everything = asyncio.gather(*calls, return_exceptions=True)
    try:
        while not everything.done():
            await asyncio.wait([everything], timeout=update_s)
            if everything.done() or found.updates == most_updates:
                break
            snapshot = await prepared
            version += 1
            prepared = asyncio.ensure_future(written(version))
            stalled_s = time.monotonic()
            await engine.pause()
            await engine.load(snapshot)
            await engine.resume()
            stalls += time.monotonic() - stalled_s
            found.updates += 1
        results = await everything
        found.stall_s = stalls / max(1, found.updates)
        found.wall_s = time.monotonic() - began_s
        return results
    finally:
        await asyncio.gather(prepared, return_exceptions=True)
        await engine.stop()


def verify(
    found: Versions,
    snapshots: Snapshots,
    asked: Sequence[Asked],
    results: Sequence[GenerateResult | BaseException],
    eos_ids: Sequence[int],
) -> None:
    """Recompute every unit with the weights that its tag names, and look for what was lost or cut."""
    by_tag: defaultdict[VersionTag, list[tuple[Asked, GenerateResult]]] = defaultdict(list)
    spans = []
    for one, result in zip(asked, results, strict=True):
        if isinstance(result, BaseException):
            found.failed.append(f"request {one.request.request_id} was lost: {result}")
            continue
        tags = set(zip(result.epochs.tolist(), result.versions.tolist(), strict=True))
        for epoch, version in tags:
            by_tag[VersionTag("policy", epoch, version)].append((one, result))
        spans.append(len(tags))
        found.units += len(result.token_ids)
        if (np.diff(result.versions) < 0).any():
            found.failed.append(f"the versions of request {one.request.request_id} go backwards")
        asked_for = one.request.sampling.max_new_tokens
        ended = result.finish_reason == "stop" and int(result.token_ids[-1]) in eos_ids
        if not ended and not (result.finish_reason == "length" and len(result.token_ids) == asked_for):
            found.failed.append(
                f"request {one.request.request_id} ended with {result.finish_reason} after "
                f"{len(result.token_ids)} of {asked_for} units"
            )
    foreign = []
    last: Reference | None = None
    for tag, uses in sorted(by_tag.items(), key=lambda item: item[0].version):
        if not snapshots.path(tag).exists():
            found.failed.append(f"units are tagged {tag}, which was never served")
            continue
        found.served += 1
        reference = Reference(snapshots.path(tag))
        before, last = last, reference
        for one, result in uses:
            mine = (result.versions == tag.version) & (result.epochs == tag.epoch)
            said = result.logprobs[mine]
            want = logprobs(reference.logits(one.prompt, result.token_ids), result, one.request.sampling)
            gap = np.abs(said - want[mine])
            found.max = max(found.max, float(gap.max()))
            if tag.version == 0:  # all are called before the first update
                found.max_own = max(found.max_own, float(gap.max()))
            if before is not None:
                wrong = logprobs(before.logits(one.prompt, result.token_ids), result, one.request.sampling)
                foreign.append(np.abs(said - wrong[mine]))
    found.spanning = float(np.mean(np.array(spans) > 1)) if spans else 0.0
    found.most_versions = max(spans, default=0)
    found.foreign = float(np.median(np.concatenate(foreign))) if foreign else 0.0


def judge(found: Versions) -> None:
    exact = found.max if found.mode == "recompute" else found.max_own
    if not exact <= BOUND:
        found.failed.append(f"a unit is {exact:.3g} nats off what the version that it names gives")
    if found.served > 1 and found.foreign < 100 * BOUND:
        found.failed.append("the versions are too much alike for a wrong tag to show")


async def versions(
    name: str,
    model: Path,
    root: Path,
    *,
    episodes: int,
    update_s: float,
    longest: int,
    mode: str = "recompute",
    eos_ids: Sequence[int] = (1,),
    slots: int = 32,
    most_updates: int | None = None,
    url: str | None = None,
    streams: bool = False,
) -> Versions:
    """One engine under updates every `update_s` seconds, `most_updates` at most; snapshots of the model in
    `model` go to `root`. `url` is of a server that runs already; `streams` has all requests streamed."""
    snapshots = Snapshots(model, root)
    found = Versions(name, mode, requests=episodes)
    job = job_for(name, model, max_model_len=PROMPT_TOKENS + longest, mode=mode, url=url)
    engine = make_engine(job, slots=slots, activity="versions")
    asked = make_requests(episodes, 16, longest)
    with one_thread():
        results = await generate_under_updates(
            engine, snapshots, asked, update_s, found, most_updates, streams
        )
        verify(found, snapshots, asked, results, eos_ids)
    judge(found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "model", nargs="?", type=Path, help="its ids 3 to 15 make the prompts, 1 ends answers"
    )
    parser.add_argument("--engines", default="local,sglang,vllm")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--update-s", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=400, help="most units of one answer")
    parser.add_argument("--mode", choices=["recompute", "keep"], default="recompute")
    parser.add_argument("--streamed", action="store_true")
    options = parser.parse_args()
    failed = False
    for name in options.engines.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = options.model or write_sharp_model(Path(folder) / "model", endless=True)
            found = asyncio.run(
                versions(
                    name,
                    model,
                    Path(folder) / "snapshots",
                    episodes=options.episodes,
                    update_s=options.update_s,
                    longest=options.longest,
                    mode=options.mode,
                    streams=options.streamed,
                )
            )
        print(json.dumps(asdict(found)))
        failed |= bool(found.failed)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
