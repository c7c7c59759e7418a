"""`python -m rollout_service.gateway`: the gateway of the worker that starts it, and sets it up."""

from __future__ import annotations

import asyncio
import gc
import os
import sys

from areal_async.runtime.spare import loading

if __name__ == "__main__":
    # transformers would load torch, which takes most of a start; a tokenizer needs none, and no advice of it.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    with loading():
        import msgspec
        from transformers import AutoTokenizer

        from areal_async.prompts import with_template_args
        from areal_async.runtime.log import setup_logging
        from rollout_service.gateway.access import GatewaySetup
        from rollout_service.gateway.server import Front

    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=GatewaySetup)
    setup_logging(setup.job, f"{setup.name}-gateway")
    tokenizers = {
        policy: with_template_args(
            AutoTokenizer.from_pretrained(model.folder, local_files_only=True), model.template_args
        )
        for policy, model in setup.models.items()
    }
    front = Front(setup, tokenizers)
    # What was imported stays: to look through it again and again took a third of a call.
    gc.collect()
    gc.freeze()
    asyncio.run(front.serve())
