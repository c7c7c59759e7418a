"""Which role may ask for what: each process has the keys of its role alone, and the server checks each
request by the key that was proven, not by what the asker says of itself."""

import importlib
import inspect
import pkgutil

import prometheus_client
import pytest

import areal_async.rpc
from areal_async.base.addresses import Address
from areal_async.base.errors import EndpointError, FaultError, RpcTimeout
from areal_async.rpc.client import Client
from areal_async.rpc.frames import REQUESTS
from areal_async.rpc.messages import Arrived, Commit, Stats
from areal_async.rpc.permissions import CALLERS, may_ask
from areal_async.rpc.schema import Hello, Ok, Request
from areal_async.rpc.secret import CHUNKS, ROLES, RoleKeys, RunSecret
from tests.unit.rpc.peers import serving

SECRET = RunSecret.generate()

RECORDS = "WriteRecord WriteSamples ReadRecords ListHome ReadHome"
GENERATES = f"""{RECORDS} WaitSnapshot AckSnapshot FindSources GetChunk OpenSession ServeAgents EndSession
    Sample RecordCalls DropCall"""
LOOKS = "Drain Stats Status ReadRecords ScaleWorkers DrainWorker"
OPENS = {
    "buffer": RECORDS,
    "trainer": f"""{RECORDS} WriteHome RemoveHome OpenTrainer NextBatch Fetch Commit ExportLedger Checkpointed
        Stats SeeTasks FetchMedia""",
    "rollout": f"""{GENERATES} AskBuild AskTensors TakeBucket BreakGroup Arrived Lease Heartbeat Release
        PutEpisodes FetchMedia Drain""",
    "evaluator": GENERATES,
    "reward": f"{RECORDS} Arrived Claim PutVerdicts FetchMedia",
    "supervisor": f"{LOOKS} ReadMetrics",
    "cli": LOOKS,
    "": "",
}
"""Requests that the key of each role opens; those of a stolen key are all that its thief can make."""


def client_of(server, role, *, of="buffer", secret=SECRET, says="trainer"):
    address = Address(server.endpoint, of)
    return Client(address, job="j", role=says, name=says, access=secret.of(role))


def refused(service, reason):
    labels = {"service": service, "reason": reason}
    return prometheus_client.REGISTRY.get_sample_value("areal_rpc_refused_total", labels) or 0.0


def test_every_request_says_who_may_make_it():
    made = set()
    for module in pkgutil.iter_modules(areal_async.rpc.__path__, "areal_async.rpc."):
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(kind, Request) and kind not in (Request, Hello):
                made.add(kind)
    assert made == CALLERS.keys() == {*REQUESTS} - {Hello}
    assert all(roles and roles <= set(ROLES) for roles in CALLERS.values())


@pytest.mark.parametrize("role", OPENS)
def test_a_key_opens_the_requests_of_its_role_and_no_other(role):
    assert {kind.__name__ for kind in REQUESTS if may_ask(role, kind)} == {*OPENS[role].split()}


async def test_a_role_gets_what_it_needs_and_no_more_whatever_it_says_it_is(endpoint, caplog):
    before = refused("the-buffer", "forbidden")
    async with serving(endpoint, access=SECRET.of("buffer"), service="the-buffer") as server:
        async with client_of(server, "rollout") as rollout, client_of(server, "trainer") as trainer:
            assert await trainer.call(Commit("policy", 1, 0), timeout_s=60) == Ok()
            assert await rollout.call(Arrived("rollout-0"), timeout_s=60) == Ok()
            for request in (Commit("policy", 1, 0), Stats()):
                with pytest.raises(FaultError, match="forbidden: the role rollout may not ask"):
                    await rollout.call(request, timeout_s=60)
        assert server.counters["forbidden"] == 2
        assert server.counters["requests"] == 2
    assert refused("the-buffer", "forbidden") == before + 2
    assert "trainer of role rollout asked the the-buffer for Commit" in caplog.messages


async def test_keys_of_another_run_open_nothing(endpoint, caplog):
    async with serving(endpoint, access=SECRET.of("buffer"), service="old-keys") as server:
        stranger = client_of(server, "trainer", secret=RunSecret.generate())
        with pytest.raises((EndpointError, RpcTimeout)):
            await stranger.connect(1.0)
        await stranger.close()
        # Somebody who knows the server's public key, and has none that it knows.
        mixed = SECRET.of("trainer")
        own = RunSecret.generate().of("trainer")
        known = {**own.publics, "buffer": mixed.publics["buffer"]}
        forged = RoleKeys("trainer", own.secrets, known, own.word, own.digests, {})
        client = Client(Address(server.endpoint, "buffer"), job="j", role="t", name="t", access=forged)
        with pytest.raises(EndpointError, match="does not accept"):
            await client.connect(10.0)
        await client.close()
        assert not server.sessions
        assert server.counters["strangers"] >= 1
    assert refused("old-keys", "stranger") >= 1
    assert "a connection without a key of this run was refused by the old-keys" in caplog.messages


async def test_a_process_of_one_role_cannot_stand_in_for_a_server_of_another():
    async with serving("tcp://127.0.0.1:0", access=SECRET.of("rollout")) as impostor:
        client = client_of(impostor, "trainer", of="buffer")
        with pytest.raises(RpcTimeout):
            await client.connect(1.0)
        await client.close()
        assert not impostor.sessions
    async with serving("tcp://127.0.0.1:0", access=SECRET.of("rollout"), identity=CHUNKS) as peer:
        async with client_of(peer, "evaluator", of=CHUNKS):
            assert len(peer.sessions) == 1


def test_a_role_learns_no_secret_of_another():
    secrets = {role: SECRET.of(role) for role in ROLES}
    for role, keys in secrets.items():
        own = {*keys.secrets.values(), keys.word}
        for other in ROLES:
            if other != role:
                theirs = {secrets[other].secrets[other], secrets[other].word}
                assert not own & theirs
                with pytest.raises(EndpointError, match=f"no keys of role {other}"):
                    keys.of(other)
        assert keys.word not in repr(keys)
    assert secrets["buffer"].token("redis") == SECRET.token("redis")
    with pytest.raises(EndpointError, match="no token for redis"):
        secrets["rollout"].token("redis")


def test_keys_are_read_from_a_file_that_is_their_owners_alone(tmp_path):
    path = tmp_path / "trainer.json"
    SECRET.of("trainer").write(path)
    assert RoleKeys.read(path) == SECRET.of("trainer")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o622)
    with pytest.raises(EndpointError, match="others may write"):
        RoleKeys.read(path)
    with pytest.raises(EndpointError, match="cannot be read"):
        RoleKeys.read(tmp_path / "absent.json")
