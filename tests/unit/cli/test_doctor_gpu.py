"""`areal-async doctor --gpu`: what it says of drivers, GPUs and builds that this machine does not have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from areal_async.cli import doctor
from areal_async.cli.doctor import Finding
from areal_async.cli.doctor_gpu import (
    Machine,
    ask_driver,
    examine_gpu,
    installed,
    of_build,
    of_compiler,
    of_driver,
    of_packages,
)
from areal_async.cli.main import app
from areal_async.config.versions import LEAST_DRIVER, STACKS

H100 = "NVIDIA H100 80GB HBM3 (80 GiB)"


class Nvml(SimpleNamespace):
    """NVIDIA's library, as the package nvidia-ml-py has it, on a machine with two GPUs."""

    class NVMLError(Exception): ...

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError(self.broken)

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=85_520_809_984)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(broken=""))
    assert ask_driver() == Machine((H100, H100), "580.95.05")
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(broken="Driver Not Loaded"))
    assert ask_driver() == Machine((), problem="Driver Not Loaded")


def test_without_the_package_gpus_are_counted_by_their_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(doctor, "DEVICES", tmp_path)
    for name in ("nvidia0", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert ask_driver().gpus == ("nvidia0", "nvidia10")
    assert "nvidia-ml-py" in of_driver(ask_driver()).fix


@pytest.mark.parametrize(
    ("machine", "level", "text"),
    [
        (Machine((H100,), LEAST_DRIVER), "ok", H100),
        (Machine((H100,), "581.1"), "ok", "581.1, 1 GPU"),
        (Machine((H100,), "580.9.1"), "fail", f"driver {LEAST_DRIVER} or newer"),
        (Machine((H100,), "575.57.08"), "fail", f"driver {LEAST_DRIVER} or newer"),
        (Machine((), LEAST_DRIVER), "fail", "no GPU"),
        (Machine((), problem="Driver Not Loaded"), "fail", "Driver Not Loaded"),
        (Machine(("nvidia0",), problem="no package"), "warn", "no package"),
    ],
)
def test_a_driver_that_is_too_old_or_missing_has_a_fix(machine: Machine, level: str, text: str) -> None:
    finding = of_driver(machine)
    assert finding.level == level
    assert text in f"{finding.found} {finding.fix}"
    assert bool(finding.fix) == (level != "ok")


def test_a_cpu_build_on_a_machine_with_a_gpu_is_a_failure() -> None:
    assert of_build(Machine((H100,)), "2.14.1+cu130", "13.0").level == "ok"
    finding = of_build(Machine((H100,)), "2.13.0+cpu", None)
    assert finding.level == "fail"
    assert "2.13.0+cpu is a CPU build" in finding.found
    assert "make install-gpu" in finding.fix
    assert of_build(Machine(()), "2.13.0+cpu", None).level == "warn"


def test_the_doctor_of_every_machine_finds_a_cpu_build_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "DEVICES", tmp_path)
    (first, *_) = doctor.examine()
    assert first.level == "ok"
    (tmp_path / "nvidia0").touch()
    (first, *_) = doctor.examine()
    assert (first.level, "make install-gpu" in first.fix) == (("warn", True) if is_cpu() else ("ok", False))


def test_what_kernels_are_compiled_with_has_a_package_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("g++", "mine"):
        (tmp_path / name).touch(0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert of_compiler().level == "ok"
    (tmp_path / "g++").unlink()
    assert (of_compiler().level, of_compiler().found[-3:]) == ("fail", "g++")
    assert of_compiler().fix.endswith("`apt install g++`")
    monkeypatch.setenv("CXX", "mine")
    assert of_compiler().level == "ok"
    (tmp_path / "Python.h").unlink()
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert of_compiler().fix.endswith(f"`apt install {python}-dev`")
    monkeypatch.delenv("CXX")
    assert of_compiler().fix.endswith(f"`apt install g++ {python}-dev`")


def is_cpu() -> bool:
    return torch.version.cuda is None


@pytest.mark.parametrize("stack", [*STACKS])
def test_a_package_of_another_release_or_build_is_named(stack: str) -> None:
    matrix = dict(STACKS[stack].packages)
    right = matrix | {"torch": f"{matrix['torch']}+cu130"}
    assert of_packages(stack, right, "fix").level == "ok"
    for package, release in matrix.items():
        for other in ("9.9", None):
            found = right | {package: other} if other else {k: v for k, v in right.items() if k != package}
            finding = of_packages(stack, found, "fix")
            if other is None and package == "megatron-core":
                assert finding.level == "ok", "the extra cuda does not install it"
                continue
            assert (finding.level, finding.fix) == ("warn", "fix")
            assert finding.found == f"{package} {other or 'missing'} instead of {release}"
    assert of_packages(stack, right | {"torch": f"{matrix['torch']}+cpu"}, "fix").level == "warn"


def test_packages_are_looked_up_in_the_environment_that_is_meant(tmp_path: Path) -> None:
    info = tmp_path / "sglang-0.5.23.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    wanted = {"sglang": "0.5.23", "torch": "2.14.1"}
    assert installed(wanted, [str(tmp_path)]) == {"sglang": "0.5.23"}
    assert installed(wanted)["torch"] == torch.__version__


def test_an_environment_whose_compiler_servers_would_not_find_is_named(tmp_path, monkeypatch) -> None:
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    packages = tmp_path / "vllm" / "lib" / "python3.11" / "site-packages"
    for name, release in STACKS["vllm"].packages.items():
        info = packages / f"{name.replace('-', '_')}-{release}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    monkeypatch.setenv("AREAL_ASYNC_ENGINES", str(tmp_path))

    def finding() -> Finding:
        return next(each for each in examine_gpu() if each.about == "vllm")

    assert (finding().level, finding().found) == ("warn", f"{tmp_path}/vllm/cuda has no CUDA compiler")
    (tmp_path / "vllm" / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "vllm" / "cuda" / "bin" / "nvcc").touch()
    assert finding().level == "ok"


def test_the_command_prints_the_matrix_and_what_it_finds() -> None:
    result = CliRunner().invoke(app, ["doctor", "--gpu"])
    for text in ("NCCL", LEAST_DRIVER, STACKS["sglang"].packages["sglang"], "driver", "trainer", "vllm"):
        assert text in result.stdout
    told = json.loads(CliRunner().invoke(app, ["doctor", "--gpu", "--json"]).stdout)
    assert {"driver", "torch", "compiler", "trainer", "sglang", "vllm"} <= {
        each["about"] for each in told["findings"]
    }
    assert all(each["fix"] for each in told["findings"] if each["level"] != "ok")
