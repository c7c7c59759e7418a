"""What is wrong with the files below `deploy/`, in words. What is right is asked of the product: its command
line, its sections of cluster and job files, its routes, its ports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.commands import (
    ROOT,
    api_right,
    cluster_of,
    cluster_problems,
    command_problems,
    is_read,
    job_problems,
    ray_options,
    ray_routes,
)
from tests.deploy.containers import Container, shell_commands, unit_settings

OUR_IMAGES = ("light", "trainer", "sglang", "vllm", "single")
USER = 10001
TOKEN_FILES = ("ray.token", "auth_token")
RAY_PORTS = {
    "node_manager_port": 6381,
    "object_manager_port": 6382,
    "dashboard_agent_grpc_port": 6383,
    "runtime_env_agent_port": 6384,
    "metrics_export_port": 6385,
    "dashboard_agent_listen_port": 52365,
    "min_worker_port": 10002,
    "max_worker_port": 10999,
}
"""One set of ports everywhere, since policies and firewalls name them."""
HEAD_PORT = 6380


def container_problems(container: Container, scratch: Path) -> Iterator[str]:
    """What is wrong with one container by itself."""
    # Grafana's image has a command of its own, which is not ours to ask.
    problems = [] if "grafana" in container.image else [*command_problems(container.command)]
    for name, value in container.environment.items():
        used = f"$({name})" in " ".join(container.command)
        if not (used or is_read(name) or name in passwords_named()):
            problems.append(f"nobody reads the variable {name}")
        if value and re.search(r"TOKEN$|PASSWORD|SECRET|_KEY$", name):
            problems.append(f"the secret {name} stands in the manifest")
        if value and name.endswith("_PATH") and container.text_of(value) is None:
            problems.append(f"{name} names {value}, which is no file of a mount")
    if not container.hardened:
        problems.append("it has rights or room that it does not need")
    if not container.probes and not container.probe_commands:
        problems.append("nothing looks whether it works")
    program = Path(container.command[0]).name if container.command else ""
    served = {52365, *container.ports}
    if program == "areal-async" and container.command[1] == "up":
        problems += _controller_problems(container, scratch)
    if program == "ray":
        problems += [f"ray start: {text}" for text in ray_problems(container.command)]
        if "RAY_USAGE_STATS_ENABLED" not in container.environment:
            problems.append("Ray reports to its makers")
    for port, path in container.probes:
        known = path in ray_routes() if program == "ray" else api_right(path) == ""
        if port not in served:
            problems.append(f"a probe asks port {port}, where nobody listens")
        if not known:
            problems.append(f"a probe asks {path}, which is not answered without a token")
    for words in container.probe_commands:
        problems += command_problems(words)
        problems += _url_problems(container, " ".join(words))
    yield from (f"{container.where}: {problem}" for problem in problems)


def _controller_problems(container: Container, scratch: Path) -> Iterator[str]:
    named = [word for word in container.command[2:] if not word.startswith("-")]
    if "--foreground" not in container.command or not named:
        yield "a controller in a container stays in front, and has a cluster file"
        return
    text = container.text_of(named[0])
    if text is None:
        yield f"{named[0]} is no file of a mount"
        return
    if problems := [*cluster_problems(text, scratch)]:
        yield from problems
        return
    cluster = cluster_of(text, scratch)
    if cluster.api.port not in container.ports:
        yield f"the API listens on {cluster.api.port}, and the container has {sorted(container.ports)}"
    if cluster.api.host != "0.0.0.0":
        yield f"the API listens on {cluster.api.host}, where nobody outside the container comes"
    home = container.mount_of(str(cluster.dir))
    if home is None or home[0].kind != "volume" or not home[0].writable:
        yield f"{cluster.dir} lies on no volume that can be written"
    if container.environment.get("AREAL_ASYNC_CLUSTER_DIR") != str(cluster.dir):
        yield "commands in the container do not find the controller: AREAL_ASYNC_CLUSTER_DIR"
    for folder in ("/tmp", "/dev/shm"):
        found = container.mount_of(folder)
        if found is None or not found[0].writable:
            yield f"{folder} cannot be written, where sockets and weights of jobs lie"
    yield from secrecy_problems(text, container.environment, scratch)
    for port, path in container.probes:
        if port != cluster.api.port:
            yield f"the probe of {path} asks port {port}, and the API listens on {cluster.api.port}"


def _url_problems(container: Container, text: str) -> Iterator[str]:
    healthy = {"prometheus": ("9090", "/-/healthy"), "grafana": ("3000", "/api/health")}
    others = [name for name in healthy if name in container.image]
    for host, port, path in re.findall(r"http://([\d.]+):(\d+)(/[\w/.-]*)", text):
        if host != "127.0.0.1":
            yield f"it asks {host}, which is not itself"
        for name in others:
            if (port, path) != healthy[name]:
                yield f"{name} answers no {path} at {port}"
        ours = not others and "up" in container.command
        if ours and (api_right(path) != "" or int(port) not in container.ports):
            yield f"nobody answers {path} at {port} without a token"


def secrecy_problems(
    cluster_text: str, environment: Mapping[str, str | None], scratch: Path
) -> Iterator[str]:
    """Whether jobs would be refused because Ray carries their keys in the clear."""
    cluster = cluster_of(cluster_text, scratch)
    tls = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")
    encrypted = environment.get("RAY_USE_TLS") == "1" and all(environment.get(name) for name in tls)
    if cluster.launcher == "ray" and not cluster.ray.trust_network and not encrypted:
        yield "the network is not trusted, and Ray does not encrypt"


def ray_problems(words: Sequence[str]) -> Iterator[str]:
    """What is wrong with a `ray start`."""
    if problems := [*command_problems(words)]:
        yield from problems
        return
    options = ray_options(words)
    for name, port in RAY_PORTS.items():
        if int(options.get(name) or 0) != port:
            yield f"{name} is {options.get(name)} and not {port}"
    if options["head"] and int(options["port"] or 0) != HEAD_PORT:
        yield f"the head listens on {options['port']} and not on {HEAD_PORT}"
    if not options["head"] and not str(options["address"]).endswith(f":{HEAD_PORT}"):
        yield f"it looks for the head at {options['address']}"


def passwords_named() -> set[str]:
    """Environment variables that job files of `deploy/` name for passwords."""
    found = set()
    for path in (ROOT / "deploy").rglob("job.yaml"):
        login = yaml.safe_load(path.read_text()).get("buffer", {}).get("redis_login", {})
        found |= {login["password_env"]} if "password_env" in login else set()
    return found


# --- images ------------------------------------------------------------------------------------------


def image_problems(containers: Sequence[Container], deploy: Path) -> Iterator[str]:
    """What is wrong with the names of images, over all manifests together."""
    dockerfile = (deploy / "docker" / "Dockerfile").read_text()
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    tags: dict[str, set[str]] = {}
    for container in containers:
        name, _, tag = container.image.partition(":")
        tags.setdefault(name, set()).add(tag)
        if name.startswith("areal-async/"):
            if name.removeprefix("areal-async/") not in OUR_IMAGES or name.split("/")[1] not in targets:
                yield f"{container.where}: no image {name} is built"
            if tag != version:
                yield f"{container.where}: {container.image} is not of version {version}"
        elif not re.match(r"v?\d+\.\d+\.\d+", tag):
            yield f"{container.where}: {container.image} is not pinned"
    yield from (f"{name} has the tags {sorted(found)}" for name, found in tags.items() if len(found) > 1)
    stages = dict(re.findall(r"^FROM \S+ AS (\w+)$(.*?)(?=^FROM |\Z)", dockerfile, re.MULTILINE | re.DOTALL))
    engines = {engine: engine for engine in re.findall(r"^(sglang|vllm) = \[", project, re.MULTILINE)}
    for image, engine in (engines | {"single": "sglang"}).items():
        if f"/src/engines/make.sh /opt/engines {engine}-cuda " not in stages.get(image, ""):
            yield f"Dockerfile: the image {image} has no CUDA lock"
    for target in OUR_IMAGES:
        stage = re.split(rf"^FROM \S+ AS {target}$", dockerfile, flags=re.MULTILINE)[-1].split("\nFROM ")[0]
        if re.findall(r"^USER (.+)$", stage, re.MULTILINE)[-1:] != [f"{USER}:{USER}"]:
            yield f"Dockerfile: {target} does not end as the user {USER}"
    for base in re.findall(r"^ARG \w+_IMAGE=(.+)$", dockerfile, re.MULTILINE):
        if not re.search(r":v?\d+\.\d+\.\d+", base):
            yield f"Dockerfile: {base} is not pinned"
    if f"--uid {USER} " not in (deploy / "docker" / "user.sh").read_text():
        yield f"user.sh: the user is not {USER}"
    for line in dockerfile.splitlines():
        if re.match(r"(ARG|ENV|COPY)\b.*(TOKEN|PASSWORD|SECRET|INDEX_URL)", line):
            yield f"Dockerfile: a secret would lie in a layer: {line}"


# --- Ray's launcher, systemd, Slurm ------------------------------------------------------------------


def ray_up_problems(deploy: Path, scratch: Path) -> Iterator[str]:
    """What is wrong with `deploy/ray`."""
    content: dict[str, Any] = yaml.safe_load((deploy / "ray" / "cluster.yaml").read_text())
    cluster_text = (deploy / "ray" / "areal.yaml").read_text()
    yield from (f"areal.yaml: {text}" for text in cluster_problems(cluster_text, scratch))
    if content["head_node_type"] not in content["available_node_types"]:
        yield f"there is no node type {content['head_node_type']}"
    setup = [*content["setup_commands"], *content["head_setup_commands"], *content["worker_setup_commands"]]
    for kind in content["available_node_types"].values():
        setup += kind.get("worker_setup_commands", [])
    for line in setup:
        for script, role in re.findall(r"~/areal-async/(\S+\.sh) (\w+)", line):
            if not (deploy.parent / script).is_file() or role not in ("light", "trainer"):
                yield f"setup: there is no {script} {role}"
    mounts = content["file_mounts"]
    started = False
    for kind in ("head_start_ray_commands", "worker_start_ray_commands"):
        for line in content[kind]:
            for exported, words in shell_commands(line):
                yield from (f"{kind}: {text}" for text in command_problems(words))
                if "start" in words or "up" in words:
                    yield from (f"{kind}: {text}" for text in _token_problems(exported, mounts))
                if "start" in words:
                    yield from (f"{kind}: {text}" for text in ray_problems(words))
                if "up" in words:
                    started = True
                    yield from (f"{kind}: {x}" for x in secrecy_problems(cluster_text, exported, scratch))
                    named = words[-1].removeprefix("~/areal-async/")
                    if not (deploy.parent / named).is_file():
                        yield f"{kind}: there is no {named}"
    if not started:
        yield "nobody starts the controller"


def _token_problems(exported: dict[str, str], mounts: dict[str, str]) -> Iterator[str]:
    path = exported.get("RAY_AUTH_TOKEN_PATH", "")
    folder, _, name = path.rpartition("/")
    if exported.get("RAY_AUTH_MODE") != "token" or folder not in mounts or name not in TOKEN_FILES:
        yield f"it is started without a token of a mounted folder ({path})"
    if exported.get("RAY_USAGE_STATS_ENABLED") != "0":
        yield "Ray reports to its makers"
    yield from (f"nobody reads the variable {name}" for name in exported if not is_read(name))


def unit_problems(deploy: Path, scratch: Path) -> Iterator[str]:
    """What is wrong with `deploy/systemd`."""
    folder = deploy / "systemd"
    users = re.findall(r"^u (\S+)", (folder / "areal-async.sysusers.conf").read_text(), re.MULTILINE)
    cluster_text = (folder / "cluster.yaml").read_text()
    yield from (f"cluster.yaml: {text}" for text in cluster_problems(cluster_text, scratch))
    for path in sorted(folder.glob("*.service")):
        settings = unit_settings(path)
        (command,) = settings["ExecStart"]
        roles = re.findall(r"^#\s+RAY_ROLE=(.*?)\s{2,}", path.read_text(), re.MULTILINE) or [""]
        for role in roles:
            words = command.replace("$RAY_ROLE", role).replace("${RAY_NODE_IP}", "10.0.0.1").split()
            yield from (f"{path.name}: {text}" for text in command_problems(words))
            if "start" in words:
                yield from (f"{path.name}: {text}" for text in ray_problems(words))
        if settings["User"][-1] not in users:
            yield f"{path.name}: nobody makes the user {settings['User'][-1]}"
        variables = dict(word.split("=", 1) for line in settings["Environment"] for word in line.split())
        unread = [name for name in variables if not is_read(name)]
        yield from (f"{path.name}: nobody reads the variable {name}" for name in unread)
        yield from (f"{path.name}: {text}" for text in secrecy_problems(cluster_text, variables, scratch))
        state = f"/var/lib/{settings['StateDirectory'][-1]}"
        if variables.get("HOME") != state or settings.get("ProtectSystem") != ["strict"]:
            yield f"{path.name}: HOME is not the one folder that can be written"
        if "up" in command:
            where = str(cluster_of(cluster_text, scratch).dir)
            if variables.get("AREAL_ASYNC_CLUSTER_DIR") != where or not where.startswith(state):
                yield f"{path.name}: commands do not find {where}, or it cannot be written"
            if settings.get("KillMode") != ["process"]:
                yield f"{path.name}: jobs would end with their controller"


def loose_files(deploy: Path, scratch: Path) -> Iterator[str]:
    """What is wrong with cluster and job files, wherever they are."""
    for path in sorted(deploy.rglob("*.yaml")):
        name = path.relative_to(deploy).as_posix()
        if path.name == "job.yaml":
            yield from (f"{name}: {text}" for text in job_problems(path.read_text(), scratch))
        elif path.name == "cluster.yaml" and path.parent.name != "ray":
            yield from (f"{name}: {text}" for text in cluster_problems(path.read_text(), scratch))
