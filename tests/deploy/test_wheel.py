"""A wheel has all that a user needs: the files beside the modules too, and programs that find them there."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest

from tests.deploy.commands import PACKAGES, ROOT
from tests.unit.page.runs import append, run_folder, step
from tests.waiting import LIMIT_S


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the packages as the wheel installs them. It is built of a copy: a `build` folder that an
    earlier build left in the tree would put files of then into it."""
    folder = tmp_path_factory.mktemp("wheel")
    source, target = folder / "source", folder / "installed"
    leave = shutil.ignore_patterns("__pycache__")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command = [*pip, "--no-build-isolation", "--target", target, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@contextmanager
def call(installed, place, *arguments):
    """The command as it is installed, started from a folder where nothing of the project lies."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    program = installed / "bin" / "areal-async"
    command = [sys.executable, program, *arguments]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_every_file_of_the_packages_is_in_the_wheel(installed):
    there = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    for name in PACKAGES:
        files = [path for path in (ROOT / name).rglob("*") if path.is_file() and path.suffix != ".pyc"]
        missing = {path.relative_to(ROOT) for path in files} - there
        assert missing == set(), "name it in pyproject.toml, tool.setuptools.package-data"


def test_dashboards_are_written_and_a_run_is_shown_by_an_installed_wheel(installed, tmp_path):
    with call(installed, tmp_path, "dashboards", "write", "d", "--json") as writing:
        written = [tmp_path / path for path in json.loads(writing.stdout.read())["files"]]
        assert writing.wait(LIMIT_S) == 0
    assert len([path for path in written if path.parent.name == "grafana" and path.stat().st_size]) == 7

    append(run_folder(tmp_path / "runs"), [step(0), step(1)])
    with call(installed, tmp_path, "view", "runs", "--no-open", "--json") as viewing:
        told = json.loads(viewing.stdout.readline())
        page = installed / "areal_async" / "show" / "page" / "static"
        for name in ("page.js", "page.css", "uPlot.iife.min.js"):
            with urllib.request.urlopen(f"{told['url']}/page/{name}", timeout=LIMIT_S) as reply:
                assert reply.read() == (page / name).read_bytes()
    assert viewing.returncode == 0
