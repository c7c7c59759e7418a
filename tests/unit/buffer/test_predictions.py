"""Jobs with known costs on a simulated clock, against what arithmetic says of them."""

from __future__ import annotations

import json
import random
from itertools import combinations_with_replacement, product

import pytest
from msgspec.structs import replace

from areal_async.base.errors import RunFolderError
from areal_async.base.mistakes import ConfigError
from areal_async.base.yaml_file import dump_yaml
from areal_async.cli.tools import AdviseRequest, SimulateRequest
from areal_async.config.fields import read_section
from areal_async.config.job import JobConfig
from areal_async.launch.run_handle import Run
from replay_buffer.ledger.rules import Rules
from replay_buffer.simulation.advice import advise
from replay_buffer.simulation.clock import Clock
from replay_buffer.simulation.costs import Costs, EngineCosts, Spread
from replay_buffer.simulation.engine import SimulatedAnswer, SimulatedEngine
from replay_buffer.simulation.world import BEGUN, HELD, MeasuredWorld, Shape, predicted
from replay_buffer.tools import advise as advise_tool
from replay_buffer.tools import simulate
from replay_buffer.tools.measured import OF_TRAINER, REWARD_PAUSE_S, measured
from reward_service import server

GROUP, BATCH, TOKENS, PASS_S = 4, 8, 100, 0.01


def costs(*, train_s=0.32, answers=None, engine=None, trainer=None, **sections):
    """Of a job whose engine makes a batch that it runs whole in a second."""
    units = GROUP * BATCH * TOKENS
    return Costs.model_validate(
        {
            "prompt_tokens": {"mean": 0},
            "answer_tokens": answers or {"mean": TOKENS},
            "engine": {"pass_s": PASS_S, "request_s": 0} | (engine or {}),
            "trainer": {"token_s": train_s / units} | (trainer or {}),
            **sections,
        }
    )


def rules(eta, pacing="full", **others):
    return Rules.alone(
        group_size=GROUP, batch_groups=BATCH, max_staleness=eta, pacing=pacing, max_groups=10_000, **others
    )


def run(eta, given=None, *, concurrent=64, shape=None, pacing="full", steps=50, **others):
    shape = shape or Shape(group_size=GROUP, max_concurrent=concurrent)
    return predicted(rules(eta, pacing, **others), shape, given or costs(), steps=steps)


def test_at_eta_0_a_step_takes_what_its_parts_take_one_after_the_other():
    parts = {
        "reward": {"episode_s": {"mean": 0.05}, "computes": False},
        "publication": {"publish_s": 0.02, "publication_s": 0.03, "fetch_s": 0.1},
    }
    found = run(0, costs(**parts), shape=Shape(group_size=GROUP, reward_workers=GROUP * BATCH))
    assert found.step_s == pytest.approx(1.0 + 0.05 + 0.32 + 0.02 + 0.03 + 0.1, rel=0.01)
    assert (found.staleness_max, found.wasted) == (0, 0)
    assert found.rollout_idle == pytest.approx(1 - 1.0 / found.step_s, rel=0.01)


SLOW_SCORING = {"reward": {"episode_s": {"mean": 0.1}, "computes": False}}
FOUR_RANKS = Shape(group_size=GROUP, workers=2, replicas=2, max_concurrent=32, ranks=4)
SHARED = {"pass_s": 0, "request_s": 0.5 / (GROUP * BATCH * TOKENS)}
"""One core does the work of both sides in turns: 0.5 s for a batch, and 1 s for a step."""


@pytest.mark.parametrize(
    ("given", "how", "figures"),
    [
        ({}, {}, {"steps_per_s": 2.0, "rollout_idle": 0, "trainer_idle": 1 - 0.32 * 2}),
        ({"train_s": 2.0}, {}, {"step_s": 2.0, "trainer_idle": 0, "staleness_mean": 4.0}),
        ({"train_s": 2.0}, {"pacing": "fresh"}, {"step_s": 2.0, "staleness_mean": 1.0}),
        (SLOW_SCORING, {}, {"episodes_per_s": 10, "reward_idle": 0}),
        ({"engine": {"pass_s": 0.01, "request_s": 0.001}}, {}, {"tokens_per_s": 64 / (0.01 + 0.064)}),
        ({"train_s": 8.0}, {"shape": FOUR_RANKS}, {"step_s": 2.0}),
        ({"train_s": 1.0, "engine": SHARED, "machine": {"cores": 1}}, {}, {"step_s": 1.5}),
        ({"train_s": 1.0, "engine": SHARED, "machine": {"cores": 2}}, {}, {"step_s": 1.0}),
    ],
)
def test_the_slower_side_never_waits_and_sets_the_pace(given, how, figures):
    found = run(4, costs(**given), **how)
    for name, value in figures.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.01, abs=0.01), name


