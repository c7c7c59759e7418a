"""Start of a server that requires a key for every request: `python keyed.py MODULE ARGUMENTS…`.

Uses only the standard library and the uvicorn in the server's environment. The key is in an environment
variable, which only this user can read and which the server's children do not get. A command line would be
readable by everybody. The key is checked before a request reaches any route, because the servers' own keys
leave routes open. SGLang leaves health and metrics open. vLLM leaves everything but `/v1` open, including its
developer endpoints.
"""

import hmac
import os
import runpy
import sys
from typing import Any

VARIABLE = "AREAL_ASYNC_ENGINE_KEY"
PREFIX = b"Bearer "


class AskForKey:
    """ASGI application that passes on requests with the key, and answers all others with 401."""

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-length", b"0"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _knows(self, scope: Any) -> bool:
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        return (
            len(shown) == 1
            and shown[0].startswith(PREFIX)
            and hmac.compare_digest(shown[0][len(PREFIX) :], self._key)
        )


def main(module: str) -> None:
    key = os.environ.pop(VARIABLE)
    import uvicorn

    load = uvicorn.Config.load

    def load_keyed(config: Any) -> None:
        load(config)
        config.loaded_app = AskForKey(config.loaded_app, key)

    setattr(uvicorn.Config, "load", load_keyed)  # noqa: B010
    sys.argv = sys.argv[1:]
    # As with `python -m`: processes that the server spawns find their main module by its name.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1])
