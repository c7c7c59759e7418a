import json

import pytest

from areal_async.launch.lifecycle import Ending
from areal_async.launch.summary import failure_text, last_lines, readable, summarise
from areal_async.rpc.messages import BufferStats, PolicyStats

PROMISED = (
    "accuracy_start accuracy_end steps wall_s tokens_per_s max_staleness_bound max_staleness_seen "
    "share_stale trainer_busy rollout_busy episodes_trained episodes_dropped"
)


def step_record(step, **changes):
    record = {"kind": "step", "step": step, "version": step + 1, "time_s": 1000.0 + 2 * step}
    figures = {"reward_mean": 0.4 + 0.01 * step, "tokens": 500, "episodes": 10, "step_s": 2.0, "busy_s": 1.5}
    return record | figures | {"staleness_max": 3, "share_stale": 0.5} | changes


STATS = BufferStats(
    groups={},
    episodes={},
    reasons={"overtaken": 1},
    policies={"policy": PolicyStats(20, 0, 0, max_staleness_seen=4, episodes_trained=200)},
    payload_bytes=0,
    redis_bytes=0,
    episodes_dropped=50,
)


def test_a_whole_run_in_numbers(job):
    records = [step_record(step) for step in range(20)]
    records[3] = step_record(3, share_stale=1.0, episodes=30)
    records += [
        {"kind": "evaluation", "version": 20, "accuracy": 0.9},
        {"kind": "evaluation", "version": 0, "accuracy": 0.4},
    ]
    records.append({"kind": "end", "wall_s": 61.234, "rollout_busy": 0.91234})
    summary = summarise(job, records, buffer=STATS)
    assert " ".join(summary).startswith(PROMISED)
    assert (summary["accuracy_start"], summary["accuracy_end"], summary["steps"]) == (0.4, 0.9, 20)
    assert summary["wall_s"] == 61.23
    assert summary["tokens_per_s"] == 500 * 20 / 40
    assert (summary["max_staleness_bound"], summary["max_staleness_seen"]) == (4, 4)
    assert summary["share_stale"] == pytest.approx((190 * 0.5 + 30) / 220, abs=1e-4)
    assert (summary["trainer_busy"], summary["rollout_busy"]) == (0.75, 0.9123)
    assert (summary["episodes_trained"], summary["episodes_dropped"]) == (200, 50)
    assert summary["held_out"] == "accuracy"


def test_the_summary_counts_updates_and_says_why_some_were_left_out(job):
    records = [step_record(step, updates=2, updates_planned=2) for step in range(20)]
    records[7] |= {"updates": 1, "skipped": "the loss is not finite"}
    summary = summarise(job, records)
    assert (summary["updates"], summary["updates_planned"]) == (39, 40)
    assert summary["updates_left_out"] == "the loss is not finite"


def test_a_training_on_files_has_no_figures_of_episodes_and_says_why_it_stopped(job):
    sft = job.model_copy(
        update={"kind": "sft", "sft": job.sft.model_copy(update={"stop_between": (0.8, 1.0)})}
    )
    records = [{"kind": "sft", "step": 3, "loss": 0.5, "accuracy": 0.9}]
    summary = summarise(sft, records)
    assert summary["stopped"] == "held-out accuracy 0.900 lies within sft.stop_between, 0.8 to 1"
    assert {"episodes_trained", "reward_last", "updates"}.isdisjoint(summary)
    assert "passes" in summarise(sft, [records[0] | {"accuracy": 0.5}])["stopped"]
    assert summarise(sft, [records[0] | {"step": sft.trainer.steps}])["stopped"] == ""


def test_what_is_not_known_is_none(job):
    summary = summarise(job, [])
    known = {"steps": 0, "wall_s": 0, "max_staleness_bound": 4}
    assert {name: summary[name] for name in PROMISED.split() if summary[name] is not None} == known


def test_without_the_buffer_the_records_still_count(job):
    summary = summarise(job, [step_record(0), step_record(1)])
    assert summary["episodes_trained"] == 20
    assert summary["max_staleness_seen"] == 3
    assert summary["episodes_dropped"] is None


def test_a_supervised_run(job):
    records = [{"kind": "sft", "step": 0, "accuracy": 0.0}, {"kind": "sft", "step": 10, "accuracy": 0.38}]
    summary = summarise(job.model_copy(update={"kind": "sft"}), records)
    assert (summary["accuracy_start"], summary["accuracy_end"], summary["steps"]) == (0.0, 0.38, 10)
    assert not {"max_staleness_seen", "episodes_trained", "reward_last"} & {*summary}


def test_the_last_evaluation_is_kept(job):
    def evaluation(version, mean):
        return {"kind": "evaluation", "version": version, "accuracy": 0.2, "mean": mean}

    early, late = evaluation(0, [0.2, 0.1, 0.3]), evaluation(10, [0.6, 0.5, 0.7])
    assert summarise(job, [early, late])["accuracy_interval"] == (0.5, 0.7)
    assert summarise(job, [])["accuracy_interval"] is None


