"""`engines/make.sh`: what it makes anew and what it leaves alone. Its engine here takes no time to set up."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

SCRIPT = Path(__file__).parents[3] / "engines" / "make.sh"
IGNORED = (SCRIPT.parents[1] / ".dockerignore").read_text().splitlines()
IN_IMAGES = [line[1:] for line in IGNORED if line.startswith("!engines/") and line.endswith(".sh")]
"""Scripts that the build of an image sees. The script needs no others."""
SETUP = f"""#!/bin/bash
set -e
mkdir -p "$1/bin"
touch "$1/pyvenv.cfg"
ln -s {sys.executable} "$1/bin/python"
if [ -e "$(dirname "$0")/../broken" ]; then exit 7; fi
touch "$1/whole"
wheels="$1/lib/python3.11/site-packages/nvidia/cu13"
mkdir -p "$wheels/bin" "$wheels/lib"
printf '#!/bin/sh\necho release 13.0' > "$wheels/bin/nvcc"
chmod +x "$wheels/bin/nvcc"
touch "$wheels/lib/libcudart.so.13" "$wheels/lib/libcudadevrt.a"
"""
CHECK = """import pathlib, sys
sys.exit(not (pathlib.Path(sys.executable).parent.parent / "whole").exists())
"""


class Place:
    """A copy of the script with one engine, `toy`, and the folder that it is made in."""

    def __init__(self, root):
        self.root, self.venv = root, root / "made" / "toy"
        for name in IN_IMAGES:
            shutil.copy(SCRIPT.parents[1] / name, root)
        for engine in ("toy", "toy-cuda"):
            (root / engine).mkdir()
            (root / engine / "setup.sh").write_text(SETUP)
            (root / engine / "setup.sh").chmod(0o755)
            (root / engine / "check.py").write_text(CHECK)
            (root / engine / "constraints.txt").write_text(f"{engine}==1\n")

    def make(self, engine="toy"):
        words = [str(self.root / "make.sh"), str(self.root / "made"), engine]
        return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    def was_made(self):
        """Whether the next call makes the environment (and succeeds)."""
        (self.venv / "trace").touch()
        done = self.make()
        assert done.returncode == 0, done.stderr
        return not (self.venv / "trace").exists()


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_a_finished_environment_is_left_alone_until_its_pins_change(place):
    assert "Making the environment" in place.make().stdout
    assert (place.venv / "whole").exists()
    assert not place.was_made()
    (place.root / "toy" / "constraints.txt").write_text("torch==9\n")
    assert place.was_made()
    assert not place.was_made()


def test_a_half_built_environment_is_made_anew(place):
    (place.root / "broken").touch()
    assert place.make().returncode == 7
    assert (place.venv / "bin" / "python").exists()
    (place.root / "broken").unlink()
    done = place.make()
    assert done.returncode == 0
    assert "It is broken" in done.stdout
    assert not place.was_made()


@pytest.mark.parametrize("lost", [(".complete", ".cuda"), (".cuda",)])
def test_a_cuda_build_without_a_mark_is_kept_and_marked(place, lost):
    assert place.make("toy-cuda").returncode == 0
    for mark in lost:
        (place.venv / mark).unlink()
    assert "Making" not in place.make("toy-cuda").stdout
    done = place.make()
    assert done.returncode == 1
    assert "has the CUDA build" in done.stderr


def test_the_compiler_of_a_cuda_build_lies_as_in_a_toolkit(place):
    """FlashInfer runs CUDA_HOME/bin/nvcc, and links with -L CUDA_HOME/lib64 -lcudart."""
    for _ in range(2):
        assert place.make("toy-cuda").returncode == 0
        home = place.venv / "cuda"
        assert subprocess.check_output([home / "bin" / "nvcc"], text=True) == "release 13.0\n"
        assert (home / "lib64" / "libcudart.so").resolve().name == "libcudart.so.13"
        assert (home / "lib64" / "libcudadevrt.a").exists()
        shutil.rmtree(home)  # as in an environment that an older script has made
    (place.venv / "lib/python3.11/site-packages/nvidia/cu13/bin/nvcc").unlink()
    done = place.make("toy-cuda")
    assert done.returncode == 1
    assert "has no nvcc" in done.stderr


def test_a_folder_that_is_no_environment_is_not_touched(place):
    place.venv.mkdir(parents=True)
    (place.venv / "thesis.tex").touch()
    done = place.make()
    assert done.returncode == 1
    assert "is no virtual environment" in done.stderr
    assert (place.venv / "thesis.tex").exists()


def test_a_cuda_build_lies_where_the_engine_is_looked_for_and_is_kept(place):
    assert place.make().returncode == 0
    assert f"Making the environment {place.venv} " in place.make("toy-cuda").stdout, "it replaces a CPU build"
    assert place.make("toy-cuda").stdout == ""
    done = place.make()
    assert done.returncode == 1
    assert "has the CUDA build" in done.stderr
    assert "AREAL_ASYNC_ENGINES" in done.stderr
    assert place.make("toy-cuda").stdout == "", "it is still whole"
