"""`benchmarks/many_engines.py` with few workers: real ones, the run's real head and its real front."""

import json

import many_engines


async def test_the_cost_of_head_and_front_is_measured_in_a_real_run(tmp_path):
    out = tmp_path / "rows.json"
    given = (
        f"--workers 3 --limits generation --seconds 1 --answer-s 0.1 --units 16 --dir {tmp_path} --json {out}"
    )
    options = many_engines.arguments().parse_args(given.split())
    await many_engines.main(options)
    (row,) = json.loads(out.read_text())["rows"]
    assert {"head", "front", "redis", "trainer", "workers"} <= row["cpu"].keys()
    assert row["peak_mib"]["head"] > row["peak_mib"]["redis"] > 0
    assert row["requests_per_s"]["PutEpisodes"] > 0
    assert row["latency_ms"]["heartbeat"]["n"] > 0
    assert "heartbeat" in row["cpu_ms"]
    assert row["poll_ms"]["n"] > 0
    assert row["view_ms"]["p50"] > 0
