"""The folder of a cluster: one controller at a time, and who is let in."""

import os
import subprocess
import sys

import pytest

from areal_async.base.mistakes import ConfigError
from areal_async.cluster.folder import ClusterFolder, ClusterFolderError, hash_of
from areal_async.config.cluster import ClusterConfig, cluster_dir, dump_cluster, load_cluster

HOLDING = """
import sys
from pathlib import Path
from areal_async.cluster.folder import ClusterFolder
folder = ClusterFolder(Path(sys.argv[1]))
print(folder.lock() is not None, flush=True)
folder.address.write_text("http://127.0.0.1:1\\n")
folder.address.chmod(0o600)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path):
    folder = ClusterFolder(tmp_path / "cluster")
    folder.make()
    return folder


def test_a_folder_has_one_controller_and_a_dead_one_leaves_nothing_that_is_believed(folder):
    assert (folder.controller(), folder.url()) == (None, None)
    command = [sys.executable, "-c", HOLDING, str(folder.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "True\n"
        assert folder.controller().pid == other.pid
        assert folder.lock() is None
        while folder.url() is None:
            assert other.poll() is None
        assert folder.url() == "http://127.0.0.1:1"
        other.kill()
        other.wait()
    assert folder.address.exists()
    assert (folder.controller(), folder.url()) == (None, None)  # whoever has that port now gets no token
    fd = folder.lock()
    assert not folder.address.exists()
    os.close(fd)


def test_the_folder_is_closed_and_no_other_folder_is_taken_for_one(tmp_path):
    path = tmp_path / "open"
    path.mkdir(mode=0o755)
    ClusterFolder(path).make()
    assert path.stat().st_mode & 0o777 == 0o700
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ClusterFolderError, match="not empty"):
        ClusterFolder(tmp_path / "mine").make()
    (tmp_path / "file").touch()
    with pytest.raises(ClusterFolderError):
        ClusterFolder(tmp_path / "file").make()


def test_tokens_are_made_once_and_only_their_hashes_are_what_is_compared(folder):
    folder.make_tokens()
    submit, look = folder.token(), folder.token("look")
    assert len(submit) == 64
    assert submit not in folder.tokens.read_text()
    assert {path.stat().st_mode & 0o777 for path in (folder.tokens, *folder.path.glob("*.token"))} == {0o600}
    folder.make_tokens()
    assert folder.token() == submit
    rights = [folder.right_of(token) for token in (submit, look, "", "x", submit[:-1])]
    assert rights == ["submit", "look", None, None, None]


def test_tokens_change_when_their_file_is_replaced_and_one_that_is_wrong_lets_nobody_in(folder):
    folder.make_tokens()
    old = folder.token()
    assert folder.right_of(old) == "submit"

    def replace(text, mode=0o600):
        new = folder.path / "new"
        new.write_text(text)
        new.chmod(mode)
        new.replace(folder.tokens)

    replace(f"# of the new year\n\nsubmit {hash_of('mine')} Ada\nlook {hash_of('mine')}\n")
    assert [folder.right_of(token) for token in (old, "mine")] == [None, "submit"]
    for text in ("submit abc\n", "admin " + "0" * 64, "\x00" * 100):
        replace(text)
        assert folder.right_of("mine") is None
        assert not folder.hashes()
    replace(f"submit {hash_of('mine')}\n", mode=0o666)  # anybody could have written that
    assert folder.right_of("mine") is None
    replace(f"submit {hash_of('mine')}\n")
    assert folder.right_of("mine") == "submit"
    folder.tokens.unlink()
    assert folder.right_of("mine") is None


def test_a_cluster_file_is_read_strictly(tmp_path, monkeypatch):
    path = tmp_path / "cluster.yaml"
    path.write_text("cluster: big\nlauncher: ray\nresources: {gpus: 8}\napi: {port: 8470}\ndir: state\n")
    cluster = load_cluster(path)
    assert (cluster.cluster, cluster.launcher) == ("big", "ray")
    assert (cluster.resources.gpus, cluster.api.port) == (8, 8470)
    assert cluster.dir == tmp_path / "state"
    path.write_text(dump_cluster(cluster))
    assert load_cluster(path) == cluster
    assert cluster_dir(cluster) == tmp_path / "state"
    monkeypatch.setenv("AREAL_ASYNC_CLUSTER_DIR", str(tmp_path / "named"))
    assert cluster_dir() == cluster_dir(ClusterConfig(cluster="big")) == tmp_path / "named"
    monkeypatch.delenv("AREAL_ASYNC_CLUSTER_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cluster_dir(ClusterConfig(cluster="big")) == tmp_path / ".areal-async" / "big"
    assert cluster_dir() == tmp_path / ".areal-async" / "local"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster: Big\n", r"cluster: 'Big' does not have the right form. Use at most 48"),
        ("cluster: ../x\n", "right form"),
        ("launcher: slurm\n", "launcher: 'slurm' is not a choice. Use 'local' or 'ray'"),
        (
            "resources: {gpu: 1}\n",
            "resources.gpu: there is no such field. Did you mean resources.gpus",
        ),
        ("resource: {}\n", "resource: there is no such field. Did you mean resources"),
        ("colour: {}\n", "colour: there is no such field.* cluster, launcher, ray, resources, api, dir"),
        ("resources: 8\n", "resources: 8 is not a section"),
        ("resources: {cpus: 0}\n", "resources.cpus: 0 is too small. Give at least 1"),
        ("api: {port: 70000}\n", "api.port: 70000 is too large"),
        ("api: {host: ''}\n", "api.host"),
        (
            "launcher: ray\nresources: {cpus: 8}\n",
            "resources: this machine's cores .* Name the cpus and gpus",
        ),
        ("- a\n", "holds a list"),
    ],
)
def test_what_is_wrong_in_a_cluster_file_is_named(tmp_path, text, said):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_cluster(path, queued=True)
