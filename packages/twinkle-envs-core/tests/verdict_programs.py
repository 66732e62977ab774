# ruff: noqa: E501  # programs, whose lines are as they are
"""Solutions that try to score without solving, and odd ones that solve.

Each is a solution and the tests it meets. `F` is the usual task: `f(x)` is `x * x`.
"""

from __future__ import annotations

import sys

__all__ = ["CORRECT", "FORGERIES"]

F = "assert f(2) == 4\nassert f(3) == 9\n"
UNIT = """import unittest
class T(unittest.TestCase):
    def test_two(self):
        self.assertEqual(f(2), 4)
    def test_three(self):
        self.assertEqual(f(3), 9)
"""
LOOP = "for x, want in [(2, 4), (3, 9)]:\n    assert f(x) == want\n"
FUNC = "CASES = [(2, 4), (3, 9)]\ndef test_f():\n    for x, want in CASES:\n        assert f(x) == want\n"
FRAME_SEARCH = """
    while frame is not None:
        for names in (frame.f_locals, frame.f_globals):
            if "want" in names:
                return names["want"]
        frame = frame.f_back
    return None
"""

FORGERIES: dict[str, tuple[str, str]] = {
    "signs with the harness's own function": (
        "import os\n"
        "def forge(names):\n"
        "    body = repr({'stage': 'tests', 'text': '', 'ended': True, 'missing': [], 'reached': [0],\n"
        "        'cases': [('line 1', 'passed', '', '')], 'absent': [], 'refused': []})\n"
        "    line = '\\nverdict %s %s\\n' % (names['sign'](body.encode()), body)\n"
        "    for fd in range(3, 120):\n"
        "        try: os.write(fd, line.encode())\n"
        "        except OSError: pass\n"
        "    os._exit(0)\n"
        "for c in object.__subclasses__():\n"
        "    if c.__name__ == 'ComparisonCheck': forge(c.compare.__globals__)\n"
        "def f(x): return 0",
        F,
    ),
    "SystemExit in the function": ("def f(x): raise SystemExit", F),
    "sys.exit(0) in the function": ("import sys\ndef f(x): sys.exit(0)", F),
    "exit() in the function": ("def f(x): exit()", F),
    "SystemExit at import": ("raise SystemExit(0)", F),
    "os._exit(0) in the function": ("import os\ndef f(x): os._exit(0)", F),
    "os._exit(0) at import": ("import os\nos._exit(0)", F),
    "an __eq__ that exits": (
        "class E:\n    def __eq__(self, other): raise SystemExit\ndef f(x): return E()",
        F,
    ),
    "always equal": ("class E:\n    def __eq__(self, o): return True\ndef f(x): return E()", F),
    "always equal, unittest": (
        "class E:\n    def __eq__(self, o): return True\ndef f(x): return E()",
        UNIT,
    ),
    "always equal in a list": (
        "class E:\n    def __eq__(self, o): return True\ndef f(x): return [1, E()]",
        "assert f(2) == [1, 2]",
    ),
    "always equal int": (
        "class E(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n"
        "def f(x): return E(1)",
        F,
    ),
    "never unequal": (
        "class E:\n    def __ne__(self, o): return False\ndef f(x): return E()",
        "assert not f(2) != 4",
    ),
    "mock.ANY": ("from unittest import mock\ndef f(x): return mock.ANY", F),
    "contains everything": (
        "class E:\n    def __contains__(self, o): return True\ndef f(x): return E()",
        "assert 4 in f(2)",
    ),
    "differences are zero": (
        "class E:\n    def __sub__(self, o): return 0.0\ndef f(x): return E()",
        "assert abs(f(2) - 4) < 1e-9",
    ),
    "differences are itself": (
        "class E:\n    def __sub__(self, o): return self\n    def __abs__(self): return 0\n"
        "def f(x): return E()",
        "assert abs(f(2) - 4) < 1e-9",
    ),
    "rounds to the always equal": (
        "class E:\n    def __eq__(self, o): return True\n    def __round__(self, n): return self\n"
        "def f(x): return E()",
        "assert round(f(2), 2) == 4",
    ),
    "shadowed sorted": (
        "def sorted(x): return [1, 2, 3]\ndef f(x): return [3, 1, 2]",
        "assert sorted(f(2)) == [1, 2, 3] and f(2) == sorted([3, 2, 1])",
    ),
    "shadowed abs": ("def abs(x): return 0\ndef f(x): return 7", "assert abs(f(2) - 4) == 0"),
    "shadowed len": ("def len(x): return 3\ndef f(x): return []", "assert len(f(2)) == 3"),
    "patched builtins.abs": (
        "import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return 7",
        "assert abs(f(2) - 4) == 0",
    ),
    "patched builtins in the function": (
        "import builtins\ndef f(x):\n    builtins.round = lambda *a: 0\n    return 7",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
        "        self.assertAlmostEqual(f(2), 4)",
    ),
    "patched math": (
        "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 7",
        "import math\nassert math.isclose(f(2), 4)",
    ),
    "patched assertEqual": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\ndef f(x): return 7",
        UNIT,
    ),
    "new code for assertEqual": (
        "import unittest\n"
        "unittest.TestCase.assertEqual.__code__ = (lambda *a, **k: None).__code__\n"
        "def f(x): return 7",
        UNIT,
    ),
    "own unittest in sys.modules": (
        "import sys, types\nm = types.ModuleType('unittest')\n"
        "class TestCase: pass\nm.TestCase = TestCase\nsys.modules['unittest'] = m\n"
        "def f(x): return 7",
        UNIT,
    ),
    "SkipTest": (
        "import unittest\ndef f(x): raise unittest.SkipTest('no')",
        UNIT,
    ),
    "a finder on sys.meta_path": (
        "import sys\nclass F:\n    def find_spec(self, name, path, target=None):\n"
        "        raise SystemExit\n"
        "sys.meta_path.insert(0, F())\ndef f(x): return 7",
        "import statistics\n" + F,
    ),
    "a printed OK": ("print('OK')\nprint('All tests pass.')\ndef f(x): return 7", F),
    "a printed report": (
        "import os\nfor n in range(3, 200):\n    try: os.write(n, b'verdict ' + b'0' * 64 + b' {}\\n')\n"
        "    except OSError: pass\ndef f(x): return 7",
        F,
    ),
    "closed descriptors": ("import os\nos.closerange(3, 300)\ndef f(x): return 4", F),
    "atexit": ("import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 7", F),
    "a thread that exits": (
        "import os, threading\nthreading.Timer(0.2, os._exit, (0,)).start()\n"
        "def f(x):\n    import time\n    time.sleep(5)",
        F,
    ),
    "a thread that outlives": (
        "import threading, time\n"
        "def g():\n    time.sleep(3)\n    print('OK')\n"
        "threading.Thread(target=g).start()\ndef f(x): return 7",
        F,
    ),
    "SIGKILL by itself": ("import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGKILL)", F),
    "sys._getframe": (f"import sys\ndef f(x):\n    frame = sys._getframe(){FRAME_SEARCH}", LOOP),
    "inspect.currentframe": (
        f"import inspect\ndef f(x):\n    frame = inspect.currentframe(){FRAME_SEARCH}",
        LOOP,
    ),
    "tb_frame": (
        "def f(x):\n    try: 1 / 0\n    except Exception as e: frame = e.__traceback__.tb_frame"
        + FRAME_SEARCH,
        LOOP,
    ),
    "a frame of traceback.walk_stack": (
        f"import traceback\ndef f(x):\n    frame = next(traceback.walk_stack(None))[0]{FRAME_SEARCH}",
        FUNC,
    ),
    "a frame of traceback.walk_tb": (
        "import traceback\ndef f(x):\n    try: 1 / 0\n    except Exception as e:\n"
        "        frame = next(traceback.walk_tb(e.__traceback__))[0]" + FRAME_SEARCH,
        FUNC,
    ),
    "the frame of a generator": (
        f"def g():\n    frame = me.gi_frame\n    yield h(frame)\ndef h(frame):{FRAME_SEARCH}"
        "def f(x):\n    global me\n    me = g()\n    return next(me)",
        LOOP,
    ),
    "gc.get_objects": (
        "import gc\ndef f(x):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, dict) and 'CASES' in o: return dict(o['CASES'])[x]",
        FUNC,
    ),
    "sys.settrace": (
        "import sys\nseen = []\nsys.settrace(lambda frame, *a: seen.append(frame))\n"
        "def f(x): return seen[-1].f_back.f_locals['want']",
        LOOP,
    ),
    "a signal handler's frame": (
        "import signal, time\nseen = []\nsignal.signal(signal.SIGALRM, lambda n, f: seen.append(f))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.1)\n"
        "def f(x):\n    time.sleep(0.3)\n    frame = seen[0]" + FRAME_SEARCH,
        LOOP,
    ),
    "ctypes": ("import ctypes\ndef f(x): return ctypes.c_int(4).value + 5 * (x - 2)", F),
    "/proc/self/mem": ("open('/proc/self/mem', 'rb')\ndef f(x): return 7", F),
    "a fork that tries both": (
        "import os\ndef f(x):\n    for guess in range(20):\n        pid = os.fork()\n"
        "        if not pid: return guess\n        if not os.waitpid(pid, 0)[1]: return guess",
        F,
    ),
    "an audit hook of its own": (
        "import sys\nseen = []\nsys.addaudithook(lambda e, a: seen.append((e, a)))\n"
        "def f(x): return 7",
        F,
    ),
    "nothing defined": ("", F),
    "wrong": ("def f(x): return x + 2", F),
    "empty for a loop": ("def f(x): return []", "for one in f(2):\n    assert one == 4"),
    "the hook's __globals__": (
        "def f(x):\n    import sys\n    try: sys.addaudithook(1)\n    except BaseException as e:\n"
        "        t = e.__traceback__\n        while t.tb_next: t = t.tb_next\n"
        "        return t.tb_frame.f_globals and 4",
        F,
    ),
    "sys.unraisablehook": (
        "import sys, os\nkept = [os.dup(n) for n in range(3, 9) if os.path.exists(f'/dev/fd/{n}')]\n"
        "def hook(u):\n    sign = u.object.__globals__['sign']\n"
        "sys.unraisablehook = hook\nos.closerange(3, 200)\ndef f(x): return 7",
        F,
    ),
    "a patched asyncio.run": (
        "import asyncio\nasyncio.runners.Runner.run = lambda self, c, **k: c.close()\n"
        "async def f(x): return 7",
        "async def test_f():\n    assert await f(2) == 4\n    assert await f(3) == 9",
    ),
    "an __eq__ that takes itself away": (
        "class A: pass\ndef f(x):\n"
        "    A.__eq__ = lambda s, o: (delattr(A, '__eq__'), True)[1]\n    return A()",
        F,
    ),
    "an __eq__ that changes its class": (
        "class B: pass\nclass A:\n    def __eq__(s, o):\n        s.__class__ = B\n"
        "        return True\ndef f(x): return A()",
        F,
    ),
    "a difference of 0 in assertAlmostEqual": (
        "class A(float):\n    def __sub__(s, o): return 0.0\n    __rsub__ = __sub__\n"
        "def f(x): return A(7)",
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertAlmostEqual(f(2), 4)",
    ),
    "__eq__ called by its name": (
        "class A:\n    def __eq__(s, o): return True\ndef f(x): return A()",
        "assert f(2).__eq__(4)",
    ),
    "a builtin that puts itself back": (
        "import builtins\nr = builtins.round\ndef f(x):\n    def fake(*a):\n"
        "        builtins.round = r\n        return 0\n    builtins.round = fake\n    return 7",
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertAlmostEqual(f(2), 4)",
    ),
    "the folder of its process": (
        "import os\nd = os.open('/proc/self', os.O_RDONLY)\ndef f(x): return x * x",
        F,
    ),
    "a callback's __globals__": (
        "def apply(g, x):\n    g.__globals__['f'] = lambda x: 4\n"
        "    g.__globals__['__builtins__']['AssertionError'] = None\n    return g(x)\n"
        "def f(x): return 7",
        "assert apply(lambda x: x + 1, 2) == 3\nassert f(2) == 4",
    ),
    "a process by multiprocessing": (
        "import multiprocessing\ndef w(): pass\ndef f(x):\n"
        "    p = multiprocessing.get_context('fork').Process(target=w)\n    p.start()\n    p.join()\n"
        "    return 7",
        F,
    ),
    "a patched contextlib": (
        "import contextlib\n"
        "contextlib._GeneratorContextManager.__exit__ = lambda *a: True\ndef f(x): return 7",
        UNIT,
    ),
}

