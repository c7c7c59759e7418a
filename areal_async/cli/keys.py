"""`areal-async keys init`: what a cluster's nodes and its controller know each other by, in one folder.

    ca.crt, node.crt, node.key   the nodes' certificate, by which Ray encrypts, and its issuer's
    ray.token                    what each Ray node and client shows
    tokens, *.token              whom the controller lets in, as its folder has them
    env.sh                       exports for Ray and areal-async, wherever the folder lies

The issuer's key is kept nowhere: who has the folder is a node, and nobody can make another one.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from areal_async.cli.tools import AsJson, readable_errors, show
from areal_async.config.errors import ConfigError, Mistake
from areal_async.rpc.endpoints import LOOPBACK

DAYS = 365
DNS_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*")
ENVIRONMENT = """\
# `. env.sh` in bash or zsh, on every node, before `ray start` and areal-async.
areal_keys=$(CDPATH= cd -- "$(dirname -- "${BASH_SOURCE:-$0}")" && pwd)
[ -r "$areal_keys/ray.token" ] || { echo "env.sh does not find its folder: use bash or zsh" >&2; return 1; }
export RAY_USE_TLS=1 RAY_TLS_CA_CERT="$areal_keys/ca.crt"
export RAY_TLS_SERVER_CERT="$areal_keys/node.crt" RAY_TLS_SERVER_KEY="$areal_keys/node.key"
unset RAY_AUTH_TOKEN # it would come before the file
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$areal_keys/ray.token" RAY_USAGE_STATS_ENABLED=0
export AREAL_ASYNC_CLUSTER_DIR="$areal_keys" AREAL_ASYNC_TOKEN_FILE="$areal_keys/submit.token"
unset areal_keys
"""

keys = typer.Typer(help="Make what the hosts of a cluster know each other by.", no_args_is_help=True)


@keys.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="A new folder.")] = Path("keys"),
    hosts: Annotated[
        list[str], typer.Option("--host", metavar="IP", help="Address of a node; again for each.")
    ] = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Make certificate, tokens and env.sh of a cluster in a new folder, to be copied to all its hosts."""
    with readable_errors():
        until = make_keys(folder, hosts)
        answer = {"folder": str(folder.absolute()), "hosts": hosts, "valid_until": until}
        show(answer, f"{folder}/ is for these hosts, until {until}: {', '.join(hosts)}", as_json)


def make_keys(folder: Path, hosts: Sequence[str]) -> str:
    """Make the files in `folder`, which must be new or empty, for nodes at `hosts`. Returns the last day on
    which the certificate is good, as YYYY-MM-DD. Raises `ConfigError`, `ClusterFolderError`."""
    from areal_async.controller.folder import TOKEN_BYTES, ClusterFolder
    from areal_async.rpc.secret import write_private

    if not hosts:
        raise _refusal("--host", "no node is named", "Give the IP address of each, also of this one")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        fix = "Name a new folder, and start Ray and the controller again with what is made there"
        raise _refusal("DIR", f"{folder} is there already, and nothing in it is replaced", fix)
    until = datetime.now(UTC) + timedelta(days=DAYS)
    files = _certificates(list(dict.fromkeys(["localhost", LOOPBACK, *hosts])), until)
    made = ClusterFolder(folder)
    made.make()
    made.make_tokens()
    files |= {"ray.token": secrets.token_hex(TOKEN_BYTES).encode(), "env.sh": ENVIRONMENT.encode()}
    for name, content in files.items():
        write_private(folder / name, content)
    return until.date().isoformat()


def _certificates(hosts: Sequence[str], until: datetime) -> dict[str, bytes]:
    """PEM by the names of the files."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        fix = "Install the extra `ray`: pip install 'areal-async[ray]'"
        raise _refusal("keys init", "the package cryptography is not installed", fix) from None
    names: list[x509.GeneralName] = []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if DNS_NAME.fullmatch(host) is None or host.replace(".", "").isdecimal():
                problem = f"{host!r} is neither an IP address nor a name"
                raise _refusal("--host", problem, "Give the address that `ray start` is given") from None
            names.append(x509.DNSName(host))
    authority, node = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        for name in ("areal-async-ca", "areal-async-node")
    )
    issuing, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    begin = x509.CertificateBuilder().issuer_name(authority).not_valid_after(until)
    begin = begin.not_valid_before(datetime.now(UTC) - timedelta(days=1))  # clocks of hosts differ

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
    signs = x509.KeyUsage(False, False, False, False, False, True, False, False, False)  # certificates
    own = x509.SubjectKeyIdentifier.from_public_key(issuing.public_key())
    ca = x509.BasicConstraints(ca=True, path_length=None)
    return {
        "ca.crt": signed(authority, issuing, (ca, True), (signs, True), (own, False)),
        "node.crt": signed(node, key, (x509.SubjectAlternativeName(names), False)),
        "node.key": key.private_bytes(pem, form, serialization.NoEncryption()),
    }


def _refusal(field: str, problem: str, fix: str) -> ConfigError:
    return ConfigError("the command line", [Mistake(field, problem, fix)])
