"""Action, observation and state of OpenEnv's `coding_env`.

Where the `coding_env` package is installed these are its own classes, else equal ones.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from openenv_server.openenv_types import Action, Observation, State

__all__ = ["CodeAction", "CodeObservation", "CodeState", "import_coding_env"]


def import_coding_env(module: str) -> Any | None:
    """Import a module of the `coding_env` package; None where the package is not installed.

    Raises:
        ImportError: The package is there and broken.
    """
    try:
        return importlib.import_module(f"coding_env.{module}")
    except ModuleNotFoundError as error:
        if error.name == "coding_env":
            return None
        raise


class CodeAction(Action):
    """A piece of Python code to run."""

    code: str


class CodeObservation(Observation):
    """What the code did."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


class CodeState(State):
    """Where the session stands."""

    last_exit_code: int = 0


if not TYPE_CHECKING:
    _models = import_coding_env("models")
    if _models is not None:
        CodeAction = _models.CodeAction
        CodeObservation = _models.CodeObservation
        CodeState = _models.CodeState
