"""HTTP access of agents to the policy, through OpenAI's chat API. Every answer is recorded exactly as it was
sampled."""

from rollout_service.gateway.access import Gateway
from rollout_service.gateway.recording import Session
from rollout_service.gateway.requests import ApiError, GatewayError

__all__ = ["ApiError", "Gateway", "GatewayError", "Session"]
