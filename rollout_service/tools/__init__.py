"""Implementation of the commands that sample from a model without training it."""
