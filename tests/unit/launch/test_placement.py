"""What processes need of a cluster, which of them are reserved as one, and how a place is given up."""

import threading
from types import SimpleNamespace

import pytest

from areal_async.base.mistakes import ConfigError
from areal_async.base.topology import ServicePlace
from areal_async.launch.plan import services_of, with_channel
from areal_async.launch.preflight import check_for_cluster
from areal_async.launch.ray import launcher
from areal_async.launch.ray.launcher import LOST_STATUS, RayPlace, RemoteChild
from areal_async.launch.ray.placement import Need, lacking, need_of, needs_in_words, together
from tests.unit.launch.launching import changed
from tests.waiting import LIMIT_S


def placed(job, **shapes):
    placement = type(job.placement).model_validate(shapes)
    return job.model_copy(update={"placement": placement})


def test_the_ranks_are_packed_the_engines_spread_and_each_process_is_in_one_group(job):
    job = changed(changed(job, "trainer", ranks=3), "rollout", workers=2)
    services = services_of(job)
    groups = together(services)
    found = [(group.name, group.strategy) for group in groups]
    assert found == [("services", "PACK"), ("trainer", "PACK"), ("engines", "SPREAD")]
    names = [place.name for group in groups for place in group.places]
    assert sorted(names) == sorted(place.name for place in services)
    assert [place.name for place in groups[1].places] == ["trainer", "trainer-1", "trainer-2"]
    sft = job.model_copy(update={"kind": "sft"})
    assert [group.name for group in together(services_of(sft))] == ["trainer"]


def test_a_process_needs_its_threads_and_its_gpus_and_what_the_job_file_says_comes_first(job):
    job = changed(job, "trainer", torch_threads=3)
    assert need_of(job, "trainer").resources == {"CPU": 3.0}
    assert need_of(job, "buffer").resources == {}
    on_gpus = changed(changed(job, "trainer", device="cuda"), "rollout", device="cuda", replicas=2)
    assert need_of(on_gpus, "trainer").resources == {"CPU": 3.0, "GPU": 1.0}
    assert need_of(on_gpus, "rollout").resources["GPU"] == 2.0
    shape = {"cpus": 0.5, "gpus": 0.25, "memory_gb": 2, "resources": {"fast": 1}, "labels": {"host": "h1"}}
    own = need_of(placed(on_gpus, trainer=shape), "trainer")
    assert own.resources == {"CPU": 0.5, "GPU": 0.25, "memory": 2.0 * 2**30, "fast": 1.0}
    assert own.labels == {"host": "h1"}


def test_a_label_that_no_node_has_is_named():
    fast, either = Need({}, {"disk": "fast"}), Need({}, {"disk": "in(fast,slow)", "zone": "!a"})
    assert "; no node has disk=fast (" in lacking([fast, Need({"CPU": 1.0}, {})], [{"disk": "slow"}])
    assert lacking([fast], [{}, {"disk": "fast", "zone": "a"}]) == ""
    assert lacking([either], [{}]) == ""


def test_what_a_job_needs_in_all_is_said_in_words(job):
    job = changed(changed(job, "trainer", ranks=2, device="cuda"), "rollout", workers=3)
    assert needs_in_words(job, services_of(job)).startswith("CPU 5, GPU 2")


@pytest.mark.parametrize(
    ("section", "fields", "named"),
    [
        ("weights", {"channel": "shm"}, "weights.channel: shm reaches the processes of one host"),
        ("trainer", {"record_batches": True}, "trainer.record_batches"),
        ("rollout", {"device": "cuda:1"}, "rollout.device: cuda:1 is a GPU of one machine"),
        ("buffer", {"max_bytes": 1 << 60}, "buffer.max_bytes: .* of this machine"),
        ("placement", {"pretend": {"rollout-0": "a"}}, "placement.pretend"),
    ],
)
def test_what_cannot_cross_hosts_is_refused_with_its_field(job, section, fields, named):
    check_for_cluster(job)
    with pytest.raises(ConfigError, match=named):
        check_for_cluster(changed(job, section, **fields))


def test_auto_is_shared_memory_on_one_host_and_the_network_on_several(job):
    assert with_channel(job, several_hosts=False).weights.channel == "shm"
    several = with_channel(changed(job, "weights", channel_args={"patience_s": 1}), several_hosts=True)
    assert (several.weights.channel, several.weights.channel_args) == ("zmq", {"patience_s": 1})
    group = changed(job, "weights", channel="nccl")
    assert with_channel(group, several_hosts=True).weights.codec == "delta"
    assert with_channel(group, several_hosts=False) == group
    named = changed(job, "weights", channel="disk", channel_args={"directory": "/x"})
    assert with_channel(named, several_hosts=True) == named


def test_a_process_that_is_stopped_while_it_starts_does_not_outlive_its_actor(monkeypatch):
    killed: list[object] = []
    asked = threading.Event()
    run = SimpleNamespace(
        folders=SimpleNamespace(run_dir=None), published_with=lambda _: b"", environment_of=lambda *_: {}
    )
    place = RayPlace(run, ServicePlace("rollout-0", "rollout", 0, "module", 0), {})
    place.actor = actor = object()
    monkeypatch.setattr(launcher, "call", lambda *_: asked.set())
    monkeypatch.setattr(launcher.ray, "wait", lambda references, timeout: ([], references))
    monkeypatch.setattr(launcher.ray, "kill", killed.append)
    child = RemoteChild()
    life = threading.Thread(target=place.live, args=(child, False, None))
    life.start()
    assert asked.wait(LIMIT_S)
    child.kill()
    life.join(LIMIT_S)
    assert killed == [actor]
    assert place.actor is None, "the next life takes another actor"
    assert child.poll() == LOST_STATUS
