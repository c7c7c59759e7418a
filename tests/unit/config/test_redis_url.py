"""What `buffer.redis` may say, and that it never says a password."""

import pytest

from areal_async.config.errors import ConfigError
from areal_async.config.load import dump_job, load_job
from areal_async.config.redis_url import RedisUrl, parse_redis_url


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("redis://host", RedisUrl("redis", "host")),
        ("redis://u@host:1/3", RedisUrl("redis", "host", 1, db=3, username="u")),
        ("rediss://[::1]:7", RedisUrl("rediss", "::1", 7)),
        ("unix:///a/b?db=2", RedisUrl("unix", path="/a/b", db=2)),
        ("unix://u@/a", RedisUrl("unix", path="/a", username="u")),
    ],
)
def test_every_form_is_read_and_shown_again(text, parts):
    assert parse_redis_url(text) == parts
    assert parse_redis_url(str(parts)) == parts


def test_a_password_is_refused_without_being_shown(folder):
    for url in ("redis://u:hunter2@a", "redis://a?password=hunter2", "redis://u:hunter2@a:b"):
        with pytest.raises(ConfigError) as caught:
            load_job(folder / "job.yaml", [f"buffer.redis={url}"])
        assert "hunter2" not in str(caught.value)


def test_the_recorded_job_names_secrets_and_certificates_and_holds_none(folder):
    (folder / "secret").write_text("hunter2")
    job = load_job(
        folder / "job.yaml",
        [
            "buffer.redis=rediss://u@a",
            "buffer.redis_login.password_file=secret",
            "buffer.redis_tls.ca_file=train.jsonl",
        ],
    )
    recorded = dump_job(job)
    assert "hunter2" not in recorded
    assert str(folder / "secret") in recorded, "relative to the job file"
    (folder / "run.yaml").write_text(recorded)
    assert load_job(folder / "run.yaml") == job
