"""one_death_is_local: any process is killed while a job runs, and the job completes as if nothing had been."""

import os
import signal
import subprocess
import time

import psutil
import pytest

from areal_async.observe.events import read_events
from tests.e2e.driving import read_until, run_of, service_process, started

pytestmark = [pytest.mark.slow, pytest.mark.alone]

QUICK = {"ready_s": 60, "first_pause_s": 0.1}


def test_placeholder():
    pass
