"""Many trajectories at once: containment, order, bounds, interruption."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from twinkle_agentic._aio.loop import background_loop
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.protocol import API, SamplingParams
from twinkle_agentic.rollout import APIMultiTurnRollout
from twinkle_agentic.tools import FunctionTool, Tool, ToolManager


def always(value: Any) -> Any:
    """Make a function that gives a value whatever it is asked."""

    def same(*_: Any, **__: Any) -> Any:
        return value

    return same


def rollout_of(*args: Any, **kwargs: Any) -> Any:
    return APIMultiTurnRollout(*args, **kwargs)


def prompts(count: int, text: str = "Hello") -> Any:
    return [{"messages": [{"role": "user", "content": f"{text} {n}"}]} for n in range(count)]


class ByPrompt(API):
    """An API object that sends each prompt to the model its text names."""

    def __init__(self, make: Any) -> None:
        self.make = make

    async def acomplete(self, trajectory: Any, sampling_params: Any, **kwargs: Any) -> Any:
        model = trajectory["messages"][0]["content"].split()[0]
        if model in ("hang", "drip"):
            kwargs["timeout_s"] = 0.3
        return await self.make(model).acomplete(trajectory, sampling_params, **kwargs)

    def __call__(self, trajectory: Any, sampling_params: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_every_trajectory_is_accounted_for_whatever_the_endpoint_does(
    api: Any, echo: ToolManager
) -> None:
    models = {
        "tools:2": "stop",
        "status:500": "api_error",
        "hang": "api_error",
        "drip": "api_error",
        "drop": "stop",
        "null_ids": "stop",
        "bad_arguments": "stop",
        "bad_calls": "stop",
        "html": "api_error",
        "truncated": "api_error",
        "no_choices:null": "api_error",
        "context": "length",
        "cut_call": "length",
        "always": "max_turns",
        "flaky:429": "stop",
        "status:400": "api_error",
    }
    given = [
        {"messages": [{"role": "user", "content": f"{model} {n}"}]}
        for n in range(4)
        for model in models
    ]
    before: Any = copy.deepcopy(given)
    outs: Any = rollout_of(ByPrompt(api), echo, request_timeout_s=60)(given)
    assert [o["stop_reason"] for o in outs] == list(models.values()) * 4
    assert [o["messages"][0] for o in outs] == [t["messages"][0] for t in given]
    assert given == before
    assert all(
        bool(o["error"]) == (o["stop_reason"] == "api_error")
        for o in outs
        if o["stop_reason"] != "length"
    )


def test_nothing_to_do_gives_nothing(api: Any, echo: ToolManager) -> None:
    assert rollout_of(api("answer"), echo)([]) == []


def test_a_trajectory_without_messages_costs_only_itself(api: Any, echo: ToolManager) -> None:
    outs: Any = rollout_of(api("answer"), echo)([{}, *prompts(1)])
    assert [o["stop_reason"] for o in outs] == ["api_error", "stop"]
    assert "no messages" in outs[0]["error"]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"messages": []}, "wrap a single one"),
        ([3], "must be a dict"),
        ([{"messages": "hi"}], "must be a list"),
        ([{"messages": ["hi"]}], "must be a dict"),
        ([{"prompt": "hi"}], "has a 'prompt' and no 'messages'"),
    ],
)
def test_what_is_no_list_of_trajectories_is_refused(
    api: Any, echo: ToolManager, given: Any, error: str
) -> None:
    with pytest.raises(TypeError, match=error):
        rollout_of(api("answer"), echo)(given)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_turns": 0},
        {"max_turns": -1},
        {"concurrency": 0},
        {"deadline_s": 0},
        {"request_timeout_s": -1},
        {"tool_timeout_s": 0},
        {"close_timeout_s": 0},
        {"max_trajectory_tokens": 0},
        {"max_threads": 0},
        {"sampling_params": SamplingParams(num_samples=2)},
        {"extra_body": {"stream": True}},
        {"extra_body": {"n": 2}},
        {"env_factory": always(None)},
        {"tool_manager": None},
        {"reset_observation": "elsewhere"},
    ],
)
def test_settings_that_cannot_work_are_refused(api: Any, kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        rollout_of(api("answer"), **{"tool_manager": ToolManager(), **kwargs})


def test_calls_take_the_documented_overrides_only(api: Any, echo: ToolManager) -> None:
    rollout = rollout_of(api("body"), ToolManager(), extra_body={"a": 1})
    (out,) = rollout(
        prompts(1), sampling_params=SamplingParams(seed=5), extra_body={"b": 2}, tool_manager=echo
    )
    body = json.loads(out["messages"][-1]["content"])
    assert (body["seed"], body["a"], body["b"], len(body["tools"])) == (5, 1, 2, 1)
    with pytest.raises(TypeError, match="temperature"):
        rollout(prompts(1), temperature=0)
    with pytest.raises(ValueError, match="2 managers, 1 traj"):
        rollout(prompts(1), tool_manager=[echo, echo])


def test_concurrency_bounds_the_trajectories_in_flight(
    api: Any, echo: ToolManager, stats: Any
) -> None:
    outs: Any = rollout_of(api("slow:0.03"), echo, concurrency=3)(prompts(9))
    assert [o["stop_reason"] for o in outs] == ["stop"] * 9
    assert stats()["peak"]["slow:0.03"] == 3
    assert max(o["timing"]["queued"] for o in outs) >= 0.03


def test_more_trajectories_than_connections_wait(api: Any, echo: ToolManager, stats: Any) -> None:
    # All together take longer than one may.
    client = api("slow:0.1", client_kwargs={"max_connections": 4, "timeout": 0.9})
    outs: Any = rollout_of(client, echo, concurrency=None)(prompts(40))
    assert [o["stop_reason"] for o in outs] == ["stop"] * 40
    assert stats()["peak"]["slow:0.1"] == 4


def test_a_hung_request_ends_its_trajectory_alone(api: Any, echo: ToolManager) -> None:
    given = [{"messages": [{"role": "user", "content": m}]} for m in ("hang", "answer", "answer")]
    outs: Any = rollout_of(ByPrompt(api), echo, request_timeout_s=60)(given)
    assert [o["stop_reason"] for o in outs] == ["api_error", "stop", "stop"]
    assert (outs[0]["error_kind"], outs[0]["retryable"]) == ("timeout", True)


def test_a_deadline_ends_a_hung_request(api: Any, echo: ToolManager) -> None:
    (out,) = rollout_of(api("hang"), echo, deadline_s=0.2)(prompts(1))
    assert out["stop_reason"] == "deadline"
    assert out["reward"] is None


def test_a_deadline_covers_the_wait_for_a_connection(api: Any, echo: ToolManager) -> None:
    client = api("hang", client_kwargs={"max_connections": 1})
    outs: Any = rollout_of(client, echo, deadline_s=0.2)(prompts(3))
    assert [o["stop_reason"] for o in outs] == ["deadline"] * 3


class Hanging(Tool):
    """Never returns; the other calls go on."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def tool_info(self) -> Any:
        return {"type": "function", "function": {"name": "echo", "parameters": {}}}

    def __call__(self, tool_name: str, arguments: Any) -> str:
        if arguments["text"] == "1":
            self.release.wait(60)
        return arguments["text"]


