"""Large attachments pass as parts of files on one host, and through the socket elsewhere."""

import os
from pathlib import Path

import pytest

from areal_async.base.errors import ProtocolError
from areal_async.rpc import by_file
from areal_async.rpc.by_file import LEAST_BYTES, STALE_S, Filed, FilePart, ServerFiles
from areal_async.rpc.messages import Fetch, Fetched, PutAck, PutEpisodes
from areal_async.rpc.schema import Message
from areal_async.rpc.server import Answer, Peer
from tests.unit.rpc.peers import client_of, serving

LARGE = [bytes([n]) * (LEAST_BYTES // 2 + n) for n in range(3)]


class Keeper:
    """Keeps what it is put; says where its own files lie to who can read them."""

    def __init__(self, held: Path) -> None:
        self.held, self.got, self.peers = held, list[list[bytes]](), list[Peer]()
        self.filed: list[Path] = []

    async def __call__(self, peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        self.peers.append(peer)
        if isinstance(message, Fetch):
            return Fetched(message.episode_ids), [FilePart("some", 3, 4), b"frame", FilePart("gone", 0, 4)]
        self.got.append([bytes(each) for each in attachments])
        if isinstance(attachments, Filed):
            assert attachments.path.exists()
            self.filed.append(attachments.path)
        return PutAck([0, 1, 2], "memory")


@pytest.fixture
def files(tmp_path):
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "some").write_bytes(b"0123456789")
    return ServerFiles(tmp_path / "incoming", tmp_path / "held", flush=True)


@pytest.fixture
def keeper(files, tmp_path):
    return Keeper(tmp_path / "held")


def put(client, attachments):
    return client.call(PutEpisodes("l", "g", [0, 1, 2]), attachments=attachments, timeout_s=60)


async def test_large_attachments_come_in_a_file_that_the_client_removes(endpoint, keeper, files):
    async with serving(endpoint, keeper, files=files) as server, client_of(server.endpoint) as client:
        await put(client, LARGE)
        await put(client, [b"a", b"", b"c"])
    assert keeper.got == [LARGE, [b"a", b"", b"c"]]
    assert len(keeper.filed) == 1
    assert not keeper.filed[0].exists()
    assert all(peer.reads_files for peer in keeper.peers)


async def test_a_client_that_does_not_see_the_folder_uses_the_socket(ipc, tmp_path, keeper, files):
    (tmp_path / "incoming" / ".token").write_text("of another host")
    async with serving(ipc, keeper, files=files), client_of(ipc) as client:
        await put(client, LARGE)
    assert keeper.got == [LARGE]
    assert keeper.filed == []
    assert not keeper.peers[0].reads_files


async def test_what_the_server_holds_in_files_is_mapped(ipc, keeper, files):
    async with serving(ipc, keeper, files=files), client_of(ipc) as client:
        _, found = await client.exchange(Fetch(["a", "b", "c"]))
        assert [bytes(each) for each in found] == [b"3456", b"frame", b""]


async def test_a_file_that_cannot_be_written_goes_through_the_socket(
    ipc, tmp_path, monkeypatch, keeper, files
):
    async with serving(ipc, keeper, files=files), client_of(ipc) as client:

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        await put(client, LARGE)
    assert keeper.got == [LARGE]
    assert [each.name for each in (tmp_path / "incoming").iterdir()] == [".token"]


async def test_another_server_is_asked_anew_whether_it_takes_files(ipc, keeper, files):
    client = client_of(ipc)
    async with serving(ipc, keeper, files=files):
        await client.connect(10)
        await put(client, LARGE)
    async with serving(ipc, keeper):
        await put(client, [b"small"])
        await put(client, LARGE)
    await client.close()
    assert keeper.got == [LARGE, [b"small"], LARGE]
    assert len(keeper.filed) == 1


def test_a_name_leads_nowhere_but_into_the_folder_and_a_short_file_is_refused(tmp_path, files):
    incoming = tmp_path / "incoming"
    (incoming / "1.1").write_bytes(b"abc")
    (incoming / "1.2").symlink_to(tmp_path / "held" / "some")
    assert [bytes(each) for each in files.read([FilePart("1.1", 1, 2)])] == [b"bc"]
    outside = [("../held/some", 0, 1), (".token", 0, 1), ("1.2", 0, 1), ("1.3", 0, 1)]
    for part in (*outside, ("1.1", 2, 2), ("1.1", 1 << 62, 1 << 62)):
        with pytest.raises(ProtocolError):
            files.read([FilePart(*part)])
    with pytest.raises(ProtocolError, match="one file"):
        files.read([FilePart("1.1", 0, 1), None])


def test_what_a_dead_client_left_is_removed_in_time_whatever_clock_is_set(tmp_path, files, monkeypatch):
    passed_s = 0.0
    monkeypatch.setattr(by_file.time, "monotonic", lambda: passed_s)
    (tmp_path / "incoming" / "1.1").write_bytes(b"abc")
    files.sweep()
    (tmp_path / "incoming" / "1.2").write_bytes(b"abc")
    os.utime(tmp_path / "incoming" / "1.2", (0, 0))  # as if the clock was set forward
    passed_s = STALE_S + 60
    files.sweep()
    assert sorted(each.name for each in (tmp_path / "incoming").iterdir()) == [".token", "1.2"]
