"""`python -m rollout_service.gateway`: the gateway's process. The worker starts it and sends its set-up."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from areal_async.service.fork_server import loading

if __name__ == "__main__":
    with loading():
        import msgspec
        import uvloop

        from areal_async.base.log import setup_logging
        from areal_async.models.prompts import with_template_args
        from areal_async.models.tokenizer import load_tokenizer
        from rollout_service.gateway.access import GatewaySetup
        from rollout_service.gateway.server import Front

    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=GatewaySetup)
    setup_logging(setup.job, f"{setup.name}-gateway")
    tokenizers = {
        policy: with_template_args(load_tokenizer(Path(model.folder)), model.template_args)
        for policy, model in setup.models.items()
    }
    front = Front(setup, tokenizers)
    # Imported modules stay loaded. Searching them for garbage repeatedly took a third of a call.
    gc.collect()
    gc.freeze()
    uvloop.run(front.serve())