def test_a_tool_that_never_returns_is_given_up(api: Any) -> None:
    tool = Hanging()
    rollout = rollout_of(api("parallel"), ToolManager([tool]), tool_timeout_s=0.1)
    (out,) = rollout(prompts(1))
    tool.release.set()
    answers = [m["content"] for m in out["messages"] if m["role"] == "tool"]
    assert (answers[0], answers[2]) == ("0", "2")
    assert "no result within 0.1 s" in str(answers[1])
    assert (out["stop_reason"], out["tool_errors"]) == ("stop", {"timeout": 1})


class Stubborn(Hanging):
    async def acall(self, tool_name: str, arguments: Any) -> str:
        while True:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                if self.release.is_set():
                    raise
                self.release.set()


def test_a_tool_that_swallows_its_cancellation_is_given_up(api: Any) -> None:
    rollout = rollout_of(api("parallel"), ToolManager([Stubborn()]), tool_timeout_s=0.05)
    (out,) = rollout(prompts(1))
    assert out["tool_errors"] == {"timeout": 3}


class BadTool(Hanging):
    async def acall(self, tool_name: str, arguments: Any) -> str:
        raise (SystemExit, KeyboardInterrupt, asyncio.CancelledError)[int(arguments["text"])]


def test_a_tool_cannot_stop_the_event_loop(api: Any) -> None:
    (out,) = rollout_of(api("parallel"), ToolManager([BadTool()]))(prompts(1))
    assert (out["stop_reason"], out["tool_errors"]) == ("stop", {"tool": 3})


