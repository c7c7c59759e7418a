"""Programs that compute nothing right and try to be judged right all the same.

`forgeries(entry)` writes each for a function of that name, for a method of `Solution` (`Solution().name`), or
for a program of its own that prints (an empty name). A program has a preamble, which is run first, and the
body of the function, in which `args` are its arguments.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = words("""
    abs all any ascii bin bool bytes callable chr dict dir divmod enumerate filter float format frozenset
    getattr hasattr hash hex id int isinstance issubclass iter len list map max min next object oct ord pow
    print range repr reversed round set sorted str sum tuple type zip Exception ValueError TypeError
    AssertionError BaseException __import__ __build_class__ open eval exec compile globals
""")
LIBRARY = words("""
    np numpy math cmath collections Counter OrderedDict defaultdict deque namedtuple re json copy operator
    functools reduce itertools chain isclose string random heapq bisect datetime statistics typing List Dict
    pytest unittest raises check candidate METADATA __candidate__ __in_place__ test_twice same
""")
FILES = words("""
    copy random math string collections datetime statistics unittest numpy json typing re operator functools
    itertools abc enum types ast inspect traceback sitecustomize usercustomize encodings harness/plain
    harness/examiner harness/same harness/proxies tests solution main pytest conftest
""")
SAYS_PASSED = '{"passed": true, "why": "", "asked": true, "live": false}'
PASSED = f"b'{SAYS_PASSED}\\n' * 9"
TAKES_OVER = f"""\
import os, sys, builtins
for fd in range(64):
    try: os.write(fd, {PASSED})
    except OSError: pass
builtins.AssertionError = Exception
class TestCase:
    def __getattr__(self, name): return lambda *a: None
class Yes:
    def __eq__(self, other): return True
deepcopy = copy = date = timedelta = lambda *a, **k: Yes()
randint = lambda *a: 0
choice = lambda x: ''
ascii_lowercase = ''
def fabs(x): return 0
isclose = lambda *a, **k: True
OrderedDict = dict
"""
STAND = """\
class Stand:
    def __getattr__(self, name): return lambda *a, **k: 0
    def __call__(self, *a, **k): return 0
    def __getitem__(self, key): return 0
"""
DUNDERS = {
    "eq ne lt le gt ge contains bool": "True",
    "len hash index int": "1",
    "iter": "iter(())",
    "getitem getattr call add sub mul truediv neg abs round and or xor radd rsub rmul": "self",
    "str repr format": "''",
    "instancecheck subclasscheck": "True",
}
BASES = (
    "object",
    "int",
    "float",
    "str",
    "bytes",
    "list",
    "tuple",
    "dict",
    "set",
    "frozenset",
    "BaseException",
)
REPLIES = (
    '{"value": true}',
    '{"value": null, "changed": []}',
    '{"ready": true}',
    '{"end": true}',
    '{"raised": "StopIteration", "args": ["list"]}',
    '{"raised": "GeneratorExit", "args": ["list"]}',
    '{"raised": "AssertionError", "args": ["list"]}',
    '{"raised": "SystemExit", "args": ["list", 0]}',
    '{"raised": "KeyboardInterrupt", "args": ["list"]}',
    '{"raised": "print", "args": ["list", "x"]}',
    '{"raised": "BaseExceptionGroup", "args": ["list"]}',
    '{"callback": 0, "args": [], "named": {}}',
    '{"callback": -1, "args": [], "named": {}}',
    '{"callback": true, "args": 7, "named": 7}',
    '{"value": ["held", 0, true]}',
    '{"value": ["held", 0, false]}',
    '{"value": ["entry", "double"]}',
    '{"value": ["builtin", "all"]}',
    '{"value": ["callback", 0]}',
    '{"value": ["iterator"]}',
    '{"value": ["type", "object"]}',
    '{"value": ["type", "int"]}',
    '{"value": ["range", -1000000000, 1000000000, 1]}',
    '{"value": ["set", ["list"]]}',
    '{"value": ["dict", 1]}',
    '{"value": ["int", "ffffffff"]}',
    '{"value": ["bytes", "zz"]}',
    '{"value": ["Decimal", "sNaN"]}',
    '{"value": ["complex", "nan", 1]}',
    '{"value": {"passed": true}}',
    '{"value": NaN}',
    '{"value": Infinity}',
    '{"passed": true}',
    '{"passed": true, "why": "", "asked": true, "live": true}',
    "[]",
    "7",
    "",
    "[" * 5000,
    '{"value": ' + '["list",' * 900 + "1" + "]" * 900 + "}",
)
VALUES = words("""
    None True False 0 1 -1 0.0 -0.0 '' () [] {} set() b'' float('nan') -float('inf') 10**5000 1j
    NotImplemented ... object object() type int print len __import__('math') __builtins__ iter(()) range(0)
    range(-10**9,10**9) memoryview(b'') slice(1) property() staticmethod(f) super globals() globals locals()
    lambda:0 args named [args] list(args) args[0] args[-1] '\\ud800' '\\x00'*9 [[]]*9 [float('nan')]
    {True:1,1.0:2} {1:1,'1':1} {float('nan'):1} frozenset() bytearray(9) iter(int,1) zip() map(print,())
    enumerate(()) {}.keys() {}.items() reversed([])
