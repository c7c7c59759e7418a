"""The process of a run that `areal_async.run` started: `python -m areal_async.launch.background`.

It reads `{"job": …, "overwrite": …, "resume": …, "modules": …}` from its standard input, runs the job with
plain lines, and says how it failed as JSON in the last line that it prints."""

from __future__ import annotations

import json
import sys

from areal_async.config.job import JobConfig
from areal_async.errors import ArealError
from areal_async.launch.run import run_job


def main() -> int:
    request = json.load(sys.stdin)
    job = JobConfig.model_validate(request["job"])
    try:
        run_job(
            job,
            overwrite=request["overwrite"],
            resume=request["resume"],
            modules=request["modules"],
            plain=True,
        )
    except ArealError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
