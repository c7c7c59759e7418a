"""A glance at a blob: its header and the number of its sampled units, and an error for what is no blob."""

import pytest

from areal_async.trajectory import EpisodeBuilder, Sampling, TrajectoryError, glance, pack, unpack


def blob() -> bytes:
    builder = EpisodeBuilder("job", "task", "group", 3)
    prompt = builder.prompt([5, 6, 7])
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8, stop=(), seed=1)
    builder.sampled(
        [1, 2, 3, 4], [-0.5] * 4, [2] * 4, parent=prompt, sampling=sampling, finish_reason="stop", epoch=1
    )
    builder.text(prompt="12+34=", response="46")
    return pack(builder.build())


def test_a_glance_says_what_the_whole_episode_says():
    header, n_sampled = glance(blob())
    whole = unpack(blob())
    assert header == whole.header
    assert n_sampled == whole.n_sampled == 4


def test_a_glance_at_anything_else_is_a_trajectory_error():
    whole = blob()
    for cut in range(0, len(whole), 7):
        with pytest.raises(TrajectoryError):
            glance(whole[:cut])
    for at in (0, 4, 8, 24, 32, 24 + 16 * 5, 24 + 16 * 5 + 8):  # magic, schema, size, places of head and mask
        for byte in (0x7F, 0xFF):
            damaged = bytearray(whole)
            damaged[at + 3 if at >= 8 else at] = byte
            with pytest.raises(TrajectoryError):
                glance(bytes(damaged))
