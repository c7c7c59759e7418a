"""What an episode does: built-in workflows, and the loading of one's own."""

from rollout_service.workflows.base import BUILT_IN, Workflow, WorkflowError, load_workflow
from rollout_service.workflows.context import Context, EpisodeAborted, Renderer, Reply

__all__ = [
    "BUILT_IN",
    "Context",
    "EpisodeAborted",
    "Renderer",
    "Reply",
    "Workflow",
    "WorkflowError",
    "load_workflow",
]
