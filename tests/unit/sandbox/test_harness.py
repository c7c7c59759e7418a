"""Plain data over the link, the comparison of results, and what tests take from the program."""

import collections
import datetime
import decimal
import fractions
import math
import os
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_service.sandbox.harness.examiner import Examiner, Spoiled, same_result, same_value
from reward_service.sandbox.harness.plain import HarnessLink, LinkEnded, Malformed, Unplain, decode, encode
from reward_service.verifiers.cases import names_of, needs_live_objects, read_cases


def nothing(*_):
    return None


def refused(kind, content):
    raise Malformed(kind)


def crossed(value):
    return decode(encode(value, nothing), refused)


def plain_data():
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    scalars |= st.complex_numbers(allow_nan=False) | st.fractions() | st.dates() | st.timedeltas()
    keys = st.deferred(lambda: scalars | st.tuples(scalars, scalars) | st.frozensets(scalars, max_size=3))

    def within(inner):
        return st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=3)

    return st.recursive(keys | st.sets(keys, max_size=3), within, max_leaves=12)


@given(st.deferred(plain_data))
def test_plain_data_crosses_as_it_is(value):
    there = crossed(value)
    assert there == value
    assert type(there) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        10**6000, -0.0, math.inf, range(3, 9, 2), collections.deque([1]), collections.OrderedDict(a=1),
        collections.Counter("aab"), decimal.Decimal("1.50"), fractions.Fraction(1, 3), datetime.time(1, 2),
        bytearray(b"x"), "\ud800", int, {1: "a", "1": "b", (2,): [None]},
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_rarer_plain_data_crosses_as_it_is(value):
    there = crossed(value)
    assert type(there) is type(value)
    assert there == value
    assert math.copysign(1, there) == math.copysign(1, value) if value == 0 else True


class Sly(list):
    def __eq__(self, other):
        return True

    def __iter__(self):
        return iter([1, 2, 3])

    __hash__ = None


class SlyText(str):
    def __str__(self):
        return "right"


def test_objects_become_plain_data_of_exactly_pythons_types_and_are_asked_nothing():
    assert type(crossed(Sly([0]))) is list
    assert crossed(Sly([0])) == [0]
    assert (type(crossed(SlyText("wrong"))), crossed(SlyText("wrong"))) == (str, "wrong")
    assert type(crossed(collections.namedtuple("P", "x y")(1, 2))) is tuple
    assert list(crossed(iter([1, 2]))) == [1, 2]
    for unplain in (object(), len, math, lambda: 0, Exception()):
        with pytest.raises(Unplain):
            encode(unplain, nothing)
    deep, cyclic = [], []
    for _ in range(500):
        deep = [deep]
    cyclic.append(cyclic)
    for one in (deep, cyclic, 1 << (1 << 23), iter(int, 1)):
        with pytest.raises(Unplain):
            encode(one, nothing)


