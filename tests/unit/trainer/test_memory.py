"""The memory model, and `areal-async plan`."""

import json
import re
import struct
from dataclasses import replace
from math import prod
from pathlib import Path
from unittest.mock import patch

import memory
import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from areal_async.cli.main import app
from areal_async.cli.tools import readable_errors
from areal_async.config.job import JobConfig, OptimizerSection, TrainerSection
from areal_async.config.parallel import RankGrid
from tests.unit.families import FAMILIES
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp import fsdp
from trainer_service.backends.fsdp.memory import MemoryOptions, pinned_bytes, rank_memory, shape_of
from trainer_service.backends.fsdp.memory import planned as planned_for
from trainer_service.tools.gpus import GPUS, gpu_named, gpu_of_device
from trainer_service.tools.plan import figures, host_bytes, job_memory, main, tensor_shapes, usable_bytes

HIDDEN, WIDTH, VOCABULARY, EXPERT, N_EXPERTS = 64, 160, 1000, 48, 4
CONFIG = {"hidden_size": HIDDEN, "num_attention_heads": 4, "vocab_size": VOCABULARY, "num_experts_per_tok": 2}


def tensors(layers: int = 2, *, experts: bool = False, head: bool = True) -> dict[str, tuple[int, ...]]:
    found = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if head:
        found["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for layer in range(layers):
        begin = f"model.layers.{layer}."
        for name, rows in {"q": 64, "k": 32, "v": 32}.items():
            found[f"{begin}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        found[f"{begin}self_attn.o_proj.weight"] = (HIDDEN, 64)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{begin}{norm}.weight"] = (HIDDEN,)
        mlps = {f"mlp.experts.{i}.": EXPERT for i in range(N_EXPERTS)} if experts else {"mlp.": WIDTH}
        for mlp, width in mlps.items():
            found[f"{begin}{mlp}gate_proj.weight"] = (width, HIDDEN)
            found[f"{begin}{mlp}up_proj.weight"] = (width, HIDDEN)
            found[f"{begin}{mlp}down_proj.weight"] = (HIDDEN, width)
    return found


def write_headers(folder, config, shapes):
    """A model directory whose weights are a header and a hole."""
    begin, header = 0, {}
    for name, shape in shapes.items():
        end = begin + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + begin)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")


def test_a_rank_holds_sixteen_bytes_of_each_parameter_and_n_ranks_share_them():
    shapes = tensors()
    model = shape_of(CONFIG, shapes)
    assert model.size == sum(map(prod, shapes.values()))
    alone = rank_memory(model, MemoryOptions())
    assert alone.state == 16 * model.size
    assert rank_memory(model, MemoryOptions(RankGrid(shard=4))).state == 4 * model.size
    assert rank_memory(model, MemoryOptions(RankGrid(data=2, shard=2))).state == 8 * model.size


def test_a_tensor_of_fewer_rows_than_ranks_is_padded():
    model = shape_of(CONFIG, tensors())
    assert rank_memory(model, MemoryOptions(RankGrid(shard=128))).parameters > 4 * model.size // 128


def test_with_adapters_the_frozen_model_takes_its_dtype_alone():
    model = shape_of(CONFIG, tensors(layers=3))
    options = MemoryOptions(compute_bytes=2, lora_rank=8, lora_targets=("q_proj", "down_proj"))
    rank = rank_memory(model, options)
    adapters = 3 * 8 * ((64 + HIDDEN) + (WIDTH + HIDDEN))
    assert (rank.parameters, rank.gradients) == (2 * model.size + 4 * adapters, 4 * adapters)
    assert rank.state == 2 * model.size + 16 * adapters
    assert rank_memory(model, replace(options, grid=RankGrid(shard=4))).state == rank.state // 4
    every = rank_memory(model, replace(options, lora_targets=()))
    assert every.gradients > rank.gradients
    assert every.peak(100) < rank_memory(model, MemoryOptions(compute_bytes=2)).peak(100)


def planned(trainer=None, **uses):
    """What `fsdp` needs for models of these uses, all of one shape."""
    trainer = TrainerSection.model_validate(trainer or {})
    models = {name: ModelUse(Path(name), **use) for name, use in uses.items()}
    return planned_for(trainer, models, lambda folder: (CONFIG, tensors()), fsdp.memory_of)


