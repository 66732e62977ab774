"""Unit tests as a program that runs a solution, and the reader of what it reports."""

from __future__ import annotations

import ast
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any, cast

from twinkle_agentic.envs.verdict._checks import parse_tests
from twinkle_agentic.envs.verdict._guest.instrument import free_names
from twinkle_agentic.envs.verdict.types import CaseResult, Reason, Verdict

__all__ = ["CompiledTests", "compile_tests"]

_PARTS = ("instrument", "guard", "comparisons", "cases", "signing", "runner")
_LINE = re.compile(r"^verdict ([0-9a-f]{64}) (.*)$", re.MULTILINE)
_REFUSED = re.compile(r"^refused (.*)$", re.MULTILINE)
_MAX_TEXT = 2_000


class CompiledTests:
    """The tests of one task. Immutable, so that threads may share it; `program` is made per run.

    Args:
        tests: Python source: assertions at the top, functions named `test...`, `unittest` classes.
        prompt: What the solution is asked for. A name that the tests use, the solution lacks and
            the prompt does not mention is the task's fault; without a prompt it is the solution's.
        provides: Names that the solution is asked to define, whatever the prompt says: modules of a
            project, and functions named like a builtin, as `pow`. The tests get every other builtin
            itself, whatever the solution defines.

    Raises:
        TaskFaultError: The tests check nothing; the message has the line.
    """

    def __init__(
        self, tests: str, *, prompt: str | None = None, provides: Iterable[str] = ()
    ) -> None:
        self.tests = tests
        self.prompt = prompt
        self.provides = tuple(provides)
        self._tree = parse_tests(tests)
        self.names = tuple(free_names(self._tree, self.provides))

    def program(
        self, solution: str | Mapping[str, str], *, unlink: bool = False
    ) -> tuple[str, bytes]:
        """Write the program that runs a solution and then the tests.

        It needs an interpreter of its own, CPython 3.11 or newer, with the descriptor to report to
        in the variable `TWINKLE_REPORT_FD`, and nothing else. It is never written to a place that
        the solution can read.

        Args:
            solution: Source, or the files of a project by their paths: then the tests import its
                modules.
            unlink: The program is run as a file, and removes it first.

        Returns:
            The source, and the key that `read_report` needs. Every run has a key of its own.
        """
        key = secrets.token_bytes(32)
        files_ = {} if isinstance(solution, str) else dict(solution)
        source = solution if isinstance(solution, str) else ""
        job = {
            "tests": self.tests,
            "solution": source,
            "files": files_,
            "provides": self.provides,
            "needs": _modules_of([source, *files_.values()]),
            "unlink": unlink,
        }
        guest = _guest_source().replace('b"__VERDICT_KEY__"', repr(key))
        text = f"{guest}\nmain({job!r})\n"
        names = '{"__name__": "verdict", "__builtins__": dict(vars(__import__("builtins")))}'
        return f"exec(compile({text!r}, '<verdict>', 'exec'), {names})\n", key

    def read_report(self, report: str, key: bytes, *, ended: str = "") -> Verdict:
        """Read what the program reported.

        Args:
            report: All that came over the descriptor.
            key: Of this run.
            ended: How the run ended where it met a limit or was killed, for the text alone.
        """
        refused = [str(_literal(said)) for said in _REFUSED.findall(report)]
        body = _signed(report, key)
        if body is None:
            if refused:
                return _failed(Reason.REFUSED, f"the solution {refused[0]}, which is refused")
            where = "the tests" if "stage tests\n" in report else "the solution"
            limit = ended and ended not in ("crash", "exception")
            how = f" ({ended})" if ended else ""
            return _failed(
                Reason.LIMIT if limit else Reason.EXITED,
                f"the interpreter ended in {where}, before the tests did{how}",
            )
        cases = tuple(
            CaseResult(name=name, outcome=outcome, text=text)
            for name, outcome, _, text in body["cases"]
        )
        kinds = {kind for _, _, kind, _ in body["cases"]}
        if refused or body["refused"]:
            said = (body["refused"] or refused)[0]
            said = said if said.startswith("a value") else f"the solution {said}"
            return _failed(Reason.REFUSED, f"{said}, which proves nothing", cases)
        if body["stage"] == "solution":
            return _failed(Reason.SOLUTION, f"the solution itself fails: {body['text']}")
        if "\0fixture" in kinds:
            bad = next(case for case in cases if case.text.startswith("the fixtures"))
            return _failed(
                Reason.TASK, f"test {bad.name} needs {bad.text}: give values", cases, fault=True
            )
        bad_cases = [case for case in cases if case.outcome != "passed"]
        if bad_cases or not body["ended"]:
            if absent := [name for name in body["absent"] if not self._asks_for(name)]:
                text = f"the tests import {absent[0]!r}, which is not installed where they run"
                return _failed(Reason.TASK, text, cases, fault=True)
            if body["missing"]:
                return self._missing(body["missing"], cases)
        if bad_cases:
            reason = Reason.FAILED if bad_cases[0].outcome == "failed" else Reason.ERROR
            return _failed(reason, f"test {bad_cases[0].name} fails: {bad_cases[0].text}", cases)
        if not body["ended"]:
            return _failed(Reason.ERROR, "the tests did not come to their end", cases)
        if not body["reached"]:
            return _failed(Reason.NOTHING_CHECKED, "no assertion was reached", cases)
        return Verdict(passed=True, text="All tests pass.", cases=cases)

    def _asks_for(self, name: str) -> bool:
        return name in self.provides or name in re.findall(r"\w+", self.prompt or "")

    def _missing(self, missing: list[str], cases: tuple[CaseResult, ...]) -> Verdict:
        unasked = [n for n in missing if self.prompt is not None and not self._asks_for(n)]
        if unasked and len(unasked) == len(missing):
            return _failed(
                Reason.TASK,
                f"the tests use {unasked[0]!r}, which neither the solution defines nor the prompt "
                "asks for: is it misspelt?",
                cases,
                fault=True,
            )
        named = next(name for name in missing if name not in unasked)
        return _failed(
            Reason.MISSING_NAME, f"the solution defines no {named!r}, which the tests use", cases
        )


