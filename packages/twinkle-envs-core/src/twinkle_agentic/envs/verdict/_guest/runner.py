"""Run a solution and then its tests, and sign what came of them.

Only functions and constants hold what matters: there is no name a solution could look up. What is
called after the solution started was taken from its module before.
"""

# pyright: basic, reportPrivateUsage=false, reportAttributeAccessIssue=false
# Values of any kind pass through here.
from __future__ import annotations

import _thread
import ast
import atexit
import builtins
import contextlib
import fcntl
import importlib
import inspect
import linecache
import os
import sys
import tempfile
import types
import unittest
from collections.abc import Callable
from typing import Any

from twinkle_agentic.envs.verdict._guest.cases import Cases
from twinkle_agentic.envs.verdict._guest.comparisons import ComparisonCheck
from twinkle_agentic.envs.verdict._guest.guard import Guard, hide_memory
from twinkle_agentic.envs.verdict._guest.instrument import PLACES, Instrument, with_constants
from twinkle_agentic.envs.verdict._guest.signing import sign

__all__ = ["main"]

_STACK_BYTES = 64 << 20
_SHOWN = 1_000
_TESTS = "<tests>"


def main(job: dict[str, Any]) -> None:
    """Run a job; returns, or ends the process where something of the solution still runs."""
    sys.dont_write_bytecode = True
    linecache.clearcache()
    here = ("", os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0] if sys.argv else "")))
    if job["unlink"]:
        os.unlink(sys.argv[0])
    sys.path[:] = [p for p in sys.path if p not in here]
    given = int(os.environ.pop("TWINKLE_REPORT_FD"))
    descriptor = fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, 64)
    os.close(given)
    hide_memory()
    done = _thread.allocate_lock()
    done.acquire()
    exit_now, count, clear = os._exit, _thread._count, atexit._clear  # pyright: ignore[reportPrivateUsage]
    before = count()
    run = _prepare(job, descriptor, done.release)
    with contextlib.suppress(ValueError):
        _thread.stack_size(_STACK_BYTES)
    _thread.start_new_thread(run, ())
    _thread.stack_size(0)
    del run, job
    try:
        done.acquire()
    except BaseException:  # the host interrupts: what it would report must not read frames
        exit_now(130)
    clear()
    if count() > before + 1:
        exit_now(0)


