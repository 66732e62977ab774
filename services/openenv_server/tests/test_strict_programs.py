"""The strict executor against CPython: the same output, or a failed step. Never another value."""

from __future__ import annotations

import contextlib
import io
import textwrap

import pytest

from openenv_server.settings import Settings
from openenv_server.strict import StrictExecutor

# Each runs in CPython, and must print the same here.
SAME = {
    "implicit_return": """
        def f(): x = 1
        print(f())
    """,
    "decorator": """
        def twice(f):
            def run(*args, **kwargs): return f(*args, **kwargs) * 2
            return run
        @twice
        def three(): return 3
        print(three())
    """,
    "decorator_order": """
        def tag(name):
            print("make", name)
            def deco(f):
                print("apply", name)
                return lambda *a: name + f(*a)
            return deco
        @tag("a")
        @tag("b")
        def f(x): return x
        print(f("c"))
    """,
    "property": """
        class P:
            def __init__(self): self._x = 1
            @property
            def x(self): return self._x
            @x.setter
            def x(self, v): self._x = v * 10
            @staticmethod
            def s(a): return a + 1
            @classmethod
            def c(cls, a): return (cls.__name__, a)
        p = P(); p.x = 2
        print(p.x, P.s(1), P.c(3), p.c(4))
    """,
    "lru_cache": """
        import functools
        calls = []
        @functools.lru_cache(maxsize=None)
        def fib(n):
            calls.append(n)
            return n if n < 2 else fib(n - 1) + fib(n - 2)
        print(fib(20), len(calls))
    """,
    "dataclass": """
        from dataclasses import dataclass, field
        @dataclass(order=True)
        class P:
            x: int
            y: int = 2
            tags: list = field(default_factory=list)
        print(P(1), P(1) < P(2), P(1, 2) == P(1), P(3).tags)
    """,
    "enum": """
        from enum import Enum
        class C(Enum):
            RED = 1
            BLUE = 2
            def loud(self): return self.name + "!"
        print([c.name for c in C], C(2), C.RED.loud())
    """,
    "abstract": """
        from abc import ABC, abstractmethod
        class Shape(ABC):
            @abstractmethod
            def area(self): ...
        class Square(Shape):
            def area(self): return 4
        print(Square().area())
        try: Shape()
        except TypeError as e: print("abstract")
    """,
    "super_three_levels": """
        class A:
            def __init__(self, x): self.x = x
            def hi(self): return "A"
        class B(A):
            def __init__(self, x, y):
                super().__init__(x)
                self.y = y
            def hi(self): return "B" + super().hi()
        class C(B):
            def __init__(self): super().__init__(1, 2)
            def hi(self): return "C" + super().hi()
        c = C()
        print(c.x, c.y, c.hi())
    """,
    "class_scope": """
        x = 1
        class A:
            x = 2
            y = x + 1
            z = [i * 2 for i in range(y)]
            def f(self): return x
            for k in range(3): pass
            class Inner:
                v = 5
        class Inner: v = 6
        print(A.y, A.z, A().f(), A.k, A.Inner.v, Inner.v)
    """,
    "class_repr_and_private": """
        class A:
            \"\"\"doc\"\"\"
            __secret = 1
            def __init__(self): self.__x = 3
            def x(self): return self.__x
        print(A, A().x(), hasattr(A(), "__x"), A().__doc__, type(A()).__name__)
    """,
    "dunders": """
        class V:
            def __init__(self, a): self.a = a
            def __add__(self, o): return V(self.a + o.a)
            def __eq__(self, o): return self.a == o.a
            def __repr__(self): return f"V({self.a!r})"
            def __len__(self): return 7
            def __getitem__(self, i): return i * 2
            def __iter__(self): return iter([1, 2])
            def __contains__(self, x): return x == 5
            def __call__(self, *a): return a
            def __lt__(self, o): return self.a < o.a
            def __hash__(self): return 1
        v = V(1) + V("2" == "2")
        print(v, len(v), v[4], list(v), 5 in v, v(1, 2))
        print(V(1) == V(1), sorted([V(3), V(1)]), {V(1): 2})
    """,
    "return_in_try_except_exception": """
        def div(a, b):
            try: return a / b
            except Exception: return "bad"
        print(div(1, 2), div(1, 0))
    """,
    "break_in_bare_except": """
        for i in range(5):
            try:
                if i == 2: break
                if i == 1: continue
            except: print("never")
        print(i)
    """,
    "except_key_index_name": """
        d, l = {}, []
        n = None
        for f in (lambda: d["k"], lambda: l[3], lambda: nope, lambda: n[0], lambda: n.zap):
            try: f()
            except KeyError as e: print("key", e)
            except IndexError as e: print("index", e)
            except NameError as e: print("name", e)
            except TypeError: print("type")
            except AttributeError: print("attr")
    """,
    "except_valueerror_does_not_catch_key": """
        def f():
            try: return {}["x"]
            except ValueError: return "wrong"
        try: f()
        except LookupError: print("lookup")
    """,
    "reraise": """
        try:
            try: int("x")
            except ValueError: raise
        except ValueError as e: print(e)
    """,
    "custom_exception": """
        class MyError(Exception):
            def __init__(self, code):
                super().__init__(f"code {code}")
                self.code = code
        try: raise MyError(5)
        except MyError as e: print(e, e.code)
    """,
    "finally_order": """
        def f():
            try: return "r"
            finally: print("f")
        print(f())
        try: print("t")
        except ValueError: print("no")
        else: print("e")
        finally: print("x")
    """,
    "for_else": """
        def prime(n):
            for d in range(2, n):
                if n % d == 0: break
            else: return True
            return False
        print([n for n in range(2, 20) if prime(n)])
        n = 0
        while n < 3: n += 1
        else: print("else")
        for a in range(3):
            for b in range(3):
                if b == 1: break
            else: print("no")
        else: print("outer")
    """,
    "print_keywords": """
        print(1, 2, sep="-", end="!")
        print("a", end="")
        print()
        for _ in map(print, [1, 2]): pass
    """,
    "method_called_print": """
        class L:
            def print(self, x): return "own" + x
        print(L().print("!"))
    """,
    "fstrings": """
        s = "a"
        print(f"{s!r} {s=} {3.14159:.2f} {s!s:>4} {10:{'>'}{6}} {'ä'!a}")
    """,
    "default_beats_global": """
        x = 5
        def f(x=1): return x
        print(f(), f(2), f(x=3))
    """,
    "mutable_default": """
        def f(v, acc=[]):
            acc.append(v)
            return acc
        f(1)
        print(f(2))
    """,
    "default_bound_early": """
        n = 1
        def f(x=n): return x
        n = 2
        fs = []
        for i in range(3):
            def g(i=i): return i
            fs.append(g)
        print(f(), [g() for g in fs], [h() for h in [lambda i=i: i for i in range(3)]])
    """,
    "arguments": """
        def f(a, /, b, *rest, c=3, d, **kw): return (a, b, rest, c, d, kw)
        print(f(1, 2, 3, 4, d=5, e=6), f(1, b=2, d=0))
        def g(*a, **k): return a, k
        print(g(), g(1, x=2), g(*[1, 2], **{"y": 3}))
    """,
    "arity_errors": """
        def f(a, b=1): return a
        for call in (lambda: f(), lambda: f(1, 2, 3), lambda: f(1, z=2), lambda: (lambda x: x)()):
            try: call(); print("no error")
            except TypeError: print("TypeError")
    """,
    "words_of_exceptions": """
        class A:
            def m(self, x): return x
        def f(a, b, c=1, *, d): return a
        def g(): return 1
        calls = [
            lambda: f(), lambda: f(1), lambda: f(1, 2), lambda: f(1, 2, 3, 4), lambda: g(1),
            lambda: f(1, 2, d=1, e=2), lambda: f(1, a=2, b=1, d=1), lambda: A().m(),
            lambda: A().nope(), lambda: A().nope, lambda: A.nope(), lambda: [].foo(),
            lambda: {}["k"], lambda: [1][3], lambda: nope(), lambda: nope, lambda: 1 + "a",
            lambda: [x for x, y in [(1, 2, 3)]], lambda: [x for x, y in [(1,)]], lambda: len(5),
        ]
        for call in calls:
            try: call(); print("no error")
            except Exception as e: print(type(e).__name__, e)
    """,
    "lambda_kinds": """
        print((lambda x, y=2, *z, k=4: (x, y, z, k))(1, 5, 6, k=7), (lambda **k: k)(a=1))
    """,
    "redefinition": """
        f = lambda: 1
        def f(): return 2
        print(f())
        f = 3
        print(f)
        def log(x): return "mine"
        print(log(1))
        def max(a, b): return "max"
        print(max(1, 2))
        sum = 10
        print(sum)
    """,
    "nested_functions_stay_inside": """
        def outer(n):
            def inner(): return n
            if n: outer(n - 1)
            return inner()
        print(outer(3))
        def area(x): return "function"
        class A:
            def area(self): return "method"
        print(area(1), A().area())
        try: inner()
        except NameError: print("NameError")
    """,
    "closures": """
        def counter():
            n = [0]
            def inc():
                n[0] += 1
                return n[0]
            return inc
        a, b = counter(), counter()
        print(a(), a(), b())
        fs = []
        for i in range(3): fs.append(lambda: i)
        print([f() for f in fs])
    """,
    "global_and_nonlocal": """
        n = 0
        def inc():
            global n, made
            n += 1
            made = "here"
        def use():
            before = n
            inc()
            return before, n
        print(use(), n, made)
        def counter():
            count = 0
            def step():
                nonlocal count
                count += 1
                return count
            def reset():
                nonlocal count
                if count: count = 0
            return step, reset, lambda: count
        step, reset, look = counter()
        print(step(), step(), look())
        reset()
        print(look(), step())
        other, _, _ = counter()
        print(other(), step())
    """,
    "closures_see_the_present": """
        def make():
            def inner(): return [config for _ in range(1)], (lambda: config)()
            return inner
        config = 1
        f = make()
        print(f())
        config = 2
        print(f())
        def outer():
            def get(): return later
            later = 5
            a = get()
            later = 6
            return a, get()
        print(outer())
    """,
    "exceptions_of_asserts": """
        try: assert 1 == 2
        except AssertionError as e: print(repr(str(e)), e.args)
        try: assert False, "why"
        except AssertionError as e: print(e)
        try:
            try: raise ValueError
            except 42: pass
        except TypeError as e: print(e)
    """,
    "format_protocol": """
        class F:
            def __init__(self): self.n = 0
            def __format__(self, spec):
                self.n += 1
                return f"<{spec or self.n}>"
        f = F()
        print(f"{f} {f} {f:x} {f!s:>1}"[:12])
        class M:
            def __matmul__(self, other): return "at"
        print(M() @ 1)
        class Once:
            seen = []
            def __getattr__(self, name):
                Once.seen.append(name)
                return lambda: name
        print(Once().hello(), Once.seen)
        class K:
            def f(self): return __class__
            @classmethod
            def g(cls): return __class__
        class L(K): pass
        print(L().f() is K, L.g() is K)
    """,
    "unbound_local": """
        x = 1
        def f():
            x += 1
            return x
        def g():
            y = x
            x = 2
        for h in (f, g):
            try: print(h())
            except UnboundLocalError as e: print("unbound", e)
        print(x)
    """,
    "unpacking": """
        a, *b, c = range(5)
        [d, e] = "xy"
        (f, (g, h)), i = (1, (2, 3)), 4
        print(a, b, c, d, e, f, g, h, i)
        for k, *v in [(1, 2, 3), (4,)]: print(k, v)
        for j in ((1,), (1, 2, 3)):
            try: p, q = j
            except ValueError as e: print(e)
        x = y = []
        x.append(1)
        print(y)
    """,
    "displays": """
        a, d = [1, 2], {"x": 1}
        print([*a, 3], (*a, 4), sorted({*a, 5}), {**d, "y": 2}, {"x": 0, **d})
    """,
    "comprehensions": """
        m = [[1, 2], [3]]
        print([x for r in m for x in r], sum(x for r in m for x in r), {k: v for k, v in [(1, 2)]})
        print({x % 2 for x in range(5)}, list(x * y for x in range(3) for y in range(2) if x))
    """,
    "generator_expressions": """
        import itertools
        x = 3
        g = (i * k for i in range(x))
        x, k = 99, 10
        print(list(g))
        g = ((i, j) for i in range(x) if i < 3 for j in range(y) if i + j)
        x, y = 0, 2
        print(list(g))
        seen = []
        def note(v):
            seen.append(v)
            return v
        g = (note(a + b + c) for a in itertools.count() for b in range(2) for c in "x" for c in [1])
        print(seen, next(g), next(g), seen)
        try: (i for i in 5)
        except TypeError as e: print(e)
        print(sum(i for i in range(4)), max((len(w), w) for w in ["a", "bb"]), any(v for v in []))
    """,
    "augmented_target_once": """
        log = []
        def key():
            log.append(1)
            return 0
        l = [1]
        l[key()] += 5
        print(l, log)
    """,
    "augmented_missing": """
        try:
            total += 1
            print("no")
        except NameError as e: print(e)
    """,
    "similar_name": """
        counter = 1
        try: print(countr)
        except NameError as e: print(e)
    """,
    "with_block": """
        class C:
            def __enter__(self): print("in"); return self
            def __exit__(self, *a): print("out", a[0] is not None); return True
        with C() as c: print("body")
        with C(): raise ValueError("x")
        print("after")
    """,
    "leaving_with_blocks": """
        class C:
            def __init__(self, name, swallow=False): self.name, self.swallow = name, swallow
            def __enter__(self): print("in", self.name); return self.name, 2
            def __exit__(self, t, v, tb):
                print("out", self.name, t.__name__ if t else None, v)
                return self.swallow
        class Fails:
            def __enter__(self): raise ValueError("enter")
            def __exit__(self, *a): print("never")
        def f():
            with C("a") as (x, y), C("b", swallow=True):
                return x, y
        print(f())
        for i in range(3):
            with C(i, swallow=True):
                if i == 1: break
                if i == 0: continue
        with C("k", swallow=True): {}["missing"]
        with C("s", swallow=True): raise SystemExit(3)
        try:
            with C("first"), Fails(): pass
        except ValueError as e: print(e)
        try:
            with 5: pass
        except TypeError: print("no context manager")
    """,
    "calls_of_expressions": """
        print((len if 1 else max)([1]), (lambda: 3)(), [len][0]("ab"), (max or min)(1, 2))
        n = None
        try: n()
        except TypeError: print("not callable")
        try: +"a"
        except TypeError: print("bad operand")
    """,
    "named_tuples_and_protocols": """
        from typing import NamedTuple, Protocol
        from collections.abc import Iterable
        import collections.abc
        class P(NamedTuple):
            x: int
            y: int = 2
        class Speaks(Protocol):
            def speak(self) -> str: ...
        print(P(1), P(1).y, isinstance([], Iterable), isinstance({}, collections.abc.Mapping))
    """,
    "class_scope_defaults": """
        class A:
            LIMIT = 3
            def f(self, n=LIMIT): return n
            g = lambda self, n=LIMIT: n + 1
            def helper(fn): return lambda self: fn(self) * 2
            @helper
            def h(self): return 5
        print(A().f(), A().g(), A().h())
    """,
    "imports": """
        from __future__ import annotations
        from typing import List, Dict, Optional
        import typing, string, operator, json, heapq
        from collections import defaultdict, Counter, deque
        def f(x: List[int]) -> Optional[Dict[str, int]]: return None
        d = defaultdict(list); d["a"].append(1)
        h = [3, 1, 2]; heapq.heapify(h)
        print(f([1]), dict(d), Counter("aab").most_common(1), string.digits, operator.add(1, 2))
        print(heapq.heappop(h), json.dumps({"a": 1}), typing.Any is typing.Any)
        try: import no_such_module
        except ImportError: print("no module")
    """,
    "exits_are_caught_as_in_python": """
        for leave in (exit, quit):
            try: leave()
            except Exception: print("never")
            except SystemExit as e: print("exit", e.code)
        try: raise KeyboardInterrupt
        except: print("bare")
        try:
            try: raise SystemExit(3)
            finally: print("finally")
        except BaseException as e: print(type(e).__name__)
    """,
    "caught_variable_is_forgotten": """
        try: 1 / 0
        except ZeroDivisionError as e: print(e)
        try: e
        except NameError: print("gone")
    """,
    "print_as_a_value": """
        log = print
        log("hi")
        for f in (print, len):
            if f is print: f("same")
    """,
    "private_methods": """
        class A:
            def __init__(self): self.__p = 1
            def __helper(self): return self.__p
            def call(self): return self.__helper()
        class B(A):
            def __init__(self):
                super().__init__()
                self.__p = 2
        print(B().call())
    """,
    "docstrings_and_names": """
        import functools
        def deco(f):
            @functools.wraps(f)
            def inner(*a): return f(*a)
            return inner
        @deco
        def g():
            "doc"
        class A:
            class B:
                class C: pass
        print(g.__name__, g.__doc__, A.B.C, type(A.B.C()).__name__)
    """,
    "new_and_metaclass": """
        class Single:
            one = None
            def __new__(cls):
                if cls.one is None: cls.one = object.__new__(cls)
                return cls.one
        class Meta(type):
            def __new__(m, name, bases, ns, **k):
                ns["tag"] = k.get("tag")
                return super().__new__(m, name, bases, ns)
            def __init__(c, name, bases, ns, **k): super().__init__(name, bases, ns)
        class A(metaclass=Meta, tag=3): pass
        class Base:
            seen = []
            def __init_subclass__(cls, **k):
                super().__init_subclass__(**k)
                Base.seen.append(cls.__name__)
        class Child(Base): pass
        print(Single() is Single(), A.tag, Base.seen)
    """,
    "parts_of_modules": """
        import sys, time, queue, random
        from time import perf_counter
        q = queue.Queue()
        q.put(1)
        print(sys.maxsize, q.get(), perf_counter() > 0, q.empty())
        random.seed(5)
        print(random.random(), random.sample(range(100), 5), random.Random(1).random())
        try: q.get_nowait()
        except queue.Empty: print("empty")
        try: sys.exit("bye")
        except SystemExit as e: print(e.code)
    """,
    "main_guard": """
        def main(): print("main")
        if __name__ == "__main__": main()
    """,
    "recursion": """
        def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
        print(depth(40))
    """,
    "sorting_and_builtins": """
        print(sorted("bca", key=lambda c: -ord(c)), list(zip([1], "a")), bin(5))
        print(repr("a"), bytes([65]), divmod(7, 3), isinstance(True, int), callable(len))
        print(any(x > 2 for x in [1, 3]), next(iter([9])), list(reversed([1, 2])))
        print("%s-%d" % ("a", 1), hex(255), frozenset([1]), round(2.5))
    """,
    "walk_a_tree": """
        class Node:
            def __init__(self, value, left=None, right=None):
                self.value, self.left, self.right = value, left, right
            def walk(self):
                out = []
                if self.left: out += self.left.walk()
                out.append(self.value)
                if self.right: out.extend(self.right.walk())
                return out
        print(Node(2, Node(1), Node(3)).walk())
    """,
}