@pytest.mark.parametrize(("eta", "pacing"), [*product([0, 1, 4], ["full", "fresh"])])
def test_staleness_is_bounded_whatever_things_cost(eta, pacing):
    for train_s, concurrent in ((0.1, 128), (1.0, 32), (5.0, 8)):
        given = costs(train_s=train_s, answers={"mean": TOKENS, "sigma": 1.0, "most": 500})
        found = run(eta, given, concurrent=concurrent, pacing=pacing, steps=20)
        assert found.steps == 20
        assert found.staleness_max <= eta


def test_every_group_ends_once():
    given = costs(
        answers={"mean": TOKENS, "sigma": 1.0}, reward={"episode_s": {"mean": 0.01}, "dropped_share": 0.2}
    )
    world = MeasuredWorld(rules(1), Shape(group_size=GROUP), given, seed=1)
    found = world.predict(60, 10)
    index = world.job.index
    counts = index.meta.counts
    dropped = sum(times for reason, times in counts.items() if reason.startswith("dropped:"))
    assert counts["queued"] == counts["committed"] + dropped + len(index.groups)
    assert counts["committed"] == 70 * BATCH
    assert counts["dropped:verdict_abstain"] / counts["stored"] == pytest.approx(0.2, rel=0.2)
    assert found.wasted >= 0.1


def test_an_engine_answers_each_request_once_and_in_the_order_of_their_ends():
    clock, seen = Clock(), []
    engine = SimulatedEngine(clock, EngineCosts(pass_s=0.001, request_s=0.0, prompt_token_s=0.001), 2)
    answers = [SimulatedAnswer(n, 1, lambda n=n: seen.append((n, clock.now_ms))) for n in (30, 10, 5)]
    engine.submit(answers, shared_prompt=10)
    while clock.tick():
        pass
    assert [n for n, _ in seen] == [10, 5, 30]
    assert [at for _, at in seen] == pytest.approx([19, 23, 39]), "the prompt gives one token"
    assert engine.load == 0
    assert engine.busy_ms == pytest.approx(39)


def test_work_of_the_event_loop_interrupts_a_busy_engine_of_its_process():
    clock, seen = Clock(cores=1), []
    engine = SimulatedEngine(clock, EngineCosts(pass_s=0.001, request_s=0.0), 1)
    assert not engine.interrupt(1.0), "an idle engine does not compute"
    engine.submit([SimulatedAnswer(10, 0, lambda: seen.append(clock.now_ms))], shared_prompt=0)
    clock.after(5, lambda: seen.append(engine.interrupt(0.003)))
    while clock.tick():
        pass
    assert seen == [True, pytest.approx(13)]


def test_prompts_that_come_while_the_engine_is_busy_are_computed_in_one_pass():
    clock, seen = Clock(), []
    engine = SimulatedEngine(clock, EngineCosts(pass_s=0.001, request_s=0.0, prefill_s=0.005), 4)

    def submit() -> None:
        engine.submit([SimulatedAnswer(2, 1, lambda: seen.append(clock.now_ms))], shared_prompt=1)

    submit()
    clock.after(1, submit)
    clock.after(2, submit)
    while clock.tick():
        pass
    assert seen == pytest.approx([11, 11, 11]), "5 + 5 of prompts, and one token more of each"


def test_work_on_too_few_cores_takes_longer_and_waits_do_not():
    clock, seen = Clock(cores=2), {}
    for name in "abc":
        clock.compute(10, lambda name=name: seen.setdefault(name, clock.now_ms))
    clock.after(10, lambda: seen.setdefault("wait", clock.now_ms))
    while clock.tick():
        pass
    assert seen == pytest.approx({"wait": 10, "a": 15, "b": 15, "c": 15})


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"train_s": 3.0}, "training"),
        ({"train_s": 0.1}, "generation"),
        ({"reward": {"episode_s": {"mean": 0.1}, "computes": False}}, "scoring"),
    ],
)
def test_advice_names_what_holds_the_job_up(change, part):
    advice = advise(rules(4), Shape(group_size=GROUP, max_concurrent=32), costs(**change), steps=5)
    assert advice.bottleneck == part


def test_advice_moves_gpus_to_the_slower_side_and_calls_no_noise_a_gain():
    shape = Shape(group_size=GROUP, workers=6, ranks=2, max_concurrent=32)
    advice = advise(rules(4), shape, costs(train_s=4.0), steps=5)
    assert advice.better[0].change == "rollout.workers=2 trainer.ranks=6"
    certain = advise(rules(4), shape, costs(train_s=4.0), steps=5, off=10.0)
    assert not certain.bottleneck
    assert all(certain.gain(each) < 0.01 for each in certain.better)