def test_one_long_step_does_not_block_the_others(api: Any) -> None:
    entered, others = threading.Event(), threading.Semaphore(0)

    def echo(text: str) -> str:
        if not entered.is_set():
            entered.set()
            for _ in range(9):  # returns only when the other nine have been here
                assert others.acquire(timeout=20)
        else:
            others.release()
        return text

    manager = ToolManager([FunctionTool(echo)])
    outs: Any = rollout_of(api("tools:1"), manager)(prompts(10))
    assert [o["stop_reason"] for o in outs] == ["stop"] * 10


def test_tools_beyond_the_threads_queue(api: Any) -> None:
    lock, running, most = threading.Lock(), 0, 0

    def echo(text: str) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1
        return text

    manager = ToolManager([FunctionTool(echo)])
    outs: Any = rollout_of(api("tools:1"), manager, max_threads=2)(prompts(12))
    assert [o["stop_reason"] for o in outs] == ["stop"] * 12
    assert most == 2


class Plain(API):
    """An API object without coroutines."""

    def __init__(self, reply: Any) -> None:
        self.reply = reply

    def __call__(self, trajectory: Any, sampling_params: Any, **kwargs: Any) -> Any:
        self.kwargs = kwargs
        reply = self.reply(trajectory) if callable(self.reply) else self.reply
        if isinstance(reply, BaseException):
            raise reply
        return reply


