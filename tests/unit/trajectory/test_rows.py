"""Training rows of hand-made trees; random ones are in test_properties.py."""

from __future__ import annotations

import pytest

from areal_async.trajectory import (
    EpisodeBuilder,
    EpisodeLimits,
    SegmentKind,
    SizeError,
    row_media,
    training_rows,
)
from tests.unit.trajectory.conftest import add_call


def tree(*segments: tuple[str, int | None]):
    """A tree of one-letter segments: `s` sampled, `p` prompt, each two tokens (10·i, 10·i + 1)."""
    builder = EpisodeBuilder("j", "t", "g", 0)
    for i, (kind, parent) in enumerate(segments):
        ids = [10 * i, 10 * i + 1]
        if kind == "s":
            add_call(builder, ids, [-1.0, -2.0], i, parent=parent, epoch=i % 2)
        else:
            builder.observed(SegmentKind.PROMPT, ids, parent)
    return builder.build()


def told(rows) -> list[tuple[tuple[int, ...], str]]:
    return [(row.path, "".join(map(str, row.mask))) for row in rows]


def test_a_single_path_is_the_unit_table_itself():
    episode = tree(("p", None), ("s", 0), ("p", 1), ("s", 2))
    (row,) = training_rows(episode)
    assert row.token_ids is episode.units.token_id
    assert told([row]) == [((0, 1, 2, 3), "00110011")]
    assert row.lengths == (2, 2, 2, 2)


def test_a_shared_segment_is_trained_with_its_first_leaf_and_is_context_for_the_others():
    rows = training_rows(tree(("p", None), ("s", 0), ("s", 1), ("s", 1), ("s", 3)))
    assert told(rows) == [((0, 1, 2), "001111"), ((0, 1, 3, 4), "00001111")]
    assert rows[1].token_ids.tolist() == [0, 1, 10, 11, 30, 31, 40, 41]
    assert rows[1].versions.tolist() == [-1, -1, 1, 1, 3, 3, 4, 4]


def test_rows_are_read_only():
    for row in training_rows(tree(("p", None), ("s", 0), ("s", 0))):
        for array in (row.token_ids, row.mask, row.logprobs, row.versions):
            assert not array.flags.writeable


def test_a_tree_whose_shared_prefixes_would_blow_up_is_refused_before_it_does():
    star = tree(("p", None), *[("s", 0)] * 50)
    assert len(training_rows(star, limits=EpisodeLimits(row_units=200, row_segments=100))) == 50
    with pytest.raises(SizeError):
        training_rows(star, limits=EpisodeLimits(row_units=199))
    with pytest.raises(SizeError):
        training_rows(star, limits=EpisodeLimits(row_segments=99))


def test_the_media_of_a_row_are_those_of_its_path_with_their_positions_in_the_row():
    builder = EpisodeBuilder("j", "t", "g", 0)
    builder.observed(SegmentKind.PROMPT, [1, 2, 3, 4], None)
    for branch in range(2):
        call = add_call(builder, [5, 6], [-1.0, -2.0], 0, parent=0, epoch=1)
        tool = builder.observed(SegmentKind.TOOL, [7, 8, 9], call)
        builder.media(tool, f"blake3:{branch:02x}", "image/png", 3, 1, 2)
        add_call(builder, [10], [-1.0], 0, parent=tool, epoch=1)
    builder.media(0, "blake3:ff", "image/png", 3, 1, 2)
    builder.media(0, "blake3:ee", "image/png", 3)  # has no units
    episode = builder.build()
    found = [
        [(media.digest, first) for media, first in row_media(episode, row)] for row in training_rows(episode)
    ]
    assert found == [[("blake3:ff", 1), (f"blake3:{branch:02x}", 7)] for branch in range(2)]
    for row in training_rows(episode):
        for media, first in row_media(episode, row):
            units = slice(media.first_unit, media.first_unit + media.n_units)
            assert (
                row.token_ids[first : first + media.n_units].tolist()
                == episode.units.token_id[units].tolist()
            )
