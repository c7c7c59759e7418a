"""Channel `nccl` between two hosts that share nothing but a network."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sealed.world import sealed_hosts, unusable

TENSORS = str(Path(__file__).parents[1] / "sealed" / "tensors.py")


@pytest.mark.slow
@pytest.mark.skipif(bool(unusable()), reason=unusable())
def test_an_engine_on_another_host_takes_the_snapshot_and_the_trainers_tensors(tmp_path: Path) -> None:
    with sealed_hosts(tmp_path) as hosts:
        for _ in range(2):
            hosts.add()
        words = hosts.on(1, sys.executable, TENSORS, "trainer", "/tmp/work")
        with subprocess.Popen(
            words, env=hosts.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as trainer:
            assert trainer.stdin is not None
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "published\n"
            said = hosts.tell(2, sys.executable, TENSORS, "engine", "/tmp/work")
            trainer.stdin.write("\n")
    assert said.decode().split("\n")[:2] == ["snapshot True", "tensors gloo True"]
