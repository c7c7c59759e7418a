"""Models that say a text by heart, and tokenizers of bytes with special tokens and a chat template."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEAD = 32  # Width of an attention head: one that every engine has a kernel for


def byte_tokenizer(
    template: str | None = CHATML,
    *,
    eos: str = "<|im_end|>",
    special: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
) -> Any:
    """Bytes as tokens; padding is `<|endoftext|>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=eos,
        pad_token="<|endoftext|>",
        additional_special_tokens=[name for name in special if name not in (eos, "<|endoftext|>")],
        chat_template=template,
    )


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def write_reciting_model(
    folder: Path, tokenizer: Any, text: str, *, ends: int | list[int] | None = None, after: str = ""
) -> Path:
    """A model that says `text` behind a line break, each of whose tokens is in it once, and then repeats the
    token `after`. `ends` are the ids that its generation config says end an answer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = len(tokenizer)
    width = -(-size // HEAD) * HEAD
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=HEAD,
        num_hidden_layers=1,
        num_attention_heads=width // HEAD,
        num_key_value_heads=width // HEAD,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    order = [*ids_of(tokenizer, "\n"), *ids_of(tokenizer, text)]
    assert len({*order}) == len(order)
    follows = dict(itertools.pairwise(order))
    if after:
        follows[order[-1]] = follows[ids_of(tokenizer, after)[0]] = ids_of(tokenizer, after)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for norm in (model.model.norm, model.model.layers[0].input_layernorm):
            norm.weight.fill_(1)
        model.model.layers[0].post_attention_layernorm.weight.fill_(1)
        for token in range(size):
            model.model.embed_tokens.weight[token, token] = 1
            model.lm_head.weight[follows.get(token, tokenizer.pad_token_id), token] = 60 / width**0.5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
    return folder
