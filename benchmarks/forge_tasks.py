"""Code tasks of every shape and form of assertion, each with a right program.

No constant answers a task: what a program that computes nothing returns is wrong in at least one case, unless
it says for itself that it is right.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Task(NamedTuple):
    shape: str
    truth: Any
    entry: str
    """Name of the function or method; empty for a program of its own."""
    right: str


def asserted(entry: str, right: str, *tests: str, setup: str = "") -> Task:
    truth: Any = {"test_list": list(tests), "test_setup_code": setup} if setup else list(tests)
    return Task("assertions", truth, entry, right)


def checked(entry: str, right: str, test: str) -> Task:
    return Task("check", {"test": test, "entry_point": entry}, entry, right)


def functions(entry: str, right: str, text: str) -> Task:
    return Task("test functions", text, entry, right)


def called(entry: str, right: str, *cases: tuple[list[Any], Any]) -> Task:
    truth = {"fn_name": entry, "inputs": [one for one, _ in cases], "outputs": [two for _, two in cases]}
    return Task("calls", truth, entry, right)


def printed(right: str, *cases: tuple[str, str]) -> Task:
    return Task(
        "stdio", {"inputs": [one for one, _ in cases], "outputs": [two for _, two in cases]}, "", right
    )


SOLUTION = """\
class Solution:
    def two_sum(self, nums, target):
        seen = {}
        for index, one in enumerate(nums):
            if target - one in seen:
                return [seen[target - one], index]
            seen[one] = index
