"""Refuse a solution what leads from its own code to the tests: frames, code, memory, forks."""

# pyright: basic, reportPrivateUsage=false, reportAttributeAccessIssue=false
# Values of any kind pass through here.
from __future__ import annotations

import _thread
import collections
import inspect
import os
import sys
import traceback
import types
import typing
from collections.abc import Callable
from typing import Any

__all__ = ["Guard", "RefusedAccess", "hide_memory"]

_GETFRAME: Any = getattr(sys, "_getframe")  # noqa: B009  # before a solution can replace it
_FLAGS: Any = getattr(inspect, "_has_code_flag").__code__  # noqa: B009  # reads the flags alone
_FRAME_ATTRIBUTES = {"tb_frame", "gi_frame", "cr_frame", "ag_frame", "f_code"}
_CODE_ATTRIBUTES = {"__code__", "gi_code", "cr_code", "ag_code"}
_SET = {"__code__", "__defaults__", "__kwdefaults__"}
_NEVER = {
    "sys._current_frames": "reads the frames of other threads",
    "sys._current_exceptions": "reads the exceptions of other threads",
    "gc.get_objects": "looks for objects with gc",
    "gc.get_referrers": "looks for objects with gc",
    "gc.get_referents": "looks for objects with gc",
    "sys.settrace": "traces the tests",
    "sys.setprofile": "profiles the tests",
    "sys.monitoring.register_callback": "monitors the tests",
    "os.fork": "forks",
    "os.forkpty": "forks",
    "sys.remote_exec": "runs code in another process",
    "cpython.PyInterpreterState_New": "starts another interpreter in this process",
    "cpython.remote_debugger_script": "debugs from outside",
}
_NATIVE = {"ctypes", "_ctypes", "cffi", "_cffi_backend", "_testcapi", "_testinternalcapi"}
_NATIVE |= {"_testlimitedcapi", "_testmultiphase", "_xxsubinterpreters", "_interpreters"}
_NATIVE |= {"_xxtestfuzz", "_testexternalinspection", "_remote_debugging"}
# They do without a frame when they get none.
_QUIET = {"logging", "collections", "enum", "typing", "warnings", "_py_warnings", "dataclasses"}


class RefusedAccess(ValueError, AttributeError):  # what the standard library catches
    """A solution asked for something that a scored run does not give."""


