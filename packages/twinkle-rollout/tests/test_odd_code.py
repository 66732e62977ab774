"""What other people's code must not do to the batch: odd exceptions, odd scores, odd replies."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import pytest

from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.protocol._messages import MAX_CALLS
from twinkle_agentic.rollout import APIMultiTurnRollout
from twinkle_agentic.tools import ToolManager
from twinkle_agentic.tools.types import Message


class PanicError(BaseException):
    """What an extension module raises when its Rust code panics."""


class Panicking(Env):
    """Panics in the coroutine named, if it is the odd one out."""

    def __init__(self, method: str | None, error: type[BaseException] = PanicError) -> None:
        self.method = method
        self.error = error

    def _maybe(self, method: str) -> None:
        if method == self.method:
            raise self.error(method)

    async def areset(self, trajectory: Any = None) -> StepResult:
        self._maybe("areset")
        return StepResult()

    async def astep(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        self._maybe("astep")
        return StepResult("ok", 1.0, True)

    async def aevaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        self._maybe("aevaluate")
        return [0.0]

    async def aclose(self) -> None:
        self._maybe("aclose")

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        raise NotImplementedError

    def tools(self) -> list[Any]:
        parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
        return [{"type": "function", "function": {"name": "echo", "parameters": parameters}}]


def play(api: Any, *envs: Env, **options: Any) -> list[Any]:
    waiting = list(envs)
    rollout: Any = APIMultiTurnRollout(
        api("always"), env_factory=lambda _: waiting.pop(0), concurrency=1, **options
    )
    prompt = {"messages": [{"role": "user", "content": "Play."}]}
    return rollout([prompt] * len(envs))


@pytest.mark.parametrize("error", [PanicError, KeyboardInterrupt])  # which no Ctrl-C caused
@pytest.mark.parametrize("method", ["areset", "astep", "aevaluate"])
@pytest.mark.parametrize("tool_timeout_s", [600.0, None])
def test_a_panic_in_one_env_costs_one_trajectory(
    api: Any, method: str, error: type[BaseException], tool_timeout_s: float | None
) -> None:
    envs = Panicking(method, error), Panicking(None)
    odd, good = play(api, *envs, tool_timeout_s=tool_timeout_s)
    assert (good["stop_reason"], good["reward"]) == ("env_done", 1.0)
    assert (odd["stop_reason"], odd["reward"]) == ("env_error", None)
    assert error.__name__ in odd["error"]


@pytest.mark.parametrize("method", ["areset", "astep", "aevaluate", "aclose"])
def test_a_generator_exit_is_the_envs_own_failure(api: Any, method: str) -> None:
    odd, good = play(api, Panicking(method, GeneratorExit), Panicking(None))
    assert (good["stop_reason"], good["reward"]) == ("env_done", 1.0)
    if method == "aclose":
        assert (odd["stop_reason"], odd["reward"]) == ("env_done", 1.0)
        assert "GeneratorExit" in odd["close_error"]
    else:
        assert (odd["stop_reason"], odd["reward"]) == ("env_error", None)
        assert ("the step was interrupted" if method == "astep" else "GeneratorExit") in odd[
            "error"
        ]


@pytest.mark.parametrize("method", ["areset", "astep", "aevaluate"])
def test_ctrl_c_that_arrives_inside_an_env_ends_the_rollout(api: Any, method: str) -> None:
    """On a loop in the main thread without the signal handling of `asyncio.run`."""

    class Interrupted(Panicking):
        def _maybe(self, method: str) -> None:
            if method == self.method:
                signal.raise_signal(signal.SIGINT)

    closed: list[str] = []

    class Closing(Interrupted):
        async def aclose(self) -> None:
            closed.append(method)

    rollout: Any = APIMultiTurnRollout(api("always"), env_factory=lambda _: Closing(method))
    prompt = {"messages": [{"role": "user", "content": "Play."}]}
    loop = asyncio.new_event_loop()
    try:
        task = loop.create_task(rollout.arun([prompt] * 3))
        for _ in range(3):  # once for each of the envs
            with pytest.raises(KeyboardInterrupt):
                loop.run_until_complete(task)
        results = loop.run_until_complete(task)
    finally:
        loop.close()
    assert [result["stop_reason"] for result in results] == ["env_error"] * 3
    assert len(closed) == 3


def test_a_panic_while_closing_is_told(api: Any) -> None:
    odd, good = play(api, Panicking("aclose"), Panicking(None))
    assert (odd["reward"], good["reward"]) == (1.0, 1.0)
    assert "PanicError" in odd["close_error"]


def test_on_done_that_panics_costs_nothing(api: Any) -> None:
    def on_done(trajectory: Any) -> None:
        raise PanicError

    outs = play(api, Panicking(None), Panicking(None), on_done=on_done)
    assert [out["reward"] for out in outs] == [1.0, 1.0]


class Scorer(Panicking):
    def __init__(self, scores: Any) -> None:
        super().__init__(None)
        self.scores = scores

    async def aevaluate(self, trajectories: Any, **kwargs: Any) -> Any:
        return self.scores


@pytest.mark.parametrize("scores", ["7", b"\x07", ["0.5"], {0.9: 1}, {3}, [1, 2], [None], 4])
def test_only_a_list_of_one_number_is_a_score(api: Any, scores: Any) -> None:
    (out,) = play(api, Scorer(scores))
    assert (out["stop_reason"], out["reward"], out["error_kind"]) == ("env_error", None, "env")
    assert "evaluate must return" in out["error"]


class Huge(Panicking):
    async def aevaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [1e308 * 1.7]

    async def astep(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        return StepResult("ok", 1e308 * 1.7, True)


def test_a_return_beyond_the_numbers_is_no_reward(api: Any) -> None:
    (out,) = play(api, Huge(None))
    assert (out["stop_reason"], out["reward"]) == ("env_error", None)
    assert "add up to inf" in out["error"]


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("method", ["areset", "aevaluate"])
def test_an_exception_without_a_text_is_the_envs_own_failure(api: Any, method: str) -> None:
    odd, good = play(api, Panicking(method, UnprintableError), Panicking(None))
    assert (good["stop_reason"], good["reward"]) == ("env_done", 1.0)
    assert (odd["stop_reason"], odd["reward"], odd["error_kind"]) == ("env_error", None, "env")
    assert "UnprintableError" in odd["error"]


class OnlyAsyncClose(Panicking):
    """Is reset too late, and can be closed by its coroutine only."""

    def __init__(self) -> None:
        super().__init__(None)
        self.release, self.closed = threading.Event(), threading.Event()
        self.closes = 0

    async def areset(self, trajectory: Any = None) -> StepResult:
        while not self.release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return StepResult()

    async def aclose(self) -> None:
        self.closes += 1
        if self.release.is_set():
            self.closed.set()


def test_a_reset_that_comes_too_late_is_followed_by_a_close(api: Any) -> None:
    env = OnlyAsyncClose()
    (out,) = play(api, env, reset_timeout_s=0.1)
    assert (out["stop_reason"], out["error_kind"]) == ("env_error", "timeout")
    env.release.set()
    assert env.closed.wait(10)


class OwnTimeout(Panicking):
    def reset(self, trajectory: Any = None) -> StepResult:
        raise TimeoutError("database pool exhausted")

    areset = Env.areset


def test_a_timeout_of_the_env_itself_keeps_its_words(api: Any) -> None:
    (out,) = play(api, OwnTimeout(None))
    assert out["error_kind"] == "timeout"
    assert "database pool exhausted" in out["error"]


class OwnReplyTimeout(Env):
    """Its answer to a text fails by a time-out of its own."""

    def reset(self, trajectory: Any = None) -> StepResult:
        return StepResult("go")

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        return StepResult("stepped")

    def reply(self, message: Message) -> StepResult | None:
        raise TimeoutError("the user simulator is busy")


def test_a_timeout_of_the_envs_reply_keeps_its_words() -> None:
    rollout: Any = APIMultiTurnRollout(
        Replying({"role": "assistant", "content": "done"}),
        env_factory=lambda _: OwnReplyTimeout(),
        max_turns=2,
    )
    (out,) = rollout([{"messages": [{"role": "user", "content": "hi"}]}])
    assert (out["error_kind"], out["reward"]) == ("timeout", None)
    assert "the user simulator is busy" in out["error"]


class Replying:
    """An API object that says one thing."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.message = message

    def __call__(self, trajectory: Any, sampling_params: Any, **kwargs: Any) -> Any:
        return self.message


