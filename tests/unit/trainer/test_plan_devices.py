"""What `plan` says of GPUs that engines use, against sums by hand and against `plan_count`."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import recipe_plans
from plan_count import counted
from transformers import DeepseekV3Config

from areal_async.base.mistakes import ConfigError
from areal_async.config.engine_memory import Served, sglang_memory
from areal_async.config.job import JobConfig
from tests.unit.trainer.test_memory import plan, sized
from trainer_service.tools.gpus import MIB, gpu_named
from trainer_service.tools.plan import figures, job_memory
from trainer_service.tools.plan_devices import TrainerBytes, gpu_plans, served_by

GIB = 1 << 30
H100 = 81_559 * MIB
SIZE = 1_543_714_304  # parameters of Qwen2.5-1.5B
TOKEN = 2 * 28 * 2 * 128 * 2  # keys and values: layers, heads, width, bfloat16
SGLANG = {"engine": "sglang", "device": "cuda", "dtype": "bfloat16", "max_model_len": 2048}
SHARES = {"server": {"arguments": {"mem-fraction-static": 0.3}}}
TRAINER = {"device": "cuda", "dtype": "bfloat16", "micro_batch_tokens": 4096}


@pytest.fixture
def make(tmp_path):
    """Return a function that makes a job for a Qwen model of which there is only a config.json."""

    def made(name="Qwen/Qwen2.5-1.5B", **sections):
        (tmp_path / "config.json").write_text(json.dumps(recipe_plans.config_of(name)))
        job = {"job": "j", "model": str(tmp_path), "tasks": {"train": "t.jsonl", "evaluation": None}}
        sections = {"trainer": TRAINER, **sections}
        sections["rollout"] = {"sampling": {"max_new_tokens": 512}} | sections.get("rollout", SGLANG)
        return JobConfig.model_validate(job | sections)

    return made


def written(make, folder):
    """Write such a job as a file."""
    make()
    (folder / "tokenizer.json").write_text("{}")
    rollout = SGLANG | {"sampling": {"max_new_tokens": 512}}
    job = {"job": "j", "model": ".", "tasks": {"train": "t.jsonl"}, "rollout": rollout, "trainer": TRAINER}
    (folder / "job.yaml").write_text(json.dumps(job))


def planned(job, gpu="H100", count=None):
    shapes, rank = job_memory(job)
    return figures(job, shapes["policy"], rank, gpu_named(gpu), count)


EVALUATED = {"tasks": {"train": "t.jsonl", "evaluation": "e.jsonl"}}
SMALL = {"evaluation": {"server": {"arguments": {"mem-fraction-static": 0.15}}}}


def test_each_server_gets_its_share_of_what_those_before_it_leave(make):
    """SGLang's share is of the free memory, so the order of the start is in every figure."""
    (device,) = planned(make(rollout=SGLANG | SHARES, **EVALUATED, **SMALL))["devices"]
    rollout, evaluator = device["engines"]
    assert (rollout["name"], evaluator["name"]) == ("rollout-0", "evaluator")
    free = H100 - 4 * SIZE - 3 * GIB // 2
    assert rollout["free_at_start_bytes"] == free
    assert rollout["bytes"]["weights"] == 2 * SIZE
    assert rollout["bytes"]["kv"] == int(0.3 * (free - GIB)) - 2 * SIZE
    assert rollout["kv_tokens"] == rollout["bytes"]["kv"] // TOKEN
    # 64 requests of the largest decode graph, and 58 graphs of prefills.
    assert rollout["bytes"]["graphs"] == (64 * 2 + 58 * 8) * MIB
    assert rollout["bytes"]["context"] == GIB
    assert rollout["total_bytes"] == sum(rollout["bytes"].values())
    free -= rollout["total_bytes"]
    assert evaluator["free_at_start_bytes"] == free
    assert evaluator["bytes"]["kv"] == int(0.15 * (free - GIB)) - 2 * SIZE
    peak = device["trainer_bytes"]["peak"]
    assert device["remaining_bytes"] == free - evaluator["total_bytes"] - peak + 4 * SIZE + 3 * GIB // 2


