import pytest

from areal_async.errors import EndpointError, RpcTimeout
from areal_async.rpc.client import Client
from areal_async.rpc.endpoints import Access
from areal_async.rpc.messages import Arrived
from areal_async.rpc.schema import Message, Ok
from areal_async.rpc.secret import CurveKeys, RunSecret
from areal_async.rpc.server import Answer, Peer, Server


async def answer_ok(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
    return Ok(), attachments


def client(access: Access, endpoint: str) -> Client:
    return Client(endpoint, job="j", role="r", name="n", access=access)


async def test_known_keys_are_let_in_and_others_are_not() -> None:
    mine, stranger, server_pair = CurveKeys.generate(), CurveKeys.generate(), CurveKeys.generate()
    server_keys = CurveKeys(server_pair.public, server_pair.secret, (mine.public,))
    server = Server("tcp://127.0.0.1:0", service="t", job="j", handler=answer_ok, access=server_keys)
    await server.start()
    trusting = CurveKeys(mine.public, mine.secret, (server_pair.public,))
    async with client(trusting, server.endpoint) as friend:
        reply, attachments = await friend.exchange(Arrived("t"), timeout_s=10, attachments=[b"x" * 100_000])
        assert (reply, attachments[0].nbytes) == (Ok(), 100_000)
    unknown = client(CurveKeys(stranger.public, stranger.secret, (server_pair.public,)), server.endpoint)
    with pytest.raises(EndpointError, match="does not accept"):
        await unknown.connect(10)
    await unknown.close()
    for access in (RunSecret.generate(), CurveKeys(mine.public, mine.secret, (stranger.public,))):
        outsider = client(access, server.endpoint)
        with pytest.raises(RpcTimeout):
            await outsider.connect(0.3)
        await outsider.close()
    assert server.counters["requests"] == 1
    assert server.counters["malformed"] == 0
    await server.stop()


async def test_a_client_must_know_its_server() -> None:
    with pytest.raises(EndpointError, match="exactly one key"):
        await client(CurveKeys.generate(), "tcp://127.0.0.1:1").connect(1)


def test_keys_do_not_show_their_secret() -> None:
    keys = CurveKeys.generate()
    assert keys.secret.decode() not in repr(keys)
