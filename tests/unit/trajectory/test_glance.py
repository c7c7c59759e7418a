"""A glance at a blob: its header and the number of its sampled units, and an error for what is no blob."""

import pytest

from areal_async.trajectory import TrajectoryError, glance, pack


def test_a_glance_says_what_the_whole_episode_says(two_turns):
    whole = two_turns.build()
    header, n_sampled = glance(pack(whole))
    assert header == whole.header
    assert n_sampled == whole.n_sampled == 7


def test_a_glance_at_anything_else_is_a_trajectory_error(two_turns):
    whole = pack(two_turns.build())
    for cut in range(0, len(whole), 7):
        with pytest.raises(TrajectoryError):
            glance(whole[:cut])
    for at in (0, 4, 8, 24, 32, 24 + 16 * 5, 24 + 16 * 5 + 8):  # magic, schema, size, places of head and mask
        for byte in (0x7F, 0xFF):
            damaged = bytearray(whole)
            damaged[at + 3 if at >= 8 else at] = byte
            with pytest.raises(TrajectoryError):
                glance(bytes(damaged))
