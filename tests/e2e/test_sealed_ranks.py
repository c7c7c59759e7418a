"""A rank group of two ranks on two hosts that share nothing but a network trains as one on one host does,
both started by Ray, on the same recorded batches."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from areal_async.config.load import dump_job
from areal_async.service.record import read_run_log
from tests.sealed.recorded_trainer import BATCHES
from tests.sealed.world import CLUSTER, WORK, SealedHosts, sealed_hosts, unusable
from tests.unit.trainer.conftest import synthetic_batch, write_model
from tests.unit.trainer.rank_process import job_of
from tests.waiting import LIMIT_S
from trainer_service.data.recording import write_step

STEPS = 6
LABELS = {"together": "home", "apart": "rank"}
"""Job → label of the hosts of its ranks."""


def write_jobs(folder: Path) -> None:
    folder.mkdir()
    (folder / "unused.jsonl").write_text("{}\n")
    (folder / "cluster.yaml").write_text(CLUSTER)
    model = write_model(folder / "model")
    for name, label in LABELS.items():
        job = job_of(model, folder / "runs", steps=STEPS, ranks=2, torch_threads=1)
        # All others at home: a share of a rank's host would leave no room for the rank.
        at_home = {role: {"labels": {"part": "home"}} for role in ("reward", "rollout")}
        placement = {**at_home, "trainer": {"labels": {"part": label}}}
        values = job.model_dump(mode="json") | {
            "job": name,
            "run_dir": "runs",
            "model": "model",
            "placement": placement,
        }
        (folder / f"{name}.yaml").write_text(dump_job(type(job).model_validate(values)))


def outcome(hosts: SealedHosts, name: str, folder: Path) -> tuple[dict[str, Any], list[str], set[str]]:
    """The model that a job made, the hash of the weights of each step, and the nodes of its ranks."""
    run_dir = hosts.copy_out(f"runs/{name}", folder)
    records = read_run_log(run_dir / "metrics.jsonl")
    services = json.loads((run_dir / "topology.json").read_text())["services"]
    nodes = {place["node_id"] for place in services if place["role"] == "trainer"}
    hashes = [record["weights_hash"] for record in records if record["kind"] == "step"]
    return load_file(run_dir / "model" / "model.safetensors"), hashes, nodes


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(bool(unusable()), reason=unusable())
def test_ranks_on_two_sealed_hosts_train_what_two_on_one_do(tmp_path: Path) -> None:
    folder, batches = tmp_path / "work", tmp_path / "batches"
    write_jobs(folder)
    for step in range(STEPS):
        batch, blobs = synthetic_batch(step, max_staleness=2, groups=4, lengths=(1, 14))
        write_step(batches, batch, blobs)
    with sealed_hosts(tmp_path) as hosts:
        for part, cpus in (("home", 6), ("rank", 1), ("rank", 1)):
            host = hosts.add()
            hosts.node(host, cpus, part=part)
            hosts.copy(host, batches, BATCHES)
        hosts.copy_in(folder)
        runs = {}
        for name in LABELS:
            words = ["env", "-C", WORK, sys.executable, "-m", "tests.sealed.recorded_job", f"{name}.yaml"]
            with (tmp_path / name).open("wb") as told:
                runs[name] = hosts.start(1, *words, output=told)
        for name, run in runs.items():
            assert run.wait(LIMIT_S) == 0, (tmp_path / name).read_text()
        together, apart = (outcome(hosts, name, tmp_path / "back") for name in LABELS)
    assert (len(together[2]), len(apart[2])) == (1, 2), "nodes of the ranks"
    assert apart[0].keys() == together[0].keys()
    assert max(float((apart[0][name] - together[0][name]).abs().max()) for name in apart[0]) <= 1e-6
    assert len(apart[1]) == STEPS
    assert apart[1] == together[1], "and every step published the same bytes"
