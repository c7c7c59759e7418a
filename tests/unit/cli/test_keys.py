"""`areal-async keys init`: one folder, closed, that a cluster's hosts and its controller take as it is."""

import json
import os
import shutil
import ssl
import subprocess
from contextlib import nullcontext, suppress

import pytest
from cryptography import x509
from typer.testing import CliRunner

from areal_async.cli.main import app
from areal_async.cluster.folder import ClusterFolder, ClusterFolderError

NODE = {"ca.crt", "issuer.crt", "node.crt", "node.key", "ray.token", "env.sh"}
SUBMIT = {"tokens", "submit.token", "look.token", "env.sh"}
HOSTS = {"10.0.0.1": "10.0.0.1", "fd00::2": "fd00::2", "gpu-1.lan": "gpu-1.lan,10.0.0.3"}


def call(*arguments):
    return CliRunner().invoke(app, ["keys", *map(str, arguments)])


def init(*arguments):
    return call("init", *arguments)


@pytest.fixture
def keys(tmp_path):
    hosts = [word for host in HOSTS.values() for word in ("--host", host)]
    told = init(tmp_path / "keys", *hosts, "--json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["hosts"] == [*HOSTS.values()]
    for path in (tmp_path / "keys").rglob("*"):
        if path.suffix in (".key", ".token"):
            assert path.read_text().strip() not in told.output
    return tmp_path / "keys"


def contents(folder):
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_each_host_has_its_own_key_and_none_that_submits_or_makes_another_host(keys):
    of_nodes = {f"nodes/{host}/{name}" for host in HOSTS for name in NODE}
    assert set(contents(keys)) == of_nodes | {f"submit/{name}" for name in SUBMIT}
    for path in (keys, *keys.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    of_submit = [(keys / "submit" / name).read_bytes().strip() for name in SUBMIT - {"env.sh"}]
    private = set()
    for host in HOSTS:
        held = contents(keys / "nodes" / host).values()
        assert sum(b"PRIVATE KEY" in content for content in held) == 1
        private |= {content for content in held if b"PRIVATE KEY" in content}
        assert not any(token in content for token in of_submit for content in held)
    assert len(private) == len(HOSTS)
    assert not any(b"PRIVATE KEY" in content for content in contents(keys / "submit").values())


@pytest.mark.parametrize("host", HOSTS)
def test_a_certificate_is_of_one_host_and_of_loopback(keys, host):
    node = x509.load_pem_x509_certificate((keys / "nodes" / host / "node.crt").read_bytes())
    names = node.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(each.value) for each in names] == ["localhost", "127.0.0.1", *HOSTS[host].split(",")]


def shake_hands(client, server, name):
    """A client with one folder of keys and a server with another prove themselves to each other, strictly, as
    Python and gRPC check."""
    to_server, to_client, sides = ssl.MemoryBIO(), ssl.MemoryBIO(), []
    for purpose, folder in ((ssl.Purpose.SERVER_AUTH, client), (ssl.Purpose.CLIENT_AUTH, server)):
        side = ssl.create_default_context(purpose, cafile=folder / "ca.crt")
        side.verify_flags |= ssl.VERIFY_X509_STRICT
        side.verify_mode = ssl.CERT_REQUIRED
        side.load_cert_chain(folder / "node.crt", folder / "node.key")
        sides.append(side)
    asks = sides[0].wrap_bio(to_client, to_server, server_hostname=name)
    answers = sides[1].wrap_bio(to_server, to_client, server_side=True)
    for side in (asks, answers) * 2:
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    asks.write(b"ping")
    assert answers.read(4) == b"ping"


@pytest.mark.parametrize(
    ("host", "name", "good"),
    [
        ("gpu-1.lan", "gpu-1.lan", True),
        ("gpu-1.lan", "10.0.0.3", True),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.3", False),
        ("gpu-1.lan", "fd00::2", False),
    ],
)
def test_hosts_prove_themselves_to_each_other_by_their_own_addresses(keys, host, name, good):
    with nullcontext() if good else pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(keys / "nodes" / "fd00::2", keys / "nodes" / host, name)


def test_a_host_that_is_revoked_is_let_in_by_none_and_knows_no_token(keys, tmp_path):
    gone = tmp_path / "gone"
    shutil.copytree(keys / "nodes" / "10.0.0.1", gone)
    before = contents(keys)
    told = call("revoke", "10.0.0.1", "--in", keys, "--json")
    assert (told.exit_code, json.loads(told.stdout)["hosts"]) == (0, ["fd00::2", "gpu-1.lan"])
    left = keys / "nodes" / "gpu-1.lan"
    for client, server, name in ((gone, left, "gpu-1.lan"), (left, gone, "10.0.0.1")):
        with pytest.raises(ssl.SSLError):
            shake_hands(client, server, name)
    shake_hands(keys / "nodes" / "fd00::2", left, "gpu-1.lan")
    tokens = {(keys / "nodes" / host / "ray.token").read_text() for host in ("fd00::2", "gpu-1.lan")}
    assert len(tokens) == 1
    assert tokens != {(gone / "ray.token").read_text()}
    changed = {name.rpartition("/")[2] for name, held in contents(keys).items() if held != before[name]}
    assert changed == {"ca.crt", "ray.token"}


def test_a_host_that_is_added_is_let_in_by_all_with_the_same_token(keys):
    token = (keys / "nodes" / "fd00::2" / "ray.token").read_text()
    told = call("add", "10.0.0.9", "--in", keys, "--json")
    assert (told.exit_code, json.loads(told.stdout)["changed"]) == (0, ["10.0.0.9"])
    new = keys / "nodes" / "10.0.0.9"
    shake_hands(new, keys / "nodes" / "fd00::2", "fd00::2")
    shake_hands(keys / "nodes" / "fd00::2", new, "10.0.0.9")
    assert (new / "ray.token").read_text() == token


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["add", "fd00::2"], "has keys already"),
        (["add", "10.0.0.300"], "neither an IP address nor a name"),
        (["add", "../x"], "neither an IP address nor a name"),
        (["revoke", "10.0.0.7"], "has no keys here"),
        (["revoke", "../submit"], "has no keys here"),
        (["revoke", ""], "has no keys here"),
    ],
)
def test_a_change_that_makes_no_sense_changes_nothing(keys, tmp_path, arguments, said):
    before = contents(keys)
    refused = call(*arguments, "--in", keys)
    assert (refused.exit_code, said in " ".join(refused.stderr.split())) == (2, True), refused.stderr
    assert contents(keys) == before
    elsewhere = call(*arguments, "--in", tmp_path)
    assert (elsewhere.exit_code, "no folder of keys" in " ".join(elsewhere.stderr.split())) == (2, True)


