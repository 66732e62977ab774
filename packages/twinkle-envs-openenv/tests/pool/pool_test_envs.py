"""Environments that the workers of the pool tests import; this directory is on their path."""

from __future__ import annotations

import ctypes
import enum
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.tools.types import user_data_dict


class OddError(Exception):
    """Cannot be unpickled: its constructor wants another number of arguments."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"odd error {code}: {reason}")


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: int


class OpenEnvClient(Env):
    """Called like the real one, which must not go into a pool."""

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        return StepResult()


class Lab(Env):
    """Does what the tool name says."""

    def __init__(self, log: str | None = None, fail: str | None = None) -> None:
        self._log = None if log is None else Path(log)
        self._write(f"made {threading.get_ident()}")
        self._steps = 0
        self._same = StepResult("same", 1.0)
        self._seen: dict[str, Any] = {}
        if fail:
            raise RuntimeError(fail)

    def reset(self, trajectory: Any = None) -> StepResult:
        self._write(f"reset {threading.get_ident()}")
        self._steps = 0
        self._seen = user_data_dict(trajectory)
        if self._seen.get("refuse"):
            raise ValueError("this task is refused")
        if gate := self._seen.get("gate"):
            _pass(gate)
        return StepResult(f"ready {sorted(self._seen.items())}")

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        self._write(f"step {threading.get_ident()}")
        self._steps += 1
        return getattr(self, f"do_{tool_name}")(**arguments)

    def tools(self) -> list[Any]:
        name = "before" if not self._seen.get("tool") else self._seen["tool"]
        return [
            {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}
        ]

    def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [float(len(t["messages"]) + kwargs.get("bonus", 0)) for t in trajectories]

    def close(self) -> None:
        self._write(f"closed {threading.get_ident()}")

    def do_add(self, reward: float = 1.0, done: bool = False) -> StepResult:
        return StepResult(f"step {self._steps}", reward, done)

    def do_same(self) -> StepResult:
        return self._same

    def do_pid(self) -> StepResult:
        return StepResult(str(os.getpid()))

    def do_environ(self, name: str) -> StepResult:
        return StepResult(os.environ.get(name, ""))

    def do_echo(self, text: str) -> StepResult:
        return StepResult(text)

    def do_sleep(self, seconds: float) -> StepResult:
        time.sleep(seconds)
        return StepResult("slept")

    def do_wait(self, gate: str) -> StepResult:
        _pass(gate)
        return StepResult("passed")

    def do_hold_interpreter(self) -> StepResult:
        ctypes.PyDLL(None).sleep(1_000)  # native code that keeps the interpreter lock
        return StepResult()

    def do_exit(self) -> StepResult:
        os._exit(3)

    def do_fail(self, message: str) -> StepResult:
        raise RuntimeError(message)

    def do_fail_oddly(self) -> StepResult:
        raise OddError(7, "nobody can unpickle me")

    def do_fail_hard(self) -> StepResult:
        raise SystemExit(4)

    def do_nan(self) -> StepResult:
        return StepResult("wrong", float("nan"))

    def do_none(self) -> StepResult:
        return StepResult(None, 1.0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    def do_nan_return(self) -> StepResult:
        return StepResult("seen", 1.0, info={"episode_reward": float("nan")})

    def do_text_done(self) -> StepResult:
        return StepResult("seen", 1.0, "yes")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    def do_wait_and_fail(self, gate: str) -> StepResult:
        _pass(gate)
        raise RuntimeError("too late")

    def do_nonsense(self) -> Any:
        return {"observation": "not a StepResult"}

    def do_objects(self) -> StepResult:
        info = {
            "point": Point(1, 2),
            "colour": Colour.RED,
            "class": Point,
            "lock": threading.Lock(),
            "list": [Point(3, 4)],
            "plain": {"a": [1, None, "x"]},
        }
        return StepResult("objects", 1.0, False, info)

    def _write(self, line: str) -> None:
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(f"{os.getpid()} {id(self)} {line}\n")


class InstantLab(Lab):
    """Says that its steps take no time."""

    instant = True


class AsyncScorer(Lab):
    """Scores with a coroutine alone."""

    evaluate = Env.evaluate

    async def aevaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [0.5] * len(trajectories)


def _pass(gate: str) -> None:
    """Tell that one is waiting, and wait until the test opens the gate."""
    directory = Path(gate)
    fifo = directory / f"{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
    os.mkfifo(fifo)
    fifo.rename(fifo.with_suffix(".waiting"))
    with fifo.with_suffix(".waiting").open() as file:
        file.read()


def make_lab(**kwargs: Any) -> Lab:
    return Lab(**kwargs)


def make_client() -> OpenEnvClient:
    return OpenEnvClient()


def make_nothing() -> Any:
    return object()


def _named_env() -> type[Env]:
    """A user's class that is called as the base is."""

    class Shadow(Env):
        def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            return StepResult()

        def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
            return [0.5] * len(trajectories)

    Shadow.__name__ = Shadow.__qualname__ = "Env"
    return Shadow


NamedEnv = _named_env()
