"""`python -m trainer_service`: the trainer, or one of its ranks, as a process of a run."""

from areal_async.service.fork_server import loading
from areal_async.service.rank_group import start_pulse

if __name__ == "__main__":
    start_pulse()  # before torch, which may take long to load

    with loading():
        from areal_async.service.main import run_service
        from trainer_service.main import main

    run_service("trainer", main)
