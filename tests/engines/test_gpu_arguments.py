"""The arguments of a server on a GPU are those that its own parser knows.

The servers of the other tests run on a CPU. Here the command lines for GPUs, from the real adapters and from
every recipe, are parsed by the release that is installed, in its own environment.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_async.base.versions import VersionTag
from areal_async.config.engines import find_engine_python
from rollout_service.engines.http.adapter import Directory, Launch, ServerSettings
from rollout_service.engines.sglang import adapter as sglang
from rollout_service.engines.sglang.messages import CONTEXT_MARGIN
from rollout_service.engines.vllm import adapter as vllm
from tests.waiting import deadline_s

RECIPES = Path(__file__).parents[2] / "recipes"
COMMANDS = {"sglang": sglang.command, "vllm": vllm.command}
MODULES = {"sglang": "sglang.launch_server", "vllm": "vllm.entrypoints.openai.api_server"}
MODES = ("recompute", "keep", "session")
POSITIONS = 4096

PARSE = {
    "sglang": """
from sglang.srt.server_args import ServerArgs, prepare_server_args as parse
import argparse
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
""",
    "vllm": """
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
def parse(words):
    given = parser.parse_args(words)
    validate_parsed_serve_args(given)
    return AsyncEngineArgs.from_cli_args(given)
""",
}
"""Statements that make `parser`, and `parse` from an argument vector to the server's settings."""
SCRIPT = """
import contextlib, io, json, sys
{make}
known = set(parser._option_string_actions)
found = []
for words in json.load(sys.stdin):
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    said = io.StringIO()
    try:
        # A flag that only begins like one of the parser's would be taken for it.
        strange = [flag for flag in flags if flag not in known and flag.replace("-", "_") not in known]
        if strange:
            raise ValueError(f"unknown flags: {{strange}}")
        with contextlib.redirect_stderr(said):
            made = parse(words)
        found.append({{name: getattr(made, name) for name in {read}}})
    except (Exception, SystemExit) as error:
        found.append({{"error": f"{{type(error).__name__}}: {{error}} {{said.getvalue()[-500:]}}"}})
print("FOUND" + json.dumps(found))
"""


def words_of(engine: str, **settings: Any) -> list[str]:
    """The arguments of a server of the engine on a GPU, without interpreter and module."""
    given = {"slots": 128, "max_model_len": POSITIONS, "device": "cuda", "dtype": "bfloat16"} | settings
    made = ServerSettings(python=Path("/env/bin/python"), **given)
    weights = Directory(VersionTag("policy", 1, 7), Path("/snapshots/policy-e1-v7"))
    words = COMMANDS[engine](Launch(made, Path("/model"), weights, POSITIONS, 30000))
    return words[words.index(MODULES[engine]) + 1 :]


def parsed(engine: str, commands: list[list[str]]) -> list[dict[str, Any]]:
    """Return the settings that the installed server parses from each command, or `error`."""
    ended = subprocess.run(
        [find_engine_python(engine), "-P", "-c", SCRIPT.format(make=PARSE[engine], read=[*WANTED[engine]])],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=deadline_s(300),
        check=False,
        # Without a network, vLLM would look for the model, which does not exist.
        env={**os.environ, "HF_HUB_OFFLINE": "0"},
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, ended.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(lines[0].removeprefix("FOUND"))
    return found


def recipes(engine: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Server arguments of the recipes that run the engine on a GPU, each with its place."""
    for path in sorted(RECIPES.rglob("*.yaml")):
        content = yaml.safe_load(path.read_text())
        policies = content.get("policies") or {"": content} if isinstance(content, dict) else {}
        for name, each in policies.items():
            rollout = {**(content.get("rollout") or {}), **(each.get("rollout") or {})}
            for part in ("rollout", "evaluation"):
                section = {**(content.get(part) or {}), **(each.get(part) or {})}
                if section.get("engine", rollout.get("engine")) == engine and "cuda" in str(
                    rollout.get("device")
                ):
                    arguments = (section.get("server") or {}).get("arguments") or {}
                    yield f"{path.relative_to(RECIPES)}:{name}:{part}", arguments


WANTED: dict[str, dict[str, Any]] = {
    "sglang": {
        "dtype": "bfloat16",
        "device": "cuda",
        "load_format": "safetensors",
        "context_length": POSITIONS + CONTEXT_MARGIN,
        "max_running_requests": 128,
        "tp_size": 2,
        "mem_fraction_static": 0.3,
        "enable_memory_saver": True,
        "disable_cuda_graph": False,
        "disable_overlap_schedule": False,
    },
    "vllm": {
        "dtype": "bfloat16",
        "load_format": "safetensors",
        "max_model_len": POSITIONS,
        "max_num_seqs": 128,
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.3,
        "enable_sleep_mode": True,
        "enforce_eager": False,
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
    },
}
"""Settings of a server of `MORE` with the mode `recompute`, under the names that the server has for them."""
MORE = {
    "sglang": {"tp-size": 2, "mem-fraction-static": 0.3, "enable-memory-saver": True},
    "vllm": {"tensor-parallel-size": 2, "gpu-memory-utilization": 0.3, "enable-sleep-mode": True},
}


@pytest.mark.engine
@pytest.mark.parametrize("engine", COMMANDS)
def test_the_installed_server_parses_the_arguments_for_a_gpu(engine: str) -> None:
    of_recipes = dict(recipes(engine))
    assert len(of_recipes) > 10
    commands = [words_of(engine, update_mode=mode, arguments=MORE[engine]) for mode in MODES]
    commands += [words_of(engine, arguments=arguments) for arguments in of_recipes.values()]
    wrong = words_of(engine, arguments={"mem-fraction-of-nothing": 0.3})
    *found, refused = parsed(engine, [*commands, wrong])
    assert "mem-fraction-of-nothing" in refused["error"]
    names = [*MODES, *of_recipes]
    assert {name: each["error"] for name, each in zip(names, found, strict=True) if "error" in each} == {}
    for mode, each in zip(MODES, found, strict=False):
        overlap = {"disable_overlap_schedule": mode != "recompute"} if engine == "sglang" else {}
        assert each == WANTED[engine] | overlap
