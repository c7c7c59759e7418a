"""The random generators of a rank are saved and restored: the CPU's, and its device's."""

from types import SimpleNamespace

import pytest
import torch

from trainer_service.backends.common import random_state_file, random_states, read_random_state
from trainer_service.backends.fsdp.shards import write_tensors
from trainer_service.errors import CheckpointError


@pytest.fixture
def gpus(monkeypatch):
    """The states of the generators of two devices, as torch.cuda keeps them."""
    states = {index: torch.full((16,), index, dtype=torch.uint8) for index in (0, 1)}

    def get(device):
        return states[torch.device(device).index].clone()

    def put(state, device):
        states[torch.device(device).index] = state.clone()

    monkeypatch.setattr(torch.cuda, "get_rng_state", get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", put)
    return states


def rank_on(device):
    return SimpleNamespace(rank=3, device=torch.device(device))


def saved(folder, device):
    write_tensors(folder / random_state_file(3), random_states(torch.device(device)), {})


def test_a_rank_on_a_gpu_goes_on_with_the_numbers_that_it_would_have_drawn(tmp_path, gpus):
    torch.manual_seed(5)
    saved(tmp_path, "cuda:1")
    drawn = torch.rand(4)
    gpus[1][:] = 9
    read_random_state(tmp_path, rank_on("cuda:1"))
    assert torch.equal(torch.rand(4), drawn)
    assert gpus[1].tolist() == [1] * 16
    assert gpus[0].tolist() == [0] * 16, "another rank's device"


def test_a_checkpoint_without_the_devices_state_is_read(tmp_path, gpus):
    torch.manual_seed(5)
    saved(tmp_path, "cpu")
    drawn = torch.rand(4)
    gpus[1][:] = 9
    read_random_state(tmp_path, rank_on("cuda:1"))
    assert torch.equal(torch.rand(4), drawn)
    assert gpus[1].tolist() == [9] * 16


def test_a_rank_on_a_cpu_goes_on_from_the_checkpoint_of_a_gpu(tmp_path, gpus):
    saved(tmp_path, "cuda:0")
    drawn = torch.rand(4)
    read_random_state(tmp_path, rank_on("cpu"))
    assert torch.equal(torch.rand(4), drawn)


def test_a_state_of_a_wrong_size_is_refused(tmp_path):
    write_tensors(tmp_path / random_state_file(3), {"cpu": torch.zeros(3, dtype=torch.uint8)}, {})
    with pytest.raises(CheckpointError, match="random state"):
        read_random_state(tmp_path, rank_on("cpu"))