@lru_cache(maxsize=256)
def compile_tests(
    tests: str, *, prompt: str | None = None, provides: tuple[str, ...] = ()
) -> CompiledTests:
    """Make `CompiledTests`, once for all samples of a task."""
    return CompiledTests(tests, prompt=prompt, provides=provides)


def _failed(
    reason: Reason, text: str, cases: tuple[CaseResult, ...] = (), *, fault: bool = False
) -> Verdict:
    return Verdict(
        passed=False, reason=reason, text=text[:_MAX_TEXT], cases=cases, task_fault=fault
    )


def _signed(report: str, key: bytes) -> dict[str, Any] | None:
    for signature, text in _LINE.findall(report):
        data = text.encode("utf-8", "replace")
        wanted = hashlib.blake2b(data, key=key, digest_size=32).hexdigest()
        if hmac.compare_digest(wanted, signature):
            found: Any = _literal(text)
            return cast("dict[str, Any]", found) if isinstance(found, dict) else None
    return None


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _modules_of(sources: Iterable[str]) -> list[str]:
    """Return the modules that a solution imports, to be loaded before it runs."""
    found: dict[str, None] = {}
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found.update(dict.fromkeys(alias.name for alias in node.names))
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found[node.module] = None
    never = {"ctypes", "_ctypes", "cffi", "antigravity", "this", "idlelib"}
    return [name for name in found if name.partition(".")[0] not in never]


@lru_cache(maxsize=1)
def _guest_source() -> str:
    folder = files("twinkle_agentic.envs.verdict._guest")
    lines = ["from __future__ import annotations"]
    for part in _PARTS:
        text = (folder / f"{part}.py").read_text("utf-8")
        lines.extend(
            line
            for line in text.split("\n")
            if not line.startswith(("from __future__", "from twinkle_agentic"))
        )
    return "\n".join(lines)
