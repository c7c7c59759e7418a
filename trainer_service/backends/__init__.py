"""Back ends, which hold a job's models and update them, and a table of the built-in ones.

A back end is a part: called with named models and the ranks it gives a `Backend` (`base.py`), and its
`check_job` says which jobs it cannot run. Reading a job file imports it, so torch is imported where it is
called.
"""

BUILT_IN = {
    "fsdp": "trainer_service.backends.fsdp:fsdp",
    "megatron": "trainer_service.backends.megatron:megatron",
}
