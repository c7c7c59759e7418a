"""Real servers answer nobody without their key: no route that loads weights, computes or tells anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest

from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.keyed import VARIABLE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
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


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_no_route_of_a_real_server_is_open_and_no_command_line_tells_the_key(
    name: str, endless_server: Callable[[str], str], run: Callable[..., Any]
) -> None:
    url = endless_server(name)

    async def body() -> None:
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

    run(body())
    port = int(url.rpartition(":")[2])
    (server,) = {
        psutil.Process(connection.pid)
        for connection in psutil.net_connections("tcp")
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
    }
    key = server.environ()[VARIABLE]
    family = [server, *server.parents()[:1], *server.children(recursive=True)]
    assert not [process for process in family if key in " ".join(process.cmdline())]
