"""Redis behind TLS and a login: both clients of the buffer speak it, and what is wrong is said at start."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_async.config.job import BufferSection
from replay_buffer.redis.address import RedisAddress, StoreUnusable


def openssl(*words):
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout")


@dataclass(frozen=True)
class Authority:
    folder: Path

    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate and its key, signed by this authority."""
        cert, key, request, extension = (
            self.folder / f"{name}.{end}" for end in ("pem", "key", "csr", "ext")
        )
        extension.write_text("subjectAltName=DNS:localhost\n")
        openssl("req", *NEW_KEY, key, "-out", request, "-subj", f"/CN={name}")
        ours = ("-CA", self.ca(), "-CAkey", self.folder / "ca.key", "-CAcreateserial")
        openssl("x509", "-req", "-in", request, *ours, "-days", "2", "-extfile", extension, "-out", cert)
        return cert, key


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """`authority(name)`: a certificate authority."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl: the Debian package openssl")

    def make(name: str) -> Authority:
        ours = Authority(tmp_path_factory.mktemp(name))
        made = ("-out", ours.ca(), "-days", "2", "-subj", f"/CN={name}")
        openssl("req", "-x509", *NEW_KEY, ours.folder / "ca.key", *made)
        return ours

    return make


@pytest.fixture
def secure(new_redis, servers, authority, folder):
    """A server that speaks TLS alone, wants a client certificate, and knows one user."""
    ours = authority("ours")
    cert, key = ours.issue("server")
    server = servers(
        new_redis,
        "tls",
        port="0",
        tls_cert_file=str(cert),
        tls_key_file=str(key),
        tls_ca_cert_file=str(ours.ca()),
    )
    server.options["tls-port"] = str(server.port)
    server.start()
    server.admin.execute_command("ACL", "SETUSER", "front", "on", ">s3cret", "~*", "+@all")
    client, client_key = ours.issue("client")
    (folder / "password").write_text("s3cret\n")
    tls = {"ca_file": ours.ca(), "cert_file": client, "key_file": client_key}
    login = {"password_file": folder / "password"}

    def address(host="localhost", login=login, **changes):
        return RedisAddress.of(
            BufferSection(
                redis=f"rediss://front@{host}:{server.port}", redis_login=login, redis_tls=tls | changes
            )
        )

    return address


async def test_a_ledger_lives_behind_tls_with_a_client_certificate_and_a_login(secure, a_life):
    async with a_life(secure()) as life:
        batches = [await life.train() for _ in range(2)]
        assert [len(batch.groups) for batch in batches] == [2, 2]
        assert life.front.index.consumer("policy").v_train == 2
    async with a_life(secure("127.0.0.1", check_hostname=False), step=2) as life:
        assert life.front.front_epoch == 2


async def test_a_certificate_that_is_not_trusted_is_refused_by_both_sides(secure, authority, a_life):
    other = authority("other")
    stranger, key = other.issue("stranger")
    for address in (
        secure(ca_file=other.ca()),  # the server is not whom we trust
        secure("127.0.0.1"),  # it is, but its certificate is for another name
        secure(cert_file=None, key_file=None),  # it wants to know who we are
        secure(cert_file=stranger, key_file=key),  # and does not trust everybody
    ):
        with pytest.raises(StoreUnusable, match=r"no TLS connection to .* Look at buffer\.redis_tls"):
            async with a_life(address):
                pass
    with pytest.raises(StoreUnusable, match=r"certificates of buffer.redis_tls cannot be used"):
        async with a_life(secure(ca_file=key)):
            pass


async def test_a_wrong_password_is_named_by_its_place_and_never_shown(secure, a_life, folder, monkeypatch):
    monkeypatch.setenv("REDIS_PASSWORD", "hunter2")
    with pytest.raises(StoreUnusable, match="password_env or password_file") as caught:
        async with a_life(secure(login={"password_env": "REDIS_PASSWORD"})):
            pass
    assert "front" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(StoreUnusable, match=r"UNSET_VARIABLE .* is not set"):
        async with a_life(secure(login={"password_env": "UNSET_VARIABLE"})):
            pass
    (folder / "password").write_text("\n")
    with pytest.raises(StoreUnusable, match="is empty"):
        async with a_life(secure()):
            pass


def test_a_password_that_changes_in_its_file_is_used_from_the_next_connection_on(tmp_path):
    file = tmp_path / "password"
    login = {"password_file": file}
    address = RedisAddress.of(BufferSection(redis="redis://front@localhost:1", redis_login=login))
    for password in ("s3cret", "next"):
        file.write_text(password)
        assert address.password() == password


def test_an_address_does_not_show_its_password():
    address = RedisAddress.parse("rediss://user:s3cret@host:1/2")
    for shown in (address, address.url):
        assert "s3cret" not in f"{shown} {shown!r}"
    assert address.password() == "s3cret"
    assert str(address) == "rediss://user@host:1/2"
