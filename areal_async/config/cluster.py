"""A cluster file: the machines for jobs, and the address of their controller."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from areal_async.base.addresses import LOOPBACK
from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.base.yaml_file import dump_yaml
from areal_async.config.base import Section
from areal_async.config.fields import read_section

DIR_VARIABLE = "AREAL_ASYNC_CLUSTER_DIR"
"""Environment variable with the folder of the cluster that commands connect to."""
LAPTOP = "local"
"""Name of the cluster without a file, which consists of this machine."""


class ResourcesSection(Section):
    """Resource limits of all jobs together. By default they are the resources of the machine."""

    cpus: int | None = Field(default=None, ge=1, le=1_000_000)
    """Cores."""
    gpus: int | None = Field(default=None, ge=0, le=1_000_000)
    """GPUs."""


class ApiSection(Section):
    """Address of the controller."""

    host: str = Field(default=LOOPBACK, min_length=1, max_length=255)
    """Address to listen on. An address other than loopback requires tokens."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port to listen on; 0 picks a free one."""


class RaySection(Section):
    """Ray cluster of `launcher: ray`."""

    address: str = Field(default="auto", min_length=1, max_length=255)
    """`auto`, or `HOST:PORT` of the head. This machine must be a node."""
    home_address: str | None = Field(default=None, max_length=255)
    """Address of this machine for the nodes; null means Ray's address."""
    ports: tuple[int, int] | None = None
    """First and last port for job processes; null allows all. Not for ports of torch, NCCL and Ray."""
    trust_network: bool = False
    """Allow unencrypted run keys between nodes; otherwise they need TLS (see docs/cluster.md)."""
    place_s: float = Field(default=600.0, gt=0)
    """Longest wait for room for a job, in seconds."""

    @field_validator("ports")
    @classmethod
    def _is_a_range(cls, ports: tuple[int, int] | None) -> tuple[int, int] | None:
        if ports is not None and not 1024 <= ports[0] <= ports[1] <= 65_535:
            raise ValueError("ports are two numbers from 1024 to 65535, the lower one first")
        return ports


class ClusterConfig(Section):
    """Cluster file of `areal-async up CLUSTER.yaml`."""

    cluster: str = Field(default=LAPTOP, pattern=r"^[a-z0-9][a-z0-9_-]{0,47}$")
    """Name of the cluster and its folder: at most 48 lower-case letters, digits, `-` and `_`."""
    launcher: Literal["local", "ray"] = "local"
    """Placement of processes: this machine, or Ray on its cluster."""
    ray: RaySection = RaySection()
    resources: ResourcesSection = ResourcesSection()
    api: ApiSection = ApiSection()
    dir: Path | None = None
    """Folder of the controller; null means `$AREAL_ASYNC_CLUSTER_DIR` or `~/.areal-async/<cluster>`."""


def load_cluster(path: Path, *, queued: bool = False) -> ClusterConfig:
    """Load a cluster file. A relative `dir` is relative to the file. `queued` means that a controller will
    queue jobs for the cluster. Raises `ConfigError`."""
    cluster = read_section(ClusterConfig, path)
    if queued and cluster.launcher == "ray" and None in (cluster.resources.cpus, cluster.resources.gpus):
        problem = "this machine's cores and GPUs are not those of a Ray cluster"
        fix = "Name the cpus and gpus of all its nodes, or those that it may be scaled up to"
        raise ConfigError(str(path), [Mistake("resources", problem, fix)])
    if cluster.dir is None:
        return cluster
    folder = os.path.normpath(path.resolve().parent / cluster.dir.expanduser())
    return cluster.model_copy(update={"dir": Path(folder)})


def dump_cluster(cluster: ClusterConfig) -> str:
    """Return the cluster as YAML. `load_cluster` reads it as an equal cluster."""
    return dump_yaml(cluster.model_dump(mode="json"))


def cluster_dir(cluster: ClusterConfig | None = None) -> Path:
    """Return the folder of `cluster`. Without `cluster`, return the folder of the cluster that commands
    connect to."""
    if cluster is not None and cluster.dir is not None:
        return cluster.dir
    if named := os.environ.get(DIR_VARIABLE):
        return Path(named).expanduser().absolute()
    return Path.home() / ".areal-async" / (cluster.cluster if cluster is not None else LAPTOP)