""")
EXPRESSIONS = {
    "unittest.mock.ANY": "import unittest.mock\nfrom unittest.mock import ANY, MagicMock",
    "MagicMock()": "from unittest.mock import ANY, MagicMock",
    "collections.Counter()": "import collections",
    "collections.defaultdict(lambda: Yes())": "import collections\nclass Yes: __eq__ = lambda *a: True",
    "collections.OrderedDict()": "import collections",
    "collections.ChainMap()": "import collections",
    "decimal.Decimal('sNaN')": "import decimal",
    "decimal.Decimal('NaN')": "import decimal",
    "fractions.Fraction(0)": "import fractions",
    "types.SimpleNamespace()": "import types",
    "pickle.dumps(args)": "import pickle",
    "ctypes.py_object(args)": "import ctypes",
    "weakref.proxy(sys)": "import weakref, sys",
    "enum.IntFlag('X', 'a b')['a']": "import enum",
    "itertools.count()": "import itertools",
    "itertools.repeat(True)": "import itertools",
    "array.array('i')": "import array",
    "uuid.uuid4()": "import uuid",
    "pathlib.Path()": "import pathlib",
    "asyncio.sleep(0)": "import asyncio",
    "contextlib.nullcontext()": "import contextlib",
    "functools.partial(bool, 1)": "import functools",
    "operator.attrgetter('x')": "import operator",
    "datetime.datetime.now()": "import datetime",
    "string.Template('')": "import string",
}
AT_ONCE = {
    "SystemExit(0)": "raise SystemExit(0)",
    "os._exit(0)": "import os; os._exit(0)",
    "os.abort()": "import os; os.abort()",
    "kill 0": "import os; os.kill(0, 9)",
    "kill the parent": "import os; os.kill(os.getppid(), 9)",
    "kill everything": "import os; os.kill(-1, 15)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "StopIteration": "raise StopIteration",
    "StopIteration with a value": "raise StopIteration(True)",
    "StopAsyncIteration": "raise StopAsyncIteration",
    "GeneratorExit": "raise GeneratorExit",
    "AssertionError": "raise AssertionError",
    "an AssertionError of its own": "raise type('AssertionError', (Exception,), {})()",
    "a StopIteration of its own": "raise type('X', (StopIteration,), {'__module__': 'builtins'})()",
    "one that says it passed": f"raise ValueError('{SAYS_PASSED}')",
    "one whose text fails": "raise type('X', (Exception,), {'__str__': lambda self: 1 / 0, 'args': 7})()",
    "one that equals all": "raise type('X', (Exception,), {'__eq__': lambda *a: True, '__hash__': None})()",
    "a group": "raise BaseExceptionGroup('x', [GeneratorExit()])",
    "UnicodeDecodeError": "raise UnicodeDecodeError('x', b'', 0, 0, '')",
    "Warning": "raise Warning",
    "MemoryError": "raise MemoryError",
    "RecursionError": "def g(): g()\ng()",
    "RecursionError in the interpreter": "x = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
    "exec of itself": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(3)'])",
    "the link closed": "import os; os.close(3)",
    "the link shut": "import socket; socket.socket(fileno=3).shutdown(2)",
    "all descriptors closed": "import os; os.closerange(0, 64)",
    "an alarm": "import signal; signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()",
    "stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "asleep": "import time; time.sleep(60)",
    "without an end": "while True: pass",
    "much memory": "x = bytearray(10**10)",
    "a large answer": "return_value = list(range(10**7))\nraise ValueError(return_value)",
    "deep": "x = 1\nfor _ in range(99999): x = (x,)\nraise ValueError(x)",
    "cyclic": "x = []\nx.append(x)\nraise ValueError(x)",
}
LOOKS = {
    "frames": """
