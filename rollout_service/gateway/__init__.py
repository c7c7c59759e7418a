"""HTTP access of agents to the policy: OpenAI's chat API, recorded as sampled."""

from rollout_service.gateway.requests import ApiError, GatewayError
from rollout_service.gateway.server import Gateway
from rollout_service.gateway.session import Session

__all__ = ["ApiError", "Gateway", "GatewayError", "Session"]
