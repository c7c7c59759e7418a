"""The secret of a run: where it is kept, what is made of it, and that who does not have it is not heard."""

import asyncio
import os
from pathlib import Path

import pytest
import zmq

from areal_async.errors import EndpointError, RpcTimeout
from areal_async.rpc.client import Client
from areal_async.rpc.frames import Kind, write_frames
from areal_async.rpc.messages import Arrived
from areal_async.rpc.schema import SCHEMA, Hello, Message, Ok
from areal_async.rpc.secret import FILE, RunSecret
from areal_async.rpc.server import Answer, Peer, Server


async def answer_ok(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
    return Ok()


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
    stranger = Client(server.endpoint, job="j", role="r", name="n", access=RunSecret.generate())
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
    async with Client(server.endpoint, job="j", role="r", name="n", access=secret) as friend:
        assert (await friend.call(Arrived("t"), timeout_s=10)) == Ok()
    # Nothing of the others was received: not even to be counted as malformed or unknown.
    assert server.counters == {"requests": 1}
    await server.stop()
