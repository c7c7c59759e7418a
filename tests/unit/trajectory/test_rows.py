"""Training rows of hand-made trees; random ones are in test_properties.py."""

from __future__ import annotations

import pytest

from areal_async.trajectory import EpisodeBuilder, EpisodeLimits, SegmentKind, SizeError, training_rows
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
