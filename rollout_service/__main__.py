"""`python -m rollout_service --context FILE --name rollout-0`: one rollout worker of a run."""

from areal_async.runtime.service import run_service
from rollout_service.service import main

if __name__ == "__main__":
    run_service("rollout", main)