def _prepare(job: dict[str, Any], descriptor: int, done: Callable[[], None]) -> Callable[[], None]:
    write, lock = os.write, _thread.allocate_lock()
    pid, getpid, exit_now = os.getpid(), os.getpid, os._exit  # pyright: ignore[reportPrivateUsage]
    refusals: dict[str, None] = {}
    signed = sign
    del globals()["sign"]  # a solution can reach these globals: by `__subclasses__`, say

    def put(line: str) -> None:
        data = line.encode("utf-8", "replace")
        with lock:
            while data:
                data = data[write(descriptor, data) :]

    def refuse(said: str) -> None:
        if said not in refusals and len(refusals) < 20:
            refusals[said] = None
            put(f"refused {said[:200]!r}\n")

    tree = ast.parse(job["tests"], _TESTS)
    files: dict[str, str] = job["files"]
    own = {name.removesuffix(".py").replace("/", ".") for name in files}
    own |= {name.partition("/")[0] for name in files if "/" in name} | {"solution"}
    own -= {*sys.stdlib_module_names, "pytest", "_pytest"}  # the real ones, whatever is in files
    wanted = _imports(tree)
    _import_all([*wanted, *job["needs"]], own)
    absent = [name for name in _needed(tree) if name not in own and _is_absent(name)]
    patched = _patched(tree)
    private = _private_modules(wanted, own, patched)
    modules = sys.modules
    module = types.ModuleType("solution")

    names_builtin = dict(vars(builtins))
    names: dict[str, Any] = {"__builtins__": names_builtin, "__name__": "tests"}
    reached: set[int] = set()
    ends = [0]
    real_names = vars(builtins)
    mocked = _mocked(tree)
    kept_names = [(k, v) for k, v in real_names.items() if k not in mocked and k[:1] != "_"]

    def reach(site: int) -> None:
        if site < 0:
            ends[0] += 1
            return
        reached.add(site)
        for key, value in kept_names:
            if real_names.get(key) is not value:
                refuse(f"replaces builtins.{key}")

    comparisons = ComparisonCheck(refuse, _classes())
    values: dict[str, object] = {
        PLACES["reached"]: reach,
        PLACES["compare"]: comparisons.compare,
        PLACES["combine"]: comparisons.combine,
        PLACES["call"]: comparisons.call,
        PLACES["solution"]: module,
    }
    _name_stars(tree, own)
    instrument = Instrument(
        tree, provides=job["provides"], modules=private, names_of_solution=not files
    )
    top = [isinstance(node, ast.Assert) for node in tree.body]
    shared = {n for node in ast.walk(tree) if isinstance(node, ast.Global) for n in node.names}
    bound = [shared | _bound(node) for node in tree.body]
    pieces: list[tuple[bool, int, types.CodeType]] = []
    codes: list[types.CodeType] = []
    flags = _future_flags(tree)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a constant that is called
        for check, node in zip(top, tree.body, strict=True):
            changed: Any = instrument.visit(node)
            body = changed if isinstance(changed, list) else [changed]
            piece = ast.fix_missing_locations(ast.Module(body, []))
            code = compile(piece, _TESTS, "exec", flags, dont_inherit=True)
            code = with_constants(code, values | instrument.constants)
            pieces.append((check, node.lineno, code))
            codes.append(code)
    ours = {id(v) for k, v in values.items() if k != PLACES["solution"]}
    own_codes = {id(c) for piece in codes for c in _nested(piece) if _holds(c, ours)}
    guard = Guard(refuse, own_codes)
    cases = Cases(ends, guard.busy)
    snapshot = _snapshot([n for n in private if n not in patched], modules)
    execute, compile_ = exec, compile
    free = sorted(instrument.free)
    project = ""
    if files:
        project = _write_files(files)
    importer = importlib.import_module
    state: dict[str, Any] = {"stage": "solution", "text": "", "ended": False, "missing": []}
    builtin_names = {n for n in dir(builtins) if n not in job["provides"]}
    solution = job["solution"]
    del job, tree, instrument

    def load() -> None:
        if project:
            sys.path.append(project)
            for name in sorted(own & set(wanted)):
                importer(name)
            return
        modules["solution"] = module
        module.__dict__["__builtins__"] = builtins
        linecache.cache["solution.py"] = (
            len(solution),
            None,
            solution.splitlines(keepends=True),
            "solution.py",
        )
        execute(compile_(solution, "solution.py", "exec", dont_inherit=True), module.__dict__)

    def run_tests() -> None:
        def check_names(before: dict[str, Any], allowed: set[str]) -> None:
            # A function of the tests that the solution gets to call has them as `__globals__`.
            if "*" in allowed:
                return
            # Where `warnings.warn(stacklevel=2)` notes what it has shown already.
            for name in (before.keys() | names.keys()) - {"__warningregistry__"}:
                if name not in allowed and names.get(name, before) is not before.get(name, names):
                    refuse(f"replaces the name {name} of the tests")

        public = [n for n in module.__dict__ if not n.startswith("__") and n not in builtin_names]
        names.update((name, module.__dict__[name]) for name in public)
        given = set(names)
        for (check, line, code), own_names in zip(pieces, bound, strict=True):
            before = dict(names)
            try:
                execute(code, names)
                check_names(before, own_names)
            except BaseException as error:
                cases.failed(f"line {line}", error)
                if not check:
                    return
            else:
                if check:
                    cases.passed(f"line {line}")
        before = dict(names)
        cases.run({k: v for k, v in names.items() if k not in given or v is not _of(module, k)})
        check_names(before, shared)
        state["ended"] = True

    def run() -> None:
        try:
            put("stage solution\n")
            try:
                load()
            except BaseException as error:
                state["text"] = cases.describe(error)
            else:
                state["stage"] = "tests"
                state["missing"] = [] if project else [n for n in free if n not in module.__dict__]
                put("stage tests\n")
                for said in _changed(snapshot):
                    refuse(said)
                run_tests()
                for said in _changed(snapshot):
                    refuse(said)
            body = repr(
                {
                    **state,
                    "reached": sorted(reached),
                    "cases": cases.results,
                    "absent": absent,
                    "refused": list(refusals),
                }
            )
            if getpid() != pid:
                exit_now(1)
            put(f"verdict {signed(body.encode('utf-8', 'replace'))} {body}\n")
        except BaseException:
            # What is raised here would go to `sys.unraisablehook`, with this function.
            pass
        finally:
            done()

    guard.install()
    return run


def _of(module: types.ModuleType, name: str) -> object:
    return module.__dict__.get(name, _of)


def _future_flags(tree: ast.Module) -> int:
    import __future__

    names = [
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        for alias in node.names
    ]
    return sum(getattr(__future__, name).compiler_flag for name in names)


