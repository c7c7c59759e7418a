"""`python -m reward_service --context FILE --name NAME`: the process of the reward service."""

from areal_async.control.service import run_service
from reward_service.server import main

if __name__ == "__main__":
    run_service("reward", main)
