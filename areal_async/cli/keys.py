"""`areal-async keys`: keys of a cluster's hosts, and tokens of its controller, in one folder.

    nodes/HOST/         for this host only
      ca.crt            issuers of all hosts that are accepted
      issuer.crt        its own issuer
      node.crt node.key its certificate, with which Ray encrypts
      ray.token         token of Ray's nodes and clients, one for the cluster
      env.sh            exports for Ray
    submit/             for the controller's host: the folder of the cluster
      tokens, *.token   tokens that the controller accepts
      env.sh            exports for areal-async

A host has no token of the controller and no key of another host. Each host's certificate has its own issuer.
The key of the issuer is not stored, so nobody can use it to sign a certificate for another host. To revoke a
host, its issuer is removed from the `ca.crt` of the other hosts."""

from __future__ import annotations

import ipaddress
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from areal_async.base.addresses import LOOPBACK
from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.cli.tools import AsJson, readable_errors, show

DAYS = 365
ISSUER = "issuer.crt"
DNS_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*")
FOUND = """\
areal_keys=$(CDPATH= cd -- "$(dirname -- "${BASH_SOURCE:-$0}")" && pwd)
[ -r "$areal_keys/%s" ] || { echo "env.sh does not find its folder: use bash or zsh" >&2; return 1; }
"""
NODE_ENVIRONMENT = f"""\
# `. env.sh` in bash or zsh, on this host, before `ray start` and areal-async.
{FOUND % "ray.token"}\
export RAY_USE_TLS=1 RAY_TLS_CA_CERT="$areal_keys/ca.crt"
export RAY_TLS_SERVER_CERT="$areal_keys/node.crt" RAY_TLS_SERVER_KEY="$areal_keys/node.key"
unset RAY_AUTH_TOKEN # it would come before the file
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$areal_keys/ray.token" RAY_USAGE_STATS_ENABLED=0
unset areal_keys
"""
SUBMIT_ENVIRONMENT = f"""\
# `. env.sh` in bash or zsh, on the controller's host, before `areal-async up` and `areal-async submit`.
{FOUND % "submit.token"}\
export AREAL_ASYNC_CLUSTER_DIR="$areal_keys" AREAL_ASYNC_TOKEN_FILE="$areal_keys/submit.token"
unset areal_keys
"""

NODES, SUBMIT = "nodes", "submit"
Hosts = Annotated[list[str], Argument(metavar="HOST...", help="As in `keys init --host`.")]
Made = Annotated[Path, Option("--in", metavar="DIR", help="Folder that `keys init` made.")]

keys = typer.Typer(
    help="Generate and revoke TLS certificates and tokens for the hosts of a cluster.", no_args_is_help=True
)