# Each gives some value in CPython that the interpreter cannot give: the step must fail, with a
# text, before or instead of printing something else.
REFUSED = {
    "lambda_in_comprehension": "print([f() for f in [lambda: i for i in range(3)]])",
    "generator": """
        def g(): yield 1
        print(list(g()))
    """,
    "walrus": "print([y for x in range(3) if (y := x)])",
    "match": """
        match 1:
            case 1: print("one")
    """,
    "print_replaced": "def print(*a): return None",
    "swallowed_limit": """
        def g(): yield 1
        try: list(g())
        except Exception: print("swallowed")
        print("after")
    """,
    "class_var": """
        from dataclasses import dataclass
        from typing import ClassVar
        @dataclass
        class A:
            x: ClassVar[int] = 1
        print(A())
    """,
    "del_attribute": """
        class A: pass
        a = A(); a.x = 1
        del a.x
        print(hasattr(a, "x"))
    """,
    "waiting_for_ever": """
        import queue
        try: queue.Queue().get()
        except Exception: print("swallowed")
    """,
    "missing_builtin_is_not_absence": """
        try: open("x")
        except Exception: print("swallowed")
    """,
    "missing_module_is_not_absence": """
        try: import os
        except ImportError: print("swallowed")
    """,
    "missing_part_of_a_module": """
        import sys
        try: sys.stdin.readline()
        except AttributeError: print("swallowed")
    """,
    "attrgetter": "import operator\nprint(operator.attrgetter('real')(1))",
    "nonlocal_in_a_class": """
        x = 1
        class A:
            global x
            x = 2
        print(x)
    """,
    "open_a_file": "print(open('x'))",
    "operating_system": "import os\nprint(os.name)",
}


def _cpython(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "<code>", "exec", dont_inherit=True), {"__name__": "__main__"})
    return out.getvalue()


@pytest.mark.parametrize("name", SAME)
def test_prints_what_cpython_prints(name: str) -> None:
    code = textwrap.dedent(SAME[name])
    result = StrictExecutor(Settings()).run(code)
    assert (result.stderr, result.stdout) == ("", _cpython(code))


@pytest.mark.parametrize("name", REFUSED)
def test_fails_rather_than_differ(name: str) -> None:
    result = StrictExecutor(Settings()).run(textwrap.dedent(REFUSED[name]))
    assert result.exit_code != 0
    assert result.failure is not None
    assert result.stderr
    assert result.stdout == ""
