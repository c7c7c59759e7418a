"""The built-in verifiers with what they take, until each declares it itself."""

from __future__ import annotations

import importlib
from typing import Any

from areal_async.config.sandbox import CodeMatrixArguments, CodeStdioArguments, CodeTestsArguments
from areal_async.config.verifierargs import VERIFIER_ARGUMENTS

ARGUMENTS = {
    **VERIFIER_ARGUMENTS,
    "code_stdio": CodeStdioArguments,
    "code_tests": CodeTestsArguments,
    "code_matrix": CodeMatrixArguments,
}


def __getattr__(name: str) -> Any:
    """The verifier of this name."""
    if name not in ARGUMENTS:
        raise AttributeError(name)
    function = getattr(importlib.import_module(f"reward_service.verifiers.{name}"), name)
    function.Arguments = ARGUMENTS[name]
    return function
