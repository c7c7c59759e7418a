import os
import subprocess
import sys

from areal_async.weights.channels.host_cache import HostCache
from tests.unit.weights.world import names, written
from tests.waiting import LIMIT_S

HOLDER = """
import sys
from pathlib import Path
from areal_async.weights.channels.host_cache import HostCache
cache = HostCache(Path(sys.argv[1]))
cache.hold(sys.argv[2])
claim = cache.claim(sys.argv[3])
print(claim is not None, flush=True)
sys.stdin.read()
"""


def test_nothing_is_unbounded_the_newest_two_stay_and_what_anybody_holds(tmp_path):
    made = [written(tmp_path, version=version, mib=0.01) for version in range(6)]
    mine = HostCache(tmp_path)
    mine.hold("policy-e1-v1")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path, "policy-e1-v3", "policy-e9-v9"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"True\n"
        mine.sweep()
        assert names(tmp_path) == {"policy-e1-v1", "policy-e1-v3", "policy-e1-v4", "policy-e1-v5"}
        assert mine.claim("policy-e9-v9") is None
        other.kill()
        other.wait(LIMIT_S)
    claim = mine.claim("policy-e9-v9")
    assert claim is not None, "a claim ends with its process"
    os.close(claim)
    mine.sweep()
    assert names(tmp_path) == {"policy-e1-v1", "policy-e1-v4", "policy-e1-v5"}
    mine.free("policy-e1-v1")
    mine.sweep()
    assert names(tmp_path) == {"policy-e1-v4", "policy-e1-v5"}
    assert mine.find("policy-e1-v5", made[5].manifest_hash) == tmp_path / "policy-e1-v5"
    mine.close()


def test_a_newer_epoch_is_newer_whatever_its_version(tmp_path):
    for version, epoch in ((8, 1), (9, 1), (3, 2)):
        written(tmp_path, version=version, epoch=epoch, mib=0.01)
    HostCache(tmp_path).sweep()
    assert names(tmp_path) == {"policy-e1-v9", "policy-e2-v3"}


def test_what_fetches_left_behind_goes_but_not_what_is_being_filled(tmp_path):
    for name in (".partial-policy-e1-v1-aa", ".partial-policy-e1-v2-bb"):
        (tmp_path / name).mkdir()
    cache = HostCache(tmp_path)
    claim = cache.claim("policy-e1-v2")
    cache.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {".partial-policy-e1-v2-bb", ".claim-policy-e1-v2"}
    os.close(claim)


def test_a_directory_of_the_same_name_and_another_manifest_is_not_found_but_removed(tmp_path):
    made = written(tmp_path, mib=0.01)
    cache = HostCache(tmp_path)
    assert cache.find(made.tag.label, "blake3:other") is None
    assert names(tmp_path) == set()