"""

TASKS = {
    "equal": asserted(
        "double", "def double(x): return x * 2", "assert double(2) == 4", "assert double('a') == 'aa'"
    ),
    "unequal": asserted(
        "parity",
        "def parity(n): return 'odd' if n % 2 else 'even'",
        "assert parity(3) != parity(4)",
        "assert parity(2) != 'odd'",
        "assert parity(3) != 'even'",
        "assert not parity(7) != 'odd'",
        "assert parity(4) in ('odd', 'even')",
    ),
    "order and chains": asserted(
        "area",
        "def area(r): return 3.141592653589793 * r * r",
        "assert 28 < area(3) < 29",
        "assert area(10) > 314 and area(10) <= 315",
        "assert 0 <= area(0) < 0.1",
    ),
    "membership": asserted(
        "primes",
        "def primes(n): return [p for p in range(2, n) if all(p % d for d in range(2, p))]",
        "assert 3 in primes(10)",
        "assert 4 not in primes(10)",
        "assert 11 in primes(12)",
        "assert not 11 in primes(10)",
    ),
    "truth": asserted(
        "is_even",
        "def is_even(n): return n % 2 == 0",
        "assert is_even(4)",
        "assert is_even(10)",  # two of a kind in turn: answers that alternate are wrong
        "assert not is_even(3)",
        "assert is_even(0) is True",
        "assert bool(is_even(5)) is False",
    ),
    "identity": asserted(
        "find",
        "def find(x, y): return x.index(y) if y in x else None",
        "assert find([1, 2], 3) is None",
        "assert find([1, 2], 2) is not None",
        "assert find([1, 2], 2) == 1",
    ),
    "isinstance": asserted(
        "read",
        "def read(x):\n    try: return int(x)\n    except ValueError: return x",
        "assert isinstance(read('3'), int)",
        "assert not isinstance(read('a'), int)",
        "assert type(read('b')) is str and read('7') == 7",
    ),
    "len": asserted(
        "repeat",
        "def repeat(x, n): return [x] * n",
        "assert len(repeat('a', 3)) == 3",
        "assert len(repeat('b', 5)) == 5",
        "assert len(repeat('b', 0)) == 0",
    ),
    "set": asserted(
        "similar",
        "def similar(a, b): return tuple(set(a) & set(b))",
        "assert set(similar((3, 4, 5, 6), (5, 7, 4, 10))) == set((4, 5))",
        "assert set(similar((1, 2, 3, 4), (5, 4, 3, 7))) == set((3, 4))",
    ),
    "sorted, str and round": asserted(
        "unique",
        "def unique(x): return list(set(x))",
        "assert sorted(unique([3, 1, 3])) == [1, 3]",
        "assert str(sorted(unique([2.04, 2.04]))[0]) == '2.04'",
        "assert round(sum(unique([1.5, 2.25])), 1) == round(3.75, 1)",
    ),
    "all and any": asserted(
        "square",
        "def square(x): return x * x",
        "assert all(square(x) == y for x, y in [(1, 1), (2, 4), (3, 9)])",
        "assert all(map(lambda case: square(case[0]) == case[1], [(2, 4), (5, 25)]))",
        "assert not any(square(x) != x ** 2 for x in range(5))",
        "assert [square(x) for x in range(4)] == [0, 1, 4, 9]",
    ),
    "iterated lazily": asserted(
        "cube",
        "def cube(x): return x ** 3",
        "assert list(map(cube, [1, 2, 3])) == [1, 8, 27]",
        "assert list(zip(map(cube, [2, 3]), [8, 27])) == [(8, 8), (27, 27)]",
        "assert not list(filter(lambda x: cube(x) != x * x * x, range(6)))",
        "for x, y in {2: 8, 3: 27}.items():\n    assert cube(x) == y",
    ),
    "all of a map": asserted(
        "square",
        "def square(x): return x * x",
        "assert all(map(lambda case: square(case[0]) == case[1], [(2, 4), (5, 25)]))",
        "assert all(map(lambda case: square(case[0]) == case[1], [(3, 9)]))",
    ),
    "near alone": asserted(
        "third",
        "def third(x): return x / 3",
        "assert isclose(third(7), 7 / 3)",
        "assert isclose(third(2), 2 / 3)",
    ),
    "sorted alone": asserted(
        "common",
        "def common(a, b): return [x for x in a if x in b]",
        "assert sorted(common([3, 4, 5], [5, 4])) == sorted([5, 4])",
        "assert sorted(common([1], [1])) == [1] or sorted(common([1], [1])) == sorted([1])",
    ),
    "abs alone": asserted(
        "root",
        "def root(x): return x ** 0.5",
        "assert abs(root(4) - 2) < 1e-6",
        "assert abs(root(2) - 1.4142135) < 1e-6",
    ),
    "check in a loop": checked(
        "square",
        "def square(x): return x * x",
        "def check(candidate):\n    for i in range(2, 9):\n        assert candidate(i) == i * i\n",
    ),
    "near": asserted(
        "half",
        "def half(x): return x / 2",
        "assert abs(half(3) - 1.5) < 1e-9",
        "assert math.isclose(half(5), 2.5)",
        "assert isclose(half(7), 3.5)",
        "assert max(abs(half(x) - x / 2) for x in (1, 8)) < 1e-6",
    ),
    "library without an import": asserted(
        "letters",
        "def letters(x): return list(x)",
        "assert Counter(letters('aab')) == Counter({'a': 2, 'b': 1})",
        "assert collections.Counter(letters('xx'))['x'] == 2",
        "assert json.dumps(letters('pq')) == '[\"p\", \"q\"]'",
        "assert re.fullmatch('c,d', ','.join(letters('cd')))",
        "assert functools.reduce(operator.add, letters('ef')) == 'ef'",
    ),
    "exceptions": asserted(
        "parse",
        "def parse(x):\n    if x is None: raise TypeError('nothing')\n    return int(x)",
        "assert raises(ValueError, 'x') and raises(TypeError, None) and not raises(Exception, '3')",
        "assert parse('12') == 12",
        setup=(
            "def raises(kind, value):\n    try:\n        parse(value)\n"
            "    except kind:\n        return True\n    return False"
        ),
    ),
    "message": asserted(
        "add",
        "def add(a, b): return a + b",
        "assert add(1, 2) == 3, 'one and two'",
        "assert (add(2, 2), add(3, 3)) == (4, 6), f'got {add(2, 2)}'",
    ),
    "kinds": asserted(
        "pairs",
        "def pairs(x): return {k: (k, [k]) for k in x}",
        "assert pairs([1, 2]) == {1: (1, [1]), 2: (2, [2])}",
        "assert pairs('a')['a'][1] == ['a'] and list(pairs('bc')) == ['b', 'c']",
    ),
    "a sum of the argument": asserted(
        "total",
        "def total(x): return sum(x)",
        "assert same([1, 2]) and same([5]) and same([])",
        setup="def same(values):\n    got = total(values)\n    return got == sum(values)",
    ),
    "check": checked(
        "below",
        "def below(x, n): return [v for v in x if v < n]",
        "METADATA = {'author': 'x', 'dataset': 'test'}\n\n\ndef check(candidate):\n"
        "    assert candidate([1, 2, 3], 3) == [1, 2]\n    assert candidate([5, 1], 2) == [1]\n"
        "    assert candidate([], 1) == []\n",
    ),
    "check in loops": checked(
        "shift",
        "def shift(text, n): return ''.join(chr((ord(c) - 97 + n) % 26 + 97) for c in text)",
        "def check(candidate):\n    from random import randint, choice\n    import copy, string\n"
        "    letters = string.ascii_lowercase\n    for number in range(20):\n"
        "        text = ''.join(choice(letters) for _ in range(randint(5, 9)))\n"
        "        kept = copy.deepcopy(text)\n        moved = candidate(text, 3)\n"
        "        assert all(ord(a) == (ord(b) - 97 + 3) % 26 + 97 for a, b in zip(moved, kept))\n"
        "        assert len(moved) == len(kept)\n        assert candidate(moved, 23) == kept\n",
    ),
    "check of a builtin's name": checked(
        "sorted",
        "def sorted(x):\n    x = list(x)\n    x.sort()\n    return x",
        "def check(candidate):\n    for case in ([3, 1, 2], [2, 1], []):\n"
        "        assert candidate(case) == sorted(case)\n    assert candidate([9, 8]) == [8, 9]\n",
    ),
    "check of floats": checked(
        "mean",
        "def mean(x): return sum(x) / len(x)",
        "import math\ndef check(candidate):\n    assert abs(candidate([1.0, 2.0]) - 1.5) < 1e-6\n"
        "    assert math.fabs(candidate([1, 1, 4]) - 2) < 1e-4\n    assert candidate([0, -3]) < 0\n",
    ),
    "check of Solution": checked(
        "Solution().two_sum",
        SOLUTION,
        "def check(candidate):\n    assert candidate(nums=[2, 7, 11, 15], target=9) == [0, 1]\n"
        "    assert candidate(nums=[3, 2, 4], target=6) == [1, 2]\n",
    ),
    "Solution": asserted(
        "two_sum",
        SOLUTION,
        "assert Solution().two_sum([2, 7, 11, 15], 9) == [0, 1]",
        "s = Solution()\nassert sorted(s.two_sum([3, 2, 4], 6)) == [1, 2]",
    ),
    "in place": functions(
        "arrange",
        "def arrange(x): x.sort()",
        "def test_small():\n    a = [3, 1, 2]\n    arrange(a)\n    assert a == [1, 2, 3]\n\n"
        "def test_one():\n    a = [1]\n    arrange(a)\n    assert a == [1] and len(a) == 1\n",
    ),
    "modules that tests import": functions(
        "later",
        "import datetime\ndef later(day, n): return day + datetime.timedelta(days=n)",
        "import copy, datetime, random, statistics, unittest\nfrom collections import OrderedDict\n\n"
        "def test_day():\n    day = datetime.date(2024, 2, 28)\n"
        "    assert later(copy.copy(day), 2) == datetime.date(2024, 3, 1)\n"
        "    case = unittest.TestCase()\n"
        "    case.assertEqual(later(day, 1), datetime.date(2024, 2, 29))\n"
        "    case.assertLess(later(day, -1), day)\n",
    ),
    "callbacks": functions(
        "twice",
        "def twice(f, x): return f(f(x))",
        "def test_twice():\n    seen = []\n    def f(x):\n        seen.append(x)\n        return x + 3\n"
        "    assert twice(f, 1) == 7\n    assert seen == [1, 4]\n    assert twice(str.upper, 'a') == 'A'\n",
    ),
    "calls: numbers": called(
        "power", "def power(a, n): return a ** n", ([3, 2], 9), ([10, 20], 10**20), ([2, -1], 0.5)
    ),
    "calls: lists": called(
        "unique", "def unique(x): return sorted(set(x))", ([[3, 1, 3]], [1, 3]), ([[2, 1]], [1, 2])
    ),
    "calls: dictionaries": called(
        "count",
        "def count(x): return {one: x.count(one) for one in x}",
        ([[1, 1, 2]], {"1": 2, "2": 1}),
        ([["a"]], {"a": 1}),
    ),
    "calls: of Solution": called("two_sum", SOLUTION, ([[2, 7], 9], [0, 1]), ([[3, 2, 4], 6], [1, 2])),
    "stdio: sum": printed("print(sum(map(int, input().split())))", ("1 2\n", "3\n"), ("5 5\n", "10\n")),
    "stdio: lines": printed(
        "import sys\nfor line in sys.stdin: print(line.strip()[::-1])",
        ("ab\ncd\n", "ba\ndc\n"),
        ("xyz\n", "zyx\n"),
    ),
    "stdio: decimals": printed("print(float(input()) / 3)", ("1\n", "0.3333333333\n"), ("6\n", "2.0\n")),
}
