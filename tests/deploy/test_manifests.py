"""Every file below `deploy/` is what the services take. Nothing is built or applied, everything compared."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.deploy.checks import (
    container_problems,
    image_problems,
    loose_files,
    ray_up_problems,
    unit_problems,
)
from tests.deploy.commands import ROOT, api_right
from tests.deploy.containers import (
    KUSTOMIZE,
    OVERLAYS,
    CannotBuild,
    Container,
    built,
    compose_containers,
    kubernetes_containers,
)
from tests.deploy.kubernetes import (
    edge_problems,
    ray_job_problems,
    rdma_problems,
    schema_problems,
    together_problems,
)

SCHEMAS = Path(__file__).parent / "schemas"
NO_KUSTOMIZE = shutil.which(KUSTOMIZE[0]) is None
needs_kustomize = pytest.mark.skipif(NO_KUSTOMIZE, reason="needs kubectl or kustomize")

Checked = Callable[[Path, Path], Iterator[str]]


def compose_problems(deploy: Path, scratch: Path) -> Iterator[str]:
    content = yaml.safe_load((deploy / "compose" / "compose.yaml").read_text())
    schema = json.loads((SCHEMAS / "compose-spec.json").read_text())
    for error in jsonschema.Draft201909Validator(schema).iter_errors(content):
        yield f"{error.json_path} {error.message[:200]}"
    containers = [*compose_containers(deploy)]
    for container in containers:
        yield from container_problems(container, scratch)
    for profile in ("cpu", "gpu"):
        images = [s["image"] for s in content["services"].values() if profile in s.get("profiles", [profile])]
        if len(images) != 4:
            yield f"the profile {profile} has {images}"
    job = yaml.safe_load((deploy / "compose" / "job.yaml").read_text())["buffer"]
    controllers = [c for c in containers if "up" in c.command]
    for controller in controllers:
        if controller.text_of(job["redis_login"]["password_file"]) in (None, ""):
            yield f"{controller.where}: the job's password is no secret of it"
    if job["redis"] != "redis://areal-front@redis:6379/0" or "redis" not in content["services"]:
        yield "the job does not find Redis"
    scrapes = yaml.safe_load((deploy / "compose" / "prometheus.yml").read_text())["scrape_configs"]
    yield from prometheus_problems(scrapes, containers)


def prometheus_problems(scrapes: list[dict], containers: list[Container]) -> Iterator[str]:
    (container, *_) = [c for c in containers if "prometheus" in c.image]
    fixed = [scrape for scrape in scrapes if "static_configs" in scrape]
    paths = [(s.get("metrics_path", "/metrics"), s["static_configs"][0]["targets"][0], s) for s in fixed]
    for scrape in scrapes:
        for found in scrape.get("http_sd_configs", ()):
            host, _, path = found["url"].removeprefix("http://").partition("/")
            paths.append((f"/{path}", host, found))
    for path, host, settings in paths:
        if host != "127.0.0.1:8470" or api_right(path) is None:
            yield f"prometheus: nobody answers {path} at {host}"
        credentials = settings.get("authorization", {}).get("credentials_file", "")
        mount = container.mount_of(credentials)
        if api_right(path) == "look" and (mount is None or not credentials.endswith("/cluster/look.token")):
            yield f"prometheus: no token for {path}"


def kubernetes_problems(deploy: Path, scratch: Path) -> Iterator[str]:
    try:
        for overlay in OVERLAYS:
            objects = built(deploy / "k8s" / "overlays" / overlay)
            if invalid := [*schema_problems(objects)]:
                yield from invalid
                return
            yield from together_problems(objects, scratch)
            yield from edge_problems(objects, scratch)
            if overlay == "rdma":
                yield from rdma_problems(objects)
            for container in kubernetes_containers(overlay, objects):
                yield from container_problems(container, scratch)
        if built(deploy / "k8s") != built(deploy / "k8s" / "overlays" / "cpu-small"):
            yield "deploy/k8s is not the small cluster"
        job = built(deploy / "k8s" / "rayjob")
        yield from schema_problems(job)
        yield from ray_job_problems(job)
    except CannotBuild as error:
        yield str(error)


def all_images(deploy: Path, scratch: Path) -> Iterator[str]:
    containers = [*compose_containers(deploy)]
    if not NO_KUSTOMIZE:
        for overlay in OVERLAYS:
            try:
                containers += kubernetes_containers(overlay, built(deploy / "k8s" / "overlays" / overlay))
            except CannotBuild:
                yield f"{overlay} cannot be built"
    yield from image_problems(containers, deploy)


def ray_problems_of(deploy: Path, scratch: Path) -> Iterator[str]:
    util = pytest.importorskip("ray.autoscaler._private.util", reason="needs Ray")
    content = yaml.safe_load((deploy / "ray" / "cluster.yaml").read_text())
    schema = json.loads((Path(util.__file__).parents[1] / "ray-schema.json").read_text())
    for error in jsonschema.Draft7Validator(schema).iter_errors(content):
        yield f"{error.json_path} {error.message[:200]}"
        return
    yield from ray_up_problems(deploy, scratch)


CHECKS: dict[str, Checked] = {
    "compose": compose_problems,
    "k8s": kubernetes_problems,
    "docker": all_images,
    "ray": ray_problems_of,
    "systemd": unit_problems,
    "files": loose_files,
}


@pytest.fixture(scope="module")
def with_secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`deploy/` with secrets in it."""
    deploy = tmp_path_factory.mktemp("manifests") / "deploy"
    shutil.copytree(ROOT / "deploy", deploy, ignore=shutil.ignore_patterns("secrets", "__pycache__"))
    for place in ("compose/secrets", "k8s/base/secrets", "ray/secrets"):
        subprocess.run([deploy / "secrets.sh", deploy / place], check=True)
    store = deploy / "k8s" / "overlays" / "multi-node" / "secrets" / "store.env"
    store.parent.mkdir()
    store.write_text("AWS_ACCESS_KEY_ID=name\nAWS_SECRET_ACCESS_KEY=secret\n")
    return deploy


