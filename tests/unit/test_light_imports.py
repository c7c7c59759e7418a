"""Torch and transformers are imported where tensors are: these processes and modules start without them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = (
    "torch._C",
    "transformers.modeling_utils",
    "sympy.core",
    "matplotlib.figure",
    "ray._raylet",
    "pyarrow.lib",
)
"""One module that is imported only if its package is really loaded, of each heavy package."""
LIGHT = {
    "supervisor": ["areal_async.runner.run_job", "areal_async.launch.preflight"],
    "trial of the prompts": ["areal_async.launch.prompt_trial"],
    "controller": ["areal_async.cluster.daemon", "areal_async.cluster.client"],
    "command line": ["areal_async.cli.main", "areal_async.cli.jobs", "areal_async.cli.tools"],
    "buffer": ["replay_buffer.server"],
    "reward service": ["reward_service.router", "reward_service.server", "reward_service.backends.remote"],
    "reward process": ["reward_service.pool.worker"],
    "worker on SGLang": ["rollout_service.service", "rollout_service.engines.sglang.adapter"],
    "worker on vLLM": ["rollout_service.service", "rollout_service.engines.vllm.adapter"],
    "evaluator on a server": ["rollout_service.evaluator"],
    "gateway": ["rollout_service.gateway.server", "areal_async.models.tokenizer"],
    "receiver of weights": ["areal_async.weights.receiver", "areal_async.weights.delta"],
}
TRACE = """
import importlib, importlib.abc, json, sys
heavy, found = set(sys.argv[1].split(",")), {}

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in heavy and name not in found:
            chain, frame = [], sys._getframe(1)
            while frame:
                module = frame.f_globals.get("__name__", "")
                if frame.f_code.co_name == "<module>" and not module.startswith("importlib"):
                    chain.append(f"{module}:{frame.f_lineno}")
                frame = frame.f_back
            found[name] = chain[-2::-1]

sys.meta_path.insert(0, Watch())
for module in sys.argv[2:]:
    importlib.import_module(module)
print(json.dumps(found))
"""


def heavy_imports(modules: list[str]) -> dict[str, list[str]]:
    """Return the heavy modules that importing `modules` loads, each with the chain of imports that leads
    there."""
    command = [sys.executable, "-c", TRACE, ",".join(HEAVY), *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("process", LIGHT)
def test_it_starts_without_torch(process):
    found = heavy_imports(LIGHT[process])
    shown = "\n".join(f"{name} is imported by\n  " + "\n  ".join(chain) for name, chain in found.items())
    assert not found, f"{process}: {shown}"


def test_a_heavy_import_is_shown_with_its_chain():
    found = heavy_imports(["trainer_service.publishing.writing"])
    assert found["torch._C"][0].startswith("trainer_service.publishing.writing:")


LOADED = """
import sys
from reward_service.pool.protocol import LoadReward
from reward_service.pool.worker import load
load(LoadReward(1, sys.argv[1] + ":length", {}, "episode", None))
print("pydantic" in sys.modules)
"""


def test_a_scoring_process_loads_a_reward_without_arguments_without_pydantic(tmp_path):
    """Pydantic takes half of such a process's start, and a killed reward service waits for this start."""
    file = tmp_path / "own.py"
    file.write_text("from reward_service.sdk import reward\n\n@reward\ndef length(given):\n    return 1.0\n")
    done = subprocess.run([sys.executable, "-c", LOADED, file], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