def test_what_is_drawn_is_what_was_asked_for():
    rng = random.Random(1)
    for spread in (Spread(mean=50, sigma=0.8), Spread(quantiles=(0, 10, 20, 170)), Spread(mean=9, most=5)):
        drawn = [spread.draw(rng) for _ in range(20_000)]
        assert sum(drawn) / len(drawn) == pytest.approx(spread.expected(), rel=0.05)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", ["prompt_tokens: this field is missing", "Add it"]),
        ("trainer: {token: 1}", ["trainer.token: there is no such field", "Did you mean trainer.token_s?"]),
        ("engine: {pass_s: -1, request_s: 0}", ["engine.pass_s: -1 is too small", "Give at least 0"]),
        ("engine: {pass_s: 0, request_s: 0}", ["engine: ", "cannot both be 0"]),
        ("answer_tokens: {sigma: 1}", ["answer_tokens: ", "either mean or quantiles"]),
        ("answer_tokens: {quantiles: [3, 2]}", ["no less than the one before"]),
        ("reward: 3", ["reward: 3 is not a section"]),
    ],
)
def test_a_mistake_in_a_costs_file_is_named_with_its_fix(tmp_path, text, words):
    path = tmp_path / "costs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_section(Costs, path)
    assert all(word in str(caught.value) for word in words), caught.value


# --- costs from what a run has recorded ---


