"""Models and data sets of the Hugging Face hub, from its local cache or from the hub.

`owner/name` in place of a model or a data set's folder means the URL `hf://owner/name` or
`hf://datasets/owner/name`. Content in the local cache (`HF_HOME`) is used unchanged, without a request to the
hub. Other content is fetched into that cache, unless `HF_HUB_OFFLINE=1`. `HF_TOKEN` and `HF_ENDPOINT` have
their usual effect. The local path of the URL is a link into the cache."""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from areal_async.models.files import weight_files
from areal_async.storage.remote import StorageError, StorageMissing

PROTOCOL = "hf://"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
HUB_URL = re.compile(rf"hf://(datasets/{HUB_NAME.pattern}(/[\w.-]+)*|(?!datasets/){HUB_NAME.pattern})")
OF_MODEL = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".arrow")
OF_DATA = [f"*{suffix}" for suffix in DATA_SUFFIXES]
SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})(\..*)")


def hub_url(text: str, base: Path, *, is_data: bool) -> str | None:
    """Return the hub URL for a name, or None if the name is a path. A name is a path if its first part exists
    in `base` or in the working directory, or if it has the suffix of a data file."""
    first = text.partition("/")[0]
    if not HUB_NAME.fullmatch(text) or (base / first).exists() or os.path.exists(first):
        return None
    if is_data and text.endswith(DATA_SUFFIXES):
        return None
    return f"{PROTOCOL}datasets/{text}" if is_data else f"{PROTOCOL}{text}"


def is_of_hub(url: str) -> bool:
    """Return whether the URL names a whole model or data set, which the local cache can hold. Other `hf://`
    URLs, with a revision or a folder of a model, are fetched as from any store."""
    return HUB_URL.fullmatch(url) is not None


def bring(url: str, target: Path, begun: Callable[[], None]) -> None:
    """Make `target` a link to the content of an `hf://` URL in the local cache. If the content is not cached,
    call `begun` and fetch it. Raises `StorageError` and OSError."""
    name = url.removeprefix(PROTOCOL)
    if name.startswith("datasets/"):
        found = _data_set(name.removeprefix("datasets/"), begun)
    else:
        found = _snapshot(name, "model", OF_MODEL, _is_whole_model, begun)
    if target.is_symlink() and target.readlink() == found:
        return
    if target.exists() and not target.is_symlink():
        raise StorageError(f"{target} is in the way of {url}. Delete it.")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    fresh.symlink_to(found)
    fresh.replace(target)  # Another process may do the same at this time


def _data_set(name: str, begun: Callable[[], None]) -> Path:
    """Return the folder of `owner/name`, or the folder or file `owner/name/place` in it. Raises
    `StorageError`."""
    owner, repository, *inner = name.split("/")
    place = "/".join(inner)
    patterns = [place, f"{place}/*"] if place else OF_DATA

    def is_whole(folder: Path) -> bool:
        return (folder / place).is_file() or _has_all_shards(folder / place)

    folder = _snapshot(f"{owner}/{repository}", "dataset", patterns, is_whole, begun)
    if not (folder / place).exists():
        raise StorageMissing(f"the data set {owner}/{repository} has no {place}. Correct the name.")
    return folder / place


def _snapshot(
    name: str, kind: str, patterns: list[str], is_whole: Callable[[Path], bool], begun: Callable[[], None]
) -> Path:
    """Return the folder of a repository in the local cache. Fetch it if needed."""
    from huggingface_hub import constants, snapshot_download  # Imported here because most jobs have paths
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    with suppress(OSError, HFValidationError):
        folder = Path(snapshot_download(name, repo_type=kind, local_files_only=True))
        if is_whole(folder):
            return folder
    called = "data set" if kind == "dataset" else kind
    looked = f"the {called} {name} is neither a path here nor whole in {constants.HF_HUB_CACHE}"
    flag = " --repo-type dataset" if kind == "dataset" else ""
    fix = f"`hf download {name}{flag}` on a machine with a network fills such a cache; HF_HOME names it"
    if constants.HF_HUB_OFFLINE:
        raise StorageMissing(f"{looked}, and HF_HUB_OFFLINE keeps the hub from being asked. {fix}.")
    begun()
    try:
        folder = Path(snapshot_download(name, repo_type=kind, allow_patterns=patterns))
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise StorageMissing(
            f"{looked}, and {constants.ENDPOINT} does not give it ({status}: there is none, or it is private "
            f"or gated). Correct the name, or set HF_TOKEN."
        ) from None
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise StorageError(
            f"{looked}, and {constants.ENDPOINT} cannot be asked ({why:.120}). {fix}."
        ) from None
    if not is_whole(folder):
        raise StorageMissing(
            f"{looked}, nor on {constants.ENDPOINT}: it lacks files (safetensors weights, or data). Name "
            "another."
        )
    return folder


def _has_all_shards(folder: Path) -> bool:
    """Return whether the folder has data files, and all parts of each sharded file."""
    files = [each for each in folder.rglob("*") if each.suffix in DATA_SUFFIXES]
    parts = Counter(
        (str(each.parent), *found.groups()) for each in files if (found := SHARD.match(each.name))
    )
    return bool(files) and all(count == int(of) for (_, _, of, _), count in parts.items())


def _is_whole_model(folder: Path) -> bool:
    """Return whether the configuration and every file of weights exist."""
    if not (folder / "config.json").is_file():
        return False
    try:
        return bool(files := weight_files(folder)) and all(map(os.path.isfile, files))
    except (OSError, ValueError):
        return False