def ask(message: dict[str, Any], tools: ToolManager) -> Any:
    rollout: Any = APIMultiTurnRollout(Replying(message), tools, max_turns=1)
    (out,) = rollout([{"messages": [{"role": "user", "content": "hi"}]}])
    return out


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": '[{"function": {"name": "echo"}}]'},
        {"tool_calls": True},
        {"function_call": {"name": "echo", "arguments": "{}"}},
        {"finish_reason": "tool_calls"},
    ],
)
def test_a_call_that_the_server_lost_is_flagged(message: dict[str, Any], echo: Any) -> None:
    out = ask({"role": "assistant", "content": "", **message}, echo)
    assert (out["stop_reason"], out["error_kind"]) == ("stop", "unparsed_tool_call")
    assert out["unparsed_tool_calls"] == 1


def test_calls_beyond_reason_are_dropped_and_counted(echo: Any) -> None:
    call = {"type": "function", "function": {"name": "echo", "arguments": '{"text": "x"}'}}
    out = ask({"role": "assistant", "tool_calls": [call] * 10_000}, echo)
    assert out["tool_errors"]["too_many_calls"] == 10_000 - MAX_CALLS
    assert sum(m["role"] == "tool" for m in out["messages"]) == MAX_CALLS


class Obliging(Panicking):
    """Has an answer for any public name, as remote objects do."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return str  # which can be called, with nothing


def test_an_env_with_an_answer_for_any_name_is_played(api: Any) -> None:
    (out,) = play(api, Obliging(None))
    assert (out["reward"], out["stop_reason"]) == (1.0, "env_done")