C_DEPTH = 4000 if sys.version_info < (3, 12) else 200  # later ones bound calls through C
CORRECT: dict[str, tuple[str, str]] = {
    "tests that bind names in odd ways": (
        "def f(x): return x * x",
        "total = 0\n"
        "def test_global():\n    global total, fresh\n    total += 1\n    fresh = 2\n"
        "    assert f(total) == 1\nassert (walrus := f(2)) == 4\nfor i in range(2): assert f(i) == i",
    ),
    "plain": ("def f(x): return x * x", F),
    "unittest style": ("def f(x): return x * x", UNIT),
    "pytest style": ("def f(x): return x * x", FUNC),
    "generator": (
        "def g(n):\n    for i in range(n):\n        yield i * i",
        "assert list(g(3)) == [0, 1, 4]",
    ),
    "match": (
        "def f(x):\n    match x:\n        case int(): return x * x\n        case _: return None",
        F,
    ),
    "walrus": ("def f(x): return y * y if (y := x) else 0", F),
    "async": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x * x",
        "import asyncio\nassert asyncio.run(f(2)) == 4",
    ),
    "async test": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x * x",
        "async def test_f():\n    assert await f(2) == 4",
    ),
    "async unittest": (
        "async def f(x): return x * x",
        "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n"
        "    async def test_f(self):\n        self.assertEqual(await f(2), 4)",
    ),
    "gather and tasks": (
        "import asyncio\nasync def one(x): return x * x\n"
        "async def f(*xs): return await asyncio.gather(*(asyncio.create_task(one(x)) for x in xs))",
        "import asyncio\nassert asyncio.run(f(1, 2, 3)) == [1, 4, 9]",
    ),
    "threads": (
        "import threading\ndef f(x):\n    out = []\n"
        "    t = threading.Thread(target=lambda: out.append(x * x))\n    t.start()\n    t.join()\n"
        "    return out[0]",
        F,
    ),
    "a pool of threads": (
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(4)\n"
        "def f(x): return list(pool.map(lambda y: y * y, [x]))[0]",
        F,
    ),
    "subprocess": (
        "import subprocess, sys\ndef f(x):\n"
        "    code = f'print({x} ** 2)'\n"
        "    return int(subprocess.run([sys.executable, '-c', code], capture_output=True, "
        "text=True, check=True).stdout)",
        F,
    ),
    "files": (
        "import os, tempfile\ndef f(x):\n"
        "    with tempfile.NamedTemporaryFile('w+', delete=False) as t: t.write(str(x * x))\n"
        "    try:\n        with open(t.name) as g: return int(g.read())\n"
        "    finally: os.unlink(t.name)",
        F,
    ),
    "if __name__": (
        "import sys\ndef f(x): return x * x\nif __name__ == '__main__':\n"
        "    print(f(int(input())))\n    sys.exit(0)",
        F,
    ),
    "globals": (
        "count = 0\ndef f(x):\n    global count\n    count += 1\n    return x * x",
        F + "assert count == 2",
    ),
    "recursion to 5,000": (
        "import sys\nsys.setrecursionlimit(20_000)\ndef s(n): return n + s(n - 1) if n else 0",
        "assert s(5000) == 12502500",
    ),
    "cached recursion": (
        "import sys, functools\nsys.setrecursionlimit(20_000)\n@functools.lru_cache(None)\n"
        "def s(n): return n + s(n - 1) if n else 0",
        f"assert s({C_DEPTH}) == {C_DEPTH * (C_DEPTH + 1) // 2}",
    ),
    "warns its caller": (
        "import warnings\n"
        "def f(x):\n    warnings.warn('old', DeprecationWarning, stacklevel=2)\n    return x * x",
        F,
    ),
    "a million steps": (
        "def f(x):\n    n = 0\n    for _ in range(1_000_000): n += 1\n    return x * x",
        F,
    ),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int",
        "assert P(1, 2) == P(1, 2) and P(1, 2) != P(2, 1)\nassert P(1, 2).x == 1",
    ),
    "enum": (
        "from enum import Enum\nclass C(Enum):\n    RED = 1\ndef f(): return C.RED",
        "assert f() is C.RED\nassert f() == C.RED\nassert C(1).name == 'RED'",
    ),
    "IntEnum": (
        "from enum import IntEnum\nclass C(IntEnum):\n    RED = 1\ndef f(): return C.RED",
        "assert f() == 1",
    ),
    "namedtuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        "assert f() == (1, 2)\nassert f().x == 1",
    ),
    "typing.NamedTuple": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int = 1\ndef f(): return P()",
        "assert f() == (1,)",
    ),
    "an own __eq__": (
        "class V:\n    def __init__(self, x): self.x = x\n"
        "    def __eq__(self, o): return isinstance(o, V) and self.x == o.x\n"
        "    def __add__(self, o): return V(self.x + o.x)\n    def __mul__(self, n): "
        "return V(self.x * n)",
        "assert V(1) + V(2) == V(3)\nassert V(1) != V(2)\nassert V(2) * 3 == V(6)",
    ),
    "context manager": (
        "import contextlib\n@contextlib.contextmanager\ndef m():\n    yield 4",
        "with m() as x:\n    assert x == 4",
    ),
    "decorators": (
        "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def h(x): return g(g(x))\n"
        "    return h\n@twice\ndef f(x): return x * 2",
        "assert f(1) == 4\nassert f.__name__ == 'f'",
    ),
    "metaclass": (
        "class M(type):\n    def __call__(cls, *a):\n        if not hasattr(cls, 'one'): "
        "cls.one = super().__call__(*a)\n        return cls.one\nclass S(metaclass=M): pass",
        "assert S() is S()",
    ),
    "closure": (
        "def counter():\n    n = 0\n    def step():\n        nonlocal n\n        n += 1\n"
        "        return n\n    return step",
        "c = counter()\nassert c() == 1\nassert c() == 2",
    ),
    "descriptors and properties": (
        "class A:\n    def __init__(self): self._x = 1\n    @property\n    def x(self): return self._x\n"
        "    @x.setter\n    def x(self, v):\n        if v < 0: raise ValueError(v)\n"
        "        self._x = v",
        "import pytest\na = A()\na.x = 5\nassert a.x == 5\n"
        "with pytest.raises(ValueError):\n    a.x = -1",
    ),
    "raises": (
        "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5",
        "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.x = -1\n"
        "    def test_f(self):\n        with self.assertRaises(ValueError) as seen: f(self.x)\n"
        "        self.assertIn('negative', str(seen.exception))\n"
        "        self.assertRaises(ValueError, f, -2)\n    def test_sub(self):\n"
        "        for n in (1, 4):\n            with self.subTest(n=n): self.assertEqual(f(n) ** 2, n)",
    ),
    "parametrize and approx": (
        "def f(x): return x / 3",
        "import pytest\n@pytest.mark.parametrize('x, want', [(1, 0.333333), (3, 1)])\n"
        "def test_f(x, want):\n    assert f(x) == pytest.approx(want, rel=1e-3)",
    ),
    "logging, warnings, traceback": (
        "import logging, traceback, warnings\nlogging.basicConfig()\n"
        "def f(x):\n    logging.getLogger(__name__).warning('at %s', x)\n"
        "    warnings.warn('old', DeprecationWarning)\n    try: 1 / 0\n    except ZeroDivisionError:\n"
        "        traceback.print_exc()\n        assert 'ZeroDivisionError' in traceback.format_exc()\n"
        "    return x * x",
        F,
    ),
    "typing and abc": (
        "from __future__ import annotations\nfrom abc import ABC, abstractmethod\n"
        "from typing import Generic, Protocol, TypeVar\nT = TypeVar('T')\n"
        "class Q(Protocol): ...\nclass B(ABC):\n    @abstractmethod\n    def f(self): ...\n"
        "class S(B, Generic[T]):\n    def f(self): return 4",
        "assert S[int]().f() == 4\nassert isinstance(S(), B)",
    ),
    "Fraction and Decimal": (
        "from fractions import Fraction\nfrom decimal import Decimal\n"
        "def f(): return Fraction(1, 2), Decimal('0.5')",
        "from fractions import Fraction\nassert f() == (Fraction(1, 2), 0.5)",
    ),
    "Counter and deque": (
        "from collections import Counter, defaultdict, deque\n"
        "def f(s): return Counter(s), deque(s), defaultdict(int, a=1)",
        "assert f('aa') == ({'a': 2}, __import__('collections').deque('aa'), {'a': 1})",
    ),
    "inspect.signature": (
        "import inspect\ndef curry(g):\n    n = len(inspect.signature(g).parameters)\n"
        "    def h(*a): return g(*a) if len(a) >= n else lambda *b: h(*a, *b)\n    return h",
        "assert curry(lambda a, b: a + b)(1)(2) == 3",
    ),
    "callbacks and retries": (
        "import traceback\ndef retry(g, n):\n    for _ in range(n):\n        try: return g()\n"
        "        except ValueError: text = traceback.format_exc()\n    return text",
        "calls = []\ndef bad():\n    calls.append(1)\n    raise ValueError('no')\n"
        "assert 'no' in retry(bad, 3)\nassert len(calls) == 3",
    ),
    "pickle": (
        "import pickle\nclass A:\n    def __init__(self): self.x = 4\n"
        "def f(): return pickle.loads(pickle.dumps(A()))",
        "assert f().x == 4",
    ),
    "printing to a captured stdout": (
        "def f(x): print(x * x)",
        "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out): f(2)\n"
        "assert out.getvalue() == '4\\n'",
    ),
    "exec and eval": ("exec('def f(x): return eval(\"x * x\")')", F),
    "a mocked input": (
        "def f(): return int(input()) ** 2",
        "from unittest import mock\nwith mock.patch('builtins.input', return_value='3'):\n"
        "    assert f() == 9",
    ),
    "a module that is patched by the tests": (
        "import time\ndef f(): return time.time() * 2",
        "import time\nkept = time.time\ntime.time = lambda: 2\nassert f() == 4\ntime.time = kept",
    ),
    "a thread that still runs": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3,), daemon=True).start()\n"
        "def f(x): return x * x",
        F,
    ),
    "seeded random": (
        "import random\nrandom.seed(1)\ndef f(x): return random.randint(x, x) ** 2",
        "import random\nrandom.seed(3)\n" + F,
    ),
    "numpy": (
        "import numpy as np\ndef f(x): return np.array([x]) ** 2",
        "import numpy as np\nassert (f(2) == np.array([4])).all()\n"
        "np.testing.assert_allclose(f(3), [9])",
    ),
}
