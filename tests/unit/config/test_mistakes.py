"""Every kind of mistake in a job file is found when it is read, names its field and says the fix."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_async.base.mistakes import WHOLE_FILE, ConfigError
from areal_async.config.load import load_job


class Case(NamedTuple):
    name: str
    field: str
    says: str
    fix: str
    spoil: Callable[[Path], object] = lambda folder: None
    overrides: tuple[str, ...] = ()


def spoilt(name: str, content: str) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        path = folder / name
        old, arrow, new = (
            part.encode().decode("unicode_escape").encode("latin-1") for part in content.partition(" => ")
        )
        if content == "-":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes().replace(old, new) if arrow else old)

    return spoil


def parquet(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"question": ["a"]}), folder / "b.parquet")


def stored(*names: str) -> Callable[[Path], object]:
    """A model of 8 × 4 tensors called so, and an output layer, whose vocabulary has 16 tokens."""

    def spoil(folder: Path) -> None:
        tensors = {name: np.zeros((8, 4), np.float32) for name in names}
        save_file(tensors | {"lm_head.weight": np.zeros((16, 4), np.float32)}, folder / MODEL)
        (folder / "model/config.json").write_text('{"vocab_size": 16}')

    return spoil


def other_vocabulary(folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "other")
    for name, token in (("other", "a"), ("model", "b")):
        (folder / name / "tokenizer.json").write_text(f'{{"model": {{"vocab": {{"{token}": 0}}}}}}')


MODEL = "model/model.safetensors"
LAYERS = stored("model.layers.0.attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight")
LORA = ("trainer.lora={rank: 2, targets: [q_proj, x_proj, lm_head]}",)
TEACHER = ("trainer.objective.advantage=distill", "trainer.teacher.model=other")

MISTAKES, FILES = (
    [
        line.split(" | ")
        for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()[2:]
    ]
    for name in ("mistakes.txt", "spoilt_files.txt")
)
CASES = [
    Case(
        "unknown target",
        "trainer.lora.targets",
        "called x_proj, lm_head that",
        "Choose of q_proj, up_proj",
        LAYERS,
        LORA,
    ),
    Case(
        "another vocabulary",
        "trainer.teacher.model",
        "another vocabulary",
        "the policy's tokenizer",
        other_vocabulary,
        TEACHER,
    ),
    Case("parquet columns", "tasks.train", "`prompt` must be", "", parquet, ("tasks.train=b.parquet",)),
]
for name, overrides, *rest in MISTAKES:
    CASES.append(Case(name, *rest, overrides=tuple(overrides.split("; "))))
for name, overrides, file, content, *rest in FILES:
    CASES.append(Case(name, *rest, spoilt(file, content), tuple(filter(None, overrides.split("; ")))))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_mistake_names_its_field_and_the_fix(folder, case):
    case.spoil(folder)
    with pytest.raises(ConfigError) as caught:
        load_job(folder / "job.yaml", case.overrides)
    text = str(caught.value)
    assert {mistake.field for mistake in caught.value.mistakes} == {case.field}
    assert all(mistake.fix for mistake in caught.value.mistakes)
    assert text.startswith(str(folder / "job.yaml"))
    where = "" if case.field == WHOLE_FILE else f"{case.field}: "
    assert [words for words in (f".yaml: {where}", case.says, case.fix) if words not in text] == []
    assert "\n" not in text, "one mistake is one paragraph"


def test_a_layer_as_wide_as_the_vocabulary_can_have_an_adapter_and_an_embedding_cannot(folder):
    tensors = {"model.layers.0.mlp.up_proj.weight": (16, 4), "model.embed_tokens.weight": (16, 4)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, folder / MODEL)
    (folder / "model/config.json").write_text('{"vocab_size": 16}')
    load_job(folder / "job.yaml", ["trainer.lora={rank: 2, targets: [up_proj]}"])
    with pytest.raises(ConfigError, match=r"no layer called embed_tokens .* Choose of up_proj"):
        load_job(folder / "job.yaml", ["trainer.lora={rank: 2, targets: [embed_tokens]}"])


IN_A_WORLD = "rollout.workflow=multi_turn", "rollout.workflow_args.environment=flows.py:World"
WITH_TOOLS = (
    "rollout.workflow=tool_use",
    "rollout.workflow_args={tools: ['flows.py:cook'], environment: 'flows.py:World'}",
)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("kind=sft", "rollout.group_size=1", "rollout.sampling.top_p=0.5"),
        ("reward.name=rewards.py:close",),  # which is not run: it would raise SystemExit
        ("reward={name: 'own.py:close', args: {digits: 2}}",),
        ("reward={name: 'own.py:tournament', scope: group, args: {rounds: 1}}",),
        ("reward={name: 'own.py:hidden', scope: group, args: {whatever: 1}}",),
        ("reward={routes: [{name: arithmetic, data_source: 'text*'}], on_error: {then: mask}}",),
        ("reward={name: math, args: {where: boxed, tolerance: 0}}",),
        ("reward={name: regex, args: {pattern: a+}}",),
        ("reward={name: weighted, args: {parts: [{name: math}, {name: gsm8k, weight: 2}]}}",),
        (
            "reward={name: code_stdio, args: {sandbox: none, budget_s: 20}, timeout_s: 30, "
            "routes: [{data_source: '', name: exact_match}]}",
        ),
        ("rollout.workflow=flows.py:talk",),
        ("rollout.workflow=flows.py:deep", "rollout.workflow_args={depth: 1, width: 2}"),
        ("rollout.workflow=flows.py:wide", "rollout.workflow_args={depth: 1}"),
        (*IN_A_WORLD, "rollout.workflow_args.environment_args={any: thing}", "reward.name=environment"),
        (*IN_A_WORLD, "rollout.workflow_args.reward=final"),
        (*WITH_TOOLS, "reward.name=environment"),
    ],
    ids=" ".join,
)
def test_what_is_right_has_no_mistakes(folder, overrides):
    load_job(folder / "job.yaml", overrides)


def test_mistakes_are_reported_at_once_but_no_broken_rule_between_fields_while_a_field_is_wrong(folder):
    """With batch_groups unknown, the rule about minibatches would speak about its default."""
    rules = {"rollout.group_size": 1, "model": "nowhere", "tasks.train": "no.jsonl"}
    fields = {"buffer.batch_groups": 0, "colour": "red"}
    for wrong, given in ((fields, rules | fields), (rules, rules)):
        overrides = [f"{field}={value}" for field, value in given.items()]
        overrides += ["trainer.minibatches=99"] * (wrong is fields)
        with pytest.raises(ConfigError, match=f"{len(wrong)} mistakes") as caught:
            load_job(folder / "job.yaml", overrides)
        assert {mistake.field for mistake in caught.value.mistakes} == {*wrong}
