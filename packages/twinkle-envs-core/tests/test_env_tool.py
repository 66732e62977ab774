from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from twinkle_agentic._aio.threads import ThreadPool, use_pool
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.env_tool import EnvTool, EpisodeRecord
from twinkle_agentic.envs.errors import SessionClosedError
from twinkle_agentic.tools import ToolManager

WAIT_S = 30.0
SOON_S = 0.01  # a limit that is meant to pass
OVER = "Error: the episode is over"


class Scripted(Env):
    """An env whose steps the test writes."""

    def __init__(self, step: Callable[[str, dict[str, Any]], Any], *names: str) -> None:
        self.script = step
        self.names = names
        self.steps: list[Any] = []

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        self.steps.append((tool_name, arguments))
        return self.script(tool_name, arguments)

    def tools(self) -> list[Any]:
        return [
            {"type": "function", "function": {"name": name, "description": f"Do {name}."}}
            for name in self.names
        ]


class Native(Scripted):
    """An env with a coroutine of its own."""

    async def astep(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        self.steps.append((tool_name, arguments))
        return await self.script(tool_name, arguments)


class Foreign:
    """An env of another framework."""

    def __init__(self, step: Callable[[str, dict[str, Any]], Any]) -> None:
        self.step = step

    def tools(self) -> list[Any]:
        return []


def results(*queue: Any) -> Callable[[str, dict[str, Any]], Any]:
    """Give the queue's results one by one, raising the exceptions in it."""
    items = list(queue)

    def step(tool_name: str, arguments: dict[str, Any]) -> Any:
        item = items.pop(0)
        if isinstance(item, BaseException):
            raise item
        return item

    return step


def call(name: str = "env_action", **arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


# --- definitions


def test_env_without_tools_gets_one_generic_tool() -> None:
    (tool,) = EnvTool.from_env(Scripted(results()))
    assert tool.tool_info() == {
        "type": "function",
        "function": {
            "name": "env_action",
            "description": "Execute an action in the environment.",
            "parameters": {"type": "object", "properties": {}},
        },
    }


def test_env_with_tools_gets_one_tool_each() -> None:
    tools = EnvTool.from_env(Scripted(results(), "look", "take"), timeout_s=3.0)
    assert [tool.tool_info()["function"]["name"] for tool in tools] == ["look", "take"]  # type: ignore[typeddict-item]
    assert [tool.timeout_s for tool in tools] == [3.0, 3.0]
    assert tools[0].record is tools[1].record


@pytest.mark.parametrize(
    "info",
    [
        None,
        "look",
        {},
        {"function": None},
        {"function": {}},
        {"function": {"name": ""}},
        {"function": {"name": 3}},
    ],
)
def test_definition_without_a_name_is_refused(info: Any) -> None:
    env = Scripted(results())
    env.tools = lambda: [info]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"tools\(\) of Scripted .* found"):
        EnvTool.from_env(env)


def test_definition_without_description_or_parameters_is_completed() -> None:
    env = Scripted(results())
    function = {"name": "go", "description": None, "parameters": None}
    env.tools = lambda: [{"function": function}]  # type: ignore[method-assign, list-item, typeddict-item]
    assert EnvTool.from_env(env)[0].tool_info()["function"] == {  # type: ignore[typeddict-item]
        "name": "go",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }


def test_further_fields_of_a_definition_are_kept() -> None:
    env = Scripted(results())
    env.tools = lambda: [{"type": "function", "function": {"name": "go", "strict": True}}]  # type: ignore[method-assign]
    assert EnvTool.from_env(env)[0].tool_info()["function"].get("strict") is True  # type: ignore[typeddict-item]


def test_unusable_timeout_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout_s must be above 0 or None, found 0"):
        EnvTool(Scripted(results()), timeout_s=0)


# --- the record


@pytest.fixture(params=["sync", "async"])
def act(request: pytest.FixtureRequest) -> Callable[..., str]:
    """Call a tool, either way."""

    def sync(tool: EnvTool, **arguments: Any) -> str:
        name = tool.tool_info()["function"]["name"]  # type: ignore[typeddict-item]
        return tool(name, arguments)

    def coroutine(tool: EnvTool, **arguments: Any) -> str:
        name = tool.tool_info()["function"]["name"]  # type: ignore[typeddict-item]
        return asyncio.run(tool.acall(name, arguments))

    return sync if request.param == "sync" else coroutine


def test_step_reaches_the_env_and_its_observation_the_model(act: Callable[..., str]) -> None:
    env = Scripted(results(StepResult("seen", 0.5)), "look")
    (tool,) = EnvTool.from_env(env)
    assert (tool.last_result, tool.done, tool.episode_reward) == (None, False, 0.0)
    assert act(tool, at="door") == "seen"
    assert env.steps == [("look", {"at": "door"})]
    assert tool.last_result == StepResult("seen", 0.5)
    assert (tool.done, tool.episode_reward) == (False, 0.5)


def test_tools_of_one_env_share_the_episode(act: Callable[..., str]) -> None:
    env = Scripted(results(StepResult("a", 1.0), StepResult("b", 2.0, True)), "look", "take")
    look, take = EnvTool.from_env(env)
    act(look)
    assert take.episode_reward == 1.0
    act(take)
    assert (look.done, look.last_result, look.episode_reward) == (True, take.last_result, 2.0)


def test_reported_episode_reward_goes_before_the_last_reward(act: Callable[..., str]) -> None:
    env = Scripted(
        results(StepResult("a", 1.0, False, {"episode_reward": 5.0}), StepResult("b", 2.0))
    )
    (tool,) = EnvTool.from_env(env)
    act(tool)
    assert tool.episode_reward == 5.0
    act(tool)
    assert tool.episode_reward == 2.0


def test_failed_step_does_not_erase_the_reward(act: Callable[..., str]) -> None:
    env = Scripted(results(StepResult("a", 1.0), StepResult.failed("broke", done=False)))
    (tool,) = EnvTool.from_env(env)
    act(tool)
    assert act(tool) == "Error: broke"
    assert (tool.episode_reward, tool.done) == (1.0, False)


def test_finished_episode_is_not_stepped_again(act: Callable[..., str]) -> None:
    env = Scripted(results(StepResult("end", 1.0, True)), "look", "take")
    look, take = EnvTool.from_env(env)
    act(look)
    assert act(take).startswith(OVER)
    assert act(look).startswith(OVER)
    assert env.steps == [("look", {})]
    assert (look.last_result, look.episode_reward) == (StepResult("end", 1.0, True), 1.0)


def test_reset_starts_a_new_record(act: Callable[..., str]) -> None:
    env = Scripted(results(StepResult("end", 1.0, True), StepResult("again", 0.25)))
    (tool,) = EnvTool.from_env(env)
    act(tool)
    env.reset()
    assert (tool.last_result, tool.done, tool.episode_reward) == (None, False, 0.0)
    assert act(tool) == "again"
    assert tool.episode_reward == 0.25


def test_reset_through_super_starts_a_new_record() -> None:
    class Sub(Scripted):
        def reset(self, trajectory: Any = None) -> StepResult:
            return super().reset(trajectory)

    class SubSub(Sub):
        def reset(self, trajectory: Any = None) -> StepResult:
            return super().reset(trajectory)

    env = SubSub(results(StepResult("end", 1.0, True), StepResult("again")))
    (tool,) = EnvTool.from_env(env)
    tool("env_action", {})
    env.reset()
    assert not tool.done
    assert tool("env_action", {}) == "again"


def test_env_that_raises_failed_a_step_and_the_episode_goes_on(act: Callable[..., str]) -> None:
    env = Scripted(results(StepResult("a", 1.0), ValueError("broke"), StepResult("b", 0.5)))
    (tool,) = EnvTool.from_env(env)
    act(tool)
    assert act(tool) == "Error: ValueError: broke"
    assert tool.last_result is not None
    assert tool.last_result.info["error_kind"] == "tool"
    assert (tool.done, tool.episode_reward) == (False, 1.0)
    assert act(tool) == "b"


@pytest.mark.parametrize("error", [TimeoutError("late"), ConnectionError("cut"), KeyError("db")])
def test_error_that_is_fatal_ends_the_episode(act: Callable[..., str], error: Exception) -> None:
    env = Scripted(results(StepResult("a", 1.0), error))
    env.fatal_errors = (LookupError,)
    (tool,) = EnvTool.from_env(env)
    act(tool)
    assert act(tool).startswith(f"Error: {type(error).__name__}: ")
    assert (tool.done, tool.episode_reward) == (True, 1.0)
    assert act(tool).startswith(OVER)


def test_error_of_ours_keeps_its_kind(act: Callable[..., str]) -> None:
    (tool,) = EnvTool.from_env(Scripted(results(SessionClosedError("gone"))))
    act(tool)
    assert tool.last_result == StepResult.failed(SessionClosedError("gone"))


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), asyncio.CancelledError("stray")])
@pytest.mark.parametrize("kind", ["env", "foreign"])
def test_exit_raised_by_an_env_ends_the_episode(
    act: Callable[..., str], error: BaseException, kind: str
) -> None:
    script = results(error)
    (tool,) = EnvTool.from_env(Scripted(script) if kind == "env" else Foreign(script))  # type: ignore[arg-type]
    assert act(tool).startswith(f"Error: {type(error).__name__}")
    assert tool.done


