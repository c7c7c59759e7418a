"""Packages of programs and tests, and what is said of those that are missing."""

import json
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from reward_service.sandbox import Program, PythonMissing, RunLimits, interpreter
from reward_service.sdk import RewardInput, RewardLoadError, Score
from reward_service.verifiers.code_rewards import code_stdio, code_tests

PATIENT = {"cpu_s": 20.0, "wall_s": 60.0, "budget_s": 200.0}
SUM = {"inputs": ["3 4\n"], "outputs": ["7\n"]}


def fenced(program, truth=SUM):
    return RewardInput(response=f"```python\n{program}\n```", ground_truth=truth)


@pytest.fixture
def environment():
    """A virtual environment with a package of its own, in a folder that a jail does not have.

    Other users may read it, whatever the umask. It is outside pytest's folder, which each pytest that starts
    on the host closes to them.
    """
    with tempfile.TemporaryDirectory(prefix="environment-", dir="/tmp") as place:
        folder = _virtual_environment(Path(place) / "environment")
        for path in (Path(place), *Path(place).rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755)
        yield str(folder)


def _virtual_environment(folder):
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (packages / "greeting").mkdir(parents=True)
    (packages / "greeting" / "__init__.py").write_text("def hello(): return 7\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(f"{sys.base_prefix}/bin/python{sysconfig.get_python_version()}")
    settings = f"home = {sys.base_prefix}/bin\ninclude-system-site-packages = false\n"
    (folder / "pyvenv.cfg").write_text(settings)
    return folder


NUMPY = "import numpy as np\nprint(int(np.array(input().split(), dtype=int).sum()))"


def test_numpy_is_there_for_programs_and_tests(best):
    assert code_stdio(fenced(NUMPY), **PATIENT).value == 1
    double = "import numpy as np\ndef double(x): return np.array(x) * 2"
    tests = {
        "test": "def check(candidate): assert np.allclose(candidate([1, 2]), [2, 4])",
        "entry_point": "double",
    }
    assert code_tests(fenced(double, tests), **PATIENT).value == 1


def test_nothing_else_of_ours_is_there_and_nothing_there_can_be_changed(isolated):
    looks = (
        "import os\nprint(sorted(os.listdir('/packages/0')))\n"
        "try:\n    open('/packages/0/numpy/x', 'w')\nexcept OSError: print('refused')"
    )
    outcome = isolated.run(Program(source=looks))
    assert outcome.stdout.splitlines()[-1] == b"refused", outcome.describe()
    assert set(json.loads(outcome.stdout.splitlines()[0].replace(b"'", b'"'))) <= {"numpy", "numpy.libs"}


@pytest.mark.parametrize("interpreter", ["", "/bin/python"], ids=["folder", "interpreter"])
def test_a_job_names_the_environment_of_its_programs_and_tests(sandbox, environment, interpreter):
    named = {"environment": environment + interpreter, "sandbox": sandbox.level, **PATIENT}
    tests = ["from greeting import hello", "assert f() == hello()"]
    called = fenced("import greeting\ndef f(): return greeting.hello()", ["\n".join(tests)])
    for verdict in (
        code_stdio(fenced("import greeting\nprint(greeting.hello())"), **named),
        code_tests(called, **named),
    ):
        assert isinstance(verdict, Score), verdict
        assert verdict.value == 1
    limits = RunLimits(wall_s=60.0)
    program = Program(source="import greeting", environment=environment, limits=limits)
    assert sandbox.run(program).ok
    assert not sandbox.run(Program(source="import greeting", limits=limits)).ok


@pytest.mark.parametrize(
    "program", ["import nobody", "print(7)\nfrom nobody.inside import x", "exec('import nobody.inside')"]
)
def test_a_program_that_imports_what_is_missing_is_wrong_and_the_verdict_says_so(best, program):
    verdict = code_stdio(fenced(program))
    assert verdict.value == 0
    assert "imports 'nobody" in verdict.detail
    assert "environment" in verdict.detail


def test_a_function_that_imports_what_is_missing_is_wrong_and_the_verdict_says_so(best):
    for program in ("import nobody\ndef f(): return 1", "def f():\n    import nobody\n    return 1"):
        verdict = code_tests(fenced(program, ["assert f() == 1"]))
        assert (verdict.value, "imports 'nobody'" in verdict.detail) == (0, True)
    assert code_tests(fenced("def f(): return 2", ["assert f() == 1"])).detail == ""
    with pytest.raises(ValueError, match=r"No module named 'nobody'.*environment"):
        code_tests(fenced("def f(): return 1", ["import nobody\nassert f() == 1"]))


@pytest.mark.parametrize("named", ["/nowhere", "/etc", "/bin/false", __file__])
def test_an_environment_that_is_none_is_refused_before_the_run(best, named):
    with pytest.raises(RewardLoadError, match=f"{named} is no Python environment"):
        code_stdio.preload(environment=named)


def test_packages_that_only_their_owner_may_read_are_refused_for_another_user(environment, monkeypatch):
    monkeypatch.setattr(interpreter, "open_to_all", lambda path: not path.startswith(environment))
    interpreter.python.cache_clear()
    with pytest.raises(PythonMissing, match="only be read by its owner"):
        interpreter.python(for_others=True, environment=environment)
    interpreter.python.cache_clear()


TESTS = {
    "import": ["import nobody\nassert f(1) == 1"],
    "from": {"test_list": ["assert f(1) == 1"], "test_imports": ["from nobody.inside import thing"]},
    "setup": {"test_list": ["assert f(1) == 1"], "test_setup_code": "import json, nobody.inside as n"},
    "inside": {
        "test": "def check(candidate):\n    import nobody\n    assert candidate(1) == 1",
        "entry_point": "f",
    },
}


@pytest.fixture
def task_file(tmp_path):
    def made(*truths):
        path = tmp_path / "tasks.jsonl"
        rows = [
            {"prompt": [{"role": "user", "content": f"{n}"}],
             "reward_model": {"style": "rule", "ground_truth": one},
             "response": "```python\ndef f(x): return 1\n```"}
            for n, one in enumerate(truths)
        ]  # fmt: skip
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return made


def test_reward_test_names_them_before_it_runs(best, task_file, capfd, monkeypatch):
    from areal_async.cli.tools import TrialRequest
    from reward_service.tools import trial

    path = task_file(["assert f(1) == 1"], TESTS["import"])
    assert trial.main(TrialRequest(reward="code_tests", data=str(path), as_json=True)) == 1
    said = capfd.readouterr()
    (problem,) = json.loads(said.out)["missing"]
    assert "'nobody'" in problem
    assert said.err.index(problem) == said.err.index("warning: ") + len("warning: ")