@pytest.mark.parametrize(
    "data",
    [
        {}, [], [1], [[]], ["held", 0, True], ["dict", 1], ["set", ["list"]], ["int", "x"], ["int", 7, 8],
        ["bytes", "z"], ["type", "object"], ["type", 7], ["Decimal", []], ["Fraction", 1, 0], ["date", "x"],
        ["date", 1], ["range", "a"], ["complex", []], ["timedelta", "x"], ["iterator", {}],
        ["__import__", "os"], ["list", ["x"]],
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_encoding_is_refused(data):
    with pytest.raises(Malformed):
        decode(data, refused)


def talk(messages):
    """What an examiner makes of these bytes, sent in answer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(len(one).to_bytes(4, "big") + one for one in messages))
        theirs.shutdown(socket.SHUT_WR)
        examiner = Examiner(HarnessLink(ours.fileno()))
        entry = type("E", (), {"_reference": ["entry", "f"]})()
        return examiner.ask("call", entry)


@pytest.mark.parametrize(
    "reply",
    [
        b"", b"[]", b"{", b"[" * 100_000, b'{"callback": 0, "args": [], "named": {}}',
        b'{"value": ["held", 0, true]}', b'{"callback": true}', b'{"raised": "print", "args": ["list"]}',
        b'{"raised": 7, "args": 7}', b"\xff", b'{"raised": "ValueError", "args": {}}',
        b'{"value": ["set", ["list"]]}', b'{"value": {"a": 1}}', b"NaN",
    ],
)  # fmt: skip
def test_a_reply_that_is_none_fails_the_test_whatever_it_catches(reply):
    with pytest.raises(Spoiled):
        talk([reply])


def test_an_exception_that_a_program_names_is_pythons_own_and_ends_no_loop():
    assert talk([b'{"end": true}']) is None
    with pytest.raises(RuntimeError, match="StopIteration"):
        talk([b'{"raised": "StopIteration", "args": ["list"]}'])
    with pytest.raises(KeyError, match="gone"):
        talk([b'{"raised": "KeyError", "args": ["list", "gone"]}'])


def test_a_link_takes_no_message_above_its_cap():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(LinkEnded, match="too long"):
            HarnessLink(ours.fileno()).receive()
        sender = threading.Thread(target=lambda: os.write(theirs.fileno(), b"\0\0\0\2{}"))
        sender.start()
        assert HarnessLink(ours.fileno()).receive() == {}
        sender.join()


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ((1, 2), [1, 2], True), ({1, 2}, [1, 2], False), ({1, 2}, [2, 1], False),
        (frozenset([1]), [1], False), ({1: "a"}, {"1": "a"}, False), ({"1": "a"}, {"1": "a"}, True),
        ({1: "a"}, {1: "a"}, True), ({1.0: "a"}, {1: "a"}, False), ({True: "a"}, {1: "a"}, False),
        ({1: "a", "1": "a"}, {1: "a"}, False), (True, 1, False), (1, True, False), (1, 1.0, True),
        (1.0, 1, True), (0.1 + 0.2, 0.3, True), (0.3001, 0.3, False), (1e15 + 1, 10**15, False),
        (1000000.4, 1000000, False), (float(10**22), 10**22, True), (1e300 * 10, 10**400, False),
        (10**400, 1.5, False), (10**20, 10**20 + 1, False), (math.nan, math.nan, True),
        (math.nan, 1.0, False), (1.0, math.nan, False), (-0.0, 0.0, True), (math.inf, 1.0, False),
        (5.0, math.inf, False), (math.inf, math.inf, True), ("1", 1, False), (b"a", "a", False),
        (None, None, True), (None, 0, False), ([], None, False), ([[]], [], False),
        ({"a": [1.0]}, {"a": [1]}, True), ([1, 2], (1, 2), False),
        (collections.OrderedDict(a=1), {"a": 1}, True), (collections.deque([1]), [1], False),
    ],
)  # fmt: skip
def test_results_are_compared_by_content_and_kind(got, expected, same):
    assert same_value(got, expected, 1e-6) == same


def test_what_is_given_out_piece_by_piece_is_a_list_and_a_wrapped_result_may_be_bare():
    assert same_result(iter([1, 2]), [1, 2], 0.0, wrapped=False)
    assert same_result({1: 2}.keys(), [1], 0.0, wrapped=False)
    assert same_result(3, [3], 0.0, wrapped=True)
    assert same_result([3], [3], 0.0, wrapped=True)
    assert not same_result(3, [3], 0.0, wrapped=False)


def test_a_result_is_wrapped_only_where_every_one_of_the_task_is():
    wrapped = read_cases({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]})
    bare = read_cases({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2, 3]]})
    assert [one.wrapped for one in wrapped.calls] == [True, True]
    assert [one.wrapped for one in bare.calls] == [False, False]


def test_keys_that_are_integers_as_python_writes_them_are_integers():
    cases = read_cases({"fn_name": "f", "inputs": [[{"1": {"a": 2}}]], "outputs": [{"1": 1, "-2": 2}]})
    assert cases.calls[0].args == [{1: {"a": 2}}]
    assert cases.calls[0].expected == {1: 1, -2: 2}
    for keys in (["1", "a"], ["01"], ["1.0"], ["+1"], [""]):
        expected = dict.fromkeys(keys, 0)
        assert (
            read_cases({"fn_name": "f", "inputs": [[]], "outputs": [expected]}).calls[0].expected == expected
        )


@pytest.mark.parametrize(
    ("tests", "entries", "imports"),
    [
        ("assert add(1, 2) == sum([1, 2])", ["add"], []),
        ("assert math.isclose(f(1), np.pi)", ["f"], ["import math", "import numpy as np"]),
        ("import math\nassert math.floor(f(1)) == 1", ["f"], []),
        ("def g(x): return x\nassert g(f(1)) == 1", ["f"], []),
        ("assert [h(x) for x in range(3)] == [y for y in k(3)]", ["h", "k"], []),
        ("def test_a():\n    x = f(1)\n    y = lambda z: z\n    assert y(x) == 1", ["f"], []),
        ("def test_a(n=N): assert f(n)", ["N", "f"], []),
        ("from collections import *\nassert f(1) == 1", ["f"], []),
        ("assert sum(1, 2) == 3", [], []),
    ],
)
def test_only_what_nobody_else_defines_is_taken_from_the_program(tests, entries, imports):
    names = names_of([tests])
    assert sorted(names.free) == sorted(entries)
    assert sorted(names.imports) == sorted(imports)


@pytest.mark.parametrize(
    ("tests", "live"),
    [
        ("assert f(1) == [1]", False), ("assert f(1).upper() == 'A'", False),
        ("x = f(1)\nx.sort()\nassert x == [1]", False), ("x = f(1)\nassert x.size() == 1", True),
        ("f(1).left = 2", True), ("assert f(1)(2) == 3", True), ("g = f(1)\nassert g(2) == 3", True),
        ("g = f()\nassert next(g) == 3", True), ("assert Solution().add(1) == 2", False),
        ("def check(candidate):\n    assert candidate(3).value == 4", True),
        ("import math\nassert math.floor(f(1)) == 1", False),
    ],
)  # fmt: skip
def test_tests_that_need_objects_of_the_program_are_known_by_their_text(tests, live):
    assert needs_live_objects([tests], ["f", "Solution"]) == live
