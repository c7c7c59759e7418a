"""The secret of a run: where it is kept, what is made of it, and that who does not have it is not heard."""

import asyncio
import os
from pathlib import Path

import pytest
import zmq

from areal_async.errors import EndpointError, RpcTimeout
from areal_async.rpc.client import Client
from areal_async.rpc.endpoints import Access
from areal_async.rpc.frames import Kind, write_frames
from areal_async.rpc.messages import Arrived
from areal_async.rpc.schema import SCHEMA, Hello, Message, Ok
from areal_async.rpc.secret import FILE, CurveKeys, RunSecret
from areal_async.rpc.server import Answer, Peer, Server


async def answer_ok(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
    return Ok(), attachments


def client(access: Access, endpoint: str) -> Client:
    return Client(endpoint, job="j", role="r", name="n", access=access)


def test_it_is_made_once_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = RunSecret.make(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert RunSecret.read(tmp_path) == made
    with pytest.raises(FileExistsError):
        RunSecret.make(tmp_path)


def test_it_is_not_shown_and_its_tokens_say_nothing_about_each_other() -> None:
    one, other = RunSecret.generate(), RunSecret.generate()
    tokens = {token for secret in (one, other) for token in (secret.token("wire"), secret.token("redis"))}
    assert len(tokens) == 4
    assert one.password.is_shown(b"run", one.token("wire").encode())
    assert not one.password.is_shown(b"run", one.token("redis").encode())
    assert one.keys == one.keys != other.keys
    assert not any(token in repr(one) for token in tokens)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_secret_that_others_may_write_is_no_secret(tmp_path: Path, mode: int) -> None:
    RunSecret.make(tmp_path)
    (tmp_path / FILE).chmod(mode)
    with pytest.raises(EndpointError, match="others may write"):
        RunSecret.read(tmp_path)


def test_a_pipe_or_a_link_in_its_place_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(EndpointError, match="no regular file"):
        RunSecret.read(tmp_path)
    (tmp_path / FILE).unlink()
    (tmp_path / "elsewhere").write_text("00" * 32)
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EndpointError, match="cannot be read"):
        RunSecret.read(tmp_path)


async def test_only_who_has_the_secret_is_heard(endpoint: str) -> None:
    secret = RunSecret.generate()
    server = Server(endpoint, service="t", job="j", handler=answer_ok, access=secret)
    await server.start()
    stranger = client(RunSecret.generate(), server.endpoint)
    # Over TCP each end finds out that the other is not who it should be; over ipc the server says so.
    with pytest.raises((EndpointError, RpcTimeout)):
        await stranger.connect(0.5)
    await stranger.close()
    context = zmq.Context()
    anonymous = context.socket(zmq.DEALER)
    anonymous.connect(server.endpoint)
    anonymous.send_multipart(write_frames(Kind.REQUEST, 5, 1, 0, Hello(SCHEMA, "j", "r", "n"), ()))
    assert not await asyncio.to_thread(anonymous.poll, 300)
    context.destroy(linger=0)
    async with client(secret, server.endpoint) as friend:
        assert (await friend.call(Arrived("t"), timeout_s=10)) == Ok()
    # Nothing of the others was received: not even to be counted as malformed or unknown.
    assert server.counters == {"requests": 1}
    await server.stop()


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
