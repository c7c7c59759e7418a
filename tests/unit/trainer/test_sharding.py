"""Memory and copies of the FSDP back end: what is computed is the same whatever is kept where."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from areal_async.base.mistakes import Mistake
from areal_async.config.parallel import RankGrid
from areal_async.config.parts import part_mistakes
from areal_async.weights.pieces import whole_tensors
from tests.unit.families import FAMILIES
from tests.unit.trainer import rank_process
from tests.unit.trainer.sharded_process import backend_of, train
from trainer_service.backends.fsdp import optimizer
from trainer_service.backends.fsdp.shards import HostCopies
from trainer_service.errors import ModelError
from trainer_service.loop.learner import load_backend
from trainer_service.ranks import join_ranks


@pytest.fixture(scope="module")
def alone(model_dir):
    """Norms of three steps, and the weights after two, of one rank."""
    torch.set_num_threads(1)
    backend = backend_of(model_dir, join_ranks(0, 1))
    norms = train(backend, range(2))
    weights = {name: t.clone() for name, t in whole_tensors(backend.export("policy")).items()}
    return norms + train(backend, range(2, 3)), weights


@pytest.mark.parametrize(
    ("ranks", "sizes", "said"),
    [
        (4, {"data": 2}, []),
        (4, {"data": 2, "shard": 2}, []),
        (4, {"data": 3}, ["trainer.parallel"]),
        (1, {"data": 2}, ["trainer.parallel"]),
        (4, {"shard": 2}, ["trainer.parallel"]),
        (4, {"sequence": 2}, []),
        (8, {"data": 2, "shard": 2, "sequence": 2}, []),
        (4, {"sequence": 3}, ["trainer.parallel"]),
        (4, {"tensor": 2}, ["trainer.parallel.tensor"]),
        (4, {"expert": 2}, ["trainer.parallel.expert"]),
    ],
)
def test_sizes_that_do_not_share_the_ranks_or_that_the_back_end_lacks_are_mistakes(
    tmp_path, ranks, sizes, said
):
    job = rank_process.job_of(tmp_path, tmp_path, ranks=ranks, parallel=sizes)
    found: list[Mistake] = list(part_mistakes(job))
    assert [mistake.field for mistake in found if "parallel" in mistake.field] == said


def test_one_rank_reads_what_copies_have_trained(tmp_path, model_dir):
    """As tools do, with the section of the job that has the copies."""
    trained = backend_of(model_dir, join_ranks(0, 1))
    train(trained, range(1))
    trained.save(tmp_path)()
    job = rank_process.job_of(model_dir, tmp_path, ranks=4, parallel={"data": 2})
    backend = load_backend(job, join_ranks(0, 1))
    backend.load(tmp_path, {"policy": 1})
    want = whole_tensors(trained.export("policy"))
    assert all(
        torch.equal(tensor, want[name]) for name, tensor in whole_tensors(backend.export("policy")).items()
    )


def test_the_back_end_itself_refuses_copies_that_do_not_divide_the_ranks(model_dir):
    with pytest.raises(ModelError, match=r"trainer\.parallel: 2 places do not share 1 ranks evenly"):
        backend_of(model_dir, join_ranks(0, 1), grid=RankGrid(data=2))


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_a_copy_is_made_into_memory_that_was_got_before():
    copies = HostCopies()
    kinds = {kind: {"a": torch.arange(6.0), "b": torch.ones(2, 3)} for kind in ("policy", "exp_avg")}
    copies.prepare(kinds)
    with _Operators() as seen:
        found = copies.fill(kinds)
        again = copies.fill({"policy": kinds["exp_avg"]})
    assert (seen.count["copy_"], seen.count["empty"]) == (6, 0)
    assert torch.equal(found["exp_avg"]["a"], torch.arange(6.0))
    assert again["policy"]["b"].data_ptr() == found["policy"]["b"].data_ptr()


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"](), dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_recomputed_activations_give_the_same_gradients(kind, model_dir, moe_dir):
    """What is computed twice: nothing; all but matrix products and attention; all."""
    found = {}
    for how in ("none", "selective", "full"):
        backend = backend_of(model_dir if kind == "dense" else moe_dir, join_ranks(0, 1), recompute=how)
        with _Operators() as seen:
            norms = train(backend, range(2))
        found[how] = norms, dict(whole_tensors(backend.export("policy"))), seen.count
    products = [sum(found[how][2][name] for name in ("mm", "addmm", "bmm")) for how in found]
    attention = [
        found[how][2]["_scaled_dot_product_flash_attention_for_cpu"] + found[how][2]["_softmax"]
        for how in found
    ]
    if kind == "dense":
        assert products[0] == products[1] < products[2]
        assert attention[0] == attention[1] < attention[2]
    everything = [sum(found[how][2].values()) for how in found]
    assert everything[0] < everything[1]
    assert everything[0] < everything[2]
    for how in ("selective", "full"):
        assert found[how][0] == pytest.approx(found["none"][0], rel=1e-6)
        for name, tensor in found["none"][1].items():
            torch.testing.assert_close(found[how][1][name], tensor, atol=1e-6, rtol=1e-5)


def test_moments_in_host_memory_change_nothing_that_is_computed(model_dir, tmp_path, monkeypatch, alone):
    """Pieces of parameters go through the device in turn; either side reads a checkpoint."""
    monkeypatch.setattr(optimizer, "STREAMED_BYTES", 12_000)
    backend = backend_of(model_dir, join_ranks(0, 1), offload_optimizer=True)
    adamw = backend._models["policy"]._adamw
    parts = adamw._parts
    assert len(parts) > 2
    norms = train(backend, range(2))
    assert not any(part.state for part in parts), "moments stay in the optimizer, on the device"
    weights = whole_tensors(backend.export("policy"))
    assert all(torch.equal(weights[name], tensor) for name, tensor in alone[1].items())
    moments = adamw.moments()
    assert {t.device.type for kind in moments.values() for t in kind.values()} == {"cpu"}
    assert all(t.any() for kind in moments.values() for t in kind.values())
    backend.save(tmp_path)()
    assert norms + train(backend, range(2, 3)) == alone[0]
    for offload in (True, False):
        again = backend_of(model_dir, join_ranks(0, 1), offload_optimizer=offload)
        again.load(tmp_path, {"policy": 2})
        assert train(again, range(2, 3)) == alone[0][2:]
