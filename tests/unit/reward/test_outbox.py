from areal_async.rpc.messages import EpisodeVerdict
from areal_async.rpc.verdicts import Parts, Score
from reward_service.outbox import MAX_BYTES, MAX_VERDICTS, VALUE_BYTES, portion


def of_claims(*sizes: int, parts: Parts | None = None) -> list[EpisodeVerdict]:
    """So many verdicts of one claim after the other."""
    return [
        EpisodeVerdict(f"g{claim}.{sample}", f"C{claim}", Score(1.0, parts=parts))
        for claim, size in enumerate(sizes)
        for sample in range(size)
    ]


def test_everything_goes_while_it_is_little():
    assert portion([]) == 0
    assert portion(of_claims(3, 4)) == 7
    assert portion(of_claims(MAX_VERDICTS)) == MAX_VERDICTS


def test_a_message_ends_between_two_claims():
    assert portion(of_claims(*[1] * (MAX_VERDICTS + 9))) == MAX_VERDICTS
    assert portion(of_claims(MAX_VERDICTS - 2, 8, 1)) == MAX_VERDICTS + 6
    assert portion(of_claims(MAX_VERDICTS + 40, 1)) == MAX_VERDICTS + 40


def test_a_message_is_bounded_in_bytes():
    large = Parts(units=[0.5] * (MAX_BYTES // VALUE_BYTES // 2 + 1))
    assert portion(of_claims(1, 1, 1, 1, parts=large)) == 2
