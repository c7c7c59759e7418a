"""A synchronous trainer in thirty lines: the plain formulas, one episode at a time, no packing.

It shares no code with the trainer's objective, packing or back end. Fed with the recorded batches of a run at
max_staleness 0 (`trainer.record_batches: true`), it must arrive at that run's losses.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from areal_async.config.job import TrainerSection
from areal_async.trajectory import unpack
from trainer_service.data.recording import RecordedStep


def reference_losses(
    model_dir: Path, steps: Iterable[RecordedStep], trainer: TrainerSection
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step from the weights in `model_dir`: GRPO with decoupled PPO, token
    normaliser, one minibatch a step, single-turn episodes."""
    optimizer, objective = trainer.optimizer, trainer.objective
    clip = {"clip_low": 0.2, "clip_high": 0.2} | objective.loss_args
    cap = objective.correction_args.get("cap", 5.0)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    adamw = torch.optim.AdamW(
        model.parameters(), optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay
    )
    results = []
    for step in steps:
        loss = 0.0
        n_tokens = sum(entry.n_sampled for group in step.batch.groups for entry in group.episodes)
        for group in step.batch.groups:
            rewards = torch.tensor([entry.reward for entry in group.episodes])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for entry, advantage in zip(group.episodes, advantages, strict=True):
                episode = unpack(step.blobs[entry.episode_id])
                sampled = torch.from_numpy(episode.units.mask == 1)
                assert set(episode.units.version[sampled.numpy()].tolist()) <= {step.batch.step}
                ids = torch.tensor(episode.units.token_id).long()
                temperature = episode.header.calls[0].sampling.temperature
                logits = model(input_ids=ids[None], use_cache=False).logits[0] / temperature
                logp = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[sampled[1:], 0]
                proximal = logp.detach()  # one update a step: the start-of-step policy is the current one
                weight = (proximal - torch.tensor(episode.units.logprob)[sampled]).exp()
                ratio = (logp - proximal).exp()
                clipped = ratio.clamp(1 - clip["clip_low"], 1 + clip["clip_high"])
                surrogate = torch.minimum(ratio * advantage, clipped * advantage)
                term = -(weight.clamp(max=cap) * surrogate).sum() / n_tokens
                term.backward()
                loss += term.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_grad_norm)
        adamw.step()
        adamw.zero_grad()
        results.append((loss, float(norm)))
    return results