TRAINED = {"optimizer": OptimizerSection()}


def test_further_models_count_what_is_kept_of_them():
    """Trained as the policy is; frozen in the dtype that is computed in, unless it follows."""
    models, alone = planned({"dtype": "bfloat16"}, policy=TRAINED)
    size = models["policy"].size
    shapes, every = planned(
        {"dtype": "bfloat16"},
        policy=TRAINED,
        critic=TRAINED | {"head": "value"},
        ref={},
        teacher={"follows": True},
    )
    critic = size - VOCABULARY * HIDDEN + HIDDEN
    assert (shapes["critic"].size, shapes["ref"].size) == (critic, size)
    assert every.state == 16 * size + 16 * critic + 2 * size + 4 * size
    assert every.saved == 12 * size + 12 * critic + 4 * size
    assert alone.saved == 12 * size
    # Passes are of one model at a time: the largest is the policy's.
    assert every.peak(500) - every.state == alone.peak(500) - alone.state
    room = every.peak(500)
    assert every.tokens_that_fit(room) == 500
    with_adapters = planned({"lora": {"rank": 4}}, policy=TRAINED, critic=TRAINED)[1]
    assert with_adapters.gradients > 4 * size, "the critic has no adapters"


def test_a_frozen_model_has_passes_without_gradients():
    (_, frozen), (_, trained) = planned(policy={}), planned(policy=TRAINED)
    assert frozen.state == trained.parameters
    assert frozen.peak(500) - frozen.state < trained.peak(500) - trained.state
    assert frozen.tokens_that_fit(frozen.peak(500)) == 500
    assert planned(policy={"head": "value"})[1].head == 0


def test_experts_and_their_router_have_no_adapters():
    shapes = tensors(experts=True) | {"model.layers.0.mlp.gate.weight": (N_EXPERTS, HIDDEN)}
    block = shape_of(CONFIG, shapes).blocks[0]
    assert len(block.adapters(4, ())) == 2 * 4


def sized(folder, **sections):
    """A job whose model is headers in `folder`, the shapes of the model and what a rank needs."""
    write_headers(folder, CONFIG, tensors())
    job = JobConfig.model_validate(
        {"job": "j", "model": str(folder), "tasks": {"train": "t.jsonl", "evaluation": None}} | sections
    )
    shapes, rank = job_memory(job)
    return job, shapes["policy"], rank


def test_what_nccl_sends_is_a_copy_on_the_trainers_gpu(tmp_path):
    gpu = gpu_named("H100")
    found = {}
    for channel in ("shm", "nccl"):
        trainer = {"dtype": "bfloat16", "micro_batch_tokens": 100_000}
        job, model, rank = sized(tmp_path, weights={"channel": channel}, trainer=trainer)
        found[channel] = figures(job, model, rank, gpu)
    copy = 2 * model.size
    assert found["nccl"]["bytes_per_rank"]["copy of the weights that nccl sends"] == copy
    assert found["nccl"]["peak_bytes"] == found["shm"]["peak_bytes"] + copy
    fits = found["nccl"]["gpu"]["tokens_that_fit"]
    assert fits == rank.tokens_that_fit(usable_bytes(gpu) - copy)
    assert "copy of the weights that nccl sends" not in found["shm"]["bytes_per_rank"]


SNAPSHOTS, COPIES = "published snapshots (shared memory)", "copy for checkpoints, ranks of the host"
ADAPTER = 2 * 2 * 8 * (64 + HIDDEN)  # bytes in bf16, of two layers
LORA = {"dtype": "bfloat16", "lora": {"rank": 8, "targets": ["q_proj"]}}
PARALLEL = {"ranks": 4, "parallel": {"data": 2}, "backend_args": {"offload_optimizer": True}}


