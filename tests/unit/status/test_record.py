import asyncio
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from areal_async.base.addresses import Address
from areal_async.base.errors import FaultError, WireError
from areal_async.launch.commands import ControlSocket
from areal_async.rpc.board import board
from areal_async.rpc.client import Client
from areal_async.rpc.control_messages import WriteRecord
from areal_async.service import record
from areal_async.service.record import RunLog, open_records, read_run_log
from areal_async.show.curves import draw_curves, points, rolling_mean
from areal_async.show.figures import rows_of, values_of
from tests.contexts import context_for_test
from tests.waiting import LIMIT_S, until


def test_records_come_back_in_order_with_null_for_what_json_has_no_form_and_are_told_in_the_status(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_run_log(path) == []
    with RunLog(path) as run_log:
        run_log.write("step", step=1, loss=np.float32(0.5))
        run_log.write("evaluation", version=1, accuracy=float("nan"), best=float("inf"), time_s=12.0)
    first, second = read_run_log(path)
    assert (first["kind"], first["step"], first["loss"]) == ("step", 1, 0.5)
    assert first["time_s"] > 1.7e9
    assert (second["accuracy"], second["best"], second["time_s"]) == (None, None, 12.0)
    step, evaluation = board.status("trainer", serves=True).records[-2:]
    assert (step.kind, step.loss, evaluation.version, evaluation.accuracy) == ("step", 0.5, 1, None)


def test_a_line_cut_short_costs_only_itself(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind":"step","step":1}\n{"kind":"st')
    with RunLog(path) as run_log:
        run_log.write("step", step=3)
    assert [record["step"] for record in read_run_log(path)] == [1, 3]


@asynccontextmanager
async def home(ctx, records):
    """The supervisor's control socket, as services find it."""
    topology = msgspec.structs.replace(ctx.topology, control=ctx.host.local_endpoint("control"))
    socket = ControlSocket(ctx.job.job, topology, ctx.keys, 0.1, records)
    await asyncio.to_thread(socket.start)
    try:
        yield replace(ctx, topology=topology)
    finally:
        await asyncio.to_thread(socket.stop)


@pytest.fixture
def ctx(job, tmp_path):
    return context_for_test(job, tmp_path, "trainer", "trainer")


async def test_records_of_services_come_to_the_home_of_the_run_in_their_order_and_once(ctx, tmp_path):
    with RunLog(tmp_path / "metrics.jsonl") as run_log:
        async with home(ctx, run_log) as there:
            writers = [await asyncio.to_thread(open_records, there) for _ in range(3)]

            def write(number):
                for i in range(100):
                    writers[number].write("step", writer=number, i=i, loss=float("nan"))

            await asyncio.gather(*(asyncio.to_thread(write, number) for number in range(3)))
            run_log.write("evaluation", version=1)
            found = await asyncio.to_thread(writers[0].read, "evaluation")
            assert [record["version"] for record in found] == [1]
            for writer in writers:
                await asyncio.to_thread(writer.close)
    for number in range(3):
        own = [r["i"] for r in read_run_log(run_log.path) if r.get("writer") == number]
        assert own == list(range(100))


async def test_a_home_that_is_away_holds_up_a_service_for_a_moment_and_gets_its_records_when_it_is_back(
    ctx, tmp_path, monkeypatch
):
    monkeypatch.setattr(record, "WRITE_WAIT_S", 0.05)
    with RunLog(tmp_path / "metrics.jsonl") as run_log:
        async with home(ctx, run_log) as there:
            remote = await asyncio.to_thread(open_records, there)
            await asyncio.to_thread(remote.write, "step", step=0)
        for step in (1, 2):
            await asyncio.to_thread(remote.write, "step", step=step)
        assert [r["step"] for r in run_log.read("step")] == [0]
        async with home(ctx, run_log):
            await asyncio.to_thread(remote.close)
        assert [r["step"] for r in run_log.read("step")] == [0, 1, 2]


async def test_an_outage_of_the_home_costs_a_service_one_wait_however_much_it_writes(
    ctx, tmp_path, monkeypatch
):
    waits = []

    class Waited(Future):
        def result(self, timeout=None):
            waits.append(timeout)
            return super().result(timeout)

    monkeypatch.setattr(record, "Future", Waited)
    monkeypatch.setattr(record, "WRITE_WAIT_S", 0.05)
    with RunLog(tmp_path / "metrics.jsonl") as run_log:
        async with home(ctx, run_log) as there:
            remote = await asyncio.to_thread(open_records, there)
            await asyncio.to_thread(remote.write, "step", step=0)
        for step in range(1, 30):
            await asyncio.to_thread(remote.write, "step", step=step)
            with pytest.raises(WireError, match="does not answer"):
                await asyncio.to_thread(remote.write_samples, "", f"step-{step:08d}.jsonl", b"{}\n")
        assert len(waits) == 2, "of the record before the outage, and of the first in it"
        monkeypatch.setattr(record, "WRITE_WAIT_S", LIMIT_S)
        async with home(ctx, run_log):

            def takes_samples():
                with suppress(WireError):
                    remote.write_samples("", "step-00000030.jsonl", b"{}\n")
                    return True

            await until(takes_samples)
            await asyncio.to_thread(remote.write, "step", step=30)
            assert len(waits) == 3, "it is waited for again"
            await asyncio.to_thread(remote.close)
        assert [r["step"] for r in run_log.read("step")] == [*range(31)]


async def test_a_disk_that_is_full_at_home_is_an_error_of_the_service_that_writes(ctx, tmp_path):
    class Full(RunLog):
        def append(self, line):
            raise OSError(28, "no space left")

    with Full(tmp_path / "metrics.jsonl") as run_log:
        async with home(ctx, run_log) as there:
            remote = await asyncio.to_thread(open_records, there)
            with pytest.raises(OSError, match="no space left"):
                await asyncio.to_thread(remote.write, "step", step=0)
            await asyncio.to_thread(remote.close)


async def test_what_is_no_line_is_refused(ctx, tmp_path):
    with RunLog(tmp_path / "metrics.jsonl") as run_log:
        async with home(ctx, run_log) as there:
            address = Address(there.topology.control, "supervisor")
            async with Client(address, job=ctx.job.job, role="x", name="x", access=ctx.keys) as client:
                for attachments in ([], [b"no end"], [b"two\nlines\n"], [b"a\n", b"b\n"]):
                    with pytest.raises(FaultError, match="one line"):
                        await client.call(WriteRecord(), attachments=attachments, timeout_s=10)
                for line in (b"no json\n", b"[1]\n", b'{"kind": 3}\n', b'{"kind": "\xff"}\n'):
                    with pytest.raises(FaultError, match="object of JSON"):
                        await client.call(WriteRecord(), attachments=[line], timeout_s=10)
    assert run_log.path.read_bytes() == b""


def run(steps):
    for step in range(steps):
        head = {"kind": "step", "step": step, "version": step + 1, "reward_mean": 0.4 + 0.3 * step / steps}
        times = {"tokens": 4600, "step_s": 0.6, "busy_s": 0.5, "wait_s": 0.05}
        yield head | times | {"staleness_mean": min(step, 2.5), "staleness_max": min(step, 4)}
        if step % 25 == 0:
            yield {"kind": "evaluation", "version": step, "accuracy": 0.4 + 0.3 * step / steps, "n": 500}


WHOLE = list(run(200))
SUPERVISED = [{"kind": "sft", "step": i, "loss": 2.0 / (i + 1), "accuracy": 0.01 * i} for i in range(40)]


@pytest.mark.parametrize(
    ("records", "size"),
    [
        (WHOLE, (1456, 962)),
        (SUPERVISED, (1456, 507)),
        ([], (728, 507)),
        (WHOLE[:1], (1456, 962)),
        ([{"kind": "evaluation", "version": 0, "accuracy": 0.4}], (728, 507)),
        ([{**record, "reward_mean": None, "staleness_mean": None} for record in WHOLE[:30]], (1456, 962)),
        ([{"kind": "something else", "x": 1}, {"kind": "step", "step": 3}], (728, 507)),
        ([{"kind": "sft", "step": 1, "accuracy": float("nan")}], (728, 507)),
    ],
)
def test_a_page_has_a_panel_for_all_that_was_recorded(tmp_path, records, size):
    from matplotlib.image import imread

    page = imread(draw_curves(records, tmp_path / "curves.png", title="demo", max_staleness=4))
    assert (page.shape[1], page.shape[0]) == size


def test_points_are_sorted_and_skip_what_has_no_number():
    records = [
        {"kind": "step", "step": 2, "loss": 0.2},
        {"kind": "step", "step": 1, "loss": 0.1},
        {"kind": "step", "step": 3, "loss": None},
        {"kind": "step", "loss": 0.4},
        {"kind": "start", "step": 4, "loss": 0.5},
    ]
    x, y = points(rows_of(records)[0], "loss")
    assert (x.tolist(), y.tolist()) == ([1.0, 2.0], [0.1, 0.2])


def test_a_ratio_needs_both_numbers_and_a_rolling_mean_keeps_the_length():
    found = [
        values_of(record | {"tokens": 10}).get("tokens_per_s")
        for record in ({"step_s": 4}, {"step_s": 0}, {})
    ]
    assert found == [2.5, None, None]
    assert rolling_mean(np.arange(5.0), 3).tolist() == [0.5, 1.0, 2.0, 3.0, 3.5]
    assert rolling_mean(np.full(7, 2.0), 4).tolist() == [2.0] * 7