def test_a_server_that_starts_again_beside_the_trainers_peak_is_refused_with_what_to_do(make):
    found = planned(make(rollout=SGLANG | SHARES, **EVALUATED, **SMALL))
    assert found["devices"][0]["engines"][1]["least_kv_tokens"] == 0
    (mistake,) = found["mistakes"]
    assert mistake["field"] == "evaluation.server.arguments.mem-fraction-static"
    assert mistake["problem"].startswith("with 0.15, evaluator does not start if the other engines")
    assert "Give each engine on the GPU a KV of its own size" in mistake["fix"]
    assert "evaluation.server.arguments.max-total-tokens" in mistake["fix"]
    limited = {
        name: {"server": {"arguments": {"mem-fraction-static": 0.6, "max-total-tokens": 40_000}}}
        for name in ("rollout", "evaluation")
    }
    limited["rollout"] |= SGLANG
    found = planned(make(**EVALUATED, **limited))
    assert found["mistakes"] == []
    for engine in found["devices"][0]["engines"]:
        assert (engine["kv_tokens"], engine["least_kv_tokens"]) == (40_000, 40_000)
        assert engine["longest_requests_at_once"] == 40_000 // 2048


def test_after_a_restart_a_server_has_its_share_of_what_the_trainer_leaves(make):
    """The trainer has gradients and moments then, and its allocator keeps its peak."""
    (device,) = planned(make(rollout=SGLANG | SHARES))["devices"]
    (rollout,) = device["engines"]
    left = H100 - device["trainer_bytes"]["peak"]
    kv = int(0.3 * (left - GIB)) - 2 * SIZE
    assert rollout["least_kv_tokens"] == kv // TOKEN < rollout["kv_tokens"]


def test_the_share_that_a_plan_advises_is_one_with_which_the_server_starts(make):
    low = {"server": {"arguments": {"mem-fraction-static": 0.03}}}
    (mistake,) = planned(make(rollout=SGLANG | low))["mistakes"]
    share = mistake["fix"].partition("or set it to ")[2].split()[0]
    low["server"]["arguments"]["mem-fraction-static"] = float(share)
    assert planned(make(rollout=SGLANG | low))["mistakes"] == []


VLLM = SGLANG | {"engine": "vllm"}


def test_vllms_share_is_of_the_whole_gpu_and_must_be_free(make):
    (device,) = planned(make(rollout=VLLM | {"server": {"arguments": {"gpu-memory-utilization": 0.3}}}))[
        "devices"
    ]
    (server,) = device["engines"]
    assert server["total_bytes"] == pytest.approx(0.3 * H100 + GIB, abs=2)
    (mistake,) = planned(make(rollout=VLLM))["mistakes"]
    assert mistake["field"] == "rollout.server.arguments.gpu-memory-utilization"
    assert "with 0.92, rollout-0 does not start in its turn: no more than 0.89 is free" in mistake["problem"]
    sized = {"gpu-memory-utilization": 0.1, "kv-cache-memory-bytes": "3G"}
    found = planned(make(rollout=VLLM | {"server": {"arguments": sized}}))
    assert found["mistakes"] == []
    assert found["devices"][0]["engines"][0]["kv_tokens"] == 3 * GIB // TOKEN


def test_without_graphs_a_server_has_none(make):
    for engine, flag in ((SGLANG, "disable-cuda-graph"), (VLLM, "enforce-eager")):
        arguments = {flag: True, "gpu-memory-utilization": 0.3, "mem-fraction-static": 0.3}
        found = planned(make(rollout=engine | {"server": {"arguments": arguments}}))
        assert found["devices"][0]["engines"][0]["bytes"]["graphs"] == 0


