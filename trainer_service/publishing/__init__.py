"""The sending half of the weights plane: the trainer's ranks write a version, and the publisher offers it.

The formats, the channels and the receiver are in `areal_async/weights`, because workers need them too.
"""
