"""The objective of a step: advantage × loss × correction × KL × normaliser, each a part named in the job
file.

The tables below map the names of the built-in parts to their modules. A part is a plain function on tensors,
which a decorator of `trainer_service.algorithms.parts` declares. `objective.py` combines the chosen parts.
The modules of parts do not import torch at their top level, because the check of a job file imports them.
"""

_HERE = "trainer_service.algorithms"

_ADVANTAGES = {
    "advantages": "grpo dr_grpo rloo reinforce_pp_baseline remax opo pass_at_k gdpo reward",
    "returns": "gae reinforce_pp gigpo marti",
    "by_models": "dpo distill prime",
}
ADVANTAGES = {name: f"{_HERE}.{of}:{name}" for of, names in _ADVANTAGES.items() for name in names.split()}
_LOSSES = "ppo gspo cispo sapo gmpo dppo topr raft_pp kimi kimi_token reinforce"
LOSSES = {name: f"{_HERE}.losses:{name}" for name in _LOSSES.split()}
_CORRECTIONS = ("decoupled", "tis", "icepop", "mis", "m2po", "bypass", "none")
CORRECTIONS = {name: f"{_HERE}.corrections:{name}" for name in _CORRECTIONS}
NORMALISERS = {name: f"{_HERE}.normalisers:{name}" for name in ("token", "sequence", "rollout", "constant")}