def hide_memory() -> None:
    """Let no other process of this user read the memory of this one."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    except (ImportError, OSError, AttributeError):
        return
    for name in [n for n in sys.modules if n.partition(".")[0] in _NATIVE]:
        del sys.modules[name]


class Guard:
    """An audit hook. It cannot be removed, and holds for every thread.

    Args:
        report: Called with what was refused.
        own_codes: Ids of code whose constants are the harness's.
    """

    def __init__(self, report: Callable[[str], None], own_codes: set[int]) -> None:
        self.report = report
        self.own_codes = own_codes
        self.busy: set[int] = set()
        self.readers, self.consumers = _stdlib_readers()
        self.roots = tuple({os.path.realpath(p) + os.sep for p in sys.path if os.path.isdir(p)})
        self.realpath, self.ident = os.path.realpath, _thread.get_ident
        self.fsdecode = os.fsdecode

    def install(self) -> None:
        """Begin to refuse."""
        rules: dict[str, Callable[[tuple[Any, ...]], str | None]] = {
            "sys._getframe": lambda args: self.frame("reads frames"),
            "object.__getattr__": self.attribute,
            "object.__setattr__": self.assignment,
            "import": self.imported,
            "open": self.opened,
            "sys.addaudithook": lambda args: "adds an audit hook",
        }
        busy, ident, report, never = self.busy, self.ident, self.report, dict(_NEVER)

        def hook(event: str, args: tuple[Any, ...]) -> None:
            said = never.get(event)
            if said is None:
                if event[:7] == "ctypes.":
                    said = "uses ctypes"
                elif (rule := rules.get(event)) is None:
                    return
            else:
                rule = None
            me = ident()
            if me in busy:
                return
            busy.add(me)
            try:
                if said is None:
                    said = rule(args)  # pyright: ignore[reportOptionalCall]
                if said is None:
                    return
                if not said.startswith("quietly "):
                    report(said)
            finally:
                busy.discard(me)
            if event == "sys.addaudithook":
                raise RuntimeError("a scored run takes no audit hooks")
            if event == "import":
                raise ImportError(f"a scored solution may not do this: it {said}")
            raise RefusedAccess(f"a scored solution may not do this: it {said}")

        sys.addaudithook(hook)

    def frame(self, said: str) -> str | None:
        """Decide on a frame that is asked for."""
        # 0 here, 1 the rule, 2 the hook, 3 who asks; a method called as a rule has one less.
        asks = _GETFRAME(3)
        if asks.f_code in self.readers:
            return None
        name = asks.f_globals.get("__name__", "")
        quiet = name in _QUIET or str(name).partition(".")[0] == "asyncio"
        return f"quietly {said}" if quiet else said

    def attribute(self, args: tuple[Any, ...]) -> str | None:
        """Decide on an attribute that gives a frame or code."""
        owner, name = args[0], args[1]
        if name in _CODE_ATTRIBUTES:
            if id(getattr(owner, name)) not in self.own_codes:
                return None
            return None if _GETFRAME(2).f_code is _FLAGS else "reads the code of the tests"
        if name not in _FRAME_ATTRIBUTES:
            return None
        asks = _GETFRAME(2)
        if asks.f_code in self.readers:
            consumer = self.consumers.get(asks.f_code)
            if consumer is None or (asks.f_back and asks.f_back.f_code in consumer):
                return None
        if name == "f_code" and id(owner.f_code) not in self.own_codes:
            return None
        return "reads frames"

    def assignment(self, args: tuple[Any, ...]) -> str | None:
        """Decide on new code for a function."""
        owner, name = args[0], args[1]
        if name not in _SET or not isinstance(owner, types.FunctionType):
            return None
        file = owner.__code__.co_filename
        known = file.startswith(self.roots) or id(owner.__code__) in self.own_codes
        return f"replaces {name} of a function that is not its own" if known else None

    def imported(self, args: tuple[Any, ...]) -> str | None:
        """Decide on an import, of native code above all."""
        name, file = str(args[0]), args[1]
        if name.partition(".")[0] in _NATIVE or name.rpartition(".")[2] in _NATIVE:
            asks = _GETFRAME(2)
            own = asks.f_globals.get("__name__") in ("solution", "__main__")
            said = f"imports {name}, which reads memory"
            return said if own else f"quietly {said}"
        if file is None:
            return None
        real = self.realpath(self.fsdecode(file))
        if not real.startswith(self.roots) or any(part in real for part in ("_ctypes", "_testc")):
            return "loads native code of its own"
        return None

    def opened(self, args: tuple[Any, ...]) -> str | None:
        """Decide on a file: what the kernel shows of processes leads to their memory."""
        if not isinstance(args[0], str | bytes):
            return None
        given = self.fsdecode(args[0])
        if given.rpartition("/")[2] == "mem" and not given.startswith("/"):
            return "reads its process in /proc"  # with `dir_fd`, which an audit hook does not see
        path = self.realpath(given)
        if path == "/proc" or (path.startswith("/proc/") and path.count("/") == 2):
            return "reads its process in /proc" if path[6:].isdigit() or path == "/proc" else None
        if not path.startswith("/proc/"):
            return None
        parts = path.split("/")
        secret = {"mem", "fd", "task", "root", "cwd", "map_files", "environ", "cmdline", "exe"}
        return "reads its process in /proc" if len(parts) > 3 and parts[3] in secret else None


def _stdlib_readers() -> tuple[set[Any], dict[Any, set[Any]]]:
    """Return code that may read frames, for it gives them to none, and for walkers their users."""
    stack: Any = traceback.StackSummary
    extract = stack._extract_from_extended_frame_gen.__func__.__code__
    walkers = [traceback.walk_tb, getattr(traceback, "_walk_tb_with_full_positions", None)]
    consumers = {walker.__code__: {extract} for walker in walkers if walker is not None}
    consumers[traceback.walk_tb.__code__] |= set(consumers)  # one walker may call the other
    plain: list[Any] = [
        collections.namedtuple,
        traceback.clear_frames,
        inspect.getgeneratorstate,
        inspect.getcoroutinestate,
        getattr(typing, "_caller", None),
    ]
    for module, path in (
        ("enum", "EnumType._create_"),
        ("asyncio.coroutines", "_format_coroutine"),
        ("unittest.result", "TestResult._is_relevant_tb_level"),
    ):
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        plain.append(found)
    codes = {f.__code__ for f in plain if f is not None and hasattr(f, "__code__")}
    return codes | set(consumers) | {extract}, consumers
