"""Names of the hub: the local cache first, then the hub, here a small server of its own."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from areal_async.storage.hub import hub_url, is_of_hub
from tests.waiting import LIMIT_S

REPOSITORY = Path(__file__).parents[3]
COMMIT = "c" * 40
LOAD = """
import json, sys
from areal_async.config.load import dump_job, load_job
from areal_async.base.mistakes import ConfigError
from pathlib import Path
mapping = json.loads(sys.argv[1])
try:
    job = load_job(mapping, source="job.yaml", base=Path.cwd())
except ConfigError as error:
    print(json.dumps({"error": str(error)}))
else:
    again = dump_job(job)
    print(json.dumps({"model": str(job.model), "files": sorted(p.name for p in job.model.iterdir()),
                      "train": str(job.tasks.train), "dumped": again}))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """A model and a data set, by what the hub calls them."""
    from areal_async.cli.quickstart.model import write_model  # with torch

    folder = tmp_path_factory.mktemp("hub")
    write_model(folder / "model", seed=0, positions=4096)
    (folder / "data" / "data").mkdir(parents=True)
    row = {"prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}}
    (folder / "data" / "data" / "train-00000-of-00001.jsonl").write_text(json.dumps(row) + "\n")
    for number in range(2):
        part = folder / "data" / "more" / f"train-0000{number}-of-00002.json"
        part.parent.mkdir(exist_ok=True)
        part.write_text(json.dumps(row) + "\n")
    return {"models/tiny-org/tiny": folder / "model", "datasets/tiny-org/sums": folder / "data"}


@pytest.fixture(scope="module")
def hub(files):
    """Serves what huggingface_hub asks for; `.asked` holds the paths."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            for name, folder in files.items():
                there = sorted(each for each in folder.rglob("*") if each.is_file())
                names = {each.relative_to(folder).as_posix(): each for each in there}
                plain = name.removeprefix("models/")
                if path.startswith(f"/api/{name}/revision/"):
                    listed = [{"rfilename": each} for each in names]
                    told = {"id": plain.removeprefix("datasets/"), "sha": COMMIT, "siblings": listed}
                    return self.send(json.dumps(told).encode(), body, "application/json")
                if path.startswith(f"/api/{name}/tree/"):
                    entries = [
                        {"type": "file", "path": each, "size": at.stat().st_size, "oid": sha1(at)}
                        for each, at in names.items()
                    ]
                    return self.send(json.dumps(entries).encode(), body, "application/json")
                if path.startswith(f"/{plain}/resolve/"):
                    wanted = path.removeprefix(f"/{plain}/resolve/").partition("/")[2]
                    return self.send(
                        names[wanted].read_bytes(), body, "application/octet-stream", sha1(names[wanted])
                    )
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None

        def send(self, content: bytes, body: bool, kind: str, tag: str = "") -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", COMMIT)
            if tag:
                self.send_header("ETag", f'"{tag}"')
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.asked = asked
    yield server
    server.shutdown()
    server.server_close()


def sha1(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


def load(folder: Path, mapping: dict, **environment: str) -> tuple[dict, str]:
    """What a process of its own makes of a job: huggingface_hub reads its environment once."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps({"job": "x"} | mapping)],
        cwd=folder,
        env=own
        | {"PYTHONPATH": path, "HF_HOME": str(folder / "hf"), "AREAL_ASYNC_CACHE": str(folder / "cache")}
        | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


NAMED = {"model": "tiny-org/tiny", "tasks": {"train": "tiny-org/sums"}}


def test_what_is_in_no_cache_is_fetched_once_and_then_used_without_a_network(tmp_path, hub):
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    found, told = load(tmp_path, NAMED, HF_ENDPOINT=endpoint)
    assert "error" not in found, found
    assert "fetching hf://tiny-org/tiny" in told
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(found["files"])
    assert "model: hf://tiny-org/tiny" in found["dumped"]
    assert "train: hf://datasets/tiny-org/sums" in found["dumped"]
    asked = len(hub.asked)
    again, told = load(tmp_path, NAMED, HF_ENDPOINT=endpoint)
    assert (again, told) == (found, "")
    assert len(hub.asked) == asked, "the hub is not asked for what the cache has"
    offline, _ = load(tmp_path, NAMED, HF_HUB_OFFLINE="1")
    assert offline == found
    for lost in ("model.safetensors", "more/train-00001-of-00002.json"):
        next((tmp_path / "hf").rglob(f"snapshots/*/{lost}")).unlink()
    mended, told = load(tmp_path, NAMED, HF_ENDPOINT=endpoint)
    assert mended == found
    assert all(named in told for named in ("tiny-org/tiny", "tiny-org/sums")), "what is missing is fetched"


def test_a_name_that_neither_cache_nor_hub_has_says_what_was_looked_for(tmp_path, hub):
    missing = {"model": "tiny-org/huge", "tasks": {"train": "tiny-org/none"}}
    for environment, words in (
        (
            {"HF_HUB_OFFLINE": "1"},
            "HF_HUB_OFFLINE keeps the hub from being asked. `hf download tiny-org/huge`",
        ),
        ({"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}, "does not give it (404"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be asked"),
    ):
        found, _ = load(tmp_path, missing, **environment)
        assert words in found["error"], found["error"]
        assert (
            f"the model tiny-org/huge is neither a path here nor whole in {tmp_path}/hf/hub" in found["error"]
        )
        assert "tasks.train: the data set tiny-org/none" in found["error"]


def test_a_url_with_a_revision_or_a_folder_of_a_model_is_fetched_as_from_any_store():
    assert is_of_hub("hf://Qwen/Qwen2.5-0.5B")
    assert is_of_hub("hf://datasets/openai/gsm8k/main/train-00000-of-00001.parquet")
    for url in ("hf://Qwen/Qwen2.5-0.5B@main", "hf://a/b/c", "hf://datasets/a", "s3://a/b"):
        assert not is_of_hub(url)


def test_what_begins_with_something_beside_the_job_file_is_a_path(tmp_path):
    (tmp_path / "runs").mkdir()
    assert hub_url("runs/model", tmp_path, is_data=False) is None
    assert hub_url("Qwen/Qwen2.5-0.5B", tmp_path, is_data=False) == "hf://Qwen/Qwen2.5-0.5B"
    assert hub_url("openai/gsm8k", tmp_path, is_data=True) == "hf://datasets/openai/gsm8k"
    for path in ("data/train.jsonl", "data/train.parquet"):
        assert hub_url(path, tmp_path, is_data=True) is None
    for path in ("base", "./Qwen/x", "../a/b", "/a/b", "a/b/c", "~/a", "s3://a/b"):
        assert hub_url(path, tmp_path, is_data=False) is None