@pytest.mark.parametrize(
    ("sections", "held"),
    [
        (
            {"rollout": {"engine": "vllm"}, "trainer": LORA},
            lambda size: {
                SNAPSHOTS: 2 * ADAPTER,
                COPIES: 6 * ADAPTER,
                "merged models (shared memory)": 6 * size,
            },
        ),
        (
            {"rollout": {"engine": "local"}, "trainer": LORA},
            lambda size: {SNAPSHOTS: 2 * ADAPTER, COPIES: 6 * ADAPTER},
        ),
        (
            {"tasks": {"train": "t.jsonl", "evaluation": "t.jsonl"}, "trainer": PARALLEL},
            lambda size: {
                COPIES: 2 * 3 * 2 * size,  # the second copy of the model writes none
                "offloaded AdamW moments, ranks of the host": 4 * 4 * size,
                SNAPSHOTS: 2 * 4 * size,
                "those that evaluations hold, at most": 2 * 4 * size,
            },
        ),
        (
            {"weights": {"codec": "delta"}},
            lambda size: {
                COPIES: 12 * size,
                SNAPSHOTS: 2 * 4 * size,
                "deltas and what they change, at most": 2 * 4 * size,
            },
        ),
        (
            {"weights": {"channel": "disk", "channel_args": {"directory": "/shared"}}},
            lambda size: {COPIES: 12 * size},
        ),
    ],
    ids=["adapters merged for vllm", "adapters", "copies and evaluations", "deltas", "disk"],
)
def test_a_host_holds_what_ranks_and_channel_put_there(tmp_path, sections, held):
    job, model, rank = sized(tmp_path, **sections)
    assert host_bytes(job, model, rank) == held(model.size)


def test_offloaded_moments_are_in_the_memory_of_the_host():
    model = shape_of(CONFIG, tensors())
    rank = rank_memory(model, MemoryOptions(offload_optimizer=True, on_host=True))
    assert (rank.optimizer, rank.host_optimizer) == (0, 8 * model.size)


