"""Call test functions, test classes and parametrized tests, and keep what came of each."""

# pyright: basic, reportPrivateUsage=false, reportAttributeAccessIssue=false
# Values of any kind pass through here.
from __future__ import annotations

import _thread
import asyncio
import itertools
import types
import unittest
import unittest.async_case
import unittest.suite
from typing import Any

__all__ = ["Cases"]

_SHOWN = 500
_MOST_CASES = 1_000  # of which the report names each
_MOST_SETS = 100_000


class Cases:
    """The tests of a task, and the results of those that have run.

    Args:
        ends: Counts the test functions that have come to their end.
        busy: Threads whose own reading of code is not refused.
    """

    def __init__(self, ends: list[int], busy: set[int]) -> None:
        self.ends = ends
        self.busy, self.ident = busy, _thread.get_ident
        self.results: list[tuple[str, str, str, str]] = []
        self.case, self.suite = unittest.TestCase, unittest.suite.TestSuite
        self.loader = unittest.TestLoader()
        self.result = _result_class(self)
        self.run_async = asyncio.run

        def quiet(this: Any) -> None:
            this._asyncioRunner = asyncio.Runner()  # its debug mode reads frames

        case: Any = unittest.async_case.IsolatedAsyncioTestCase
        case._setupAsyncioRunner = quiet

    def arguments(self, function: Any) -> tuple[set[str], bool, bool]:
        """Return the arguments a test needs, and whether it is a coroutine, or a generator."""
        function = getattr(function, "__func__", function)
        self.busy.add(self.ident())
        try:
            code: types.CodeType = function.__code__
        finally:
            self.busy.discard(self.ident())
        positional = code.co_varnames[: code.co_argcount]
        named = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
        needed = set(positional[: len(positional) - len(function.__defaults__ or ())])
        needed |= set(named) - set(function.__kwdefaults__ or {})
        return needed - {"self"}, bool(code.co_flags & 0x80), bool(code.co_flags & 0x220)

    def passed(self, name: str) -> None:
        """Keep a test that passed."""
        if len(self.results) < _MOST_CASES:
            self.results.append((name, "passed", "", ""))

    def failed(self, name: str, error: BaseException) -> None:
        """Keep a test that failed, or one that ended with another exception."""
        outcome = "failed" if isinstance(error, AssertionError) else "error"
        kind = _type_name(error)
        if kind == "Failed":  # of pytest, whose BaseException is no AssertionError
            outcome = "failed"
        text = self.describe(error) if len(self.results) < _MOST_CASES else kind
        self.results.append((name, outcome, kind, text))

    def describe(self, error: BaseException) -> str:
        """Say what an exception says, and in which lines of tests and solution it was raised."""
        try:
            text = str(error)[:_SHOWN]
        except BaseException:
            text = "its text cannot be had"
        kind, line = _type_name(error), 0
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None:
            line = trace.tb_lineno
        return f"{kind}: {text} (line {line})" if text else f"{kind} (line {line})"

    def run(self, found: dict[str, Any]) -> None:
        """Run everything that is named as a test is."""
        for name, value in found.items():
            if isinstance(value, type):
                if issubclass(value, self.case):
                    suite = self.suite([self.loader.loadTestsFromTestCase(value)])
                    suite.run(self.result())
                elif name.startswith("Test"):
                    self._class(name, value)
            elif name.startswith("test") and isinstance(value, types.FunctionType):
                self._function(name, value)

    def _class(self, name: str, cls: type) -> None:
        if _skipped(cls):
            return
        for method in [m for m in dir(cls) if m.startswith("test")]:
            where = f"{name}.{method}"
            try:
                one: Any = cls()
                setup = getattr(one, "setup_method", None) or getattr(one, "setUp", None)
                teardown = getattr(one, "teardown_method", None) or getattr(one, "tearDown", None)
                if setup is not None:
                    setup(*(None for _ in self.arguments(setup)[0]))
            except BaseException as error:
                self.failed(where, error)
                continue
            self._function(where, getattr(one, method))
            if teardown is not None:
                try:
                    teardown(*(None for _ in self.arguments(teardown)[0]))
                except BaseException as error:
                    self.failed(where, error)

    def _function(self, name: str, function: Any) -> None:
        if _skipped(function):
            return
        try:
            sets = _parameters(function)
            needed, coroutine, generator = self.arguments(function)
        except BaseException as error:
            self.failed(name, error)
            return
        for number, arguments in enumerate(sets):
            where = f"{name}[{number}]" if len(sets) > 1 else name
            if lacking := sorted(needed - set(arguments)):
                text = f"the fixtures {', '.join(lacking)}"
                self.results.append((where, "error", "\0fixture", text))
                continue
            before = self.ends[0]
            try:
                value = function(**arguments)
                if coroutine:
                    self.run_async(value)
                if generator or self.ends[0] == before:
                    raise AssertionError("the test did not come to its end")
            except BaseException as error:
                self.failed(where, error)
            else:
                self.passed(where)


def _type_name(error: BaseException) -> str:
    return str(type.__dict__["__name__"].__get__(type(error)))[:100]


def _marks(owner: Any) -> list[Any]:
    found = getattr(owner, "pytestmark", [])
    return found if isinstance(found, list) else [found]


def _skipped(owner: Any) -> bool:
    if getattr(owner, "__unittest_skip__", False):
        return True
    for mark in _marks(owner):
        if mark.name == "skip" or (mark.name == "skipif" and mark.args and mark.args[0]):
            return True
    return False


def _parameters(function: Any) -> list[dict[str, Any]]:
    """Return the arguments of each case of `pytest.mark.parametrize`."""
    axes: list[list[dict[str, Any]]] = []
    for mark in _marks(function):
        if mark.name != "parametrize":
            continue
        names, rows = mark.args[:2]
        keys = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        axis: list[dict[str, Any]] = []
        for row in rows:
            if type(row).__name__ == "ParameterSet":
                values = list(row.values)
            else:
                values = [row] if len(keys) == 1 else list(row)
            axis.append(dict(zip(keys, values, strict=True)))
        axes.append(axis)
    cases = itertools.islice(itertools.product(*axes), _MOST_SETS)
    return [{k: v for part in case for k, v in part.items()} for case in cases]


def _result_class(cases: Cases) -> type[unittest.TestResult]:
    class Result(unittest.TestResult):
        """Keeps what a `TestCase` says; its own tracebacks read frames."""

        def startTest(self, test: Any) -> None:
            super().startTest(test)
            self.before = cases.ends[0]

        def addSuccess(self, test: Any) -> None:
            if cases.ends[0] > self.before:
                cases.passed(_id(test))
            else:
                cases.failed(_id(test), AssertionError("the test did not come to its end"))

        def addError(self, test: Any, err: Any) -> None:
            cases.failed(_id(test), err[1])

        addFailure = addError

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            if err is not None:
                cases.failed(_id(test), err[1])

        def addSkip(self, test: Any, reason: str) -> None:
            method = getattr(test, getattr(test, "_testMethodName", ""), None)
            if not _skipped(test) and not _skipped(method):
                cases.results.append((_id(test), "error", "SkipTest", f"skipped: {reason[:200]}"))

        def addExpectedFailure(self, test: Any, err: Any) -> None:
            cases.passed(_id(test))

        def addUnexpectedSuccess(self, test: Any) -> None:
            cases.results.append((_id(test), "failed", "", "it passes, which was not expected"))

    return Result


def _id(test: Any) -> str:
    return ".".join(str(test.id()).split(".")[-2:])
