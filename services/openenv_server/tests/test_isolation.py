"""Code of one session reaches neither the server nor what another session sees."""

from __future__ import annotations

import collections
import decimal
import enum
import fractions
import functools
import heapq
import json
import typing
from collections.abc import Callable, Iterable

import pytest

from openenv_server.executor import Executor
from openenv_server.executors import make_executor
from openenv_server.settings import EXECUTOR_NAMES, Settings

CANARY = "canary-of-the-server"

_TRAVERSALS = [
    "'{0.__globals__[codecs].sys.modules[os].environ}'.format(json.dumps)",
    "'{x.__globals__[codecs].sys.modules[os].environ}'.format_map({'x': json.dumps})",
    "str.format('{0.__globals__[codecs].sys.modules[os].environ}', json.dumps)",
    "getattr('{0.__globals__[codecs].sys.modules[os].environ}', 'format')(json.dumps)",
    "list(map('{0.__globals__[codecs].sys.modules[os].environ}'.format, [json.dumps]))",
    "list(map(str.format, ['{0.__globals__[codecs].sys.modules[os].environ}'], [json.dumps]))",
    "'{0:{1.__globals__[codecs].sys.modules[os].environ}}'.format('', json.dumps)",
    "'{0.codecs.sys.modules[os].environ}'.format(json)",
    "'{0._sys.modules[os].environ}'.format(collections)",
    "S('{0.__globals__[codecs].sys.modules[os].environ}').format(json.dumps)",
    "super(S, S('{0.__globals__[codecs].sys.modules[os].environ}')).format(json.dumps)",
    "json.codecs.sys.modules['os'].environ",
    "collections._sys.modules['os'].environ",
    "enum.sys.modules['os'].environ",
    "list(map(getattr, map(getattr, [enum], ['sys']), ['modules']))[0]['os'].environ",
    "list(map(getattr, [json.dumps], ['__globals__']))[0]['codecs']",
    "getattr(json.dumps, '__glo' + 'bals__')",
    "getattr(json.dumps, Name('__globals__'))",
    "getattr((x for x in [1]), 'gi_frame').f_globals",
    "(x for x in [1]).gi_frame.f_back.f_globals",
    "(x for x in [1]).gi_code",
    "().__class__.__base__.__subclasses__()",
    "object.__subclasses__()",
    "type(())().__class__.__mro__[1]",
    "getattr(type(1), '__subclasses__')()",
    "getattr(object, '__sub' + 'classes__')()",
    "print.__globals__",
    "print.func.__globals__",
    "print.args",
    "[].append.__self__",
    "getattr(getattr(len, '__self__'), 'open')('/etc/passwd').read()",
    "json.dumps.__kwdefaults__",
    "json.dumps.__code__",
    "(lambda: 0).__closure__[0].cell_contents",
    "getattr(lambda: 0, '__closure__')",
    "open('/etc/passwd').read()",
    "eval('1')",
    "exec('1')",
    "__import__('os').environ",
    "compile('1', 'a', 'eval')",
    "globals()",
    "vars(json)",
    "dir(json)",
    "breakpoint()",
    "input()",
    "_print_outputs._text",
    "_operations_count.deadline",
    "help()",
    "object.__getattribute__(json.dumps, '__globals__')",
    "object.__reduce_ex__(json, 4)",
    "type(json)('os').environ",
    "functools.partial(json.dumps).func.__globals__",
    "collections.UserString('{0.__globals__[codecs].sys.modules[os].environ}').format(json.dumps)",
    "collections.UserString.format('{0.__globals__[codecs].sys.modules[os].environ}', json.dumps)",
    "functools.reduce(getattr, ['__globals__'], json.dumps)",
    "time.clock_settime(time.CLOCK_REALTIME, 0)",
]
_SETUP = """
import collections, copy, dataclasses, enum, functools, json, time
class Name(str):
    def startswith(self, *a): return False
    def endswith(self, *a): return False
class S(str): pass
"""
_EXPRESSIONS = [f"value = {expression}\nprint('REACHED', value)" for expression in _TRAVERSALS]
PAYLOADS = [
    *_EXPRESSIONS,
    "import os",
    "import sys\nprint('REACHED', sys.modules)",
    "import subprocess",
    "import builtins",
    "import importlib",
    "import json.codecs",
    "from json import codecs\nprint('REACHED', codecs)",
    "from enum import sys\nprint('REACHED', sys)",
    "from collections import _sys\nprint('REACHED', _sys)",
    "from operator import attrgetter\nprint('REACHED', attrgetter('__globals__')(json.dumps))",
    "from statistics import attrgetter\nprint('REACHED', attrgetter)",
    "try: 1 / 0\nexcept Exception as e: print('REACHED', e.__traceback__.tb_frame.f_globals)",
    "try: 1 / 0\nexcept Exception as e: print('REACHED', getattr(e, '__traceback__').tb_frame)",
    "try: 1 / 0\nexcept Exception as e: print('REACHED', '{0.__traceback__.tb_frame}'.format(e))",
    "class Spy:\n    pass\ns = Spy()\n"
    "g = functools.update_wrapper(s, json.dumps, ('__globals__',), ())\nprint('REACHED', s)",
    "class Got(dict):\n    def update(self, d): print('REACHED', d)\nclass Spy: pass\ns = Spy()\n"
    "s.got = Got()\nfunctools.update_wrapper(s, json.dumps, (), ('__globals__', 'got'))",
    "A = type('A', (), {'__annotations__': {'x=print(\"REACHED\")': int}})\n"
    "dataclasses.dataclass(A)\nprint('REACHED')",
    "class Id(str):\n    def isidentifier(self): return True\n"
    "dataclasses.make_dataclass('A', [(Id('x=print(1)'), int)])\nprint('REACHED')",
    "def f(): pass\nf.__code__ = 1\nprint('REACHED')",
]