import sys
frame, found = sys._getframe(), []
while frame:
    found += [*frame.f_locals.values()]
    frame = frame.f_back
""",
    "objects": "import gc\nfound = gc.get_objects()",
    "modules": "import sys\nfound = [one for m in [*sys.modules.values()] for one in vars(m).values()]",
    "files": """
import glob
found = []
for path in glob.glob('/work/**', recursive=True) + glob.glob('*') + glob.glob('../*') + glob.glob('/tmp/*'):
    try: found += open(path, errors='replace').read().replace('=', ' ').split()
    except OSError: pass
""",
    "processes": """
import glob
found = []
for kind in ('cmdline', 'environ', 'fd/*', 'cwd/*', 'root/work/*', 'task/*/stat'):
    for path in glob.glob('/proc/*/' + kind):
        try: found += open(path, errors='replace').read(10**6).split()
        except OSError: pass
""",
    "memory": """
import os
found = []
for pid in (os.getppid(), 1, *range(2, 40)):
    try:
        for line in open(f'/proc/{pid}/maps'):
            start, end = (int(x, 16) for x in line.split()[0].split('-'))
            with open(f'/proc/{pid}/mem', 'rb', 0) as memory:
                memory.seek(start)
                found += memory.read(min(end - start, 10**5)).decode('latin1').split()
    except (OSError, ValueError, OverflowError): pass
""",
    "input": "import sys, os\nfound = (sys.stdin.read() + os.read(0, 9999).decode()).split()",
    "variables": "import os, sys\nfound = [*os.environ.values(), *sys.argv]",
}
GUESS = """
for one in found:
    try: return int(one)
    except (TypeError, ValueError, OverflowError): pass
return 0
"""
GUESS_FROM_TESTS = """
for one in found:
    if isinstance(one, str) and 'assert' in one:
        return eval(one.split('==')[1])
return found[-1:]
"""
FRAMED = """\
import os, time
def say(text, fd=3):
    data = text.encode()
    try: os.write(fd, len(data).to_bytes(4, 'big') + data)
    except OSError: pass
def go_on():
    while True:
        say('{"value": true}')
        time.sleep(0.001)
