"""Do the engines say the same as a plain forward pass, and does the trainer agree with what they sampled?

    python benchmarks/parity.py [MODEL] [--engines local,sglang,vllm] [--prompts 64] [--new-tokens 48]

Greedy: each engine answers the prompts; up to the first place where the reference's best two logits lie less
than 1e-4 apart, its ids must be the reference's, and so those of every other engine. Log-probs must be within
1e-4 of a full fp32 forward pass. Sampled: episodes at temperature 0.8, recomputed by the trainer's own back
end as its self-check does, within 1e-3. MODEL is a Hugging Face directory with weights in float32; without it
a tiny random one with clear choices is made. Exits with status 1 when something differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from agreement import Reference, Snapshots, job_for, logprobs, one_thread, write_sharp_model

from areal_async.base.versions import POLICY, VersionTag
from areal_async.rpc.messages import BatchEpisode
from areal_async.trajectory import Call, EpisodeBuilder, Sampling, pack, unpack
from areal_async.weights.snapshot import Snapshot
from rollout_service.engines import make_engine
from rollout_service.engines.base import Engine, GenerateRequest, GenerateResult
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.checks.logprobs import compare, rows_to_compare
from trainer_service.data.episode_rows import EpisodeBytes
from trainer_service.ranks import join_ranks

TIE = 1e-4
"""Where the reference's best two logits are closer than this, rounding may decide."""
LOGPROB_BOUND = 1e-4
TRAINER_BOUND = 1e-3
TAG = VersionTag(POLICY, 1, 0)


@dataclass
class Parity:
    """One engine against the reference and the trainer. Differences in nats."""

    engine: str
    greedy_units: int = 0
    compared_units: int = 0
    """Before the first tie of each answer: ids that had to be equal."""
    tied_answers: int = 0
    wrong_ids: list[tuple[int, int]] = field(default_factory=list)
    """(prompt, place) of ids that are not the reference's."""
    logprob_max: float = 0.0
    sampled_units: int = 0
    trainer_max: float = 0.0
    trainer_mean: float = 0.0
    failed: list[str] = field(default_factory=list)

    def judge(self) -> None:
        if self.wrong_ids:
            prompt, place = self.wrong_ids[0]
            self.failed.append(f"{len(self.wrong_ids)} answers differ, first prompt {prompt} at unit {place}")
        if not self.logprob_max <= LOGPROB_BOUND:
            self.failed.append(f"a greedy log-prob is {self.logprob_max:.3g} off")
        if not self.trainer_max <= TRAINER_BOUND:
            self.failed.append(f"the trainer's log-prob of a sampled unit is {self.trainer_max:.3g} off")


def make_prompts(count: int, vocabulary: int, *, seed: int = 0) -> list[list[int]]:
    """Of 1 to 24 ids, special ones left out; several share a beginning, as the prompts of one task do."""
    rng = np.random.default_rng(seed)
    beginning = rng.integers(3, vocabulary, 6).tolist()
    made = [rng.integers(3, vocabulary, int(rng.integers(1, 19))).tolist() for _ in range(count)]
    return [beginning + ids if number % 3 == 0 else ids for number, ids in enumerate(made)]


async def measure(
    engine: Engine,
    name: str,
    snapshot: Snapshot,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    samples: int = 2,
) -> Parity:
    """Start `engine` with `snapshot`, ask it, stop it, and compare."""
    with one_thread():
        return await _measure(engine, name, snapshot, prompts, new_tokens, samples)


async def _measure(
    engine: Engine,
    name: str,
    snapshot: Snapshot,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    samples: int,
) -> Parity:
    greedy = Sampling(temperature=0.0, max_new_tokens=new_tokens)
    drawn = [
        Sampling(temperature=0.8, max_new_tokens=new_tokens, seed=1000 + n)
        for n in range(samples * len(prompts))
    ]
    try:
        await engine.start(snapshot)
        answers = await asyncio.gather(
            *(engine.generate(GenerateRequest(f"g{n}", ids, greedy)) for n, ids in enumerate(prompts))
        )
        sampled = await asyncio.gather(
            *(
                engine.generate(GenerateRequest(f"s{n}", prompts[n % len(prompts)], how))
                for n, how in enumerate(drawn)
            )
        )
    finally:
        await engine.stop()
    found = Parity(name)
    against_reference(found, Reference(snapshot.path), prompts, answers, greedy)
    episodes = [
        (prompts[n % len(prompts)], how, result)
        for n, (how, result) in enumerate(zip(drawn, sampled, strict=True))
    ]
    against_trainer(found, snapshot.path, episodes)
    found.judge()
    return found


