"""Answers kept by the digest of the content that they follow from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_async.base.cache import MOST_ANSWERS, digest_of, keep, recall


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AREAL_ASYNC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "known" / "kind"


def test_an_answer_is_recalled_by_its_kind_and_digest(tmp_path):
    keep("kind", "digest", b"answer")
    assert recall("kind", "digest") == b"answer"
    assert recall("kind", "another digest") is None
    assert recall("another kind", "digest") is None


def test_a_digest_changes_with_names_contents_and_values(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("12")
    other.write_text("12")
    digests = {digest_of([one]), digest_of([other]), digest_of([one, other]), digest_of([other, one])}
    digests |= {digest_of([one], "1", "2"), digest_of([one], "12"), digest_of([one], packages=["numpy"])}
    one.write_text("13")
    digests |= {digest_of([one]), digest_of([])}
    assert len(digests) == 9


def test_an_answer_that_others_can_write_is_not_read(own_cache):
    keep("kind", "digest", b"answer")
    (own_cache / "digest").chmod(0o666)
    assert recall("kind", "digest") is None


def test_a_link_is_not_followed(own_cache, tmp_path):
    keep("kind", "another", b"")
    (tmp_path / "elsewhere").write_bytes(b"answer")
    (own_cache / "digest").symlink_to(tmp_path / "elsewhere")
    assert recall("kind", "digest") is None


def test_a_cache_that_cannot_be_written_to_keeps_nothing(own_cache, tmp_path):
    (tmp_path / "cache").write_text("a file")
    keep("kind", "digest", b"answer")
    assert recall("kind", "digest") is None


def test_the_older_half_goes_when_there_are_too_many(own_cache):
    for number in range(MOST_ANSWERS):
        keep("kind", str(number), b"")
        os.utime(own_cache / str(number), (number, number))
    keep("kind", "newest", b"answer")
    left = {path.name for path in own_cache.iterdir()}
    assert left == {str(number) for number in range(MOST_ANSWERS // 2, MOST_ANSWERS)} | {"newest"}
