"""The reference server over https, and a client that checks who answers."""

import asyncio
import shutil
import ssl
import subprocess

import pytest
from starlette.responses import PlainTextResponse

from areal_async.rpc.verdicts import Score
from areal_async.runtime.http_server import HttpLimits, HttpServer, listen
from reward_service.backends.remote.host.http import http_server, http_socket, tls_of
from reward_service.backends.remote.host.service import ScoringService, read_offers
from reward_service.backends.remote.schema import RequestLimits
from reward_service.pool.pool import WorkerPool
from reward_service.sdk import RewardInput, RewardLoadError


@pytest.fixture
def certificate(tmp_path):
    """(certificate, key) of 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl: the Debian package openssl")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", *words.split(), *names], check=True, capture_output=True)
    return cert, key


async def test_https_works_with_a_certificate_that_is_trusted_and_with_no_other(
    certificate, backend, collect, monkeypatch
):
    monkeypatch.setenv("REWARD_TEST_TOKEN", "t")
    cert, key = certificate
    offers = read_offers(["exact_match"])
    async with WorkerPool([offers[0].spec], workers=1) as pool:
        service = ScoringService(pool, offers, limits=RequestLimits(), max_waiting=64)
        server = http_server(service, "t", http_socket("127.0.0.1:0", "t"), tls_of(cert, key))
        server.start()
        try:
            assert server.url.startswith("https://")
            with pytest.raises(RewardLoadError, match="certificate"):
                async with backend(server.url, token_env="REWARD_TEST_TOKEN", connect_s=1.0):
                    pass
            async with backend(server.url, token_env="REWARD_TEST_TOKEN", ca_file=str(cert)) as entered:
                answers = await collect(entered, [RewardInput(response="57", ground_truth="57")])
        finally:
            await server.close()
    assert answers == [Score(1.0)]


async def test_clients_that_never_shake_hands_do_not_keep_others_out(certificate):
    cert, key = certificate

    async def app(scope, receive, send):
        await PlainTextResponse("fine")(scope, receive, send)

    listening = listen("127.0.0.1", 0)
    server = HttpServer(app, listening, HttpLimits(connections=8), name="test", tls=tls_of(cert, key))
    server.start()
    port = int(server.url.rpartition(":")[2])
    trusting = ssl.create_default_context(cafile=cert)
    try:
        async with asyncio.timeout(60):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"fine")
            writer.close()
            for _, one in silent:
                one.close()
    finally:
        await server.close()
