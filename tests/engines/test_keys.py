"""Real servers answer nobody without their key: no route that loads weights, computes or tells anything."""

from __future__ import annotations

import pytest

from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.keyed import VARIABLE
from tests.engines.conftest import processes

pytestmark = pytest.mark.engine
ROUTES = {
    "sglang": [
        "POST /update_weights_from_disk",
        "POST /init_weights_update_group",
        "POST /update_weights_from_distributed",
        "POST /update_weights_from_tensor",
        "POST /pause_generation",
        "POST /flush_cache",
        "POST /generate",
        "GET /health_generate",
        "GET /health",
        "GET /metrics",
        "GET /model_info",
        "GET /server_info",
        "OPTIONS /generate",
    ],
    "vllm": [
        "POST /collective_rpc",
        "POST /sleep",
        "POST /wake_up",
        "POST /reset_prefix_cache",
        "POST /pause",
        "POST /inference/v1/generate",
        "POST /v1/completions",
        "GET /v1/models",
        "GET /server_info",
        "GET /health",
        "GET /metrics",
        "GET /load",
    ],
}


async def test_no_route_of_a_real_server_is_open_and_no_command_line_tells_the_key(
    server_of: tuple[str, str],
) -> None:
    name, url = server_of
    stranger = ServerClient("server", url)
    guessing = ServerClient("server", url, key="0" * 64)
    try:
        for route in ROUTES[name]:
            method, path = route.split()
            for client in (stranger, guessing):
                status, content = await client.request(method, path, {"model_path": "elsewhere"})
                assert (route, status, content) == (route, 401, b"")
    finally:
        await stranger.close()
        await guessing.close()
    server, *children = processes(url)
    key = server.environ()[VARIABLE]
    family = [server, *server.parents()[:1], *children]
    assert not [process for process in family if key in " ".join(process.cmdline())]
