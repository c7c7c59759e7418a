"""The parts of `areal-async gpu check` that need a server, on its CPU build."""

import json
import os
import subprocess
import sys

import pytest

from tests.deploy.commands import ROOT
from tests.waiting import LIMIT_S, deadline_s


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(deadline_s(1200))
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_server_is_started_updated_and_compared(engine, tmp_path):
    command = [
        sys.executable,
        "-P",
        "-m",
        "areal_async",
        "gpu",
        "check",
        "--device",
        "cpu",
        "--tiny",
        "--json",
    ]
    command += ["--parts", f"{engine},decode-{engine}", "--keep", str(tmp_path / "kept")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    found = json.loads(done.stdout)["parts"]
    assert {name: found[name]["status"] for name in found} == dict.fromkeys(found, "ok"), done.stderr
    assert found[engine]["figures"]["checks_passed"] == 2
    assert found[f"decode-{engine}"]["figures"]["tokens_per_s"] > 0