def _imports(tree: ast.AST) -> list[str]:
    """Return the full names of the modules that a source imports."""
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(dict.fromkeys(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found[node.module] = None
            found.update(dict.fromkeys(f"{node.module}.{alias.name}" for alias in node.names))
    return list(found)


def _needed(tree: ast.Module) -> list[str]:
    """Return the modules that the tests cannot do without: those imported outside of `try`."""
    needed = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    found = _imports(ast.Module([*needed], []))
    return [n for n in dict.fromkeys(name.partition(".")[0] for name in found) if n]


def _is_absent(name: str) -> bool:
    if name in sys.modules:
        return False
    try:
        importlib.import_module(name)
    except Exception:
        return True
    return False


def _name_stars(tree: ast.Module, own: set[str]) -> None:
    """Name what `from module import *` brings, or those names would be the solution's to define."""
    for node in ast.walk(tree):
        star = isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
        if not star or node.level or not node.module or node.module.partition(".")[0] in own:
            continue
        found = sys.modules.get(node.module)
        if found is not None:
            public = [n for n in vars(found) if not n.startswith("_")]
            node.names = [ast.alias(name) for name in getattr(found, "__all__", public)]


def _bound(node: ast.AST) -> set[str]:
    """Return names that a statement of the tests may bind; `*` where the text does not say."""
    found: set[str] = {"__annotations__"}
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
            found.add(each.id)
        elif isinstance(each, ast.Name) and each.id in ("exec", "globals", "locals", "vars"):
            found.add("*")
        elif isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(each.name)
        elif isinstance(each, ast.alias):
            found.add((each.asname or each.name).partition(".")[0])
        elif isinstance(each, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and each.name:
            found.add(each.name)
        elif isinstance(each, ast.MatchMapping) and each.rest:
            found.add(each.rest)
    return found


def _import_all(names: list[str], own: set[str]) -> None:
    """Import the real modules before the solution can stand in their way."""
    for name in names:
        if name.partition(".")[0] not in own and name != "__future__":
            # Where the tests need it, their own import says so.
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _patched(tree: ast.AST) -> set[str]:
    """Return names whose attributes the tests set: those modules must be the real ones."""
    targets = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    stored = [n for n in targets if not isinstance(n.ctx, ast.Load)]
    return {n.value.id for n in stored if isinstance(n.value, ast.Name)}


def _private_modules(wanted: list[str], own: set[str], patched: set[str]) -> dict[str, Any]:
    """Give the tests modules of their own, whose names a solution cannot replace."""
    private: dict[str, Any] = {}
    _ = unittest.IsolatedAsyncioTestCase  # imported on first use, which would be another copy
    packages = [n for w in wanted for n in (w, *(w[:i] for i, c in enumerate(w) if c == "."))]
    for name in dict.fromkeys(packages):
        real = sys.modules.get(name)
        if real is None or name.partition(".")[0] in own:
            continue
        if name in patched or name in ("sys", "builtins") or type(real) is not types.ModuleType:
            private[name] = real
            continue
        copy = types.ModuleType(name)
        copy.__dict__.update(vars(real))
        private[name] = copy
    for name in list(sys.modules):  # the solution imports copies of these
        if name.partition(".")[0] in ("unittest", "pytest", "_pytest"):
            own_names = vars(sys.modules.pop(name))
            for key, value in vars(builtins).items():  # so that none can be replaced for them
                if not key.startswith("_"):
                    own_names.setdefault(key, value)
    return private


def _classes() -> set[int]:
    """Return the ids of all classes there are; `mock.ANY` and the like are not to be trusted."""
    seen: dict[int, type] = {}
    left: list[type] = [object]
    while left:
        cls = left.pop()
        if id(cls) not in seen:
            seen[id(cls)] = cls
            left.extend(type.__subclasses__(cls))
    _KEPT.extend(seen.values())  # so that no later class gets the id of one of them
    return {number for number, cls in seen.items() if cls.__module__ != "unittest.mock"}


_KEPT: list[type] = []


def _nested(code: types.CodeType) -> list[types.CodeType]:
    found = [code]
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found.extend(_nested(const))
    return found


def _holds(code: types.CodeType, objects: set[int]) -> bool:
    return any(id(const) in objects for one in _nested(code) for const in one.co_consts)


def _mocked(tree: ast.AST) -> set[str]:
    """Return names of builtins that the tests replace, as far as their text shows."""
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value.removeprefix("builtins."))
    return found


def _snapshot(private: list[str], modules: dict[str, Any]) -> list[tuple[str, Any, dict[str, Any]]]:
    """Keep the functions and classes of the modules that the tests use, and their methods."""
    kept: list[tuple[str, Any, dict[str, Any]]] = []
    for name in ("builtins", *private):
        real = modules.get(name)
        if real is None or name == "sys":
            continue
        names = {k: v for k, v in vars(real).items() if callable(v) and not k.startswith("__")}
        kept.append((name, vars(real), names))
        for key, cls in names.items():
            if isinstance(cls, type) and cls.__flags__ & 1 << 9:
                methods = {k: v for k, v in vars(cls).items() if inspect.isfunction(v)}
                kept.append((f"{name}.{key}", type.__dict__["__dict__"].__get__(cls), methods))
    return kept


def _changed(kept: list[tuple[str, Any, dict[str, Any]]]) -> list[str]:
    for name, now, before in kept:
        for key, value in before.items():
            if now.get(key) is not value:
                return [f"replaces {name}.{key}"]
    return []


def _write_files(files: dict[str, str]) -> str:
    folder = tempfile.mkdtemp(prefix="project-")
    for name, text in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    os.chdir(folder)
    return folder
