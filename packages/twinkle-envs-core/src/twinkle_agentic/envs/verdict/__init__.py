"""A verdict of unit tests over a solution, in an interpreter of their own.

What a solution can and cannot forge: decision 0080.
"""

from __future__ import annotations

from twinkle_agentic.envs.verdict.compiled import CompiledTests, compile_tests
from twinkle_agentic.envs.verdict.types import CaseResult, Reason, TaskFaultError, Verdict

__all__ = ["CaseResult", "CompiledTests", "Reason", "TaskFaultError", "Verdict", "compile_tests"]
