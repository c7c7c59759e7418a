from areal_async.control.service import run_service
from rollout_service.service import main

run_service("rollout", main)