def test_copies_beside_a_gpu_are_counted_as_torch_pins_them():
    """Each tensor has memory of its own: a small one of a power of two bytes, a large one of its size."""
    small, large = [1, 2, 3, 1000, 1 << 26], [(1 << 26) + 4, 300_000_000]
    assert [pinned_bytes(size) for size in small] == [1, 2, 4, 1024, 1 << 26]
    assert [pinned_bytes(size) for size in large] == large
    model = shape_of(CONFIG, tensors(layers=1, head=False))
    shapes = [*tensors(layers=1, head=False).values()]
    for shards in (1, 4):
        options = MemoryOptions(RankGrid(shard=shards), offload_optimizer=True)
        own = [4 * -(-shape[0] // shards) * prod(shape[1:]) for shape in shapes]
        taken = sum(pinned_bytes(size) for size in own)
        assert taken > sum(own), "no size is rounded"
        rank = rank_memory(model, options)
        assert (rank.saved, rank.host_optimizer) == (3 * taken, 2 * taken)
        followed = rank_memory(model, replace(options, frozen=True, follows=True))
        assert followed.saved == taken


def test_a_tied_output_layer_is_counted_once():
    tied = shape_of(CONFIG | {"tie_word_embeddings": True}, tensors())
    assert tied.size == shape_of(CONFIG, tensors(head=False)).size
    assert tied.tied


def test_experts_are_counted_whole_and_their_activations_by_those_of_a_token():
    dense, sparse = (shape_of(CONFIG, tensors(experts=experts)) for experts in (False, True))
    assert sparse.size == sum(map(prod, tensors(experts=True).values()))
    more = shape_of(CONFIG | {"num_experts_per_tok": 4}, tensors(experts=True))
    two, four = (rank_memory(model, MemoryOptions()).activations_per_token for model in (sparse, more))
    # Gate, up, activated gate and product in fp32, and the expert's input and output, in both layers.
    assert four - two == 2 * 2 * (4 * 4 * EXPERT + 2 * 4 * HIDDEN)
    assert rank_memory(dense, MemoryOptions()).activations_per_token != two


def test_recomputation_keeps_the_input_of_each_block():
    full = MemoryOptions(recompute="full")
    seven, eight = (rank_memory(shape_of(CONFIG, tensors(n)), full).activations_per_token for n in (7, 8))
    assert eight - seven == 4 * HIDDEN


def test_the_tokens_that_fit_are_the_most_whose_peak_does():
    rank = rank_memory(shape_of(CONFIG, tensors()), MemoryOptions(compute_bytes=2))
    room = rank.peak(500)
    fits = rank.tokens_that_fit(room)
    assert rank.peak(fits) <= room < rank.peak(fits + 1)
    assert rank.tokens_that_fit(rank.state) == 0


def test_ranks_that_share_rows_have_a_part_of_the_tokens_each_and_of_the_weights():
    """The last of three has its keys and values twice."""
    model = shape_of(CONFIG, tensors())
    apart = MemoryOptions(RankGrid(shard=8), recompute="selective")
    one, two = (
        rank_memory(model, apart),
        rank_memory(model, replace(apart, grid=RankGrid(shard=4, sequence=2))),
    )
    assert two.state == one.state
    assert two.peak(200_001) == two.peak(200_002) == one.peak(100_001)
    assert two.peak(200_000, 120_000) == one.peak(100_000, 100_000)
    assert two.tokens_that_fit(1 << 30) == 2 * one.tokens_that_fit(1 << 30)
    grids = [RankGrid(shard=8 // size, sequence=size) for size in (1, 2, 4)]
    one, two, four = (rank_memory(model, MemoryOptions(grid)) for grid in grids)
    assert two.activations_per_token == one.activations_per_token
    assert four.activations_per_token == two.activations_per_token + 2 * 2 * 4 * 32
    assert four.peak(400_000) == two.peak(200_000) + 100_000 * 2 * 2 * 4 * 32


def test_a_model_without_decoder_blocks_cannot_be_planned():
    with pytest.raises(ValueError, match="layers"):
        shape_of(CONFIG, {"encoder.weight": (3, 3)})
    with pytest.raises(ValueError, match="num_attention_heads"):
        shape_of({}, tensors())


def test_a_model_whose_layers_the_formulas_do_not_know_is_planned_with_a_warning_that_names_them(job):
    assert shape_of(CONFIG, tensors(experts=True)).uncounted == []
    assert "Not counted" not in plan(job).stdout
    shapes = tensors()
    for layer in range(2):
        for part in ("gate", "up"):
            del shapes[f"model.layers.{layer}.mlp.{part}_proj.weight"]
        shapes[f"model.layers.{layer}.mlp.gate_up_proj.weight"] = (2 * WIDTH, HIDDEN)
    write_headers(job, CONFIG, shapes)
    assert json.loads(plan(job, "--json").stdout)["uncounted_layers"] == ["mlp.gate_up_proj"]
    for arguments in ([], ["--gpu", "L4"]):
        page = plan(job, *arguments).stdout
        assert "what these layers of a block keep: mlp.gate_up_proj.\nA pass takes more" in page


def test_a_gpu_is_found_by_the_name_that_people_and_drivers_use():
    assert gpu_named("a100-80gb") is gpu_named("A100-80")
    assert gpu_named("voodoo") is None
    assert gpu_of_device("NVIDIA A100-SXM4-40GB", 1).bytes_per_s == 1.555e12
    assert gpu_of_device("NVIDIA H100 PCIe", 1).bf16_flops == 756e12
    assert gpu_of_device("NVIDIA H100 80GB HBM3", 1).bf16_flops == 989.4e12
    assert gpu_of_device("NVIDIA L40S", 7).memory_bytes == 7
    assert gpu_of_device("Voodoo", 7).bf16_flops is None


def plan(folder, *arguments):
    """The command, with its program in this process."""

    def answer(request):
        tensor_shapes.cache_clear()
        with readable_errors():
            main(request)

    with patch("areal_async.cli.tools.become", answer):
        return CliRunner().invoke(app, ["plan", str(folder / "job.yaml"), *arguments])


@pytest.fixture
def job(tmp_path):
    write_headers(tmp_path, CONFIG, tensors())
    task = {"data_source": "s", "prompt": "1", "ability": "m", "reward_model": {"ground_truth": "1"}}
    (tmp_path / "t.jsonl").write_text(json.dumps(task | {"extra_info": {}}))
    (tmp_path / "job.yaml").write_text("{job: plan, kind: sft, model: ., tasks: {train: t.jsonl}}")
    return tmp_path


def test_the_plan_of_a_job_is_told_from_headers_alone(job):
    done = plan(job, "trainer.dtype=bfloat16", "--gpu", "h100", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parameters"] == sum(map(prod, tensors().values()))
    expected = rank_memory(shape_of(CONFIG, tensors()), MemoryOptions(compute_bytes=2))
    assert found["peak_bytes"] == expected.peak(8192)
    assert found["gpu"]["tokens_that_fit"] == expected.tokens_that_fit(found["gpu"]["usable_bytes"])
    page = plan(job, "--gpu", "H100").stdout
    assert "AdamW moments" in page
    assert "Micro-batches of up to" in page
    assert "tokens fit; the job's micro-batch of 8,192 does too." in page


def test_what_does_not_fit_is_said_with_what_to_do_also_for_a_long_row(job):
    page = plan(job, "trainer.micro_batch_tokens=100000000", "--gpu", "L4").stdout
    assert re.search(r"Micro-batches of up to [\d,]+ tokens fit", page)
    assert "the job's micro-batch of 100,000,000 does not.\nChange one of these and plan again: " in page
    page = plan(
        job, "kind=rl", "trainer.micro_batch_tokens=1024", "rollout.max_model_len=1500", "--gpu", "L4"
    )
    assert "peak of a row of 1,500 tokens" in page.stdout
    assert "the job's row of 1,500 does too." in page.stdout


def large(**changes):
    """A job whose model is of the size of Qwen3-8B, of which config.json alone would be there."""
    section = {"job": "j", "model": "nowhere", "tasks": {"train": "t.jsonl"}}
    return JobConfig.model_validate(section | changes)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_untied_bias", "qwen3_moe", "mixtral"])
def test_the_plan_of_config_json_alone_is_that_of_the_files(tmp_path, family):
    AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(tmp_path / "files")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_bytes((tmp_path / "files" / "config.json").read_bytes())
    expected, found = (
        job_memory(large(model=str(tmp_path / name), trainer={"ranks": 2})) for name in ("files", "config")
    )
    assert found == expected


def test_a_model_of_which_there_is_only_config_json_is_planned_without_the_other_files(tmp_path):
    FAMILIES["qwen2"]().save_pretrained(tmp_path)
    rollout = "{max_model_len: 100, sampling: {max_new_tokens: 9}}"
    text = f"{{job: p, model: ., tasks: {{train: no.jsonl}}, rollout: {rollout}}}"
    (tmp_path / "job.yaml").write_text(text)
    done = plan(tmp_path, "--gpu", "L4")
    assert done.exit_code == 0, done.stderr
    assert "Its shapes are those of config.json" in done.stdout
    wrong = ("trainer.dtype=fp8", "rollout.max_model_len=0", "buffer.max_byte=3")
    told = plan(tmp_path, "trainer.lora={rank: 4, targets: [nothing]}").stderr
    assert "trainer.lora.targets: the model has no layer called nothing" in told
    told = plan(tmp_path, *wrong).stderr
    for field in wrong:
        assert f"- {field.partition('=')[0]}: " in told
    assert "has 3 mistakes" in told
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    assert "transformers makes no model of its config.json" in plan(tmp_path).stderr


def test_the_page_names_the_gpus_that_are_known():
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert "Known GPUs: " + ", ".join(f"`{gpu.name}`" for gpu in GPUS) + ".\n" in page


def test_what_cannot_be_planned_is_refused_with_what_to_do(job):
    assert "Known are B200" in plan(job, "--gpu", "voodoo").stderr
    (job / "config.json").write_text('{"model_type": "qwen2"}')
    assert "config.json has no 'num_attention_heads'" in plan(job).stderr


@pytest.mark.parametrize(
    "arguments", [{}, {"recompute": "full", "offload_optimizer": True}, {"lora_rank": 16}]
)
def test_the_plan_is_within_a_tenth_of_the_measured_peak(arguments):
    sizes = {"num_hidden_layers": 3, "vocab_size": 2048}
    arguments = dict(arguments)
    rank = arguments.pop("lora_rank", 0)
    row = memory.measure("qwen3", "float32", 512, arguments, lora_rank=rank, **sizes)
    assert 0.9 < row["ratio"] < 1.1, row
