from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from areal_async.rpc.reply_book import Admission, ReplyBook, ServerLimits


def test_the_floor_frees_replies_and_makes_late_duplicates_stale():
    b = ReplyBook(ServerLimits(4, 8, 1000), 3)
    for request in (1, 2, 3):
        b.admit(7, request, 1)
        b.finish(7, request, [b"x" * 10])
    assert (len(b), b.size_bytes) == (3, 30)
    assert b.admit(7, 4, 3) is Admission.RUN
    assert (len(b), b.size_bytes) == (1, 10)
    assert b.admit(7, 1, 1) is Admission.STALE


def test_an_idle_client_makes_room_for_a_new_one():
    b = ReplyBook(ServerLimits(4, 8, 1000), max_clients=2)
    b.admit(1, 1, 1)
    b.admit(2, 1, 1)
    b.finish(2, 1, [b"x"])
    b.admit(3, 1, 1)
    assert b.admit(1, 1, 1) is Admission.JOIN
    assert b.size_bytes == 0


class Book(RuleBasedStateMachine):
    """Against a model that remembers everything: nothing runs twice at a time, or again while remembered."""

    LIMIT, ENTRIES, BYTES = 3, 5, 60
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.book = ReplyBook(ServerLimits(self.LIMIT, self.ENTRIES, self.BYTES), 100)
        self.next_id = dict.fromkeys(range(3), 1)
        self.floor = dict.fromkeys(range(3), 0)
        self.under_way: set[tuple[int, int]] = set()
        self.answered: dict[tuple[int, int], bytes] = {}

    def admit(self, client: int, request: int, floor: int):  # type: ignore[no-untyped-def]
        admission = self.book.admit(client, request, floor)
        self.floor[client] = max(self.floor[client], floor)
        key = (client, request)
        if request < self.floor[client]:
            assert admission is Admission.STALE
        elif key in self.under_way:
            assert admission is Admission.JOIN
        elif admission is Admission.REPLAY:
            assert self.book.reply(*key) == [self.answered[key]]
        elif sum(c == client for c, _ in self.under_way) >= self.LIMIT:
            assert admission is Admission.BUSY
        else:
            assert admission is Admission.RUN
            self.under_way.add(key)
            return key
        return multiple()

    @rule(target=running, client=st.integers(0, 2), back=st.integers(0, 4))
    def new_request(self, client: int, back: int):  # type: ignore[no-untyped-def]
        request = self.next_id[client]
        self.next_id[client] += 1
        return self.admit(client, request, max(self.floor[client], request - back))

    @rule(target=running, client=st.integers(0, 2), back=st.integers(1, 6))
    def duplicate(self, client: int, back: int):  # type: ignore[no-untyped-def]
        request = self.next_id[client] - back
        return self.admit(client, request, self.floor[client]) if request >= 1 else multiple()

    @rule(key=consumes(running), size=st.integers(0, 40), passing=st.booleans())
    def finish(self, key: tuple[int, int], size: int, passing: bool) -> None:
        reply = bytes(size)
        self.under_way.discard(key)
        wanted = self.book.finish(*key, None if passing else [reply])
        assert wanted == (key[1] >= self.floor[key[0]])
        self.answered[key] = reply

    @invariant()
    def stays_in_bounds(self) -> None:
        assert len(self.book) <= self.ENTRIES
        assert 0 <= self.book.size_bytes <= self.BYTES


Book.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_reply_book_keeps_its_promises = Book.TestCase
