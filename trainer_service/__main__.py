"""`python -m trainer_service`: the trainer as a process of a run."""

from areal_async.runtime.service import run_service
from trainer_service.main import main

if __name__ == "__main__":
    run_service("trainer", main)