class Endless(API):
    """An API object whose coroutine takes no notice of `timeout_s`."""

    async def acomplete(self, trajectory: Any, sampling_params: Any, **kwargs: Any) -> Any:
        await asyncio.Event().wait()

    def __call__(self, trajectory: Any, sampling_params: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_a_foreign_coroutine_is_held_to_the_request_limit(echo: ToolManager) -> None:
    (out,) = rollout_of(Endless(), echo, request_timeout_s=0.1)(prompts(1))
    assert (out["stop_reason"], out["error_kind"], out["retryable"]) == (
        "api_error",
        "timeout",
        True,
    )


def test_on_done_that_is_cancelled_by_itself_costs_nothing(api: Any, echo: ToolManager) -> None:
    async def on_done(trajectory: Any) -> None:
        raise asyncio.CancelledError

    outs: Any = rollout_of(api("answer"), echo)(prompts(3), on_done=on_done)
    assert [out["stop_reason"] for out in outs] == ["stop"] * 3


class StubbornStep(EnvTool):
    """A tool of the caller's whose step swallows its cancellation once."""

    release: asyncio.Event

    async def acall(self, tool_name: str, arguments: dict[str, Any]) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()
        return "never"


class Once(Env):
    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        return StepResult("stepped", 1.0)


def test_a_step_given_up_by_the_rollout_ends_the_episode(api: Any) -> None:
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
    manager = ToolManager([StubbornStep(Once(), "echo", "", parameters)])
    (out,) = rollout_of(api("always"), manager, tool_timeout_s=0.1, max_turns=3)(prompts(1))
    assert (out["stop_reason"], out["error_kind"], out["turns"]) == ("env_error", "timeout", 1)
    assert (out["reward"], out["failed_steps"]) == (None, [0])


def test_a_blocking_api_object_works(echo: ToolManager) -> None:
    def answer(trajectory: Any) -> Any:
        assert set(trajectory) == {"messages", "tools"}
        if len(trajectory["messages"]) > 1:
            return {"role": "assistant", "content": "done"}
        call = {"function": {"name": "echo", "arguments": '{"text": "x"}'}}
        return {"role": "assistant", "tool_calls": [call]}

    api = Plain(answer)
    outs: Any = rollout_of(api, echo, extra_body={"k": 1})(prompts(5))
    assert [(o["stop_reason"], o["turns"]) for o in outs] == [("stop", 2)] * 5
    assert api.kwargs == {"extra_body": {"k": 1}}


class ForeignStatusError(Exception):
    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status_code


@pytest.mark.parametrize(
    ("reply", "stop", "kind", "retryable"),
    [
        (ForeignStatusError(400, "maximum context length is 9"), "length", "context_length", False),
        (ForeignStatusError(429, "slow"), "api_error", "rate_limited", True),
        (ForeignStatusError(401, "who"), "api_error", "refused", False),
        (ConnectionResetError("gone"), "api_error", "connection", True),
        (TimeoutError("late"), "api_error", "timeout", True),
        (ValueError("bug"), "api_error", "client", False),
        (SystemExit(1), "api_error", "client", False),
        ([], "api_error", "client", False),
    ],
)
def test_failures_of_a_foreign_api_object_are_classified(
    echo: ToolManager, reply: Any, stop: str, kind: str, retryable: bool
) -> None:
    (out,) = rollout_of(Plain(reply), echo)(prompts(1))
    assert (out["stop_reason"], out["error_kind"], out["retryable"]) == (stop, kind, retryable)


def test_a_blocking_api_object_that_hangs_is_given_up(echo: ToolManager) -> None:
    release = threading.Event()

    def wait(trajectory: Any) -> Any:
        release.wait(60)

    rollout = rollout_of(Plain(wait), echo, request_timeout_s=0.1)
    (out,) = rollout(prompts(1))
    release.set()
    assert (out["stop_reason"], out["error_kind"]) == ("api_error", "timeout")


def test_a_call_inside_a_running_loop_works(api: Any, echo: ToolManager) -> None:
    async def notebook_cell() -> Any:
        return rollout_of(api("tools:1"), echo)(prompts(2))

    assert [o["stop_reason"] for o in asyncio.run(notebook_cell())] == ["stop", "stop"]


async def test_arun_runs_on_the_callers_loop(api: Any, echo: ToolManager) -> None:
    loops: list[Any] = []

    def on_done(trajectory: Any) -> None:
        loops.append(asyncio.get_running_loop())

    rollout = rollout_of(api("answer"), echo, on_done=on_done)
    await rollout.arun(prompts(2))
    assert loops == [asyncio.get_running_loop()] * 2


def test_a_call_on_the_background_loop_is_refused(api: Any, echo: ToolManager) -> None:
    async def inside() -> None:
        rollout_of(api("answer"), echo)(prompts(1))

    future = asyncio.run_coroutine_threadsafe(inside(), background_loop())
    with pytest.raises(RuntimeError, match="await its async twin"):
        future.result(10)


def test_two_rollouts_in_two_threads_do_not_meet(api: Any, echo: ToolManager) -> None:
    rollout = rollout_of(api("tools:1"), echo)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(rollout(prompts(5)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [[o["stop_reason"] for o in outs] for outs in found] == [["stop"] * 5] * 2


def test_on_done_sees_each_trajectory_once_and_cannot_break_the_batch(
    api: Any, echo: ToolManager
) -> None:
    seen: list[Any] = []

    async def on_done(trajectory: Any) -> None:
        seen.append(trajectory)
        raise RuntimeError("progress bar broke")

    outs = rollout_of(api("answer"), echo)(prompts(4), on_done=on_done)
    assert sorted(map(id, seen)) == sorted(map(id, outs))


class Watched(Env):
    """Counts how many of it are open."""

    open: ClassVar[set[int]] = set()

    def reset(self, trajectory: Any = None) -> StepResult:
        self.open.add(id(self))
        return StepResult()

    def step(self, tool_name: str, arguments: Any) -> StepResult:
        return StepResult()

    def close(self) -> None:
        self.open.discard(id(self))


def watched(trajectory: Any) -> Env:
    return Watched()


async def test_cancelling_closes_every_env(api: Any) -> None:
    Watched.open.clear()
    rollout = rollout_of(api("hang"), env_factory=watched)
    task = asyncio.create_task(rollout.arun(prompts(8)))
    while len(Watched.open) < 8:  # noqa: ASYNC110 (threads fill it)
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert Watched.open == set()


class Opening(Env):
    """Opens in the place named, and takes until it is let."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.begun, self.go = asyncio.Event(), threading.Event()
        self.loop = asyncio.get_running_loop()
        self.log: list[str] = []

    def open(self, where: str) -> None:
        if where == self.where:
            self.loop.call_soon_threadsafe(self.begun.set)
            self.go.wait(60)
            self.log.append("opened")

    def made(self, trajectory: Any) -> Env:
        self.open("factory")
        return self

    async def made_late(self, trajectory: Any) -> Env:
        with contextlib.suppress(asyncio.CancelledError):
            self.begun.set()
            await asyncio.Event().wait()
        self.log.append("opened")
        return self

    def reset(self, trajectory: Any = None) -> StepResult:
        self.open("reset")
        return StepResult()

    def step(self, tool_name: str, arguments: Any) -> StepResult:
        return StepResult()

    def close(self) -> None:
        self.log.append("closed")


@pytest.mark.parametrize("where", ["factory", "coroutine", "reset"])
async def test_cancelling_closes_what_was_just_being_opened(api: Any, where: str) -> None:
    env = Opening(where)
    factory = env.made_late if where == "coroutine" else env.made
    task = asyncio.create_task(rollout_of(api("answer"), env_factory=factory).arun(prompts(1)))
    await env.begun.wait()
    task.cancel()
    asyncio.get_running_loop().call_later(0.1, env.go.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.log == ["opened", "closed"]


async def test_cancelling_tells_of_a_trajectory_whose_trace_is_being_written(
    api: Any, echo: ToolManager, tmp_path: Path
) -> None:
    writing, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def held(_: Any) -> bool:
        loop.call_soon_threadsafe(writing.set)
        return go.wait(60)

    told: list[Any] = []
    rollout = rollout_of(
        api("answer"), echo, trace_dir=tmp_path, trace_callback=held, on_done=told.append
    )
    task = asyncio.create_task(rollout.arun(prompts(1)))
    await writing.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    (out,) = told
    assert (out["stop_reason"], out["trace_path"]) == ("stop", None)
    assert out["trace_error"] == "the rollout was cancelled"


_INTERRUPTED = r"""
import os, sys
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.protocol import OpenAI
from twinkle_agentic.rollout import APIMultiTurnRollout

opened = []
class Noisy(Env):
    def reset(self, trajectory=None):
        opened.append(self)
        if len(opened) == 8:
            print("running", flush=True)
        return StepResult()
    def step(self, tool_name, arguments):
        return StepResult()
    closed = False
    def close(self):
        if not self.closed:
            self.closed = True
            os.write(1, b"closed\n")

rollout = APIMultiTurnRollout(OpenAI("hang", base_url=sys.argv[1]), env_factory=lambda _: Noisy())
try:
    rollout([{"messages": [{"role": "user", "content": "Play."}]}] * 8)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_closes_every_env_and_is_raised(server: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, f"{server}/v1"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        with process.stdout:
            assert process.stdout.readline() == "running\n"
            os.kill(process.pid, signal.SIGINT)
            assert process.stdout.read().split() == [*["closed"] * 8, "interrupted"]
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, twinkle_agentic.rollout, twinkle_agentic.protocol\n"
        "heavy = ('aiohttp', 'httpx', 'jsonschema', 'pydantic', 'numpy')\n"
        "print([module for module in heavy if module in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_every_exported_name_resolves() -> None:
    import twinkle_agentic.rollout as package

    assert all(getattr(package, name) is not None for name in package.__all__)


def test_a_rollout_of_twinkle_kit_is_named_where_it_is_missing() -> None:
    import twinkle_agentic.rollout as package

    with pytest.raises(AttributeError, match="part of twinkle-kit"):
        _ = package.MultiTurnCondenseRollout
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = package.Nothing


def test_a_client_can_be_shared(api: Any, echo: ToolManager) -> None:
    client: Any = api("answer")
    assert len(rollout_of(client, echo)(prompts(2))) == 2
    assert (
        client({"messages": [{"role": "user", "content": "x"}]}, SamplingParams())["content"]
        == "42"
    )


def test_a_low_open_file_limit_lowers_the_concurrency(server: str, tmp_path: Path) -> None:
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (160, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from twinkle_agentic.protocol import OpenAI
from twinkle_agentic.rollout import APIMultiTurnRollout
from twinkle_agentic.tools import ToolManager
rollout = APIMultiTurnRollout(OpenAI("slow:0.02", base_url="{server}/v1"), ToolManager())
outs = rollout([{{"messages": [{{"role": "user", "content": "Low."}}]}}] * 200)
print({{o["stop_reason"] for o in outs}})
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert shown.stdout.strip() == "{'stop'}"
    assert "concurrency lowered from 200 to 16" in shown.stderr
