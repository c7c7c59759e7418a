"""What holds a job's models and updates them. The table says where the built-in back ends are.

A back end is a part: called with named models and the ranks it gives a `Backend` (`base.py`), and its
`check_job` says which jobs it cannot run. Reading a job file imports it, so torch is imported where it is
called.
"""

BUILT_IN = {
    "fsdp": "trainer_service.backends.fsdp:fsdp",
    "megatron": "trainer_service.backends.megatron:megatron",
}
