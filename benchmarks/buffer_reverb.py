"""dm-reverb's side of `buffer.py`; runs in an environment of its own (`make reverb-env`), knows nothing of
ours.

python buffer_reverb.py serve prints the port python buffer_reverb.py produce NAME PORT the protocol of
`buffer_producer.py`
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import reverb

MESSAGE_BYTES = 8 << 20
"""As much as one of our messages holds."""


def serve() -> None:
    table = reverb.Table(
        name="episodes",
        sampler=reverb.selectors.Fifo(),
        remover=reverb.selectors.Fifo(),
        max_size=10_000_000,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server([table])
    print(json.dumps({"port": server.port}), flush=True)
    sys.stdin.readline()  # ends with its parent
    server.stop()


def produce(port: str) -> None:
    client = reverb.Client(f"localhost:{port}")
    blob, items = np.zeros(1, np.uint8), 0
    for line in sys.stdin:
        order = json.loads(line)
        acks_ms = []
        if order["do"] == "prepare":
            blob, items = np.fromfile(order["blob"], np.uint8), order["items"]
            print(json.dumps({"items": items, "size_bytes": items * blob.size}), flush=True)
            continue
        began_s = time.monotonic()
        if order["do"] == "reverb insert":
            for _ in range(items):
                asked_s = time.perf_counter()
                client.insert([blob], priorities={"episodes": 1.0})
                acks_ms.append(1e3 * (time.perf_counter() - asked_s))
        else:  # a writer that confirms as many at once as one of our messages holds
            n = max(1, min(256, MESSAGE_BYTES // blob.size))
            with client.writer(max_sequence_length=1) as writer:
                left = items
                while left:
                    asked_s = time.perf_counter()
                    for _ in range(min(n, left)):
                        writer.append([blob])
                        writer.create_item("episodes", 1, 1.0)
                    writer.flush()
                    left -= min(n, left)
                    acks_ms.append(1e3 * (time.perf_counter() - asked_s))
        print(json.dumps({"began_s": began_s, "ended_s": time.monotonic(), "acks_ms": acks_ms}), flush=True)


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else produce(sys.argv[3])
