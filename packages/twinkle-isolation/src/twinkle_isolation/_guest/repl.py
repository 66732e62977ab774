"""The loop of a Python session: runs pieces of code in one `__main__`, as Python's prompt does.

It reads requests from the control channel and answers each when its code has ended. Everything the
code prints, tracebacks too, goes to the descriptors 1 and 2. What happens in here is the code's to
change (it is one process): the host must not trust an answer for more than what the code itself
may say.
"""

from __future__ import annotations
import __future__

import ast
import atexit
import builtins
import codecs
import contextlib
import io
import json
import linecache
import os
import random
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable, Generator, Mapping
from types import CodeType, FrameType
from typing import Any

from twinkle_isolation._guest.warm import CONTROL_FD

__all__ = ["main"]

_LENGTH = struct.Struct("!I")
_INTERRUPTED = 130  # what a shell gives for SIGINT
_MAX_CHAIN = 100
_FUTURE = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})

# The code may replace these in their modules.
_dumps, _loads, _exit, _getpid = json.dumps, json.loads, os._exit, os.getpid
_compile, _exec, _format_exception = compile, exec, traceback.format_exception


OnError = Callable[[BaseException, str], None]


def main(*, on_error: OnError | None = None, after: Callable[[], None] | None = None) -> None:
    """Serve requests until the control channel closes.

    Args:
        on_error: Takes an exception that ended the code, `SystemExit` too, and the text that Python
            prints of it, instead of printing it.
        after: Called after each piece of code, as if it were the end of it.
    """
    control = socket.socket(fileno=CONTROL_FD)
    session = _Session(on_error, after)
    while True:
        request = _receive(control)
        if request is None:
            _exit(0)
        answer = session.run(request)
        data = _dumps(answer).encode()
        control.sendall(_LENGTH.pack(len(data)) + data)


def _receive(control: socket.socket) -> dict[str, Any] | None:
    header = _read(control, _LENGTH.size)
    if header is None:
        return None
    data = _read(control, _LENGTH.unpack(header)[0])
    return None if data is None else _loads(data)