@keys.command()
def init(
    folder: Annotated[Path, Argument(metavar="[DIR]", help="A new folder.")] = Path("keys"),
    hosts: Annotated[
        list[str], Option("--host", metavar="IP[,NAME]...", help="Addresses of a node; again for each node.")
    ] = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Create keys in a new folder, with one folder for each host of a cluster and one for its controller."""
    with readable_errors():
        until = make_keys(folder, hosts)
        answer = {"folder": str(folder.absolute()), "hosts": hosts, "valid_until": until}
        show(answer, f"{folder}/ is for these hosts, until {until}: {', '.join(hosts)}", as_json)


@keys.command()
def add(hosts: Hosts, folder: Made = Path("keys"), as_json: AsJson = False) -> None:
    """Create keys for further hosts, which the other hosts then accept."""
    with readable_errors():
        until = add_hosts(folder, hosts)
        _show_changed(folder, hosts, f"{', '.join(hosts)} added, until {until}", as_json)


@keys.command()
def revoke(hosts: Hosts, folder: Made = Path("keys"), as_json: AsJson = False) -> None:
    """Revoke these hosts, so that the other hosts refuse them, and replace the cluster's Ray token, which the
    revoked hosts know."""
    with readable_errors():
        revoke_hosts(folder, hosts)
        _show_changed(folder, hosts, f"{', '.join(hosts)} revoked", as_json)


def _show_changed(folder: Path, changed: Sequence[str], text: str, as_json: bool) -> None:
    now = sorted(path.name for path in (folder / NODES).iterdir())
    answer = {"folder": str(folder.absolute()), "changed": changed, "hosts": now}
    text += (
        f". Hosts now: {', '.join(now)}. Copy each folder in {folder / NODES} to its host again and restart "
    )
    show(answer, f"{text}Ray there: until then nothing has changed for it.", as_json)


def make_keys(folder: Path, hosts: Sequence[str]) -> str:
    """Create the files in a new or empty `folder`, for nodes at `hosts`. Each of `hosts` has the addresses of
    one node, separated by commas. Return the last valid day of the certificates as YYYY-MM-DD. Raises
    `ConfigError` or `ClusterFolderError`."""
    from areal_async.cluster.folder import TOKEN_BYTES, ClusterFolder
    from areal_async.rpc.secret import write_private

    if not hosts:
        raise _refusal("--host", "no node is named", "Give the IP address of each, also of this one")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        fix = "Name a new folder, or change what is there with `keys add` and `keys revoke`"
        raise _refusal("DIR", f"{folder} is there already, and nothing in it is replaced", fix)
    made, until = _new_nodes(hosts)
    submit = ClusterFolder(folder / SUBMIT)
    for closed in (folder, folder / NODES):
        closed.mkdir(mode=0o700, parents=True, exist_ok=True)
        closed.chmod(0o700)
    submit.make()
    submit.make_tokens()
    write_private(submit.path / "env.sh", SUBMIT_ENVIRONMENT.encode())
    _write_nodes(folder, made, secrets.token_hex(TOKEN_BYTES))
    return until


def add_hosts(folder: Path, hosts: Sequence[str]) -> str:
    """Create keys for further hosts. Return the last valid day of their certificates. Raises
    `ConfigError`."""
    nodes, token = _read_nodes(folder)
    made, until = _new_nodes(hosts)
    if there := sorted(made.keys() & nodes.keys()):
        raise _refusal("HOST", f"{there[0]} has keys already", "Revoke it first to give it new ones")
    _write_nodes(folder, nodes | made, token)
    return until


def revoke_hosts(folder: Path, hosts: Sequence[str]) -> None:
    """Remove hosts, and replace the cluster's Ray token, which the removed hosts know. Raises
    `ConfigError`."""
    from areal_async.cluster.folder import TOKEN_BYTES

    nodes, _ = _read_nodes(folder)
    names = [host.partition(",")[0] for host in hosts]
    for name in names:
        if name not in nodes:
            raise _refusal("HOST", f"{name} has no keys here", f"Name one of {', '.join(sorted(nodes))}")
        shutil.rmtree(folder / NODES / name)
    left = {name: files for name, files in nodes.items() if name not in names}
    _write_nodes(folder, left, secrets.token_hex(TOKEN_BYTES))


Files = dict[str, bytes]


def _new_nodes(hosts: Sequence[str]) -> tuple[dict[str, Files], str]:
    """Return the files of new hosts by host name, and the last valid day of the certificates."""
    until = datetime.now(UTC) + timedelta(days=DAYS)
    names = [list(dict.fromkeys(host.split(","))) for host in dict.fromkeys(hosts)]
    return {each[0]: _certificates(each, until) for each in names}, until.date().isoformat()


def _read_nodes(folder: Path) -> tuple[dict[str, Files], str]:
    """Return the certificates and keys of all existing hosts, and the token."""
    try:
        nodes = {
            node.name: {name: (node / name).read_bytes() for name in (ISSUER, "node.crt", "node.key")}
            for node in sorted((folder / NODES).iterdir())
        }
        token = (folder / NODES / next(iter(nodes)) / "ray.token").read_text()
    except (OSError, StopIteration) as error:
        problem = f"{folder} is no folder of keys: {error or 'it has no host'}"
        raise _refusal("--in", problem, "Name the folder that `keys init` made") from None
    return nodes, token


def _write_nodes(folder: Path, nodes: Mapping[str, Files], token: str) -> None:
    """Write the folders of all hosts again. Each `ca.crt` gets the issuers of all hosts."""
    from areal_async.rpc.secret import write_private

    issuers = b"".join(files[ISSUER] for files in nodes.values())
    shared = {"ca.crt": issuers, "ray.token": token.encode(), "env.sh": NODE_ENVIRONMENT.encode()}
    for name, files in nodes.items():
        node = folder / NODES / name
        node.mkdir(mode=0o700, exist_ok=True)
        for file, content in (files | shared).items():
            (node / file).unlink(missing_ok=True)
            write_private(node / file, content)


def _certificates(hosts: Sequence[str], until: datetime) -> Files:
    """Create the certificate, key and issuer of a host with these addresses. Return them as PEM by file
    name."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        fix = "Install the extra `ray`: pip install 'areal-async[ray]'"
        raise _refusal("keys init", "the package cryptography is not installed", fix) from None
    names: list[x509.GeneralName] = []
    for host in ["localhost", LOOPBACK, *hosts]:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if DNS_NAME.fullmatch(host) is None or host.replace(".", "").isdecimal():
                problem = f"{host!r} is neither an IP address nor a name"
                raise _refusal("--host", problem, "Give the address that `ray start` is given") from None
            names.append(x509.DNSName(host))
    authority, node = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"areal-async-{kind} {hosts[0]}"[:64])])
        for kind in ("ca", "node")
    )
    issuing, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    begin = x509.CertificateBuilder().issuer_name(authority).not_valid_after(until)
    begin = begin.not_valid_before(datetime.now(UTC) - timedelta(days=1))  # Clocks of hosts differ

    begin = begin.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(issuing.public_key()), False
    )

    def signed(
        subject: x509.Name, of: ec.EllipticCurvePrivateKey, *about: tuple[x509.ExtensionType, bool]
    ) -> bytes:
        made = begin.subject_name(subject).public_key(of.public_key())
        made = made.serial_number(x509.random_serial_number())
        for extension, critical in about:
            made = made.add_extension(extension, critical)
        return made.sign(issuing, hashes.SHA256()).public_bytes(pem)

    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    signs = x509.KeyUsage(False, False, False, False, False, True, False, False, False)  # Signs certificates
    own = x509.SubjectKeyIdentifier.from_public_key(issuing.public_key())
    ca = x509.BasicConstraints(ca=True, path_length=None)
    return {
        ISSUER: signed(authority, issuing, (ca, True), (signs, True), (own, False)),
        "node.crt": signed(node, key, (x509.SubjectAlternativeName(names), False)),
        "node.key": key.private_bytes(pem, form, serialization.NoEncryption()),
    }


def _refusal(field: str, problem: str, fix: str) -> ConfigError:
    return ConfigError("the command line", [Mistake(field, problem, fix)])