@pytest.fixture
def copy(with_secrets: Path, tmp_path: Path) -> Path:
    return shutil.copytree(with_secrets, tmp_path / "deploy")


def problems(check: str, deploy: Path) -> Iterator[str]:
    if check == "k8s" and NO_KUSTOMIZE:
        pytest.skip("needs kubectl or kustomize")
    scratch = deploy.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    return CHECKS[check](deploy, scratch)


@pytest.mark.parametrize("check", CHECKS)
def test_manifests_are_what_the_services_take(check: str, copy: Path) -> None:
    assert [*problems(check, copy)] == []


BROKEN = [
    pytest.param(place["check"], place["file"], *row, id=f"{place['file']}: {row[1].splitlines()[0][:40]}")
    for place in yaml.safe_load((Path(__file__).parent / "broken.yaml").read_text())
    for row in place["broken"]
]


@pytest.mark.parametrize(("check", "name", "old", "new", "words"), BROKEN)
def test_what_is_broken_is_found(check: str, name: str, old: str, new: str, words: str, copy: Path) -> None:
    path = copy / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    found: list[str] = []
    for problem in problems(check, copy):
        found.append(problem)
        if words in problem:
            return
    raise AssertionError(f"{words!r} was not found, but {found}")


@needs_kustomize
def test_every_file_of_kubernetes_is_built_into_a_cluster(copy: Path) -> None:
    """A file that no kustomization names would be checked by nobody."""
    named: set[str] = set()
    folder = copy / "k8s"
    for path in folder.rglob("kustomization.yaml"):
        content = yaml.safe_load(path.read_text())
        for entry in (*content.get("resources", ()), *content.get("configurations", ())):
            named.add((path.parent / entry).resolve().relative_to(folder).as_posix())
        for patch in content.get("patches", ()):
            if "path" in patch:
                named.add((path.parent / patch["path"]).relative_to(folder).as_posix())
        for made in (*content.get("configMapGenerator", ()), *content.get("secretGenerator", ())):
            for file in (*made.get("files", ()), *made.get("envs", ())):
                named.add((path.parent / file.split("=")[-1]).relative_to(folder).as_posix())
    there = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    files = {path.as_posix() for path in there if "secrets" not in path.parts}
    assert {name for name in files - named if not name.endswith("kustomization.yaml")} == set()