def _read(control: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = control.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return bytes(data)


class _Session:
    """The names of the code, and what of the interpreter's state the loop keeps."""

    def __init__(self, on_error: OnError | None, after: Callable[[], None] | None) -> None:
        self.on_error = on_error
        self.after = after
        self.main = types.ModuleType("__main__")
        self.names = self.main.__dict__
        self.names |= {"__builtins__": builtins, "__annotations__": {}}
        self.replaced = [sys.modules["__main__"], *_forget_own_modules()]
        sys.modules["__main__"] = self.main
        self.pid = _getpid()
        self.steps = 0
        self.flags = 0
        self.running = False
        # asyncio compares the handler with this name before it installs its own.
        handler = self.on_interrupt
        signal.default_int_handler = handler  # pyright: ignore[reportAttributeAccessIssue]
        signal.signal(signal.SIGINT, handler)

    def on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Stop the code; between two steps there is none to stop."""
        if self.running:
            raise KeyboardInterrupt

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one piece of code to its end."""
        if request.get("seed") is not None:
            _seed(request["seed"])
        if sys.stdin is None or sys.stdin.closed:  # `exit()` closes it
            sys.stdin = sys.__stdin__ = open(  # noqa: SIM115  # the code's, to its end
                0, encoding="utf-8", errors="surrogateescape", closefd=False
            )
        self.steps += 1
        answer: dict[str, Any] = {"exit_code": 0, "error": None, "stage": "run"}
        try:
            try:
                self.running = True
                with _environment(request["env"]):
                    try:
                        self.execute(request, answer)
                    finally:
                        if self.after is not None:
                            self.after()
                if request["finish"]:
                    _finish()
            finally:
                self.running = False
        except BaseException as error:
            self.running = False
            answer["exit_code"] = _report(error, self.on_error)
            answer["error"] = None if isinstance(error, SystemExit) else _describe(error)
        if _getpid() != self.pid:
            # A child the code forked, which has come to the end of its program.
            with contextlib.suppress(BaseException):
                _finish()
            _flush()
            _exit(answer["exit_code"])
        _flush()
        return answer

    def execute(self, request: dict[str, Any], answer: dict[str, Any]) -> None:
        """Compile and run the code of a request; its value is shown if that is asked for."""
        source = request["code"]
        file = f"<step-{self.steps}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        answer["stage"] = "compile"
        parts = self.compile(source, file, display=request["display"])
        answer["stage"] = "run"
        for part in parts:
            _exec(part, self.names)

    def compile(self, source: str, file: str, *, display: bool) -> list[CodeType]:
        """Compile the code, its last expression apart if its value is to be shown."""
        # As text: a declaration of an encoding in it means nothing.
        tree = _parse_source(source, file, self.flags)
        whole = self.code_of(tree, file, "exec")
        if not display or not tree.body or not isinstance(tree.body[-1], ast.Expr):
            return [whole]
        last = tree.body.pop()
        parts = [self.code_of(ast.Interactive([last]), file, "single")]
        return [self.code_of(tree, file, "exec"), *parts] if tree.body else parts

    def code_of(self, tree: ast.Module | ast.Interactive, file: str, mode: str) -> CodeType:
        code = _compile(tree, file, mode, self.flags, dont_inherit=True)
        self.flags |= code.co_flags & _FUTURE  # they hold for later steps, as at the prompt
        return code


def _parse_source(source: str, file: str, flags: int) -> ast.Module:
    return _compile(source, file, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)


def _forget_own_modules() -> list[types.ModuleType]:
    """Take this package from `sys.modules`, where the code has no use for it."""
    names = [name for name in sys.modules if name.partition(".")[0] == "twinkle_isolation"]
    return [sys.modules.pop(name) for name in names]


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed % 2**32)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None, None, None]:
    """Set environment variables for one piece of code; then they are as they were before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _finish() -> None:
    """Do what Python does at its end."""
    wait_for_threads: Any = getattr(threading, "_shutdown")  # noqa: B009  # not in the stubs
    wait_for_threads()
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(BaseException):
            stream.flush()  # pyright: ignore[reportOptionalMemberAccess]


def _report(error: BaseException, on_error: OnError | None) -> int:
    """Print what Python prints of an exception nothing caught; return its exit code."""
    try:
        if on_error is not None:
            _cut_own_frames(error)
            on_error(error, _text_of(error))
            return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        if isinstance(error, SystemExit):
            return _exit_code(error.code)
        _cut_own_frames(error)
        kind, value, trace = type(error), error, error.__traceback__
        if sys.excepthook is sys.__excepthook__:
            _flush()
            print(_text_of(value), end="", file=sys.stderr)  # noqa: T201  # as Python does
        else:
            sys.excepthook(kind, value, trace)
    except BaseException as failed:
        with contextlib.suppress(BaseException):
            os.write(2, f"{type(error).__name__} ({type(failed).__name__} in its text)\n".encode())
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _text_of(error: BaseException) -> str:
    """Format an exception as the interpreter does."""
    lines = _format_exception(error)
    if sys.version_info < (3, 12) and isinstance(error, (NameError, AttributeError)):
        # Only the interpreter itself knows what could have been meant, and it has no source lines.
        stderr, sys.stderr = sys.stderr, io.StringIO()
        try:
            sys.__excepthook__(type(error), error, error.__traceback__)
            last = sys.stderr.getvalue().rpartition("\n" + lines[-1].rstrip("\n"))[2]
        finally:
            sys.stderr = stderr
        if last.startswith(". Did you mean"):
            lines[-1] = lines[-1].rstrip("\n") + last
    return "".join(lines)


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)  # noqa: T201  # as Python does
    return 1


def _cut_own_frames(error: BaseException) -> None:
    """Leave the frames of the code: the loop stands before them, its SIGINT handler after."""
    seen: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if seen is None:
            return
        trace = seen.__traceback__
        while trace is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        seen.__traceback__ = trace
        while trace is not None:
            after = trace.tb_next
            if after is not None and after.tb_frame.f_globals is globals():
                trace.tb_next = after = None
            trace = after
        seen = seen.__cause__ or seen.__context__


def _describe(error: BaseException) -> dict[str, Any]:
    """Name the exception for the host, which tells a limit that was met from other failures."""
    number = getattr(error, "errno", None)
    text = ""
    with contextlib.suppress(BaseException):
        text = str(error)[:200]
    return {
        "type": _word(type(error).__name__),
        "kinds": [_word(kind.__name__) for kind in type(error).__mro__[:8]],
        "errno": number if type(number) is int else None,
        "message": _word(text),
    }


def _word(text: str) -> str:
    return codecs.encode(text, "utf-8", "replace").decode()
