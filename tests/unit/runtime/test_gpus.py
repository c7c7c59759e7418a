"""The CPUs next to GPUs, and the variables that all processes get."""

import os
import subprocess
import sys

import pytest

from areal_async.base.gpus import cpus_near, gpu_variables, names_of

ADDRESSES = ("0000:1B:00.0", "0000:9c:00.0", "0001:00:00.0")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A root with three equal GPUs: two on node 0, one on node 1, of 8 CPUs of which all are allowed."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for number, address in enumerate(ADDRESSES):
        told = tmp_path / "proc/driver/nvidia/gpus" / address
        told.mkdir(parents=True)
        said = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 7\nGPU UUID: \t GPU-{number}0aa-11\n"
        (told / "information").write_text(said)
        device = tmp_path / "sys/bus/pci/devices" / address.lower()
        device.mkdir(parents=True)
        (device / "numa_node").write_text("1\n" if number == 1 else "0\n")
        (device / "local_cpulist").write_text("4-7\n" if number == 1 else "0-1,3\n")
    return tmp_path


def near(machine, *gpus, **variables):
    return sorted(cpus_near(gpus, variables=variables, root=machine))


def test_a_gpu_is_found_by_number_or_uuid_and_several_have_the_cpus_of_all(machine):
    assert near(machine, "0") == near(machine, "2") == near(machine, "GPU-00aa-11") == [0, 1, 3]
    assert near(machine, "1") == near(machine, "GPU-10aa") == [4, 5, 6, 7]
    assert near(machine, "0", "1") == [0, 1, 3, 4, 5, 6, 7]
    assert near(machine) == []


@pytest.mark.parametrize("gpu", ["3", "-", "MIG-1c", "GPU-ffff", "GPU-", ""])
def test_a_gpu_that_is_not_known_binds_nothing(machine, gpu):
    assert near(machine, gpu) == near(machine, "0", gpu) == []


def test_where_the_kernel_names_no_node_nothing_is_bound(machine):
    (machine / "sys/bus/pci/devices" / ADDRESSES[0].lower() / "numa_node").write_text("-1\n")
    assert near(machine, "0") == near(machine, "1", "0") == []
    assert near(machine, "1") == [4, 5, 6, 7]
    (machine / "sys/bus/pci/devices" / ADDRESSES[1] / "local_cpulist").write_text("\n")
    assert near(machine, "1") == []
    assert near(machine / "nothing", "0") == []


def test_cpus_that_this_process_may_not_use_are_left_out(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 9})
    assert near(machine, "0") == [1, 3]
    assert near(machine, "1") == near(machine, "0", "1") == []


def test_gpus_of_several_kinds_have_a_number_only_in_the_order_of_their_addresses(machine):
    told = machine / "proc/driver/nvidia/gpus" / ADDRESSES[1] / "information"
    told.write_text(told.read_text().replace("H100", "T4"))
    assert near(machine, "0") == []
    assert near(machine, "0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == [0, 1, 3]
    assert near(machine, "GPU-00aa-11") == [0, 1, 3]


def test_a_thread_is_bound_with_those_that_it_starts_and_children_alone_if_asked():
    """In a process of its own, because nothing unbinds it."""
    code = (
        "import os, threading, subprocess, sys\n"
        "from areal_async.base.gpus import bind_thread, children_on\n"
        "own, before = {max(os.sched_getaffinity(0))}, os.sched_getaffinity(0)\n"
        "show = [sys.executable, '-c', 'import os; print(sorted(os.sched_getaffinity(0)))']\n"
        "with children_on(frozenset(own)):\n"
        "    print(subprocess.run(show, capture_output=True, text=True).stdout.strip() == str(sorted(own)))\n"
        "print(os.sched_getaffinity(0) == before)\n"
        "bind_thread(frozenset()); print(os.sched_getaffinity(0) == before)\n"
        "seen = []\n"
        "other = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))\n"
        "bind_thread(frozenset(own)); other.start(); other.join()\n"
        "print(seen == [own] == [os.sched_getaffinity(0)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 4


def test_the_variables_of_gpu_libraries_are_told_but_not_which_gpus_a_process_has():
    given = {"NCCL_B": "2", "CUDA_VISIBLE_DEVICES": "0", "NCCL_A": "1", "HOME": "/", "TORCH_X": ""}
    assert [*gpu_variables(given).items()] == [("NCCL_A", "1"), ("NCCL_B", "2"), ("TORCH_X", "")]
    assert names_of((1,), {"CUDA_VISIBLE_DEVICES": "4, GPU-7"}) == ("GPU-7",)