@pytest.mark.parametrize(("tensor", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_tensor_ranks_divide_heads_until_each_has_one(make, tensor, heads):
    """Qwen2.5-7B has 4 heads of keys and values, of 128 numbers each, in 28 layers."""
    job = make("Qwen/Qwen2.5-7B", rollout=SGLANG | {"server": {"arguments": {"tp-size": tensor}}})
    from areal_async.config.engines import engine_part

    served = served_by(engine_part("sglang"), job.rollout, job_memory(job)[0]["policy"], 64)
    assert served.kv_token == 2 * 28 * heads * 128 * 2
    assert served.weights == 2 * 7_615_616_512 // tensor


def test_latent_attention_keeps_one_vector_per_token_and_layer(tmp_path):
    """DeepSeek-V3: 512 numbers and 64 with the position, in 61 layers, on each tensor rank."""
    from areal_async.config.engines import engine_part

    job, shapes, _ = deepseek(tmp_path)
    rollout = job.rollout.model_copy(update={"dtype": "bfloat16"})
    assert served_by(engine_part("sglang"), rollout, shapes["policy"], 64).kv_token == 61 * 576 * 2


def deepseek(folder, **trainer):
    DeepseekV3Config().save_pretrained(folder)
    trainer = {"ranks": 256, "device": "cuda", "dtype": "bfloat16", **trainer}
    job = JobConfig.model_validate(
        {
            "job": "j",
            "model": str(folder),
            "tasks": {"train": "t.jsonl", "evaluation": None},
            "rollout": {"dtype": "bfloat16"},
            "trainer": trainer,
        }
    )
    return job, *job_memory(job)


def test_a_model_whose_snapshots_no_host_holds_is_refused_without_advice_that_cannot_help(tmp_path):
    job, shapes, rank = deepseek(tmp_path)
    found = figures(job, shapes["policy"], rank, gpu_named("H100"))
    (mistake,) = found["mistakes"]
    assert mistake["field"] == "model"
    assert "snapshots and copies take" in mistake["problem"]
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "job.yaml").write_text(json.dumps({"job": "j", "model": ".", "tasks": {"train": "t.jsonl"}}))
    page = plan(tmp_path, "trainer.ranks=256", "trainer.dtype=bfloat16", "--gpu", "H100").stdout
    assert "on the host of rank 0, and a host with eight GPUs has about 2048.00 GiB" in page
    assert "Change one of these" not in page
    # Two gathers of 1.3 TB, and a reduction in fp32, at 45 GB/s.
    assert found["communication"]["link"] == "between hosts"
    assert found["communication"]["seconds_per_pass"] == pytest.approx(8 * 671e9 / 45e9, rel=0.02)


def test_a_server_that_does_not_start_leaves_the_advice_for_the_trainer(make, tmp_path):
    written(make, tmp_path)
    page = plan(tmp_path, "rollout.engine=vllm", "trainer.micro_batch_tokens=9000000", "--gpu", "L4").stdout
    assert "Change one of these and plan again" in page
    assert "- rollout.server.arguments.gpu-memory-utilization: with 0.92, rollout-0 does not start" in page


BIG = "trainer.micro_batch_tokens=9000000"


def advised(folder, *overrides, gpu="L4"):
    page = plan(folder, BIG, *overrides, "--gpu", gpu).stdout
    (line,) = (each for each in page.splitlines() if each.startswith("Change one of these"))
    return line.partition("again: ")[2].rstrip(".").split(", ")


def test_on_one_gpu_the_advice_begins_with_turns_and_the_servers_memory(make, tmp_path):
    written(make, tmp_path)
    sizes = "trainer.micro_batch_tokens and rollout.max_model_len"
    offload = "trainer.backend_args.offload_optimizer: true"
    of_rank = [sizes, "trainer.backend_args.recompute", offload, "trainer.lora.rank"]
    memory = "rollout.server.arguments.mem-fraction-static"
    for gpu in ("L4", "1xL4"):
        assert advised(tmp_path, gpu=gpu) == ["placement.share: time", memory, *of_rank]
    vllm = advised(tmp_path, "rollout.engine=vllm")
    assert vllm[:2] == ["placement.share: time", "rollout.server.arguments.gpu-memory-utilization"]
    assert advised(tmp_path, "rollout.engine=local")[:2] == ["placement.share: time", sizes]
    workers = advised(tmp_path, "rollout.workers=2", "rollout.device=cuda:0", "trainer.device=cuda:0")
    assert workers[0] == memory, "two engines take no turns"
    evaluated = advised(tmp_path, "tasks.evaluation=e.jsonl", "evaluation.engine=local")
    assert evaluated[0] == memory, "an engine of its own for the evaluation takes no turns"
    assert advised(tmp_path, "placement.share=time") == of_rank
    done = "{recompute: full, offload_optimizer: true}"
    assert advised(tmp_path, "placement.share=time", f"trainer.backend_args={done}") == [sizes, of_rank[-1]]
    assert advised(tmp_path, "trainer.dtype=float32", gpu="1xL4")[4] == "trainer.dtype: bfloat16"


def test_with_more_gpus_the_advice_has_more_ranks(make, tmp_path):
    written(make, tmp_path)
    two = advised(tmp_path, gpu="2xL4")
    assert two[-3:] == ["trainer.parallel", "trainer.ranks", "trainer.lora.rank"]
    assert "trainer.dtype: bfloat16" not in two
    assert not [each for each in two if each.startswith(("placement", "rollout"))]
    assert "trainer.ranks" in advised(tmp_path, "kind=sft"), "the number of GPUs is not known"
    assert "trainer.ranks" not in advised(tmp_path, "kind=sft", gpu="1xL4")


def test_a_host_has_eight_ranks_at_most(tmp_path):
    _, _, two = sized(tmp_path, trainer={"ranks": 2})
    job, model, many = sized(tmp_path, trainer={"ranks": 32, "backend_args": {"offload_optimizer": True}})
    host = figures(job, model, many, None)["host_bytes"]
    assert host["copy for checkpoints, ranks of the host"] == 8 * many.saved
    assert host["offloaded AdamW moments, ranks of the host"] == 8 * many.host_optimizer
    assert (
        figures(job, model, two, None)["host_bytes"]["copy for checkpoints, ranks of the host"]
        == 8 * two.saved
    )


def test_what_ranks_exchange_in_a_pass(make):
    sections = {"rollout": SGLANG | {"device": "cpu", "engine": "local"}}
    alone = planned(make(**sections))
    assert "communication" not in alone
    two = planned(make(trainer=TRAINER | {"ranks": 2}, **sections))["communication"]
    assert two["seconds_per_pass"] == pytest.approx((2 * 2 + 4) * SIZE / 2 / 200e9, rel=1e-3)
    adapted = planned(make(trainer=TRAINER | {"ranks": 2, "lora": {"rank": 8}}, **sections))["communication"]
    assert adapted["seconds_per_pass"] == pytest.approx(2 * 2 * SIZE / 2 / 200e9, rel=0.02)


def test_a_job_that_needs_several_gpus_has_each_of_them_once(make):
    job = make(trainer=TRAINER | {"ranks": 2}, rollout=SGLANG | {"workers": 2}, **EVALUATED)
    trainer, rollout, evaluation = planned(job)["devices"]
    assert (trainer["gpus"], rollout["gpus"], evaluation["gpus"]) == ([0, 1], [2, 3], [4])
    assert trainer["engines"] == []
    assert rollout["engines"][0]["free_at_start_bytes"] == H100


def test_the_number_of_gpus_is_told_with_their_name(make, tmp_path):
    written(make, tmp_path)
    one, two = (json.loads(plan(tmp_path, "--gpu", gpu, "--json").stdout) for gpu in ("H100", "2xH100"))
    assert [device["gpus"] for device in one["devices"]] == [[0]]
    assert [device["gpus"] for device in two["devices"]] == [[0], [1]]
    page = plan(tmp_path, "--gpu", "2 x h100").stdout
    assert "GPU 1\n" in page
    assert "tokens of KV after a restart, at worst" in page
    told = plan(tmp_path, "trainer.ranks=4", "--gpu", "2xH100").stderr
    assert "trainer.device: cuda with 4 GPUs for the trainer's ranks needs 4, and 2 are visible" in told


def test_the_gpus_that_are_visible_are_planned_for(make, tmp_path, monkeypatch):
    """Two GPUs are visible, so trainer and engine have one each. With eight ranks, as many as these need."""
    written(make, tmp_path)
    monkeypatch.setattr("trainer_service.tools.plan.shutil.which", lambda name: "/bin/true")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    seen = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", total_memory=80 * GIB)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: seen)
    two, many = (json.loads(plan(tmp_path, f"trainer.ranks={ranks}", "--json").stdout) for ranks in (1, 8))
    assert two["gpu"]["memory_bytes"] == 80 * GIB
    assert [device["gpus"] for device in two["devices"]] == [[0], [1]]
    assert [device["gpus"] for device in many["devices"]] == [[*range(8)], [8]]


def test_a_local_engine_has_room_for_the_longest_request_in_each_slot(make):
    local = SGLANG | {"engine": "local", "max_concurrent": 16}
    (device,) = planned(make(rollout=local))["devices"]
    assert device["engines"][0]["bytes"]["kv"] == 16 * 2048 * TOKEN
    (mistake,) = planned(make(rollout=local | {"max_concurrent": 2000}))["mistakes"]
    assert mistake["field"] == "rollout.max_concurrent"


def test_a_reward_model_is_counted_on_its_gpu(make, tmp_path):
    folder = tmp_path / "scorer"
    folder.mkdir()
    config = recipe_plans.config_of("Qwen/Qwen2.5-0.5B")
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    arguments = {"model": str(folder), "device": "cuda:3", "max_batch_tokens": 4096}
    found = planned(make(reward={"name": "reward_model", "args": arguments}, rollout=SGLANG | {"workers": 2}))
    (device,) = (each for each in found["devices"] if each["reward_models"])
    assert device["gpus"] == [3]
    # 494 million parameters in bfloat16, a pass of 4,096 tokens, and a context.
    held = device["reward_models"]["reward"]
    assert held == pytest.approx(GIB + 2 * 494e6 + 4096 * 2 * (3 * 4864 + 4 * 896), rel=0.02)
    told = "reward is on cuda:3, and GPUs are planned up to 0: name more with --gpu"
    with pytest.raises(ConfigError, match=told):
        planned(make(reward={"name": "reward_model", "args": arguments}))
    arguments["device"] = "cpu"
    found = planned(make(reward={"name": "reward_model", "args": arguments}, rollout=SGLANG | {"workers": 2}))
    assert not any(device["reward_models"] for device in found["devices"])


def test_trainer_and_engine_that_take_turns_do_not_add_up(make, monkeypatch):
    """Asleep, a server keeps its graphs and its context."""
    job = make(rollout=SGLANG | SHARES)
    shapes, _ = job_memory(job)
    trainer = TrainerBytes(8 * GIB, 40 * GIB)

    def held():
        (device,), _ = gpu_plans(job, shapes["policy"], {}.get, trainer, gpu_named("H100"), 1)
        return device, device["engines"][0]

    beside, server = held()
    assert beside["used_bytes"] == 40 * GIB + server["total_bytes"]
    monkeypatch.setattr("trainer_service.tools.plan_devices.takes_turns", lambda job: True)
    alone, server = held()
    asleep = server["bytes"]["graphs"] + server["bytes"]["context"]
    assert alone["used_bytes"] == 40 * GIB + asleep
    assert alone["beside_trainer_bytes"] == asleep
    # While it samples, the trainer has its context alone.
    trainer = TrainerBytes(8 * GIB, 10 * GIB)
    alone, server = held()
    assert alone["used_bytes"] == GIB + server["total_bytes"]


def test_shares_of_one_gpu_agree_with_the_second_count(make):
    """The recipes have fixed sizes of KV. With shares, the order of the start decides, and heads and graphs
    matter for the tokens."""
    job = make(rollout=SGLANG | SHARES, **EVALUATED, **SMALL)
    found = planned(job)["devices"][0]["engines"]
    second = counted(job, 1)
    for engine in found:
        own = second[engine["section"]]
        assert engine["kv_tokens"] == pytest.approx(own["kv_tokens"], rel=0.01)
        assert engine["total_bytes"] == pytest.approx(own["total"], rel=0.01)


def test_a_vision_tower_and_the_tokens_of_an_image_are_planned(tmp_path):
    """The tower has 676,550,144 of the model's 8,292,166,656 parameters. An image of 28 x 28 pixels is a
    token, of 4 patches."""
    written(lambda: None, tmp_path)
    config = recipe_plans.config_of("Qwen/Qwen2.5-VL-7B-Instruct")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_pixels": 12_845_056}))

    def told(*overrides):
        return json.loads(plan(tmp_path, "--json", "--gpu", "H100", *overrides).output)

    found = told()
    assert found["parameters"] == 8_292_166_656
    blocks = 32 * 1280 * (4 * 1280 + 3 * 3420)
    assert found["vision"] == {
        "parameters": 676_550_144,
        "trained": False,
        "flops_per_token": {"of an image": 2 * 4 * blocks, "language model": 13_050_576_896},
        "largest_image_tokens": 16_384,
    }
    trained = told("rollout.images.max_pixels=1003520", "trainer.backend_args={vision: trained}")
    assert (trained["vision"]["trained"], trained["vision"]["largest_image_tokens"]) == (True, 1280)
    grown = (
        trained["bytes_per_rank"]["AdamW moments (fp32)"] - found["bytes_per_rank"]["AdamW moments (fp32)"]
    )
    assert grown == 8 * 676_550_144
    shown = plan(tmp_path).output
    assert "vision tower: 0.68 billion parameters, frozen" in shown
    assert "tokens of the largest image: 16,384" in shown


def test_sglang_leaves_memory_free_beside_a_vision_tower():
    served = Served(1 << 30, TOKEN, 1 << 14, 1000, 64, 2048, {})
    shares = [
        sglang_memory(replace(served, tower=hidden), H100, H100, 0).share for hidden in (0, 1024, 1152, 1280)
    ]
    assert [share / shares[0] for share in shares[1:]] == pytest.approx([0.95, 0.92477, 0.89656], abs=1e-5)
