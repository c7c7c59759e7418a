"""`rollout.gateway`: HTTP access of agents to the policy."""

import ipaddress
from typing import Literal

from pydantic import Field, field_validator

from areal_async.config.base import Section


class GatewaySection(Section):
    """Used by workflows that open `ctx.gateway()`; nothing listens before the first of them does."""

    host: str = "127.0.0.1"
    """Address to listen on: one of this machine's loopback addresses."""
    port: int = Field(default=0, ge=0, le=65535)
    """Of the first worker; the next ones take the next ports. 0 picks free ones."""
    sampling: Literal["agent", "job"] = "agent"
    """Whose temperature, top_p and top_k count. `agent`: those a call names, and a call that names some which
    cannot be trained on (greedy, truncated) is refused. `job`: those of `rollout.sampling`, always."""
    tool_format: Literal["auto", "hermes", "xml", "mistral", "llama", "none"] = "auto"
    """How the model writes tool calls; `auto` reads it off the chat template."""
    max_calls: int = Field(default=32, ge=1, le=65_536)
    """Most answers in the making at once in one session; more are refused (429)."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024, le=1 << 31)
    """Longer requests are refused (413)."""
    call_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one call; then it is aborted (504)."""
    idempotency_keys: int = Field(default=256, ge=1)
    """Calls with an idempotency key that one session remembers."""

    @field_validator("host")
    @classmethod
    def _loopback(cls, host: str) -> str:
        try:
            loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = False
        if not loopback:
            raise ValueError("the gateway listens on loopback addresses only: use 127.0.0.1 or ::1")
        return host
