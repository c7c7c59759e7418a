"""CPU stand-in for the vLLM server and the rollout process of TRL's asynchronous trainer.

A process of its own samples whole groups with transformers, scores them with the job's reward, and puts
them into a queue. A step's prompts are computed once for each group, then their caches are repeated and all
samples are decoded in one batch; finished samples leave the batch once they are a quarter of it. This is
faster than `generate`, which computes every sample's prompt and keeps finished samples.

Batch b starts as soon as version b - `max_staleness` exists, so that no sample is too stale and dropped.
Weights come through a file in /dev/shm with room for two versions, written by `SharedWeights.publish`. Of
adapters only the adapters come, and are merged here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

POLL_S = 0.002
SHRINK_SHARE = 0.75
"""Share of unfinished samples at which the batch leaves out the finished ones."""


class SharedWeights:
    """Weights of the two newest versions, in a file that two processes map. `version` is a shared integer."""

    def __init__(self, path: Path, version: Any, shapes: Mapping[str, Sequence[int]]) -> None:
        self._version, self._shapes = version, {name: tuple(shape) for name, shape in shapes.items()}
        self._sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self._shapes.values()]
        total = sum(self._sizes)
        self._slots = torch.from_file(str(path), shared=True, size=2 * total, dtype=torch.float32).view(
            2, total
        )

    @property
    def version(self) -> int:
        return int(self._version.value)

    def publish(self, version: int, tensors: Iterable[Tensor]) -> None:
        """Copy `tensors`, in the order of the shapes, and announce their version."""
        parts = self._slots[version % 2].split(self._sizes)
        with torch.no_grad():
            for part, tensor in zip(parts, tensors, strict=True):
                part.copy_(tensor.reshape(-1))
        self._version.value = version

    def newest(self) -> tuple[int, dict[str, Tensor]]:
        """Return the newest version and views of its tensors, which stay whole until the next but one."""
        version = self.version
        parts = self._slots[version % 2].split(self._sizes)
        named = zip(self._shapes.items(), parts, strict=True)
        return version, {name: part.view(shape) for (name, shape), part in named}


class Policy:
    """The generating model. It takes whole tensors by name, or peft's adapters, which it merges."""

    def __init__(self, model: Any, scale: float) -> None:
        self.model, self._scale = model, scale
        self._own = dict(model.named_parameters())
        self._base: dict[str, Tensor] = {}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if ".lora_A." not in name:
                if ".lora_B." not in name:
                    self._own[name].copy_(tensor)
                continue
            target = name.removeprefix("base_model.model.").partition(".lora_A.")[0] + ".weight"
            base = self._base.setdefault(target, self._own[target].detach().clone())
            up = tensors[name.replace(".lora_A.", ".lora_B.")]
            torch.addmm(base, up, tensor, alpha=self._scale, out=self._own[target].data)

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        copies: int,
        most: int,
        temperature: float,
        eos: set[int],
        pad: int,
    ) -> list[tuple[list[int], list[float]]]:
        """Return `copies` answers of each prompt, with the log-probs of their tokens."""
        lengths = torch.tensor([len(ids) for ids in prompts])
        width = int(lengths.max())
        ids = torch.tensor([[pad] * (width - len(each)) + list(each) for each in prompts])
        mask = (torch.arange(width) >= width - lengths[:, None]).long()
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        out = self.model(
            input_ids=ids, attention_mask=mask, position_ids=position, use_cache=True, logits_to_keep=1
        )
        cache = out.past_key_values
        cache.batch_repeat_interleave(copies)
        logits = out.logits[:, -1].repeat_interleave(copies, 0)
        mask, position = (each.repeat_interleave(copies, 0) for each in (mask, lengths[:, None]))
        total, ends = len(prompts) * copies, torch.tensor(sorted(eos))
        tokens, logprobs = torch.full((total, most), pad), torch.zeros(total, most)
        count, here, live = (
            torch.full((total,), most),
            torch.arange(total),
            torch.ones(total, dtype=torch.bool),
        )
        for n in range(most):
            found = torch.log_softmax(logits.float() / temperature, -1)
            # The largest of log-probs plus Gumbel noise is a sample of the distribution.
            chosen = (found - torch.empty_like(found).exponential_().log()).argmax(-1)
            tokens[here, n], logprobs[here, n] = chosen, found.gather(1, chosen[:, None])[:, 0]
            ended = torch.isin(chosen, ends) & live
            count[here[ended]] = n + 1
            live = live & ~ended
            if n + 1 == most or not live.any():
                break
            if live.float().mean() < SHRINK_SHARE:
                kept = live.nonzero()[:, 0]
                cache.batch_select_indices(kept)
                mask, position, chosen, here = (each[kept] for each in (mask, position, chosen, here))
                live = live[kept]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            out = self.model(
                input_ids=chosen[:, None],
                attention_mask=mask,
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
            )
            logits, position = out.logits[:, -1], position + 1
        rows = zip(tokens.tolist(), logprobs.tolist(), count.tolist(), strict=True)
        return [(row[:n], values[:n]) for row, values, n in rows]


