"""`python -m replay_buffer --context FILE --name buffer`: serve the replay buffer of a run."""

from areal_async.service.main import run_service
from replay_buffer.server import main

if __name__ == "__main__":
    run_service("buffer", main)
