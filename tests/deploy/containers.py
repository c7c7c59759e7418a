"""What runs by a manifest, in one form whatever kind of manifest names it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from tests.waiting import LIMIT_S

OVERLAYS = ("cpu-small", "single-gpu-node", "multi-node", "rdma")
KUSTOMIZE = [found, "build"] if (found := shutil.which("kustomize")) else ["kubectl", "kustomize"]

Json = Mapping[str, Any]


class CannotBuild(Exception):
    """kustomize does not take the files."""


@dataclass(frozen=True)
class Mount:
    """What a path of a container holds: files by name where the manifests give them, a volume else."""

    kind: Literal["config", "secret", "volume"]
    writable: bool
    files: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Container:
    """One container. `environment` has None for what comes from a secret."""

    where: str
    image: str
    command: list[str]
    environment: Mapping[str, str | None] = field(default_factory=dict)
    mounts: Mapping[str, Mount] = field(default_factory=dict)
    ports: frozenset[int] = frozenset()
    probes: tuple[tuple[int, str], ...] = ()
    """Port and path of HTTP probes; those that run a command are in `probe_commands`."""
    probe_commands: tuple[tuple[str, ...], ...] = ()
    hardened: bool = False
    """It has a user without rights, a root that cannot be written, no capability, and limits."""

    def mount_of(self, path: str) -> tuple[Mount, str] | None:
        """The mount that `path` lies in, and the path below it."""
        for point in sorted(self.mounts, key=len, reverse=True):
            if path == point or path.startswith(point + "/"):
                return self.mounts[point], path[len(point) :].lstrip("/")
        return None

    def text_of(self, path: str) -> str | None:
        """The content of a file that the manifests give; None where there is none."""
        found = self.mount_of(path)
        return (found[0].files or {}).get(found[1]) if found else None


# --- compose -----------------------------------------------------------------------------------------


def compose_containers(deploy: Path) -> Iterator[Container]:
    """The containers of `deploy/compose/compose.yaml`."""
    folder = deploy / "compose"
    content = yaml.safe_load((folder / "compose.yaml").read_text())
    for name, service in content["services"].items():
        mounts: dict[str, Mount] = {}
        for volume in service.get("volumes", ()):
            source, point, *options = volume.split(":")
            if source.startswith("."):
                path = (folder / source).resolve()
                text = {"": path.read_text()} if path.is_file() else None
                mounts[point] = Mount("config", "ro" not in options, text)
            elif source in content["volumes"]:
                mounts[point] = Mount("volume", "ro" not in options)
        secrets: dict[str, str] = {}
        for secret in service.get("secrets", ()):
            path = folder / content["secrets"][secret]["file"]
            secrets[secret] = path.read_text() if path.is_file() else ""
        mounts["/run/secrets"] = Mount("secret", False, secrets)
        for entry in service.get("tmpfs", ()):
            mounts[entry.split(":")[0]] = Mount("volume", True)
        if "shm_size" in service:
            mounts["/dev/shm"] = Mount("volume", True)
        test, ours = tuple(service["healthcheck"]["test"]), service["image"].startswith("areal-async/")
        yield Container(
            f"compose {name}",
            service["image"],
            service.get("command") or (image_command(deploy) if ours else []),
            service.get("environment", {}),
            mounts,
            frozenset(int(port.split(":")[-1]) for port in service.get("ports", ())),
            probe_commands=((test[1:] if test[0] == "CMD" else ("sh", "-c", test[1])),),
            hardened=(
                service.get("read_only") is True
                and service.get("cap_drop") == ["ALL"]
                and "no-new-privileges:true" in service.get("security_opt", ())
                and service.get("user", "0").split(":")[0].isdecimal()
                and not service.get("user", "0").startswith("0")
                and bool(service.get("mem_limit") and service.get("cpus") and service.get("pids_limit"))
            ),
        )


def image_command(deploy: Path) -> list[str]:
    """What our images run when nothing else is said."""
    for line in (deploy / "docker" / "Dockerfile").read_text().splitlines():
        if line.startswith("CMD "):
            return [*yaml.safe_load(line.removeprefix("CMD "))]
    raise CannotBuild("the Dockerfile has no CMD")


# --- Kubernetes --------------------------------------------------------------------------------------


_MADE: dict[tuple[Path, str], list[dict[str, Any]]] = {}
"""Output of kustomize, by the contents of the folder."""


def built(folder: Path) -> list[dict[str, Any]]:
    """Return the output of kustomize for a folder of `k8s`. Raises `CannotBuild`."""
    root = next(parent for parent in (folder, *folder.parents) if parent.name == "k8s")
    files = sorted(path for path in root.rglob("*") if path.is_file())
    key = folder.relative_to(root), "".join(f"{path.relative_to(root)} {path.read_text()}" for path in files)
    if key not in _MADE:
        words = [*KUSTOMIZE, str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise CannotBuild(done.stderr.strip())
        _MADE[key] = [*yaml.load_all(done.stdout, yaml.CSafeLoader)]
    return _MADE[key]


def pod_templates(objects: list[dict[str, Any]]) -> Iterator[tuple[str, Json]]:
    """Each template of a pod, with a name."""
    for item in objects:
        name, spec = f"{item['kind']} {item['metadata']['name']}", item.get("spec", {})
        if item["kind"] in ("Deployment", "StatefulSet"):
            yield name, spec["template"]
        elif item["kind"] == "RayCluster":
            yield f"{name} head", spec["headGroupSpec"]["template"]
            for group in spec["workerGroupSpecs"]:
                yield f"{name} {group['groupName']}", group["template"]


def kubernetes_containers(where: str, objects: list[dict[str, Any]]) -> Iterator[Container]:
    """The containers of all pods. A Ray container has the command that the operator gives it."""
    start = {}
    for item in objects:
        if item["kind"] == "RayCluster":
            name = f"RayCluster {item['metadata']['name']}"
            for group in (item["spec"]["headGroupSpec"], *item["spec"]["workerGroupSpecs"]):
                head = "groupName" not in group
                words = [f"--{key}={value}" for key, value in group.get("rayStartParams", {}).items()]
                words.insert(0, "--head" if head else "--address=ray-head-svc:6380")
                start[f"{name} {group.get('groupName', 'head')}"] = ["ray", "start", "--block", *words]
    for name, template in pod_templates(objects):
        spec = template["spec"]
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        templates = [x.get("spec", {}).get("volumeClaimTemplates", ()) for x in objects]
        claims = {claim["metadata"]["name"] for each in templates for claim in each}
        for each in (*spec.get("initContainers", ()), *spec["containers"]):
            kinds = ("startupProbe", "readinessProbe", "livenessProbe")
            probes = [each[kind] for kind in kinds if kind in each]
            named = {port.get("name"): port["containerPort"] for port in each.get("ports", ())}
            http = [probe["httpGet"] for probe in probes if "httpGet" in probe]
            mounts = each.get("volumeMounts", ())
            yield Container(
                f"{where} {name}/{each['name']}",
                each["image"],
                each.get("command") or start.get(name, []),
                _environment(each),
                {m["mountPath"]: _mount(volumes.get(m["name"]), m, claims, objects) for m in mounts},
                frozenset(named.values()),
                tuple((named.get(get["port"], get["port"]), get["path"]) for get in http),
                tuple(tuple(probe["exec"]["command"]) for probe in probes if "exec" in probe),
                hardened=_is_hardened(spec.get("securityContext", {}), each),
            )


def _environment(container: Json) -> dict[str, str | None]:
    return {each["name"]: each.get("value") for each in container.get("env", ())}


def _is_hardened(pod: Json, container: Json) -> bool:
    own = container.get("securityContext", {})
    return bool(
        pod.get("runAsNonRoot")
        and pod.get("runAsUser")
        and pod.get("seccompProfile", {}).get("type") == "RuntimeDefault"
        and own.get("readOnlyRootFilesystem")
        and own.get("allowPrivilegeEscalation") is False
        and own.get("capabilities", {}).get("drop") == ["ALL"]
        and own["capabilities"].get("add", ["IPC_LOCK"]) == ["IPC_LOCK"]
        and {"cpu", "memory"} <= container.get("resources", {}).get("limits", {}).keys()
    )


def _mount(volume: Json | None, mount: Json, claims: set[str], objects: list[dict[str, Any]]) -> Mount:
    writable = not mount.get("readOnly", False)
    if volume is None:
        if mount["name"] not in claims:
            raise CannotBuild(f"no volume is called {mount['name']}")
        return Mount("volume", writable)
    if "configMap" in volume:
        source = volume["configMap"]
        made = _named(objects, "ConfigMap", source["name"])
        if made is None and not source.get("optional"):
            raise CannotBuild(f"no ConfigMap is called {source['name']}")
        return Mount("config", False, made["data"] if made else None)
    if "secret" in volume:
        made = _named(objects, "Secret", volume["secret"]["secretName"])
        if made is None:
            raise CannotBuild(f"no Secret is called {volume['secret']['secretName']}")
        return Mount("secret", False, dict.fromkeys(made["data"], ""))
    return Mount("volume", writable)


def _named(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any] | None:
    return next((x for x in objects if x["kind"] == kind and x["metadata"]["name"] == name), None)


# --- units, scripts ----------------------------------------------------------------------------------


def unit_settings(path: Path) -> dict[str, list[str]]:
    """The settings of a unit, each with all its values."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().replace("\\\n", " ").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(" ".join(value.split()))
    return found


def shell_commands(text: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The simple commands of a line of shell, each with what was exported before."""
    exported: dict[str, str] = {}
    for part in text.split(";"):
        words = shlex.split(part)
        if words[:1] == ["export"]:
            exported |= dict(word.split("=", 1) for word in words[1:])
        elif words:
            yield dict(exported), words
