"""Every block of the pages: its commands exist and run, its job file loads, its Python imports public names.

A block says what it is: `bash` (commands), `console` (commands behind `$ `, and what they print), `text`
(neither) or its language. The commands run here, page by page, in a folder with a finished run `runs/sums`,
unless a comment right before the block, or at the top of its page for all of its blocks, says

    <!-- not run: needs two hosts -->
    <!-- run by: tests/e2e/test_controller.py -->

where the files named must be there and have the words of the commands.
"""

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from markdown_it import MarkdownIt
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.testing import CliRunner

import areal_async
from areal_async import write_model
from areal_async.base.yaml_file import parse_yaml
from areal_async.cli.main import app
from areal_async.config.cluster import ClusterConfig
from areal_async.config.job import merged
from areal_async.config.load import load_job
from replay_buffer.simulation.costs import Costs
from tests.waiting import LIMIT_S

ROOT = Path(areal_async.__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
KINDS = {"bash", "console", "text", "yaml", "json", "toml", "python", "inline"}
NOTE = re.compile(r"<!-- (not run|run by): (.+?) -->", re.DOTALL)
OURS = re.compile(r"(?:benchmarks|deploy|docs|engines|examples|recipes|tests)/[\w./-]+")
SEPARATORS = re.compile(r"&&|\|\||[;|&]")

JOB = """\
job: sums
model: model
tasks: {train: train.jsonl, evaluation: held_out.jsonl}
rollout:
  workflow: agent.py:second_try
  group_size: 2
  max_concurrent: 16
  max_model_len: 32
  sampling: {max_new_tokens: 6}
buffer: {batch_groups: 4}
reward: {name: arithmetic}
trainer: {steps: 3, record_batches: true}
checkpoint: {every_steps: 1}
observe: {metrics_port: 0}
"""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    kind: str
    text: str
    note: tuple[str, str] | None
    """What a comment says about it: ("not run", why) or ("run by", files)."""

    @property
    def commands(self):
        """Its commands, as lists of words."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.kind == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        elif self.kind != "bash":
            lines = [line for line in lines if line.startswith("areal-async ")]
        begun = ""
        for line in lines:
            begun += line.strip() + "\n"
            lexer = shlex.shlex(begun, posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            try:
                found = [*lexer, ";"]
            except ValueError:
                continue  # a quotation that goes on in the next line
            begun, words = "", []
            for word in found:
                if not SEPARATORS.fullmatch(word):
                    words.append(word)
                elif words:
                    yield words
                    words = []
        assert not begun, "a quotation has no end"


def blocks_of(path):
    """The fenced blocks of a page, each with the note that holds for it."""
    page, before, whole = path.relative_to(ROOT).as_posix(), None, None
    for place, token in enumerate(MarkdownIt().parse(path.read_text(encoding="utf-8"))):
        found = NOTE.fullmatch(token.content.strip()) if token.type == "html_block" else None
        note = (found[1], " ".join(found[2].split())) if found else None
        if place == 0:
            whole = note
        elif token.type in ("fence", "code_block"):
            yield Block(page, token.map[0] + 1, token.info, token.content, before or whole)
        elif token.type == "inline":
            for code in token.children or ():
                if code.type == "code_inline" and code.content.startswith("areal-async "):
                    yield Block(page, token.map[0] + 1, "inline", code.content, None)
        before = note


BLOCKS = [block for path in PAGES for block in blocks_of(path)]


def of(*kinds):
    chosen = [block for block in BLOCKS if block.kind in kinds]
    return pytest.mark.parametrize("block", chosen, ids=[f"{each.page}:{each.line}" for each in chosen])


def refused(words, *, whole):
    """What the command line has against a command, or None; but for a `whole` one only the names of
    commands and options are looked at."""
    command, rest = typer.main.get_command(app), words[1:]
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        names = rest.pop(0).split("|")
        if missing := [name for name in names if name not in command.commands]:
            return f"there is no command {missing[0]}"
        command = command.commands[names[0]]
    if not whole:
        known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        given = re.findall(r"(?<![\w-])-(?:-[a-z][\w-]*|[a-z])", " ".join(rest))
        return next((f"there is no option {option}" for option in given if option not in known), None)
    try:
        command.make_context(words[0], rest)
    except (typer.Exit, TyperException) as error:
        return None if isinstance(error, typer.Exit) else str(error)
    return None


def unknown(words, *, whole):
    """What is wrong with a command as it is written, or None."""
    if words[0] == "areal-async" and (mistake := refused(words, whole=whole)):
        return mistake
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        missing = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"there is no target {missing[0]}" if missing else None
    paths = [ROOT / path for path in filter(OURS.fullmatch, words)]
    if gone := [path for path in paths if not (path if path.suffix else path.parent).exists()]:
        return f"there is no {gone[0].relative_to(ROOT)}"
    module = words[words.index("-m") + 1] if "-m" in words[1:] else "tests"
    ours = (ROOT / module.partition(".")[0]).is_dir()
    return f"there is no module {module}" if ours and not importlib.util.find_spec(module) else None


def test_every_block_says_what_it_is():
    assert len(BLOCKS) > 200
    assert [f"{each.page}:{each.line}" for each in BLOCKS if each.kind not in KINDS] == []


@of("bash", "console", "text", "inline")
def test_commands_exist_with_their_options(block):
    whole = block.kind in ("bash", "console")
    assert [(words, wrong) for words in block.commands if (wrong := unknown(words, whole=whole))] == []


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("areal-async advice runs/sums", "no command advice"),
        ("areal-async run job.yaml --inlin", "No such option: --inlin"),
        ("areal-async validate", "Missing parameter"),
        ("make tests", "no target tests"),
        ("python benchmarks/nothing.py", "no benchmarks/nothing.py"),
        ("python -m reward_service.sandbx", "no module reward_service.sandbx"),
    ],
)
def test_what_is_wrong_with_a_command_is_found(command, wrong):
    assert wrong in unknown(command.split(), whole=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands run: a job that was run, under the names that the pages have for it."""
    folder = tmp_path_factory.mktemp("pages")
    write_model(folder / "model", seed=0, positions=128)
    for name, first in (("train", 0), ("held_out", 100)):
        truths = [{"style": "rule", "ground_truth": str(i + 1)} for i in range(first, first + 40)]
        rows = (
            {"prompt": f"{i}+1=", "response": str(i), "reward_model": truth}
            for i, truth in enumerate(truths, first)
        )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.yaml").write_text(JOB)
    (folder / "sorting" / "base").mkdir(parents=True)
    (agent,) = (each.text for each in BLOCKS if "def second_try(" in each.text)
    (folder / "agent.py").write_text(agent)
    done = called("-m", "areal_async.cli.main", "run", "job.yaml", "--inline", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("quickstart", "cut", "sums-eta-4"):
        shutil.copytree(folder / "runs" / "sums", folder / "runs" / name)
    (costs,) = (each.text for each in BLOCKS if each.kind == "yaml" and "prompt_tokens:" in each.text)
    (folder / "costs.yaml").write_text(costs)
    return folder


@of("bash", "console")
def test_commands_run(block, folder, monkeypatch):
    kind, said = block.note or ("here", "")
    if kind == "not run":
        assert len(said.split()) > 1, "say why"
        return
    if kind == "run by":
        tests = " ".join((ROOT / name.strip()).read_text(encoding="utf-8") for name in said.split(","))
        told = {word: re.search(rf"(?<![\w-]){re.escape(word)}\b", tests) for word in told_words(block)}
        assert [word for word, found in told.items() if not found] == []
        return
    monkeypatch.chdir(folder)
    monkeypatch.setattr(
        os, "execv", lambda path, command: sys.exit(called(*command[1:], cwd=folder).returncode)
    )
    for words in block.commands:
        if words[0] == "areal-async":
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, (words, done.output)
        else:
            assert words[0] == "python", f"mark the block: who runs {words[0]}, or why nobody does"
            done = called(*words[1:], cwd=folder)
            assert done.returncode == 0, (words, done.stdout + done.stderr)


def called(*words, cwd):
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)


def told_words(block):
    """The names of commands, options and files in a block's commands."""
    for words in block.commands:
        yield from (word.partition("=")[0] for word in words[1:] if word.startswith("--"))
        if words[0] == "areal-async":
            yield words[1]
        else:
            yield from (Path(word).name for word in words if OURS.fullmatch(word))


@of("yaml")
def test_job_files_load(block, tmp_path):
    content = parse_yaml(block.text)
    content.pop("include", None)
    if "launcher" in content:
        ClusterConfig.model_validate(content)
    elif "prompt_tokens" in content:
        Costs.model_validate(content)
    else:
        least = {"job": "page", "model": "model", "tasks": {"train": "train.jsonl"}}
        load_job(merged(least, content), source=block.page, base=tmp_path, files=False)


@of("python")
def test_python_compiles_and_imports_what_is_public(block):
    tree = compile(block.text, block.page, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "areal_async":
            assert {each.name for each in node.names} <= set(areal_async.__all__)
        elif isinstance(node, ast.Import):
            assert all(importlib.util.find_spec(each.name.partition(".")[0]) for each in node.names)


@of("json", "toml")
def test_data_is_in_its_format(block):
    json.loads(block.text) if block.kind == "json" else tomllib.loads(block.text)
