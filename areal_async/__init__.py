"""Fully asynchronous, decoupled reinforcement learning for language models."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("areal-async")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"
