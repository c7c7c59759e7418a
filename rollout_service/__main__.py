"""`python -m rollout_service --context FILE --name rollout-0`: one rollout worker of a run."""

from areal_async.service.fork_server import loading

if __name__ == "__main__":
    with loading():
        from areal_async.service.main import run_service
        from rollout_service.service import main

    run_service("rollout", main)