OF_RAY = {"RAY_TLS_CA_CERT": "ca.crt", "RAY_TLS_SERVER_CERT": "node.crt"}
OF_RAY |= {"RAY_TLS_SERVER_KEY": "node.key", "RAY_AUTH_TOKEN_PATH": "ray.token"}
OF_SUBMIT = {"AREAL_ASYNC_TOKEN_FILE": "submit.token", "AREAL_ASYNC_CLUSTER_DIR": ""}


@pytest.mark.parametrize(("part", "named"), [("nodes/10.0.0.1", OF_RAY), ("submit", OF_SUBMIT)])
def test_env_sh_finds_its_folder_wherever_that_was_copied_to(keys, tmp_path, part, named):
    there = tmp_path / "another host"
    shutil.copytree(keys / part, there)
    shutil.rmtree(keys)
    run = ["bash", "-uc", '. "$1/env.sh" && env -0', "bash", there]
    variables = os.environ | {"RAY_AUTH_TOKEN": "would be taken instead of the file"}
    shown = subprocess.run(run, capture_output=True, text=True, check=True, env=variables).stdout
    found = dict(line.split("=", 1) for line in shown.split("\0") if line)
    if part != "submit":
        assert "RAY_AUTH_TOKEN" not in found
        assert (found["RAY_USE_TLS"], found["RAY_AUTH_MODE"]) == ("1", "token")
        assert found["RAY_USAGE_STATS_ENABLED"] == "0"
    assert [name for name, file in named.items() if not os.path.samefile(found[name], there / file)] == []


def test_a_controller_has_its_folder_there_and_lets_in_the_tokens_that_were_made(keys, tmp_path):
    folder = ClusterFolder(keys / "submit")
    folder.make()
    before = folder.tokens.read_bytes()
    folder.make_tokens()
    assert folder.tokens.read_bytes() == before
    submit, look = folder.token("submit"), folder.token("look")
    assert [folder.right_of(token) for token in (submit, look)] == ["submit", "look"]
    lines = before.decode().splitlines(keepends=True)
    fresh = folder.tokens.with_suffix(".new")
    fresh.write_text("".join(line for line in lines if not line.startswith("submit")))
    fresh.chmod(0o600)
    fresh.replace(folder.tokens)
    assert [folder.right_of(token) for token in (submit, look)] == [None, "look"], "the line was removed"
    for host in HOSTS:
        assert folder.right_of((keys / "nodes" / host / "ray.token").read_text()) is None
    alone = ClusterFolder(tmp_path / "alone")
    alone.path.mkdir()
    shutil.copy(folder.tokens, alone.tokens)
    alone.make()
    with pytest.raises(ClusterFolderError, match=r"submit\.token"):
        alone.token()


def test_nothing_that_is_there_is_replaced_and_no_host_is_guessed(keys, tmp_path):
    before = contents(keys)
    again = init(keys, "--host", "10.0.0.1")
    assert (again.exit_code, "nothing in it is replaced" in again.stderr) == (2, True)
    assert contents(keys) == before
    for hosts in ([], ["10.0.0.300"], ["a b"], ["http://h"]):
        refused = init(tmp_path / "new", *(word for host in hosts for word in ("--host", host)))
        assert (refused.exit_code, "--host" in refused.stderr) == (2, True)
    assert not (tmp_path / "new").exists()
