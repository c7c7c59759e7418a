"""The sending side of the distribution of weights: the trainer's ranks write a version, and the publisher
offers it to receivers.

The formats, the channels and the receiver are in `areal_async/weights`, because workers need them too.
"""
