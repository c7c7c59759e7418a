"""HTTP access of agents to the policy: OpenAI's chat API, with every answer recorded as sampled."""

from rollout_service.gateway.access import Gateway
from rollout_service.gateway.recording import Session
from rollout_service.gateway.requests import ApiError, GatewayError

__all__ = ["ApiError", "Gateway", "GatewayError", "Session"]
