from areal_async.rpc.schema import VersionTag
from trainer_service.checkpoint import PublishedVersions


def test_a_version_published_again_with_equal_weights_is_recognised(tmp_path):
    first = PublishedVersions(tmp_path)
    assert first.add(VersionTag("policy", 1, 4), "a") == []
    assert first.add(VersionTag("policy", 1, 5), "b") == []
    second = PublishedVersions(tmp_path)
    assert second.add(VersionTag("policy", 2, 4), "a") == [1]
    assert second.add(VersionTag("policy", 2, 5), "other") == []
    assert PublishedVersions(tmp_path).add(VersionTag("policy", 3, 4), "a") == [1, 2]


def test_what_a_checkpoint_covers_is_forgotten_and_a_torn_line_is_skipped(tmp_path):
    published = PublishedVersions(tmp_path)
    for version in range(4):
        published.add(VersionTag("policy", 1, version), str(version))
    published.forget_before(2)
    with published.path.open("ab") as file:
        file.write(b'{"epoch":1,"ver')
    again = PublishedVersions(tmp_path)
    assert again.add(VersionTag("policy", 2, 1), "1") == []
    assert again.add(VersionTag("policy", 2, 2), "2") == [1]