def test_a_summary_covers_all_lives_of_a_run(job):
    """One that was interrupted, one whose supervisor was killed, and one that finished."""
    records = [
        {"kind": "start", "time_s": 900.0},
        {"kind": "evaluation", "version": 0, "accuracy": 0.2, "partial_credit": False, "time_s": 950.0},
        *(step_record(step) for step in range(10)),
        {"kind": "restart", "service": "rollout-0", "time_s": 1010.0},
        {"kind": "restart", "service": "reward", "time_s": 1012.0},
        {"kind": "end", "ending": "interrupted", "wall_s": 120.0, "rollout_busy": 0.5, "time_s": 1021.0},
        {"kind": "resume", "time_s": 5000.0},
        {"kind": "restart", "service": "rollout-0", "time_s": 5004.0},
        *(step_record(step, time_s=5010.0 + 2 * step) for step in range(10, 15)),
        {"kind": "resume", "time_s": 9000.0},
        *(step_record(step, time_s=9000.0 + 2 * step) for step in range(15, 20)),
        {"kind": "evaluation", "version": 20, "accuracy": 0.7, "partial_credit": True, "time_s": 9050.0},
        {"kind": "end", "ending": "finished", "wall_s": 60.0, "rollout_busy": 0.8, "time_s": 9060.0},
    ]
    summary = summarise(job, records, buffer=STATS)
    assert summary["steps"] == 20
    assert summary["wall_s"] == 120 + (5038 - 5000) + 60
    assert summary["steps_per_s"] == 20 / (20 + 10 + 10)
    assert summary["tokens"] == 20 * 500
    assert summary["restarts"] == {"rollout-0": 2, "reward": 1}
    assert summary["resumes"] == 2
    assert summary["rollout_busy"] == pytest.approx((0.5 * 20 + 0.8 * 10) / 30, abs=1e-4)
    assert (summary["accuracy_start"], summary["accuracy_end"]) == (0.2, 0.7)
    assert summary["held_out"] == "mean reward"
    assert summary["reward_first"] < summary["reward_last"]
    early = summarise(job, records[:5], buffer=STATS)  # three steps of it: one, one between, one
    firsts = [record["reward_mean"] for record in records[2:5]]
    assert (early["reward_first"], early["reward_last"]) == pytest.approx((firsts[0], firsts[2]), abs=1e-4)


def test_the_paragraph_names_service_status_words_and_log(tmp_path):
    log = tmp_path / "reward.log"
    record = {"time": "x", "level": "error", "event": "service failed", "message": "twice"}
    log.write_text(json.dumps(record) + "\nreward: rewards.py has no function far.\n")
    text = failure_text(Ending("died", "reward", 1, 12.34), log)
    assert text.startswith("reward ended with status 1 after 12.3 s")
    assert "\n    reward: rewards.py has no function far.\n" in text
    assert "twice" not in text
    assert text.endswith(str(log))


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        (Ending("died", "trainer", -9, 1.0), "was killed by SIGKILL"),
        (Ending("died", "trainer", -9, 1.0), "ran out of memory"),
        (Ending("died", "trainer", 1, 1.0, 1, "ran out of memory (CUDA)"), "areal-async plan"),
        (
            Ending("died", "trainer-1", -9, 1.0, 6, "gave no sign of life for 60 s and was killed"),
            "was doing",
        ),
        (Ending("died", "trainer-1", -9, 1.0, 6, "did not come to a collective within 9 s"), "was doing"),
        (Ending("died", "trainer", -11, 1.0), "SIGSEGV"),
        (Ending("died", "trainer", -40, 1.0), "signal 40"),
        (Ending("died", "trainer", 143, 1.0), "something outside the run sent it a signal"),
        (Ending("died", "buffer", 0, 1.0), "which no service may"),
        (
            Ending("died", "trainer-1", -9, 1.0, 6, "did not come to the meeting within 9 s and was killed"),
            "was doing",
        ),
        (Ending("not_ready", "trainer", lived_s=300), "did not serve within 300 s of its start, so the run"),
        (Ending("not_ready", "trainer", lived_s=300, cause="trainer-1"), "its start, nor did trainer-1, so"),
        (Ending("did_not_end", "evaluator", lived_s=120), "The trained model is complete"),
    ],
)
def test_each_ending_says_what_to_do(tmp_path, ending, says):
    text = failure_text(ending, tmp_path / "absent.log")
    assert says in text
    assert "It said last: nothing." in text


def test_structured_lines_are_put_in_words():
    line = {"time": "t", "level": "warning", "job": "j", "process": "p", "event": "call slow", "ms": 3}
    assert readable(json.dumps(line)) == "warning: call slow ms=3"
    assert readable("plain ") == "plain"
    assert readable("{not json") == "{not json"
    failed = line | {"traceback": "Traceback\n  File x\nValueError: no"}
    assert readable(json.dumps(failed)).endswith("ValueError: no")


def test_only_the_end_of_a_large_log_is_read(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {i} {'x' * 1000}\n" for i in range(1000)))
    lines = last_lines(log)
    assert [line.split()[1] for line in lines] == [str(i) for i in range(994, 1000)]
    assert all(len(line) <= 400 for line in lines)