@pytest.fixture(params=EXECUTOR_NAMES)
def make(request: pytest.FixtureRequest) -> Callable[[], Executor]:
    return lambda: make_executor(Settings(executor=request.param))


@pytest.mark.parametrize("payload", PAYLOADS)
def test_no_payload_reaches_the_server(
    make: Callable[[], Executor], payload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_CANARY", CANARY)
    executor = make()
    assert executor.run(_SETUP).exit_code == 0
    result = executor.run(payload)
    assert result.exit_code != 0, result.stdout
    assert "REACHED" not in result.stdout
    assert CANARY not in result.stdout + result.stderr
    assert "root:" not in result.stdout + result.stderr


_COUNTER = "from collections import Counter\n"
POISONS = [
    _COUNTER + "Counter.most_common = lambda self, n=None: [('hacked', 99)]",
    _COUNTER + "setattr(Counter, 'most_common', lambda self, n=None: 99)",
    _COUNTER + "list(map(setattr, [Counter], ['most_common'], [99]))",
    _COUNTER + "type.__setattr__(Counter, 'most_common', 99)",
    _COUNTER + "delattr(Counter, 'most_common')",
    _COUNTER + "type.__delattr__(Counter, 'most_common')",
    _COUNTER + "del Counter.most_common",
    _COUNTER + "for Counter.most_common in [99]: pass",
    _COUNTER + "Counter.most_common, x = 99, 1",
    _COUNTER + "class M(type):\n    def f(cls): super().__setattr__('most_common', 99)\n"
    "M.f(Counter)\ntype.__setattr__(Counter, 'most_common', 99)",
    _COUNTER + "import functools\nfunctools.update_wrapper(Counter, len, ('most_common',), ())",
    _COUNTER + "import functools\nclass A: most_common = 99\n"
    "functools.wraps(A, ('most_common',), ())(Counter)",
    _COUNTER + "import copy\nclass A:\n    def __new__(cls, *a): return Counter\n"
    "    def __getstate__(self): return None, {'most_common': 99}\n"
    "a = object.__new__(A)\ncopy.copy(a)",
    _COUNTER + "import copy\nclass A:\n"
    "    def __reduce_ex__(self, n): return (lambda: Counter, (), (None, {'most_common': 99}))\n"
    "copy.deepcopy(A())",
    _COUNTER + "import dataclasses\ndataclasses.dataclass(Counter)",
    "import dataclasses, fractions\ndataclasses.dataclass(repr=True)(fractions.Fraction)",
    "import functools, fractions\nfunctools.total_ordering(fractions.Fraction)",
    "import json\njson.JSONEncoder.item_separator = ' hacked '",
    "import json\njson.JSONEncoder.item_separator += ' hacked '",
    "import json\njson.dumps.__kwdefaults__ = {'indent': 4}",
    "import json\njson.dumps.__defaults__ = (1,)",
    "import json\njson.dumps.hacked = 1",
    "import json\njson.dumps = lambda x: 'hacked'",
    "import json\njson.decoder.JSONDecoder = 1",
    "import json\nsetattr(json, 'dumps', 1)",
    "import heapq\nheapq.heappush = 1",
    "import heapq\nheapq.__all__.append('hacked')",
    "import math\nmath.pi = 3",
    "import string\nstring.digits = 'hacked'",
    "import fractions\nfractions.Fraction.__add__ = lambda a, b: 99",
    "import fractions\nfractions.Fraction.__slots__ = ()",
    "from collections.abc import Iterable\nIterable.register(int)",
    "from collections.abc import Iterable\ngetattr(Iterable, 'register')(int)",
    "from collections.abc import Iterable\nimport abc\nabc.ABCMeta.register(Iterable, int)",
    "from abc import ABCMeta\nfrom collections.abc import Iterable\nclass M(ABCMeta): pass\n"
    "M.register(Iterable, int)",
    "import re\nre.RegexFlag.IGNORECASE._value_ = 99",
    "import re\nre.RegexFlag._member_map_['HACKED'] = 99",
    "import enum\nenum.Enum.hacked = 1",
    "import enum\nclass E(enum.IntEnum):\n    dumps = 1\n"
    "E._convert_('E', 'json', lambda n: True, E)",
    "import enum\nclass E(enum.Enum):\n    dumps = 1\nE.__module__ = 'json'\nenum.global_enum(E)",
    "import enum\nclass B(enum.IntEnum): pass\nclass E:\n    dumps = 1\n"
    "B._convert_('dumps', 'json', lambda n: n == 'dumps', E)",
    "import abc, json\nabc.abstractmethod(json.dumps)",
    "from collections.abc import Mapping\nfrom abc import abstractmethod\n"
    "abstractmethod(Mapping.get)",
    "import typing\ntyping.runtime_checkable(typing.Protocol)",
    "import typing\ntyping.NamedTuple.hacked = 1",
    "print.hacked = 1",
    "len.hacked = 1",
    "ValueError.__str__ = lambda self: 'hacked'",
]
_LOOK = """
from collections import Counter
import json, fractions, string, math, re, heapq, enum
print(Counter('abca').most_common(1), json.dumps([1, 2]), fractions.Fraction(1, 2) + 1, math.pi)
print(string.digits if hasattr(string, 'digits') else 0, re.I.value, len(heapq.nlargest(2, [1])))
"""


def _as_seen_by_the_server() -> list[object]:
    shared: list[object] = [collections.Counter("abca").most_common(1), json.dumps([1, 2])]
    shared += [isinstance(1, Iterable), hasattr(enum.Enum, "hacked"), len(heapq.__all__)]
    for kind in (collections.Counter, fractions.Fraction, json.JSONEncoder, typing.NamedTuple):
        shared.append({name: id(value) for name, value in vars(kind).items()})
    for kind in (typing.Protocol, enum.Enum, ValueError):
        shared.append(
            {n: id(v) for n, v in vars(kind).items() if n != "__abstractmethods__"}  # a cache
        )
    shared += [dict(vars(json.dumps)), json.dumps.__kwdefaults__, json.dumps.__defaults__]
    return [*shared, {name: id(value) for name, value in vars(json).items()}]


@pytest.mark.parametrize("poison", POISONS)
def test_no_code_changes_what_others_see(poison: str) -> None:
    expected = make_executor(Settings()).run(_LOOK)
    before = _as_seen_by_the_server()
    result = make_executor(Settings()).run(poison)
    assert _as_seen_by_the_server() == before
    assert make_executor(Settings()).run(_LOOK) == expected
    assert result.exit_code != 0
    assert result.stderr


def test_the_stock_executor_does_not_change_what_others_see_either() -> None:
    before = _as_seen_by_the_server()
    for poison in POISONS:
        make_executor(Settings(executor="stock")).run(poison)
        assert _as_seen_by_the_server() == before, poison


def test_a_refused_change_cannot_be_swallowed() -> None:
    code = _COUNTER + "try: Counter.x = 1\nexcept Exception: print('swallowed')"
    result = make_executor(Settings()).run(code)
    assert (result.failure, result.stdout) == ("refused", "")
    assert "Counter" in result.stderr
    assert "subclass" in result.stderr


def test_what_belongs_to_the_session_may_be_changed() -> None:
    code = """
import collections, functools, decimal, enum, copy, dataclasses
class A: pass
A.x = 1; a = A(); a.y = 2; setattr(a, 'z', 3); setattr(A, 'w', 4); delattr(a, 'z')
A.__repr__ = lambda self: 'A!'
def f(): f.calls += 1
f.calls = 0; f()
P = collections.namedtuple('P', 'x y'); P.area = lambda self: self.x * self.y
T = type('T', (), {}); T.v = 5
d = collections.defaultdict(list); d.default_factory = None
e = ValueError('a'); e.code = 7; e.args = ('b',)
class F:
    def __init__(self): object.__setattr__(self, 'q', 8)
class C(collections.Counter): pass
C.most_common = lambda self, n=None: 'mine'
@functools.wraps(f)
def g(): return 1
@functools.total_ordering
class O:
    def __init__(self, v): self.v = v
    def __lt__(self, o): return self.v < o.v
    def __eq__(self, o): return self.v == o.v
@dataclasses.dataclass(frozen=True)
class D:
    v: list
class L(enum.Enum):
    ONE = 1
D2 = dataclasses.make_dataclass('D2', ['a', ('b', int, 3)])
c = copy.deepcopy({'a': a, 'd': D([1])})
print(a, A.w, f.calls, P(2, 3).area(), P(2, 3)._asdict(), T().v, d.default_factory, e.code, e)
print(F().q, C('aa').most_common(), g.__name__, O(2) >= O(1), c['d'].v, c['a'].y, L(1), D2(1))
print(getattr(a, 'nope', 'no'), hasattr(a, 'y'), '{0.y} {1[k]} {2!r:>4}'.format(a, {'k': 1}, 'z'))
"""
    result = make_executor(Settings()).run(code)
    assert (result.stderr, result.stdout) == (
        "",
        "A! 4 1 6 {'x': 2, 'y': 3} 5 None 7 b\n"
        "8 mine f True [1] 2 L.ONE D2(a=1, b=3)\n"
        "no True 2 1  'z'\n",
    )


def test_a_class_belongs_to_the_session_however_it_was_made() -> None:
    code = """
import collections, dataclasses, enum, typing
class Plain: pass
class Fields(typing.NamedTuple):
    x: int
made = [
    Plain,
    Fields,
    type('Typed', (), {}),
    collections.namedtuple('Tuple', 'x y'),
    typing.NamedTuple('Named', [('x', int)]),
    enum.Enum('Colour', 'red blue'),
    dataclasses.make_dataclass('Data', ['a']),
]
for kind in made:
    kind.mark = kind.__name__
print(*(kind.mark for kind in made))
"""
    result = make_executor(Settings()).run(code)
    assert (result.stderr, result.stdout) == ("", "Plain Fields Typed Tuple Named Colour Data\n")


def test_missing_attributes_raise() -> None:
    result = make_executor(Settings()).run("getattr(1, 'nope')")
    assert result.stderr.endswith("AttributeError: 'int' object has no attribute 'nope'")


@pytest.mark.parametrize("same_thread", [True])
def test_each_session_has_its_decimal_context(
    make: Callable[[], Executor], same_thread: bool
) -> None:
    one, two = make(), make()
    look = "import decimal\nprint(decimal.Decimal(1) / 3)"
    plain = two.run(look).stdout
    assert one.run("import decimal\ndecimal.getcontext().prec = 3").exit_code == 0
    assert one.run(look).stdout.startswith("0.333\n")
    assert two.run(look).stdout == plain
    one.run("decimal.DefaultContext.prec = 4\ndecimal.setcontext(decimal.DefaultContext)")
    assert two.run(look).stdout == plain
    assert decimal.getcontext().prec == decimal.DefaultContext.prec == 28


def test_each_session_has_its_random_numbers(make: Callable[[], Executor]) -> None:
    one, two, alone = make(), make(), make()
    seed, draw = "import random\nrandom.seed(3)", "print(random.random())"
    for executor in (one, alone):
        executor.run(seed)
    two.run("import random\nrandom.seed(4)\nrandom.random()")
    assert one.run(draw).stdout == alone.run(draw).stdout != ""


def test_partial_functions_still_work() -> None:
    code = "import functools\np = functools.partial(int, base=2)\nprint(p('101'), p.func is int)"
    assert make_executor(Settings()).run(code).stdout == "5 True\n"
    assert functools.partial(int, base=2)("101") == 5


def test_text_with_its_own_idea_of_equality_stays_out_of_the_librarys_caches() -> None:
    code = """
import datetime, re, time
class T(str):
    def __eq__(self, other): return True
    def __hash__(self): return hash('%Y-%H')
class M(type):
    def __eq__(cls, other): return True
    def __hash__(cls): return hash(str)
class R(str, metaclass=M):
    def __eq__(self, other): return True
    def __hash__(self): return hash('b.d')
datetime.datetime.strptime('01-02', T('%H-%M'))
time.strptime('01-02', T('%H-%M'))
re.findall(R('zz'), 'zz')
print('done')
"""
    assert make_executor(Settings()).run(code).stdout == "done\n"
    look = (
        "import datetime, re, time\nprint(datetime.datetime.strptime('2020-05', '%Y-%H').hour, "
        "time.strptime('2020-05', '%Y-%H').tm_hour, re.findall('b.d', 'bad'))"
    )
    assert make_executor(Settings()).run(look).stdout == "5 5 ['bad']\n"