def load(steps, *, episodes, passes=None, at_s=0.0, **cpu):
    services = {
        name: {"cpu_s": cpu.get(name, 0.0), "busy_s": {}, "tokens": 0}
        for name in ("buffer", "trainer", "reward", "rollout-0", "supervisor")
    }
    if passes is not None:
        services["rollout-0"] |= {"passes": passes, "tokens": int(passes[1])}
    services["reward"]["calls"] = [float(episodes), 0.001 * episodes]
    counts = {"stored": episodes, "trained": episodes // 4}
    return {
        "kind": "load",
        "time_s": at_s,
        "steps": steps,
        "cores": 2,
        "services": services,
        "counts": counts,
    }


def recorded(folder, job, *records):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return Run(folder, job, None)


def sums_of(passes):
    """What an engine keeps of its passes, (sampled, prompt tokens, seconds) each: see its `PassSums`."""
    rows = [(1.0, float(n), float(p > 0), float(p), seconds) for n, p, seconds in passes]
    pairs = [*combinations_with_replacement(range(4), 2), *((term, 4) for term in range(4))]
    return [sum(row[i] * row[j] for row in rows) for i, j in pairs]


def measured_run(folder, job):
    """A run of two steps whose parts cost what the tests below say."""
    passes = [
        (sampled, prompts, 0.004 + 3e-5 * sampled + (0.002 if prompts else 0) + 1e-4 * prompts)
        for sampled, prompts in [(10, 0), (50, 40), (200, 0), (120, 8), (1, 0)]
    ]
    spent = sum((0.004 * 5, 3e-5 * 381, 0.002 * 2, 1e-4 * 48))
    step = {
        "kind": "step", "time_s": 7.0, "episodes": 32, "tokens": 96, "units": 288, "wait_s": 0.01,
        "step_s": 0.5, "publish_s": 0.002, "publication_s": 0.012, "busy_s": 0.4, "staleness_mean": 1.0,
        "sampled_quantiles": [1, 3, 5],
    }  # fmt: skip
    before = load(1, episodes=32, passes=[0.0] * 14, at_s=5.0)
    after = load(
        3, episodes=96, passes=sums_of(passes), at_s=10.0,
        trainer=0.6, buffer=0.064, reward=0.192, **{"rollout-0": spent + 0.128},
    )  # fmt: skip
    return recorded(folder, job, before, step, after)


def test_costs_are_found_in_what_a_run_has_recorded(tmp_path, job):
    found = measured([measured_run(tmp_path / "run", job)])
    engine = found.engine
    assert (engine.pass_s, engine.request_s) == pytest.approx((0.004, 3e-5))
    assert (engine.prefill_s, engine.prompt_token_s) == pytest.approx((0.002, 1e-4))
    assert engine.episode_s == pytest.approx(0.002, rel=0.01)
    half_wait_s = OF_TRAINER * 0.01
    assert found.trainer.token_s == pytest.approx((0.3 - half_wait_s) / 288, rel=0.01)
    buffer_s = 0.064 - 2 * half_wait_s
    assert found.machine.buffer_group_s == pytest.approx(buffer_s / 64 * job.rollout.group_size)
    assert found.reward.episode_s.mean == pytest.approx(0.001)
    assert found.machine.reward_episode_s == pytest.approx(0.002)
    assert found.prompt_tokens.mean == pytest.approx(6)
    assert found.answer_tokens.expected() == pytest.approx(3, rel=0.02)
    assert found.publication.publication_s == pytest.approx(0.01)


def test_the_wait_for_a_batch_is_found_as_a_constant_and_a_part_for_each_episode(tmp_path, job):
    runs = []
    for episodes, wait_s in ((16, 0.03), (64, 0.078)):
        run = measured_run(tmp_path / str(episodes), job)
        metrics = run.folder / "metrics.jsonl"
        metrics.write_text(
            metrics.read_text()
            .replace('"wait_s": 0.01', f'"wait_s": {wait_s}')
            .replace('"episodes": 32', f'"episodes": {episodes}')
        )
        runs.append(run)
    found = measured(runs).trainer
    assert (found.batch_s, found.batch_episode_s) == pytest.approx((0.014, 0.001))


def test_the_pause_of_a_reward_is_that_of_the_reward_service():
    assert REWARD_PAUSE_S == server.CLAIM_PAUSE_S / 2 + server.SEND_PAUSE_S


def test_a_batch_and_a_verdict_take_the_time_that_the_costs_give_them():
    """The trainer waits for each of them once in every step if η is 0."""
    plain = predicted(rules(0), Shape(GROUP), costs(), steps=10).step_s
    batch = predicted(
        rules(0), Shape(GROUP), costs(trainer={"batch_s": 0.1, "batch_episode_s": 0.01}), steps=10
    )
    pause = predicted(rules(0), Shape(GROUP), costs(reward={"pause_s": 0.2}), steps=10)
    assert batch.step_s - plain == pytest.approx(0.1 + 0.01 * GROUP * BATCH)
    assert pause.step_s - plain == pytest.approx(0.2)


def test_the_event_loop_of_a_worker_takes_the_time_of_its_engine():
    """Both share an interpreter, so more cores help only with a part. No engine computes after the last
    token."""
    machine = {"cores": 8}
    slow = predicted(rules(0), Shape(GROUP), costs(machine=machine, engine={"episode_s": 0.01}), steps=10)
    fast = predicted(rules(0), Shape(GROUP), costs(machine=machine), steps=10)
    held = BEGUN * HELD + 1 - BEGUN
    assert slow.step_s - fast.step_s == pytest.approx(held * 0.01 * GROUP * BATCH, rel=0.05)


def test_a_run_that_has_recorded_too_little_says_so(tmp_path, job):
    run = recorded(tmp_path / "run", job, load(3, episodes=32))
    with pytest.raises(RunFolderError, match="two `load` records"):
        measured([run])


def test_a_job_is_predicted_from_a_costs_file_and_what_is_missing_is_said(tmp_path, capsys):
    for name in ("job", "costs"):
        (tmp_path / f"{name}.yaml").touch()
    text = "job: j\nmodel: m\ntasks: {train: t.jsonl}\nrollout: {group_size: 4}\nbuffer: {batch_groups: 8}\n"
    (tmp_path / "job.yaml").write_text(text)
    (tmp_path / "costs.yaml").write_text(dump_yaml(costs().model_dump()))
    job_file = str(tmp_path / "job.yaml")
    asked = SimulateRequest(job_file, costs=str(tmp_path / "costs.yaml"), steps=10, as_json=True)
    simulate.main(asked)
    told = json.loads(capsys.readouterr().out)["prediction"]
    assert told["steps"] == 10
    assert told["staleness_max"] <= 4
    simulate.main(replace(asked, as_json=False))
    assert "trainer idle" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--from RUN, or a file"):
        simulate.main(SimulateRequest(job_file))


def test_advice_on_a_run_says_what_it_saw_and_how_far_off_the_simulation_is(
    tmp_path, job, monkeypatch, capsys
):
    small = {"rollout": {"group_size": GROUP}, "buffer": {"batch_groups": 2}}
    run = measured_run(tmp_path / "run", JobConfig.model_validate(job.model_dump() | small))
    monkeypatch.setattr(advise_tool, "find_run", lambda path: run)
    advise_tool.main(AdviseRequest("run", 3))
    said = capsys.readouterr().out
    assert "the run" in said
    assert "0.4" in said, "two steps in five seconds"
    assert "no ground" in said or "too much to go by" in said, "these records are made up"
