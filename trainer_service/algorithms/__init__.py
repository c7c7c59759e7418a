"""What a step computes: advantage × loss × correction × normaliser, each a part that a job file names.

The tables say where the built-in parts are. A part is a plain function on tensors, declared by a decorator of
`trainer_service.algorithms.parts`; `objective.py` puts the chosen ones together. Reading a job file imports
parts, so their modules do not import torch.
"""

ADVANTAGES = {"grpo": "trainer_service.algorithms.built_in:grpo"}
LOSSES = {"ppo": "trainer_service.algorithms.built_in:ppo", "sft": "trainer_service.algorithms.built_in:sft"}
CORRECTIONS = {
    "decoupled": "trainer_service.algorithms.built_in:decoupled",
    "none": "trainer_service.algorithms.built_in:none",
}
NORMALISERS = {
    "token": "trainer_service.algorithms.built_in:token",
    "sequence": "trainer_service.algorithms.built_in:sequence",
}
