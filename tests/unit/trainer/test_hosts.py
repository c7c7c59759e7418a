"""A rank group whose ranks are on two hosts, which share no disk and no memory, trains as one on one host."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from areal_async.service.record import read_run_log
from tests.unit.trainer import hosts_process
from tests.unit.trainer.forked_ranks import fork_ranks
from tests.unit.trainer.hosts_process import STEPS
from tests.waiting import LIMIT_S
from trainer_service.checkpoint import Checkpoints, Retention
from trainer_service.checkpoint_store import CheckpointStore
from trainer_service.data.recording import write_step
from trainer_service.errors import TrainerError
from trainer_service.ranks import Ranks, join_ranks

NEAR_AND_FAR = ("near", "far")


@pytest.fixture(scope="module")
def batches(tmp_path_factory, make_batch):
    root = tmp_path_factory.mktemp("batches")
    for step in range(STEPS):
        batch, blobs = make_batch(step, max_staleness=2, groups=4, lengths=(1, 14))
        write_step(root, batch, blobs)
    return root


class Trainer:
    """The ranks of one job, on `hosts`, whose folders are below `folder`."""

    def __init__(self, folder, model, batches, hosts=NEAR_AND_FAR):
        self.folder, self.hosts = folder, hosts
        self.store = f"file://{folder}/store"
        self._paths = [str(path) for path in (model, batches, folder)]

    def run(self, **environment):
        """Run all ranks to their end; the status of each, and what rank 0 printed. Where one is killed
        (`KILL_RANK`), the others are then too, as the supervisor does it."""
        command = [sys.executable, hosts_process.__file__]
        world = str(len(self.hosts))
        ranks = fork_ranks(
            [
                [*command, str(rank), world, host, *self._paths, self.store]
                for rank, host in enumerate(self.hosts)
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | environment,
        )
        try:
            if killed := environment.get("KILL_RANK"):
                assert ranks[int(killed)].wait(LIMIT_S) == -signal.SIGKILL, ranks[int(killed)].communicate()
                for process in ranks:
                    process.kill()
            said = [process.communicate(timeout=LIMIT_S) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        self.errors = [errors for _, errors in said]
        return [process.returncode for process in ranks], said[0][0].strip()

    def finish(self, **environment):
        """Run to the end of the job or to a stop; the step that it began with."""
        status, said = self.run(**environment)
        assert status == [0] * len(self.hosts), "\n".join(self.errors)
        return int(said)

    def lose(self, *folders):
        """What was in these folders, such as `near/run`, is gone."""
        for name in folders:
            shutil.rmtree(self.folder / name)

    def published(self):
        """Hash of the weights of each step."""
        log = read_run_log(self.folder / self.hosts[0] / "run" / "metrics.jsonl")
        return {record["step"]: record["weights_hash"] for record in log if record["kind"] == "step"}

    def last_snapshot(self):
        (found,) = (self.folder / self.hosts[0] / "shm").glob(f"*-v{STEPS}*/model.safetensors")
        return found.read_bytes()

    def model(self):
        return self.folder / self.hosts[0] / "run" / "model" / "model.safetensors"

    def stored(self):
        return CheckpointStore(f"{self.store}/job/checkpoints").whole()


@pytest.fixture(scope="module")
def one_host(tmp_path_factory, model_dir, batches):
    trainer = Trainer(tmp_path_factory.mktemp("one"), model_dir, batches, ("near", "near"))
    assert trainer.finish() == 0
    return trainer


@pytest.fixture
def two_hosts(tmp_path, model_dir, batches):
    return Trainer(tmp_path, model_dir, batches)


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory, model_dir, batches):
    trainer = Trainer(tmp_path_factory.mktemp("stopped"), model_dir, batches)
    assert trainer.finish(STOP_AFTER="5") == 0
    return trainer.folder


@pytest.fixture
def stopped(stopped_once, two_hosts):
    """Two hosts whose job was stopped after five of its six steps."""
    shutil.copytree(stopped_once, two_hosts.folder, dirs_exist_ok=True)
    return two_hosts


def same_model(one, other):
    first, second = load_file(one.model()), load_file(other.model())
    assert first.keys() == second.keys()
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-6


def test_ranks_on_two_hosts_train_and_publish_what_one_host_does(one_host, two_hosts):
    assert two_hosts.finish() == 0
    assert two_hosts.published() == one_host.published()
    assert [*two_hosts.published()] == [*range(STEPS)]
    assert two_hosts.last_snapshot() == one_host.last_snapshot()
    same_model(one_host, two_hosts)
    stored = two_hosts.folder / "store" / "job"
    assert (stored / "model" / "model.safetensors").read_bytes() == two_hosts.model().read_bytes()
    assert two_hosts.stored() == [2, 4, 6]
    names = {path.name for path in (stored / "checkpoints" / "step-000004").iterdir()}
    assert {f"policy-0000{rank}-of-00002.safetensors" for rank in (0, 1)} < names
    far = two_hosts.folder / "far"
    assert not [*far.rglob("model.safetensors")], "only the first rank's host has snapshots and a model"
    for host in NEAR_AND_FAR:
        left = [*(two_hosts.folder / host / "run" / "checkpoints").glob("*step-*")]
        assert not left, "what is in the store is not kept on a host"


@pytest.mark.parametrize(
    ("lost", "step"),
    [
        (["near/run", "far/run"], 5),
        (["near", "far"], 4),
        (["near/run", "far"], 4),
        (["near", "far/run"], 4),
    ],
    ids=["processes", "both hosts", "the other host", "the first host"],
)
def test_they_go_on_from_what_all_of_them_still_have(one_host, stopped, lost, step):
    """From what they left in memory where both hosts have it, and else from the store."""
    stopped.lose(*lost)
    assert stopped.finish() == step
    same_model(one_host, stopped)
    assert stopped.last_snapshot() == one_host.last_snapshot()
    assert stopped.stored() == [2, 4, 6]


def test_ranks_that_come_back_on_each_others_hosts_go_on_from_the_store(one_host, stopped):
    """Each finds in memory what the other one reads."""
    stopped.hosts = ("far", "near")
    assert stopped.finish() == 4
    same_model(one_host, stopped)


def test_states_of_one_name_that_are_not_the_same_are_not_taken(one_host, stopped):
    manifest = stopped.folder / "far" / "shm" / "trainer-state" / "step-000005" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"epoch": 1', b'"epoch": 2'))
    assert stopped.finish() == 4
    same_model(one_host, stopped)


def test_a_rank_killed_while_it_names_its_part_of_a_state_has_both_go_on_from_the_one_before(
    one_host, two_hosts
):
    """The first host has a newer state, of which the other's part has no name."""
    two_hosts.run(KILL_RANK="1", KILL_AT="trainer.mid_state@3")
    names = {
        host: sorted(
            path.name for path in (two_hosts.folder / host / "shm" / "trainer-state").glob("*step-*")
        )
        for host in NEAR_AND_FAR
    }
    assert names == {
        "near": ["step-000003", "step-000005"],
        "far": [".step-000005.tmp", "step-000003"],
    }
    assert two_hosts.finish() == 4
    same_model(one_host, two_hosts)
    assert two_hosts.last_snapshot() == one_host.last_snapshot()


def test_a_killed_rank_has_both_come_back(one_host, two_hosts):
    two_hosts.run(KILL_RANK="1", KILL_AT="trainer.after_train@5")
    assert two_hosts.finish() in (2, 3, 4)
    same_model(one_host, two_hosts)


def test_without_a_store_ranks_on_several_hosts_are_refused(tmp_path):
    alone = join_ranks(0, 1)
    apart = Ranks(0, 2, alone.device, alone.mesh, hosts=NEAR_AND_FAR)
    with pytest.raises(TrainerError, match=r"checkpoint\.store"):
        Checkpoints(tmp_path, job="job", policy="policy", keep=Retention(1), ranks=apart)