def against_reference(
    found: Parity,
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[GenerateResult],
    greedy: Sampling,
) -> None:
    for number, (prompt, result) in enumerate(zip(prompts, answers, strict=True)):
        logits = reference.logits(prompt, result.token_ids)
        best = np.sort(logits, axis=-1)
        tied = np.flatnonzero(best[:, -1] - best[:, -2] < TIE)
        clear = int(tied[0]) if len(tied) else len(logits)
        wrong = np.flatnonzero(logits.argmax(-1)[:clear] != result.token_ids[:clear])
        found.greedy_units += len(logits)
        found.compared_units += clear
        found.tied_answers += bool(len(tied))
        if len(wrong):
            found.wrong_ids.append((number, int(wrong[0])))
        gap = np.abs(logprobs(logits, result, greedy) - result.logprobs).max(initial=0.0)
        found.logprob_max = max(found.logprob_max, float(gap))


def against_trainer(
    found: Parity, folder: Path, episodes: Sequence[tuple[Sequence[int], Sampling, GenerateResult]]
) -> None:
    """The trainer's own back end and the code of its self-check, on episodes as it would be given them."""
    ranks = join_ranks(0, 1)
    backend = FsdpBackend({"policy": ModelUse(folder)}, ranks, dtype=torch.float32)
    skipped: Counter[str] = Counter()
    rows = []
    for number, (prompt, how, result) in enumerate(episodes):
        builder = EpisodeBuilder("parity", f"t{number}", f"t{number}#0", 0)
        builder.sampled(
            result.token_ids,
            result.logprobs,
            result.versions,
            parent=builder.prompt(np.asarray(prompt, np.int32)),
            call=Call(sampling=how, finish_reason=result.finish_reason, logprobs_of=result.logprobs_of),
            epoch=result.epochs,
        )
        blob = pack(builder.build())
        told = unpack(blob)
        versions = told.versions[TAG.policy]
        entry = BatchEpisode(
            told.episode_id, 0, told.n_units, told.n_sampled, versions.oldest, versions.newest, 0.0
        )
        rows += rows_to_compare(
            EpisodeBytes(memoryview(blob), entry, number, [0]),
            policy=TAG.policy,
            version=TAG.version,
            epochs=[TAG.epoch],
            update_mode="recompute",
            skipped=skipped,
        )
    compared = compare(backend, ranks, rows, 8192)
    found.sampled_units = len(compared.token)
    if sum(skipped.values()):
        found.failed.append(f"units were not of the version that served: {dict(skipped)}")
    if not found.sampled_units:
        return
    found.trainer_max = float(compared.difference.max())
    found.trainer_mean = float(compared.difference.mean())


async def parity(
    engines: Sequence[str],
    model: Path,
    root: Path,
    *,
    prompts: int,
    new_tokens: int,
    samples: int = 2,
    url: str | None = None,
) -> list[Parity]:
    """Each engine in turn, on the same snapshot of the model in `model`, written under `root`. `url` is of a
    server that runs already."""
    snapshot = Snapshots(model, root).write(TAG)
    vocabulary = min(tensor.shape[0] for name, tensor in snapshot.tensors.items() if "embed_tokens" in name)
    asked = make_prompts(prompts, vocabulary)
    found = []
    for name in engines:
        job = job_for(name, model, max_model_len=24 + new_tokens + 1, url=url)
        engine = make_engine(job, slots=min(64, prompts), activity="parity")
        found.append(await measure(engine, name, snapshot, asked, new_tokens=new_tokens, samples=samples))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--engines", default="local,sglang,vllm")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_sharp_model(Path(folder) / "model")
        results = asyncio.run(
            parity(
                options.engines.split(","),
                model,
                Path(folder) / "snapshots",
                prompts=options.prompts,
                new_tokens=options.new_tokens,
            )
        )
    for result in results:
        print(json.dumps(asdict(result)))
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
