"""Back ends, which hold a job's models and update them, and the table of the built-in ones.

A back end is a part. A call with named models and the ranks returns a `TrainingBackend` (`base.py`). Its
`check_job` yields the mistakes in jobs that it cannot run. Reading a job file imports the part, so it imports
torch only when it is called.
"""

BUILT_IN = {
    "fsdp": "trainer_service.backends.fsdp:fsdp",
    "megatron": "trainer_service.backends.megatron:megatron",
}
