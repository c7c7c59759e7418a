"""The make-believe device refuses and counts what CUDA refuses and waits for."""

import pytest
import torch

from tests.accelerator.device import CUDA, make_believe_cuda


@pytest.fixture
def device():
    with make_believe_cuda() as made:
        yield made


def on_device(*values):
    return torch.tensor(values, device=CUDA)


def test_tensors_claim_to_be_on_the_device_wherever_they_come_from(device):
    x = on_device(1.0, 2.0)
    made = [x, x * 2, x[1:], x.new_zeros(3), torch.zeros_like(x), torch.arange(3, device="cuda"), x.double()]
    made += [x.unsqueeze(0).expand(2, 2), *x.split(1), torch.stack([x, x]), torch.nn.Parameter(x)]
    assert {(each.device, each.is_cuda) for each in made} == {(CUDA, True)}
    assert x.cpu().device == torch.device("cpu")
    assert x.to(CUDA) is x
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


def test_gradients_flow_on_the_device_and_views_share_memory(device):
    x = on_device(1.0, 2.0, 3.0).requires_grad_()
    (x[1:].square().sum() + x.prod()).backward()
    assert x.grad.device == CUDA
    assert x.grad.tolist() == [6.0, 7.0, 8.0]
    base = torch.zeros(4, device=CUDA)
    base.view(2, 2)[1].add_(1)
    assert base.tolist() == [0, 0, 1, 1]


MIXED = {
    "sum": lambda x, host: x + host,
    "sum in place": lambda x, host: x.add_(host),
    "host in place": lambda x, host: host.add_(x),
    "a host scalar in place": lambda x, host: torch.zeros(()).add_(x.sum()),
    "where": lambda x, host: torch.where(x > 0, x, host),
    "stack": lambda x, host: torch.stack([x, host]),
    "stack of a host scalar": lambda x, host: torch.stack([x.sum(), torch.zeros(())]),
    "product": lambda x, host: x @ host,
    "index_add": lambda x, host: x.index_add(0, torch.arange(3), x),
    "values to a host tensor": lambda x, host: host[x.long()],
    "values put": lambda x, host: x.__setitem__(x.long(), host),
    "loss": lambda x, host: torch.nn.functional.mse_loss(x, host),
    "embedding": lambda x, host: torch.nn.functional.embedding(torch.arange(2), x[:, None]),
}
"""Name → what CUDA refuses, of a device tensor [3] and a host tensor [3]."""
TOGETHER = {
    "a host scalar": (lambda x: x * torch.tensor(2.0), 0),
    "where with a host scalar": (lambda x: torch.where(x > 0, x, torch.tensor(0.0)), 0),
    "filled with a host scalar": (lambda x: x.masked_fill(x > 0, torch.tensor(1.0)), 0),
    "host indices": (lambda x: x[torch.arange(2)], 1),
    "a copy of a host tensor": (lambda x: x.copy_(torch.ones(3)), 1),
    "a number": (lambda x: x + 1.5, 0),
    # What makes the host wait.
    "item": (lambda x: x.sum().item(), 1),
    "float": (lambda x: float(x.sum()), 1),
    "truth": (lambda x: bool((x > 0).any()), 1),
    "list": (lambda x: x.tolist(), 1),
    "to the host": (lambda x: x.cpu(), 1),
    "to the host without waiting": (lambda x: x.to("cpu", non_blocking=True), 0),
    "nonzero": (lambda x: x.nonzero(), 1),
    "mask as an index": (lambda x: x[x > 0], 1),
    "mask put, one value": (lambda x: x.__setitem__(x > 0, 0.0), 0),
    "mask put, several values": (lambda x: x.__setitem__(x > 5, x[:0]), 1),
    "masked_select": (lambda x: x.masked_select(x > 0), 1),
    "unique": (lambda x: x.unique(), 1),
    "repeats on the device": (lambda x: x.repeat_interleave(x.long()), 1),
    "repeats of a known number": (lambda x: x.repeat_interleave(x.long(), output_size=3), 0),
    "repeats by a number": (lambda x: x.repeat_interleave(2), 0),
    "comparison": (lambda x: torch.equal(x, x), 1),
    "a new tensor from a list": (lambda x: torch.tensor([1.0], device=x.device), 1),
    "from ordinary memory": (lambda x: torch.ones(3).to(x.device, non_blocking=True), 1),
    "from pinned memory": (lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True), 0),
    "from pinned memory, waiting": (lambda x: torch.ones(3).pin_memory().to(x.device), 1),
    "into pinned memory": (lambda x: torch.ones(3, pin_memory=True).copy_(x, non_blocking=True), 0),
    "made on the device": (lambda x: torch.zeros(3, device=x.device), 0),
    "device indices": (lambda x: x[x.long() * 0], 0),
    "sorted": (lambda x: x.sort().values.cumsum(0), 0),
}
"""Name → what CUDA does with a device tensor of three ones, and how often the host waits."""


@pytest.mark.parametrize("what", MIXED)
def test_operators_refuse_tensors_of_two_devices(device, what):
    with pytest.raises(RuntimeError, match="same device"):
        MIXED[what](on_device(1.0, 1.0, 1.0), torch.ones(3))


@pytest.mark.parametrize("what", TOGETHER)
def test_waits_of_the_host_are_counted(device, what):
    x = on_device(1.0, 1.0, 1.0)
    device.clear()
    function, waits = TOGETHER[what]
    function(x)
    assert device.syncs.total() == waits, device.report()


def test_a_wait_is_counted_at_the_line_of_the_product(device):
    from trainer_service.algorithms.critic import ValueStatistics

    x = ValueStatistics(CUDA)
    device.clear()
    x.report()
    (sync,) = device.syncs
    assert sync.place.startswith("trainer_service/algorithms/critic.py:")


def test_values_of_a_device_that_has_ended_are_refused():
    with make_believe_cuda():
        x = on_device(1.0)
    with pytest.raises(RuntimeError, match="ended"):
        x + 1


def test_no_device_is_left_for_later_tests_of_the_process():
    with make_believe_cuda():
        pass
    with torch.random.fork_rng():
        torch.manual_seed(1)
    assert not torch.accelerator.is_available()
