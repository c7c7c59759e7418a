"""Loader of the tokenizers of Hugging Face model folders, without torch.

`from transformers import AutoTokenizer` imports torch and every generation utility. This takes seconds and
hundreds of megabytes, even in a process that only sends requests to an inference server. Therefore a separate
process, in which torch is hidden, finds the class that `AutoTokenizer` chooses for a folder. The class is
cached by the digest of the folder's files (`areal_async/base/cache.py`). Later processes import the class,
which loads the folder in the same way as `AutoTokenizer`.

    python -P -m areal_async.models.tokenizer FOLDER      prints the class, as MODULE:NAME
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from areal_async.base.cache import digest_of, keep, recall
from areal_async.base.errors import ArealError

KIND = "tokenizer-class"
LOOK_LIMIT_S = 300.0  # Longest time for finding the class
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
"""Suffixes of weight files. No tokenizer depends on them."""
TEMPLATES = "additional_chat_templates/*"
"""Folder in which transformers looks for further chat templates."""
CLASS = re.compile(r"transformers(\.\w+)+:\w+")


class TokenizerError(ArealError):
    """Transformers cannot load a tokenizer from the model folder."""


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model folder. Code in the model folder is never run. Torch is used only if the
    process has already imported it. Raises `TokenizerError`."""
    try:
        if sys.modules.get("torch") is not None:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        loader = resolve_name(tokenizer_class(folder))
        return loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise TokenizerError(
            f"{folder} has no usable tokenizer: {reason}. `model` must name a Hugging Face folder with its "
            "tokenizer files."
        ) from error


def tokenizer_class(folder: Path) -> str:
    """Return the class that `AutoTokenizer` chooses for the folder, as `module:name`. Raises ValueError if
    there is none."""
    key = digest_of(tokenizer_files(folder))
    known = (recall(KIND, key) or b"").decode("utf-8", "replace")
    if CLASS.fullmatch(known):
        return known
    command = [sys.executable, "-P", "-m", __name__, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"loading it takes longer than {LOOK_LIMIT_S:g} s") from None
    found = done.stdout.strip().rpartition("\n")[2]
    if done.returncode != 0 or not CLASS.fullmatch(found):
        last = done.stderr.strip().rpartition("\n")[2]
        raise ValueError(last or f"transformers has no class for it ({found!r})")
    keep(KIND, key, found.encode())
    return found


def keep_class(folder: Path, tokenizer: Any) -> None:
    """Cache the class of `tokenizer`, which `AutoTokenizer` has just loaded from `folder`."""
    if CLASS.fullmatch(found := _class_of(tokenizer)):
        keep(KIND, digest_of(tokenizer_files(folder)), found.encode())


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a model folder that its tokenizer may depend on, sorted by name."""
    found = [*folder.iterdir(), *folder.glob(TEMPLATES)]
    return sorted(path for path in found if path.is_file() and path.suffix not in WEIGHTS)


def _class_of(tokenizer: Any) -> str:
    return f"{type(tokenizer).__module__}:{type(tokenizer).__qualname__}"


def _main() -> None:
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # transformers would import it
    from transformers import AutoTokenizer

    folder = Path(sys.argv[1])
    print(_class_of(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)))


if __name__ == "__main__":
    _main()
