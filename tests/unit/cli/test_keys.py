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
from areal_async.controller.folder import ClusterFolder, ClusterFolderError, TokenBook

FILES = {"ca.crt", "node.crt", "node.key", "ray.token", "tokens", "submit.token", "look.token", "env.sh"}
SECRET = "node.key", "ray.token", "submit.token", "look.token"


def init(*arguments):
    return CliRunner().invoke(app, ["keys", "init", *map(str, arguments)])


@pytest.fixture
def keys(tmp_path):
    told = init(tmp_path / "keys", "--host", "10.0.0.1", "--host", "fd00::2", "--host", "gpu-1.lan", "--json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["hosts"] == ["10.0.0.1", "fd00::2", "gpu-1.lan"]
    assert not any((tmp_path / "keys" / name).read_text().strip() in told.output for name in SECRET)
    return tmp_path / "keys"


def test_the_folder_is_its_owners_alone_and_has_no_key_that_makes_another_node(keys):
    assert keys.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in keys.iterdir()} == dict.fromkeys(FILES, 0o600)
    assert sum("PRIVATE KEY" in path.read_text() for path in keys.iterdir()) == 1


def test_the_certificate_is_of_all_hosts_and_of_loopback(keys):
    node = x509.load_pem_x509_certificate((keys / "node.crt").read_bytes())
    ca = x509.load_pem_x509_certificate((keys / "ca.crt").read_bytes())
    node.verify_directly_issued_by(ca)
    names = node.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert " ".join(str(each.value) for each in names) == "localhost 127.0.0.1 10.0.0.1 fd00::2 gpu-1.lan"


@pytest.mark.parametrize(("host", "good"), [("gpu-1.lan", True), ("10.0.0.1", True), ("10.0.0.3", False)])
def test_hosts_that_were_named_prove_themselves_to_each_other_and_no_others(keys, host, good):
    """Strictly, as Python and gRPC check; both ends show the certificate, as Ray's do."""
    to_server, to_client, sides = ssl.MemoryBIO(), ssl.MemoryBIO(), []
    for purpose in (ssl.Purpose.SERVER_AUTH, ssl.Purpose.CLIENT_AUTH):
        side = ssl.create_default_context(purpose, cafile=keys / "ca.crt")
        side.verify_flags |= ssl.VERIFY_X509_STRICT
        side.verify_mode = ssl.CERT_REQUIRED
        side.load_cert_chain(keys / "node.crt", keys / "node.key")
        sides.append(side)
    client = sides[0].wrap_bio(to_client, to_server, server_hostname=host)
    server = sides[1].wrap_bio(to_server, to_client, server_side=True)
    with nullcontext() if good else pytest.raises(ssl.SSLCertVerificationError):
        for side in (client, server) * 2:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
        client.write(b"ping")
        assert server.read(4) == b"ping"


def test_env_sh_finds_its_folder_wherever_that_was_copied_to(keys, tmp_path):
    there = tmp_path / "another host"
    shutil.copytree(keys, there)
    shutil.rmtree(keys)
    run = ["bash", "-uc", '. "$1/env.sh" && env -0', "bash", there]
    variables = os.environ | {"RAY_AUTH_TOKEN": "would be taken instead of the file"}
    shown = subprocess.run(run, capture_output=True, text=True, check=True, env=variables).stdout
    found = dict(line.split("=", 1) for line in shown.split("\0") if line)
    assert "RAY_AUTH_TOKEN" not in found
    assert (found["RAY_USE_TLS"], found["RAY_AUTH_MODE"]) == ("1", "token")
    assert found["RAY_USAGE_STATS_ENABLED"] == "0"
    files = {"CA_CERT": "ca.crt", "SERVER_CERT": "node.crt", "SERVER_KEY": "node.key"}
    files = {f"RAY_TLS_{name}": file for name, file in files.items()} | {"RAY_AUTH_TOKEN_PATH": "ray.token"}
    files |= {"AREAL_ASYNC_TOKEN_FILE": "submit.token", "AREAL_ASYNC_CLUSTER_DIR": ""}
    assert [name for name, file in files.items() if not os.path.samefile(found[name], there / file)] == []


def test_a_controller_has_its_folder_there_and_lets_in_the_tokens_that_were_made(keys, tmp_path):
    folder = ClusterFolder(keys)
    folder.make()
    before = folder.tokens.read_bytes()
    folder.make_tokens()
    assert folder.tokens.read_bytes() == before
    book = TokenBook(folder.tokens)
    assert [book.right_of(folder.token(right)) for right in ("submit", "look")] == ["submit", "look"]
    alone = ClusterFolder(tmp_path / "alone")
    alone.path.mkdir()
    shutil.copy(folder.tokens, alone.tokens)
    alone.make()
    with pytest.raises(ClusterFolderError, match=r"submit\.token"):
        alone.token()


def test_nothing_that_is_there_is_replaced_and_no_host_is_guessed(keys, tmp_path):
    before = {path.name: path.read_bytes() for path in keys.iterdir()}
    again = init(keys, "--host", "10.0.0.1")
    assert (again.exit_code, "nothing in it is replaced" in again.stderr) == (2, True)
    assert {path.name: path.read_bytes() for path in keys.iterdir()} == before
    for hosts in ([], ["10.0.0.300"], ["a b"], ["http://h"]):
        refused = init(tmp_path / "new", *(word for host in hosts for word in ("--host", host)))
        assert (refused.exit_code, "--host" in refused.stderr) == (2, True)
    assert not (tmp_path / "new").exists()
