"""Programs of commands that sample from a model without training it."""