def test_ctrl_c_during_a_step_goes_on_and_ends_the_episode() -> None:
    (tool,) = EnvTool.from_env(Scripted(results(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        tool("env_action", {})
    assert tool.done


@pytest.mark.parametrize("value", [None, "seen", ("seen", 1.0, False, {}), {"observation": "x"}])
def test_env_that_returns_no_result_ends_the_episode(act: Callable[..., str], value: Any) -> None:
    (tool,) = EnvTool.from_env(Scripted(results(value)))
    assert "is no StepResult" in act(tool)
    assert tool.done
    assert tool.last_result is not None
    assert tool.last_result.info["error_kind"] == "env"


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1.0"])
def test_bad_reward_is_flagged_and_never_counted(act: Callable[..., str], reward: Any) -> None:
    env = Scripted(results(StepResult("a", 1.0), StepResult("b", reward)))
    (tool,) = EnvTool.from_env(env)
    act(tool)
    assert act(tool) == "b"
    assert (tool.episode_reward, tool.done) == (1.0, False)
    assert tool.last_result is not None
    assert tool.last_result.error


def test_observation_of_any_kind_becomes_text(act: Callable[..., str]) -> None:
    (tool,) = EnvTool.from_env(Scripted(results(StepResult({"board": [1]}))))  # type: ignore[arg-type]
    assert act(tool) == '{"board": [1]}'


def test_env_of_another_framework_is_stepped_in_a_thread(act: Callable[..., str]) -> None:
    class Result:
        observation, reward, done, info = "seen", 0.5, True, {"a": 1}

    (tool,) = EnvTool.from_env(Foreign(lambda n, a: Result()))  # type: ignore[arg-type]
    assert act(tool) == "seen"
    assert tool.last_result == StepResult("seen", 0.5, True, {"a": 1})
    assert act(tool).startswith(OVER)
    tool.record.clear(0)
    assert act(tool) == "seen"


async def test_native_coroutine_of_the_env_is_awaited() -> None:
    async def step(tool_name: str, arguments: dict[str, Any]) -> StepResult:
        await asyncio.sleep(0)
        return StepResult("from the loop")

    (tool,) = EnvTool.from_env(Native(step))
    assert await tool.acall("env_action", {}) == "from the loop"


# --- limits and late answers


async def test_step_that_hangs_ends_the_episode_and_its_late_answer_is_nobodys() -> None:
    pool, go = ThreadPool(4), threading.Event()
    use_pool(pool)

    def hang(tool_name: str, arguments: dict[str, Any]) -> StepResult:
        go.wait(WAIT_S)
        return StepResult("late", 7.0)

    env = Scripted(hang)
    tools = EnvTool.from_env(env, timeout_s=SOON_S)
    manager = ToolManager(tools)
    outcome = await manager.arun(call())
    assert outcome.error_kind == "timeout"
    assert tools[0].done
    assert tools[0].last_result is not None
    assert tools[0].last_result.info["error_kind"] == "timeout"
    assert tools[0].last_result.info["retryable"] is True
    assert "no result within 0.01 s" in await manager.acall(call())
    assert len(env.steps) == 1
    go.set()
    while pool.abandoned:
        await pool.run(int)
    assert tools[0].last_result.info["error_kind"] == "timeout"
    assert tools[0].episode_reward == 0.0
    env.reset()
    assert (tools[0].done, tools[0].episode_reward, tools[0].last_result) == (False, 0.0, None)


def test_late_answer_of_an_earlier_episode_is_nobodys() -> None:
    go, started = threading.Event(), threading.Event()

    def slow_once(tool_name: str, arguments: dict[str, Any]) -> StepResult:
        if arguments.get("slow"):
            started.set()
            go.wait(WAIT_S)
            return StepResult("late", 7.0, True)
        return StepResult("now", 1.0)

    env = Scripted(slow_once)
    (tool,) = EnvTool.from_env(env)
    late: list[str] = []
    thread = threading.Thread(target=lambda: late.append(tool("env_action", {"slow": True})))
    thread.start()
    assert started.wait(WAIT_S)
    env.reset()
    assert tool("env_action", {}) == "now"
    go.set()
    thread.join(WAIT_S)
    assert late == ["late"]
    assert (tool.episode_reward, tool.done) == (1.0, False)


def test_late_answer_after_a_reset_nobody_looked_at_is_nobodys() -> None:
    go, started = threading.Event(), threading.Event()

    def slow(tool_name: str, arguments: dict[str, Any]) -> StepResult:
        started.set()
        go.wait(WAIT_S)
        return StepResult("late", 7.0, True)

    env = Scripted(slow)
    (tool,) = EnvTool.from_env(env)
    thread = threading.Thread(target=lambda: tool("env_action", {}))
    thread.start()
    assert started.wait(WAIT_S)
    env.reset()
    go.set()
    thread.join(WAIT_S)
    assert (tool.episode_reward, tool.done) == (0.0, False)


async def test_cancelled_step_ends_the_episode() -> None:
    started = asyncio.Event()

    async def hang(tool_name: str, arguments: dict[str, Any]) -> StepResult:
        started.set()
        await asyncio.Event().wait()
        return StepResult()

    (tool,) = EnvTool.from_env(Native(hang))
    task = asyncio.create_task(tool.acall("env_action", {}))
    await asyncio.wait_for(started.wait(), WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tool.done


def test_abandoning_a_finished_episode_changes_nothing() -> None:
    (tool,) = EnvTool.from_env(Scripted(results(StepResult("end", 1.0, True))))
    tool("env_action", {})
    tool.abandon("too late")
    assert tool.last_result == StepResult("end", 1.0, True)


def test_abandoning_races_with_answers_and_always_ends_the_episode() -> None:
    for _ in range(200):
        (tool,) = EnvTool.from_env(Scripted(lambda n, a: StepResult("x", 1.0)))
        together = threading.Barrier(2)

        def step(tool: EnvTool = tool, together: threading.Barrier = together) -> None:
            together.wait(WAIT_S)
            tool("env_action", {})

        thread = threading.Thread(target=step)
        thread.start()
        together.wait(WAIT_S)
        tool.abandon("given up")
        thread.join(WAIT_S)
        assert tool.done


def test_record_pickles() -> None:
    record = EpisodeRecord()
    record.add(StepResult("a", 1.0))
    twin = pickle.loads(pickle.dumps(record))
    assert twin == record
    assert not twin.done


class FaultyError(Exception):
    pass


def fault(*_: Any) -> StepResult:
    raise FaultyError("no such key")


def test_the_line_that_raised_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        EnvTool(Scripted(fault))("env_action", {})
        asyncio.run(EnvTool(Scripted(fault)).acall("env_action", {}))
    (record,) = caplog.records
    assert record.getMessage().startswith("Scripted.step raised FaultyError: no such key")
    assert "in fault" in caplog.text


def test_a_loss_of_the_infrastructure_is_no_fault_of_the_env(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def lost(*_: Any) -> StepResult:
        raise SessionClosedError("gone")

    EnvTool(Scripted(lost))("env_action", {})
    assert not caplog.records
