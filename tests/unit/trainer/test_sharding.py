"""Memory and copies of the FSDP back end: what is computed is the same whatever is kept where."""

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from areal_async.config.errors import Mistake
from areal_async.config.parallel import RankGrid
from areal_async.config.parts import part_mistakes
from areal_async.weights.pieces import whole_tensors
from tests.unit.trainer import rank_process, sharded_process
from tests.unit.trainer.forked_ranks import run_script
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
    norms = train(backend, 0, 1, range(2))
    weights = {name: t.clone() for name, t in whole_tensors(backend.export("policy")).items()}
    return norms + train(backend, 0, 1, range(2, 3)), weights


@pytest.fixture(scope="module")
def copies(tmp_path_factory, model_dir):
    """Folder of four ranks that trained as two copies of two shards, and what each rank wrote."""
    out, world = tmp_path_factory.mktemp("copies"), 4
    run_script(sharded_process.__file__, world, 2, model_dir, out)
    return out, [load_file(out / f"rank{rank}.safetensors") for rank in range(world)]


def test_no_unsharded_gradient_outlives_its_micro_batch(copies):
    """In float32 and in bfloat16, where the rank's own are added up in fp32 (asserted by the ranks)."""
    assert [found["held"].tolist() for found in copies[1]] == [[0] * 4] * 4


def test_copies_of_the_sharded_model_compute_what_one_rank_does(copies, model_dir, alone):
    """The checkpoint that one of them wrote is read by one rank."""
    out, ranks = copies
    norms, weights = alone
    assert ranks[0]["norms"].tolist() == pytest.approx(norms, rel=1e-5)
    assert all(found["norms"].tolist() == ranks[0]["norms"].tolist() for found in ranks)
    for name, tensor in weights.items():
        torch.testing.assert_close(ranks[0][name], tensor, atol=1e-6, rtol=1e-5)
    files = sorted(path.name for path in (out / "checkpoint").iterdir())
    kinds = ("policy", "policy.exp_avg", "policy.exp_avg_sq")
    assert [name for name in files if not name.startswith("rng")] == [
        f"{kind}-{shard:05d}-of-00002.safetensors" for kind in kinds for shard in range(2)
    ]
    assert len(files) == 6 + 4
    one = backend_of(model_dir, join_ranks(0, 1))
    one.load(out / "checkpoint", {"policy": 2})
    assert train(one, 0, 1, range(2, 3)) == pytest.approx(norms[2:], rel=1e-5)


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


def test_one_rank_reads_what_copies_have_trained(tmp_path, model_dir, copies):
    """As tools do, with the section of the job that had the copies."""
    out, found = copies
    job = rank_process.job_of(model_dir, tmp_path, ranks=4, parallel={"data": 2})
    backend = load_backend(job, join_ranks(0, 1))
    backend.load(out / "checkpoint", {"policy": 2})
    weights = whole_tensors(backend.export("policy"))
    assert weights.keys() <= found[0].keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, found[0][name])


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
    config = Qwen3MoeConfig(
        vocab_size=17,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_recomputed_activations_give_the_same_gradients(kind, model_dir, moe_dir):
    """What is computed twice: nothing; all but matrix products and attention; all."""
    found = {}
    for how in ("none", "selective", "full"):
        backend = backend_of(model_dir if kind == "dense" else moe_dir, join_ranks(0, 1), recompute=how)
        with _Operators() as seen:
            norms = train(backend, 0, 1, range(2))
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
    norms = train(backend, 0, 1, range(2))
    assert not any(part.state for part in parts), "moments stay in the optimizer, on the device"
    weights = whole_tensors(backend.export("policy"))
    assert all(torch.equal(weights[name], tensor) for name, tensor in alone[1].items())
    moments = adamw.moments()
    assert {t.device.type for kind in moments.values() for t in kind.values()} == {"cpu"}
    assert all(t.any() for kind in moments.values() for t in kind.values())
    backend.save(tmp_path)()
    assert norms + train(backend, 0, 1, range(2, 3)) == alone[0]
    for offload in (True, False):
        again = backend_of(model_dir, join_ranks(0, 1), offload_optimizer=offload)
        again.load(tmp_path, {"policy": 2})
        assert train(again, 0, 1, range(2, 3)) == alone[0][2:]