def advantages_of(rewards: Sequence[float]) -> NDArray[np.float64]:
    """Return the advantages of a group, by the formula of TRL's rollout process."""
    given = np.asarray(rewards, float)
    advantages: NDArray[np.float64] = (given - given.mean()) / (given.std() + 1e-8)
    return advantages


def orders(count: int, seed: int) -> Iterator[int]:
    """Yield prompts for ever, shuffled anew in every pass."""
    random = np.random.default_rng(seed)
    while True:
        yield from random.permutation(count).tolist()


def generate(settings: Mapping[str, Any], shm: str, version: Any, shapes: Any, queue: Any) -> None:
    """Sample and score batches until the parent ends. `shapes` receives the names and shapes of what is
    trained. `queue` gets lists of (prompt, answer, log-probs, advantage, reward, version, group)."""
    from against_trl_judge import Judge
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(settings["generate_threads"])
    config, lora, parent = settings["config"], settings["lora"], os.getppid()
    torch.manual_seed(config["seed"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32).eval()
    ends = model.generation_config.eos_token_id
    eos = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    policy = Policy(model, lora["lora_alpha"] / lora["r"] if lora else 1.0)
    judge, copies = Judge(tokenizer, **settings["reward"]), config["num_generations"]
    episodes = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
    order, held = orders(len(settings["tasks"]), config["seed"]), -1
    weights = SharedWeights(Path(shm), version, shapes.get())
    pad, most = tokenizer.pad_token_id or 0, config["max_completion_length"]
    for batch in range(config["max_steps"] + 1):  # the trainer fetches one batch ahead, beyond the last too
        # The trainer fetches batch b when version b is the newest; version 1 is that before the first step.
        while weights.version < max(1, batch - config["max_staleness"]):
            time.sleep(POLL_S)
            if os.getppid() != parent:
                return
        newest, tensors = weights.newest()
        if newest != held:
            policy.load(tensors)
            held = newest
        rows = [next(order) for _ in range(episodes // copies)]
        prompts = [settings["prompt_ids"][row] for row in rows]
        answers = policy.sample(prompts, copies, most, config["temperature"], eos, pad)
        texts = tokenizer.batch_decode([ids for ids, _ in answers], skip_special_tokens=True)
        made = []
        for index, row in enumerate(rows):
            task, own = settings["tasks"][row], slice(index * copies, (index + 1) * copies)
            rewards = [judge(task["prompt"], text, task["truth"]) for text in texts[own]]
            scored = zip(answers[own], advantages_of(rewards).tolist(), rewards, strict=True)
            group = batch * len(rows) + index
            made += [
                (prompts[index], ids, logps, a, reward, held, group) for (ids, logps), a, reward in scored
            ]
        queue.put(made)