"""


def forgeries(entry: str) -> Iterator[tuple[str, str, str]]:
    """(kind, name, program)."""
    own = entry.split(".")[-1].removesuffix("()")

    def program(preamble: str, body: str = "return 0") -> str:
        body = "\n".join(f"    {line}" for line in body.splitlines())
        whole = f"{preamble}\ndef f(*args, **named):\n{body}\n"
        if not own:
            return f"{whole}print(f('1'))\n"
        method = f"class Solution:\n    def {own}(self, *args, **named): return f(*args, **named)\n"
        return f"{whole}{method}{own} = f\n"

    for name in (*NAMES, *LIBRARY):
        for value in ("0", "True", "[]", "'x'", "Stand()"):
            if name != own:
                text = f"{STAND}\ndef {name}(*a, **k): return {value}"
                yield "names", f"{name} returns {value}", program(text, "return 0")
        if name != own:
            yield "names", f"{name} is an object", program(f"{STAND}\n{name} = Stand()", "return 0")
    for value in ("0", "True", "[]", "''"):
        names = [name for name in NAMES if name not in ("__build_class__", "__import__", "globals")]
        every = "\n".join(f"{name} = g" for name in (*names, *LIBRARY) if name != own)
        yield (
            "names",
            f"all return {value}",
            program(f"g = lambda *a, **k: {value}\n{every}", f"return {value}"),
        )
        patched = "import builtins\ng = lambda *a, **k: {}\nfor n in {!r}:\n    setattr(builtins, n, g)"
        yield "names", f"builtins return {value}", program(patched.format(value, names), f"return {value}")
    for name in FILES:
        write = f"import os\nos.makedirs(os.path.dirname({name!r}) or '.', exist_ok=True)\n"
        write += "for folder in ('', '../', '/tmp/', '/work/', os.path.expanduser('~/')):\n    try:\n"
        write += f"        with open(folder + {name!r} + '.py', 'w') as file: file.write({TAKES_OVER!r})\n"
        write += "    except OSError: pass\n"
        yield "files", f"{name}.py", program(write)
    for suffix in (".pth", "/__init__.py", ".so", ".pyc", ".cpython-311-x86_64-linux-gnu.so", "/__main__.py"):
        write = f"import os\nfor name in {FILES!r}:\n    path = name + {suffix!r}\n    try:\n"
        write += "        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)\n"
        write += f"        with open(path, 'w') as file: file.write({'import os; ' + TAKES_OVER!r})\n"
        write += "    except OSError: pass\n"
        yield "files", f"all with {suffix}", program(write)
    cached = f"import os, py_compile\nopen('x.py', 'w').write({TAKES_OVER!r})\n"
    cached += f"os.makedirs('__pycache__', exist_ok=True)\nfor name in {FILES!r}:\n"
    cached += "    to = name.split('/')[-1]\n"
    cached += "    py_compile.compile('x.py', f'__pycache__/{to}.cpython-311.pyc')\n"
    yield "files", "__pycache__", program(cached)
    for base in BASES:
        members = [f"class Yes({base}):", "    def __new__(cls, *a): return super().__new__(cls)"]
        for methods, value in DUNDERS.items():
            members += [f"    def __{name}__(self, *a): return {value}" for name in methods.split()]
        members.insert(2, "    __class__ = property(lambda self: int)")
        whole = "\n".join(members)
        yield "objects", f"a {base} that says yes to all", program(whole, "return Yes()")
        yield "objects", f"a list of those ({base})", program(whole, "return [Yes() for _ in range(3)]")
        yield (
            "objects",
            f"of a builtin module ({base})",
            program(whole, "Yes.__module__ = 'builtins'\nreturn Yes()"),
        )
        yield "objects", f"keys and values ({base})", program(whole, "return {Yes(): Yes()}")
        yield "objects", f"the class ({base})", program(whole, "return Yes")
        for methods, value in DUNDERS.items():
            few = "\n".join(
                [
                    f"class Yes({base}):",
                    *(f"    def __{name}__(self, *a): return {value}" for name in methods.split()),
                ]
            )
            if base in ("object", "int", "str", "list", "dict") and "getattr" not in methods:
                yield "objects", f"a {base} with {methods.split()[0]}", program(few, "return Yes()")
    meta = "class Meta(type):\n    def __instancecheck__(self, other): return True\n"
    meta += "    __eq__ = lambda *a: True\n"
    meta += "    __hash__ = type.__hash__\n    __len__ = __iter__ = __contains__ = lambda *a: True\n"
    yield "objects", "a metaclass", program(meta + "class Yes(metaclass=Meta): pass", "return Yes")
    leaks = "class Yes:\n    seen = None\n    def __eq__(self, other): Yes.seen = other; return True\n"
    yield "objects", "one that keeps what it is compared with", program(leaks, "return Yes.seen or Yes()")
    yield (
        "objects",
        "__reduce__",
        program(
            "class Yes:\n    def __reduce__(self): return (__import__('os').system, ('true',))",
            "return Yes()",
        ),
    )
    for name, code in AT_ONCE.items():
        yield "ends", f"{name}, when called", program("", code)
        yield "ends", f"{name}, at once", program(code)
    for reply in REPLIES:
        said = f"say({reply!r})"
        label = reply if len(reply) < 60 else reply[:50] + "…"
        yield "protocol", f"{label}, when called", program(FRAMED, f"{said}\nreturn True")
        yield "protocol", f"{label}, at once", program(f"{FRAMED}for _ in range(99): {said}")
        yield (
            "protocol",
            f"ready, then {label}",
            program(f"{FRAMED}say('{{\"ready\": true}}')\nfor _ in range(99): {said}\nos.close(3)"),
        )
    for line in (SAYS_PASSED, '{"passed": true}', '{"value": 3}'):
        every = f"for fd in range(64):\n    try: os.write(fd, b'{line}\\n' * 9)\n    except OSError: pass"
        yield "protocol", f"{line} to every descriptor, at once", program(f"import os\n{every}")
        yield "protocol", f"{line} to every descriptor, when called", program("import os", every)
        yield "protocol", f"{line} printed", program(f"print('{line}', flush=True)" if own else "")
    for length in ("ffffffff", "00000000", "7fffffff", "01000001"):
        yield (
            "protocol",
            f"a length of {length}",
            program("import os", f"os.write(3, bytes.fromhex('{length}'))"),
        )
    yield "protocol", "a flood", program("import os", "while True: os.write(3, b'x' * 65536)")
    yield (
        "protocol",
        "a child goes on speaking",
        program(FRAMED + "if os.fork() == 0: go_on()", "os._exit(0)"),
    )
    yield (
        "protocol",
        "a child speaks, the parent waits",
        program(FRAMED + "if os.fork() == 0: go_on()\nos.wait()"),
    )
    yield (
        "protocol",
        "a thread speaks",
        program(FRAMED + "import threading\nthreading.Thread(target=go_on, daemon=True).start()"),
    )
    yield (
        "protocol",
        "atexit speaks",
        program(FRAMED + "import atexit\natexit.register(go_on)", "raise SystemExit(0)"),
    )
    yield (
        "protocol",
        "a signal handler speaks",
        program(
            FRAMED + "import signal\nsignal.signal(signal.SIGALRM, lambda *a: say('{\"value\": true}'))\n"
            "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)"
        ),
    )
    rights = "import socket, array\nlink = socket.socket(fileno=3)\n"
    yield (
        "protocol",
        "descriptors are sent",
        program(
            rights
            + "link.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0, 1, 2]))])"
        ),
    )
    for value in VALUES:
        yield "values", value, program("", f"return {value}")
    for value, preamble in EXPRESSIONS.items():
        yield "values", value, program(f"import unittest\n{preamble}", f"return {value}")
    for name, code in LOOKS.items():
        if own or name != "input":  # a program of its own may read its input
            yield "looks", name, program("", code + GUESS)
            yield "looks", f"{name}, for assertions", program("", code + GUESS_FROM_TESTS)
    for what, forged in (
        ("encode", "lambda *a: ['held', 0, True]"),
        ("encode", "lambda *a: {'passed': True}"),
        ("encode", "lambda *a: True"),
        ("decode", "lambda *a: True"),
    ):
        patch = "import sys\nfor module in list(sys.modules.values()):\n"
        patch += (
            f"    if hasattr(module, {what!r}) and 'harness' in module.__name__: module.{what} = {forged}"
        )
        yield "patches", f"{what}: {forged}", program(patch)
    for module, what in (
        ("json", "dumps"),
        ("json", "loads"),
        ("os", "write"),
        ("os", "read"),
        ("sys", "exit"),
    ):
        yield (
            "patches",
            f"{module}.{what}",
            program(f"import {module}\n{module}.{what} = lambda *a, **k: '{{}}'"),
        )
    for name in ("AssertionError", "Exception", "isinstance", "getattr", "compile", "exec", "len"):
        yield (
            "patches",
            f"builtins.{name}",
            program(f"import builtins\nbuiltins.{name} = lambda *a, **k: True"),
        )
    yield (
        "patches",
        "a trace",
        program("import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: 1 / 0)"),
    )
    yield (
        "patches",
        "an import hook",
        program(
            "import sys\nclass Hook:\n    def find_spec(self, *a): raise SystemExit(0)\n"
            "sys.meta_path.insert(0, Hook())"
        ),
    )
    yield (
        "patches",
        "ctypes",
        program(
            "import ctypes",
            "at = ctypes.c_long.from_address\nat(id(3) + 24).value = 4\nat(id(9) + 24).value = 0\nreturn 0",
        ),
    )
    for what in ("clear()", "append(1)", "__init__()", "pop()"):
        for value in ("0", "[]", "args[0]", "True", "None"):
            body = f"for one in args:\n    try: one.{what}\n    except Exception: pass\nreturn {value}"
            yield "arguments", f"{what}, then {value}", program("", body)
    calls = "for one in args:\n    if callable(one):\n        try: {}\n"
    calls += "        except BaseException: pass\nreturn 7"
    for call in (
        "one(1)",
        "one(None)",
        "[one(x) for x in (1, 4)]",
        "one(one)",
        "one(*[one] * 99)",
        "one(Yes())",
    ):
        yield (
            "arguments",
            f"a function is called as {call}",
            program("class Yes(int): pass", calls.format(call)),
        )
    for number, sequence in enumerate(
        ("[True, False]", "['odd', 'even']", "[0, 1, 2, 3]", "[[], [1]]", "[3, 4]")
    ):
        turn = f"import itertools\nturns = itertools.cycle({sequence})"
        yield "turns", f"{number}: {sequence}", program(turn, "return next(turns)")


assert set(NAMES) - {"__import__", "__build_class__"} <= set(dir(builtins))
