"""What is wrong with objects of Kubernetes together: schemas, selectors, and who reaches whom."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from areal_async.config.redis_url import parse_redis_url
from tests.deploy.checks import HEAD_PORT, RAY_PORTS, USER
from tests.deploy.commands import ROOT, cluster_of, command_problems
from tests.deploy.containers import pod_templates

VERSION = "1.33.0"
"""The oldest Kubernetes whose schemas hold: sidecars are settled since."""
RAY_SCHEMA = json.loads((Path(__file__).parent / "schemas" / "ray.json").read_text())
DASHBOARD = 8265
Ports = tuple[tuple[int, int], ...]


def schema_problems(objects: list[dict[str, Any]]) -> Iterator[str]:
    """What schemas say against the objects, and against the pods in those of Ray."""
    for item in objects:
        name = f"{item['kind']} {item['metadata']['name']}"
        if item["apiVersion"].startswith("ray.io/"):
            schema = RAY_SCHEMA["$defs"]["job" if item["kind"] == "RayJob" else "cluster"]
            whole = jsonschema.Draft202012Validator({**schema, "$defs": RAY_SCHEMA["$defs"]})
            if errors := [*whole.iter_errors(item)]:
                yield from (f"{name}: {error.json_path} {error.message[:200]}" for error in errors)
                continue
            for place, template in pod_templates([item]):
                pod = {"apiVersion": "v1", "kind": "Pod", **template}
                yield from (f"{place}: {text}" for text in _invalid(pod))
        else:
            yield from (f"{name}: {text}" for text in _invalid(item))


def _invalid(item: Mapping[str, Any]) -> list[str]:
    return _judged(json.dumps(item, sort_keys=True))


@cache
def _judged(text: str) -> list[str]:
    try:
        kubernetes_validate.validate(json.loads(text), VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message[:200]}"]
    except kubernetes_validate.SchemaNotFoundError:
        return ["there is no such kind"]
    return []


# --- what belongs together ---------------------------------------------------------------------------


def together_problems(objects: list[dict[str, Any]], scratch: Path) -> Iterator[str]:
    """What does not fit together among the objects of one cluster."""
    pods = {name: template["metadata"]["labels"] for name, template in pod_templates(objects)}
    templates = dict(pod_templates(objects))
    of_kind: dict[str, list[dict[str, Any]]] = {}
    for item in objects:
        of_kind.setdefault(item["kind"], []).append(item)
        if item["kind"] != "Namespace" and item["metadata"].get("namespace") != "areal-async":
            yield f"{item['kind']} {item['metadata']['name']} is in no namespace"
    for service in of_kind["Service"]:
        found = [name for name, labels in pods.items() if _matches(service["spec"]["selector"], labels)]
        if len(found) != 1:
            yield f"Service {service['metadata']['name']} selects {found}"
            continue
        ports = [p for c in templates[found[0]]["spec"]["containers"] for p in c.get("ports", ())]
        named = {port["name"]: port["containerPort"] for port in ports}
        for port in service["spec"]["ports"]:
            if named.get(port["targetPort"]) != port["port"]:
                yield f"Service {service['metadata']['name']}: port {port['port']} is none of the container's"
    for budget in of_kind["PodDisruptionBudget"]:
        name, spec = f"PodDisruptionBudget {budget['metadata']['name']}", budget["spec"]
        found = [name for name, labels in pods.items() if _matches(spec["selector"]["matchLabels"], labels)]
        if not found:
            yield f"{name} is about nobody"
        least = spec.get("minAvailable")
        if any(each.startswith("RayCluster") for each in found) and not isinstance(least, int):
            yield f"{name}: of a RayCluster only a whole minAvailable is taken"
        if isinstance(least, int) and least > _copies(objects, found):
            yield f"{name} keeps {least} of {_copies(objects, found)}"
    for name, template in templates.items():
        for volume in template["spec"].get("volumes", ()):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and claim not in [item["metadata"]["name"] for item in of_kind["PersistentVolumeClaim"]]:
                yield f"{name}: there is no claim {claim}"
        kernel = [s["value"] for s in template["spec"]["securityContext"].get("sysctls", ())]
        if template["metadata"]["labels"].get("areal.io/ray") and kernel != ["30000 39999"]:
            yield f"{name}: the kernel picks ports of {kernel}, which network.yaml does not know"
    for label in ("controller", "redis", "ray-head", "ray-worker"):
        if not any(labels.get("areal.io/component") == label for labels in pods.values()):
            yield f"no pod is a {label}"
    for name, template in templates.items():
        spec = template["spec"]
        if spec.get("automountServiceAccountToken") is not False:
            yield f"{name} has a token of Kubernetes"
        if not name.endswith("redis") and spec["securityContext"].get("runAsUser") != USER:
            yield f"{name} is not the user of the images"
    (cluster,) = of_kind["RayCluster"]
    (wanted,) = re.findall(r'^ray = \["ray==([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if cluster["spec"]["rayVersion"] != wanted:
        yield f"Ray is {cluster['spec']['rayVersion']}, and pyproject.toml has {wanted}"
    auth = cluster["spec"].get("authOptions", {})
    secret = next((s for s in of_kind["Secret"] if s["metadata"]["name"] == auth.get("secretName")), None)
    if auth.get("mode") != "token" or secret is None or "auth_token" not in secret["data"]:
        yield "Ray lets everybody in"
    yield from _room_problems(objects, scratch)


def _copies(objects: list[dict[str, Any]], names: list[str]) -> int:
    count = 0
    for item in objects:
        kind, spec = f"{item['kind']} {item['metadata']['name']}", item.get("spec", {})
        count += spec.get("replicas", 1) if kind in names else 0
        if item["kind"] == "RayCluster":
            count += f"{kind} head" in names
            chosen = [g for g in spec["workerGroupSpecs"] if f"{kind} {g['groupName']}" in names]
            count += sum(group["replicas"] for group in chosen)
    return count


def _room_problems(objects: list[dict[str, Any]], scratch: Path) -> Iterator[str]:
    """Whether the controller gives away what the workers have."""
    (cluster,) = [item for item in objects if item["kind"] == "RayCluster"]
    cpus = gpus = 0
    for group in cluster["spec"]["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        cpus += group["replicas"] * int(limits.get("cpu", 0))
        gpus += group["replicas"] * int(limits.get("nvidia.com/gpu", 0))
    given = cluster_of(_cluster_text(objects), scratch).resources
    if (given.cpus, given.gpus) != (cpus, gpus):
        yield f"the cluster file gives away {given.cpus} cores and {given.gpus} GPUs, not {cpus} and {gpus}"


def _cluster_text(objects: list[dict[str, Any]]) -> str:
    (config,) = [x for x in objects if x["kind"] == "ConfigMap" and x["metadata"]["name"] == "cluster"]
    return str(config["data"]["cluster.yaml"])


def rdma_problems(objects: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the reasons why NCCL could not use the network cards in the pods with GPUs."""
    for name, template in pod_templates(objects):
        pod, container = template["spec"], template["spec"]["containers"][0]
        given = container["resources"]
        if "nvidia.com/gpu" not in given.get("limits", {}):
            continue
        if not all(given[kind].get("rdma/hca") for kind in ("requests", "limits")):
            yield f"{name} has no RDMA device"
        if container["securityContext"]["capabilities"].get("add") != ["IPC_LOCK"]:
            yield f"{name} cannot lock memory"
        if not template["metadata"].get("annotations", {}).get("k8s.v1.cni.cncf.io/networks"):
            yield f"{name} is in one network only"
        if not any(each["name"] == "NCCL_IB_HCA" and each.get("value") for each in container["env"]):
            yield f"{name}: NCCL is not told its cards"
        (shm,) = [m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
        (volume,) = [each["emptyDir"] for each in pod["volumes"] if each["name"] == shm]
        if volume.get("medium") != "Memory" or not volume.get("sizeLimit", "").endswith("Gi"):
            yield f"{name}: /dev/shm is no memory"


# --- who reaches whom --------------------------------------------------------------------------------


def edges_of(objects: list[dict[str, Any]]) -> dict[tuple[str, str], Ports]:
    """(from, to) → the ports that policies leave open between pods, by the components' names. `client` is a
    pod that wears the label, `operator` KubeRay's, `dns` Kubernetes' and `store` the world outside."""
    pods = {
        template["metadata"]["labels"]["areal.io/component"]: dict(template["metadata"]["labels"])
        for _, template in pod_templates(objects)
    }
    pods["client"] = {"areal.io/client": "true"}
    outside = {
        "operator": ("kuberay-system", {"app.kubernetes.io/name": "kuberay-operator"}),
        "dns": ("kube-system", {"k8s-app": "kube-dns"}),
    }
    policies = [item["spec"] for item in objects if item["kind"] == "NetworkPolicy"]
    found: dict[tuple[str, str], Ports] = {}
    for one, labels in pods.items():
        for other, to_labels in pods.items():
            out = _open(policies, "egress", labels, to_labels, "areal-async")
            into = _open(policies, "ingress", to_labels, labels, "areal-async")
            if ports := tuple(sorted(set(out) & set(into))):
                found[one, other] = ports
        for name, (namespace, their) in outside.items():
            if ports := _open(policies, "egress", labels, their, namespace):
                found[one, name] = ports
            if ports := _open(policies, "ingress", labels, their, namespace):
                found[name, one] = ports
        if ports := _open(policies, "egress", labels, None, ""):
            found[one, "store"] = ports
    return found


def _open(
    policies: list[Any], way: str, labels: Mapping[str, str], peer: Mapping[str, str] | None, namespace: str
) -> Ports:
    of_way = [policy for policy in policies if way.capitalize() in policy["policyTypes"]]
    chosen = [p for p in of_way if _matches(p["podSelector"].get("matchLabels", {}), labels)]
    if not chosen:
        return ((0, 65_535),)
    found: set[tuple[int, int]] = set()
    for policy in chosen:
        for rule in policy.get(way, ()):
            for each in rule["to" if way == "egress" else "from"]:
                if _is_peer(each, peer, namespace):
                    found |= {(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]}
    return tuple(sorted(found))


def _is_peer(rule: Mapping[str, Any], labels: Mapping[str, str] | None, namespace: str) -> bool:
    if labels is None or "ipBlock" in rule:
        return labels is None and "ipBlock" in rule
    own = {"matchLabels": {"kubernetes.io/metadata.name": "areal-async"}}
    space = rule.get("namespaceSelector", own).get("matchLabels", {})
    return space.get("kubernetes.io/metadata.name") == namespace and _matches(
        rule.get("podSelector", {}).get("matchLabels", {}), labels
    )


def needed_edges(objects: list[dict[str, Any]], scratch: Path) -> dict[tuple[str, str], Ports]:
    """The edges that the processes need, by what they listen on."""
    text = _cluster_text(objects)
    cluster, written = cluster_of(text, scratch), yaml.safe_load(text)
    job = yaml.safe_load((ROOT / "deploy" / "k8s" / "rayjob" / "job.yaml").read_text())
    redis = parse_redis_url(job["buffer"]["redis"])
    contexts = [template["spec"]["securityContext"] for _, template in pod_templates(objects)]
    first, last = map(int, min(s["value"] for each in contexts for s in each.get("sysctls", ())).split())
    among = [(HEAD_PORT, max(port for port in RAY_PORTS.values() if port < 10_000)), (first, last)]
    among += [(RAY_PORTS["min_worker_port"], RAY_PORTS["max_worker_port"]), tuple(written["ray"]["ports"])]
    among += [(RAY_PORTS["dashboard_agent_listen_port"],) * 2]
    nodes = ("controller", "ray-head", "ray-worker")
    edges: dict[tuple[str, str], Ports] = dict.fromkeys(product(nodes, nodes), tuple(sorted(among)))
    edges |= {(one, "redis"): ((redis.port, redis.port),) for one in nodes}
    edges |= {(one, "dns"): ((53, 53),) for one in (*nodes, "redis", "client")}
    edges["client", "controller"] = ((cluster.api.port, cluster.api.port),)
    edges["operator", "ray-head"] = ((DASHBOARD, DASHBOARD),)
    if any(item["kind"] == "Secret" and item["metadata"]["name"] == "store" for item in objects):
        edges |= {(one, "store"): ((443, 443),) for one in nodes}
    return edges


def edge_problems(objects: list[dict[str, Any]], scratch: Path) -> Iterator[str]:
    found, needed = edges_of(objects), needed_edges(objects, scratch)
    for pair in sorted(found.keys() | needed.keys()):
        if found.get(pair, ()) != needed.get(pair, ()):
            open_, wanted = found.get(pair, ()), needed.get(pair, ())
            yield f"from {pair[0]} to {pair[1]} the ports {open_} are open, and {wanted} needed"


def ray_job_problems(objects: list[dict[str, Any]]) -> Iterator[str]:
    """What is wrong with the RayJob: its command, and the files that the head is to see."""
    (job,) = [item for item in objects if item["kind"] == "RayJob"]
    words = job["spec"]["entrypoint"].split()
    yield from command_problems(words)
    config, point = next(x for x in objects if x["kind"] == "ConfigMap"), "/etc/areal-async-jobs/"
    inside = [word.removeprefix(point) for word in words if word.startswith(point)]
    if config["metadata"]["name"] != "jobs" or not inside or inside[0] not in config["data"]:
        yield f"the head sees no {inside}"


def _matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in selector.items())
