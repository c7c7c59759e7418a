"""The secret of a run: where it is kept, what is made of it, and that who does not have it is not heard."""

import os

import pytest

from areal_async.base.errors import EndpointError, RpcTimeout
from areal_async.rpc.messages import Arrived
from areal_async.rpc.secret import FILE, CurveKeys, RunSecret
from tests.unit.rpc.peers import client_of, serving


def test_it_is_made_once_for_its_owner_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        made = RunSecret.make(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert RunSecret.read(tmp_path) == made
    with pytest.raises(FileExistsError):
        RunSecret.make(tmp_path)


def test_it_is_not_shown_and_its_tokens_say_nothing_about_each_other():
    one, other = RunSecret.generate(), RunSecret.generate()
    tokens = {token for secret in (one, other) for token in (secret.token("wire"), secret.token("redis"))}
    assert len(tokens) == 4
    guard = one.guard("ipc://x", "")
    assert guard.role_of(b"PLAIN", [b"run", one.token("wire").encode()]) == ""
    assert guard.role_of(b"PLAIN", [b"run", one.token("redis").encode()]) is None
    assert one.shown("tcp://x", "") == one.shown("tcp://x", "") != other.shown("tcp://x", "")
    assert not any(token in repr(one) for token in tokens)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_secret_that_others_may_write_is_no_secret(tmp_path, mode):
    RunSecret.make(tmp_path)
    (tmp_path / FILE).chmod(mode)
    with pytest.raises(EndpointError, match="others may write"):
        RunSecret.read(tmp_path)


def test_a_pipe_or_a_link_in_its_place_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(EndpointError, match="no regular file"):
        RunSecret.read(tmp_path)
    (tmp_path / FILE).unlink()
    (tmp_path / "elsewhere").write_text("00" * 32)
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EndpointError, match="cannot be read"):
        RunSecret.read(tmp_path)


async def is_turned_away(endpoint, access, error, message=None, limit_s=0.3):
    client = client_of(endpoint, access=access)
    with pytest.raises(error, match=message):
        await client.connect(limit_s)
    await client.close()


async def test_known_keys_are_let_in_and_others_are_not():
    mine, stranger, servers = CurveKeys.generate(), CurveKeys.generate(), CurveKeys.generate()
    server_keys = CurveKeys(servers.public, servers.secret, (mine.public,))
    async with serving("tcp://127.0.0.1:0", access=server_keys) as server:
        trusting = CurveKeys(mine.public, mine.secret, (servers.public,))
        async with client_of(server.endpoint, access=trusting) as friend:
            _, attachments = await friend.exchange(Arrived("t"), timeout_s=60, attachments=[bytes(100_000)])
            assert attachments[0].nbytes == 100_000
        unknown = CurveKeys(stranger.public, stranger.secret, (servers.public,))
        await is_turned_away(server.endpoint, unknown, EndpointError, "does not accept", 10)
        for access in (RunSecret.generate(), CurveKeys(mine.public, mine.secret, (stranger.public,))):
            await is_turned_away(server.endpoint, access, RpcTimeout)
        assert server.counters["requests"] == 1
        assert server.counters["malformed"] == 0


async def test_a_client_must_know_its_server():
    with pytest.raises(EndpointError, match="exactly one key"):
        await client_of("tcp://127.0.0.1:1", access=CurveKeys.generate()).connect(1)


def test_keys_do_not_show_their_secret():
    keys = CurveKeys.generate()
    assert keys.secret.decode() not in repr(keys)
