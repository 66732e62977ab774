from __future__ import annotations

import asyncio
import gc
import json
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from twinkle_agentic._aio.threads import ThreadPool, use_pool
from twinkle_agentic.tools import FunctionTool, Tool, ToolInfo, ToolManager, ToolOutcome

WAIT_S = 30.0
SOON_S = 0.01  # a limit that is meant to pass


class Scripted(Tool):
    """A tool whose behaviour the test writes."""

    def __init__(
        self,
        function: Callable[[str, dict[str, Any]], Any],
        *,
        name: str = "scripted",
        parameters: Any = None,
        timeout_s: float | None = None,
    ) -> None:
        self.function = function
        self.name = name
        self.parameters = parameters
        self.timeout_s = timeout_s
        self.reasons: list[str] = []

    def tool_info(self) -> ToolInfo:
        info: ToolInfo = {"type": "function", "function": {"name": self.name}}
        if self.parameters is not None:
            info["function"]["parameters"] = self.parameters
        return info

    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> Any:
        return self.function(tool_name, arguments)

    def abandon(self, reason: str) -> None:
        self.reasons.append(reason)


class AsyncScripted(Scripted):
    """A tool that awaits."""

    async def acall(self, tool_name: str, arguments: dict[str, Any]) -> Any:
        return await self.function(tool_name, arguments)


class Raw:
    """A tool of another framework: neither `acall` nor `timeout_s` nor `abandon`."""

    def __init__(self, function: Callable[[str, dict[str, Any]], Any], name: str = "raw") -> None:
        self.function, self.name = function, name

    def tool_info(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}

    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> Any:
        return self.function(tool_name, arguments)


def call(name: object = "scripted", arguments: object = "{}") -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def echo(tool_name: str, arguments: dict[str, Any]) -> Any:
    return f"{tool_name}{arguments}"


async def both(manager: ToolManager, tool_call: Any) -> ToolOutcome:
    """Run a call both ways; they must agree."""
    outcome = await manager.arun(tool_call)
    assert manager.run(tool_call) == outcome
    assert manager(tool_call) == outcome.text == await manager.acall(tool_call)
    return outcome


# --- registration


def test_tools_are_registered_by_name_and_unregistered() -> None:
    one, two = Scripted(echo, name="one"), Scripted(echo, name="two")
    manager = ToolManager([one])
    manager.register(two)
    assert manager.names() == ["one", "two"]
    assert manager.tools() == [one, two]
    assert manager.unregister("one") is one
    assert manager.unregister("one") is None
    assert manager.names() == ["two"]


def test_registering_a_name_again_replaces_the_tool() -> None:
    manager = ToolManager([Scripted(lambda n, a: "old")])
    manager.register(Scripted(lambda n, a: "new"))
    assert manager(call()) == "new"


def test_copy_is_independent_and_keeps_the_limits() -> None:
    manager = ToolManager([Scripted(echo)], timeout_s=5.0, max_result_chars=7)
    twin = manager.copy()
    twin.unregister("scripted")
    assert (manager.names(), twin.names()) == (["scripted"], [])
    assert (twin.timeout_s, twin.max_result_chars) == (5.0, 7)


@pytest.mark.parametrize("tools", [None, [], {}, ()])
def test_no_tools_are_fine(tools: Any) -> None:
    assert ToolManager(tools).tool_infos() == []


def test_any_iterable_of_tools_is_taken() -> None:
    assert ToolManager(Scripted(echo, name=name) for name in "ab").names() == ["a", "b"]


async def test_mapping_chooses_the_names_also_towards_the_model() -> None:
    tool = Scripted(echo, name="own", parameters={"type": "object"})
    manager = ToolManager({"left": tool, "own": tool})
    assert [info["function"] for info in manager.tool_infos()] == [  # type: ignore[typeddict-item]
        {"name": "left", "parameters": {"type": "object"}},
        {"name": "own", "parameters": {"type": "object"}},
    ]
    assert tool.tool_info()["function"]["name"] == "own"  # type: ignore[typeddict-item]
    assert (await both(manager, call("left"))).text == "left{}"


@pytest.mark.parametrize("tools", ["search", b"search", 7, echo])
def test_what_is_no_collection_of_tools_is_refused(tools: Any) -> None:
    with pytest.raises(TypeError, match="tools must be a mapping or an iterable of tools, found"):
        ToolManager(tools)


@pytest.mark.parametrize(
    "tool",
    [
        echo,
        object(),
        Scripted,
        Scripted(echo, name=""),
        Raw(echo, name=None),  # type: ignore[arg-type]
        None,
    ],
)
def test_what_is_no_tool_is_refused(tool: Any) -> None:
    with pytest.raises(ValueError, match=r"wrap a plain function in FunctionTool|non-empty"):
        ToolManager([tool])
    with pytest.raises(ValueError, match=r"wrap a plain function in FunctionTool|non-empty"):
        ToolManager().register(tool)


@pytest.mark.parametrize("name", ["", 3, None])
def test_mapping_with_an_unusable_name_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="a tool name must be a non-empty text, found"):
        ToolManager({name: Scripted(echo)})


def test_mapping_may_name_a_tool_without_a_name() -> None:
    assert ToolManager({"named": Scripted(echo, name="")})(call("named")) == "named{}"


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(
        ValueError, match="two tools are called 'scripted': rename one, or pass a dict"
    ):
        ToolManager([Scripted(echo), Scripted(echo)])


def test_invalid_schema_is_refused_at_registration() -> None:
    with pytest.raises(
        ValueError, match="the parameters of tool 'scripted' are no valid JSON Schema"
    ):
        ToolManager([Scripted(echo, parameters={"type": "strin"})])


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), 1e300, "5", True])
def test_unusable_timeout_is_refused(timeout_s: Any) -> None:
    with pytest.raises(ValueError, match="timeout_s must be above 0 or None, found"):
        ToolManager(timeout_s=timeout_s)
    with pytest.raises(ValueError, match="timeout_s must be above 0 or None, found"):
        ToolManager([Scripted(echo, timeout_s=timeout_s)])


def test_unusable_result_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_result_chars must be at least 1 or None, found 0"):
        ToolManager(max_result_chars=0)


# --- calls that are refused


@pytest.mark.parametrize(
    ("tool_call", "message"),
    [
        (None, "tool_call must be an object, found NoneType"),
        ("search", "tool_call must be an object, found str"),
        ([], "tool_call must be an object, found list"),
        ({}, 'tool_call has no "function" object'),
        ({"function": None}, 'tool_call has no "function" object'),
        ({"function": "search"}, 'tool_call has no "function" object'),
        ({"function": {}}, 'tool_call has no "function.name"'),
        (call(None), 'tool_call has no "function.name"'),
        (call(""), 'tool_call has no "function.name"'),
        (call(7), 'tool_call has no "function.name"'),
        (call(["scripted"]), 'tool_call has no "function.name"'),
    ],
)
async def test_call_without_a_shape_is_answered(tool_call: Any, message: str) -> None:
    outcome = await both(ToolManager([Scripted(echo)]), tool_call)
    assert outcome == ToolOutcome(text=f"Error: {message}", error=message, error_kind="bad_call")


async def test_unknown_tool_is_answered_with_the_names_there_are() -> None:
    manager = ToolManager([Scripted(echo, name="b"), Scripted(echo, name="a")])
    outcome = await both(manager, call("searhc"))
    assert outcome.text == "Error: unknown tool 'searhc', available: a, b"
    assert (outcome.tool_name, outcome.error_kind) == ("searhc", "unknown_tool")


def test_unknown_tool_without_any_tools() -> None:
    assert ToolManager()(call("x")) == "Error: unknown tool 'x', available: (none)"


async def test_arguments_that_do_not_fit_never_reach_the_tool() -> None:
    ran: list[Any] = []
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    manager = ToolManager([Scripted(lambda n, a: ran.append(a), parameters=schema)])
    for arguments in ("{}", '{"n": "1"}', '{"n":', "[1]", '{"n": NaN}', "[" * 100_000):
        outcome = await both(manager, call(arguments=arguments))
        assert outcome.error_kind == "invalid_arguments"
        assert outcome.text.startswith("Error: tool 'scripted': ")
    assert ran == []


async def test_mutated_arguments_leave_the_conversation_alone() -> None:
    tool_call = call(arguments={"items": [1]})
    await both(ToolManager([Scripted(lambda n, a: str(a.pop("items").pop()))]), tool_call)
    assert tool_call == call(arguments={"items": [1]})


async def test_lone_surrogates_are_replaced_everywhere() -> None:
    manager = ToolManager([Scripted(lambda n, a: 1 / 0), Raw(lambda n, a: "\ud800")])
    for tool_call in (call("\ud800"), call("raw"), call(arguments='{"\\ud800": ')):
        outcome = await both(manager, tool_call)
        assert json.dumps([outcome.text, outcome.error], ensure_ascii=False).encode()


# --- results and errors


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), ("x", "x"), ({"a": 1}, '{"a": 1}'), (3, "3"), ("a" * 9, "aa\n[... 5 of 9 cha")],
)
async def test_result_becomes_text(value: Any, text: str) -> None:
    manager = ToolManager([Scripted(lambda n, a: value)], max_result_chars=4 if value else None)
    outcome = await both(manager, call())
    if len(text) < 9:
        manager.max_result_chars = None
        outcome = await both(manager, call())
    assert outcome.text.startswith(text)
    assert (outcome.error, outcome.error_kind, outcome.tool_name) == (None, None, "scripted")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (ValueError(), "ValueError"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError("stray"), "CancelledError: stray"),
        (StopIteration("end"), "StopIteration: end"),
        (BaseExceptionGroup("g", [SystemExit(1)]), "BaseExceptionGroup: g"),
        (RecursionError("deep"), "RecursionError: deep"),
        (TimeoutError("its own"), "TimeoutError: its own"),
        (Unprintable(), "Unprintable: <Unprintable that cannot be printed: RuntimeError>"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
@pytest.mark.parametrize("timeout_s", [None, WAIT_S])
@pytest.mark.parametrize("kind", [Scripted, Raw])
async def test_whatever_a_tool_raises_is_answered(
    error: BaseException, text: str, timeout_s: float | None, kind: Any
) -> None:
    def fail(tool_name: str, arguments: dict[str, Any]) -> Any:
        raise error

    manager = ToolManager([kind(fail, name="t")], timeout_s=timeout_s)
    outcome = await asyncio.wait_for(both(manager, call("t")), WAIT_S)
    assert outcome.error_kind == "tool"
    assert outcome.text.split(" (")[0] == f"Error: tool 't' raised {text}"


@pytest.mark.parametrize(
    "error",
    [ValueError("bad"), SystemExit(3), asyncio.CancelledError("stray"), BaseException("panic")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("timeout_s", [None, WAIT_S])
async def test_whatever_a_coroutine_tool_raises_is_answered(
    error: BaseException, timeout_s: float | None
) -> None:
    async def fail(tool_name: str, arguments: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        raise error

    outcome = await ToolManager([AsyncScripted(fail)], timeout_s=timeout_s).arun(call())
    assert outcome.error_kind == "tool"
    assert f"raised {type(error).__name__}" in outcome.text


@pytest.mark.parametrize("timeout_s", [None, WAIT_S])
async def test_a_result_whose_conversion_panics_is_answered(timeout_s: float | None) -> None:
    class PanicError(BaseException):
        pass

    class Odd:
        def model_dump(self, **_: Any) -> Any:
            raise PanicError

    manager = ToolManager([Scripted(lambda n, a: Odd())], timeout_s=timeout_s)
    assert (await both(manager, call())).text == "Error: tool 'scripted' raised PanicError"


def test_ctrl_c_during_a_tool_goes_on() -> None:
    def interrupt(tool_name: str, arguments: dict[str, Any]) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ToolManager([Scripted(interrupt)]).run(call())


async def test_huge_error_is_cut_in_text_and_in_field() -> None:
    def fail(tool_name: str, arguments: dict[str, Any]) -> Any:
        raise ValueError("x" * 5_000_000)

    outcome = await both(ToolManager([Scripted(fail)], max_result_chars=1000), call())
    assert len(outcome.text) < 1200
    assert outcome.error is not None
    assert len(outcome.error) < 1200


@pytest.mark.parametrize("timeout_s", [None, WAIT_S])
async def test_coroutine_given_by_a_plain_call_is_awaited(timeout_s: float | None) -> None:
    async def later(tool_name: str, arguments: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        return {"later": True}

    manager = ToolManager([Raw(later)], timeout_s=timeout_s)
    assert (await both(manager, call("raw"))).text == '{"later": true}'


async def test_acall_that_is_no_coroutine_is_taken_as_it_is() -> None:
    class Direct(Scripted):
        def acall(self, tool_name: str, arguments: dict[str, Any]) -> Any:  # type: ignore[override]
            return "direct"

    assert await ToolManager([Direct(echo)]).acall(call()) == "direct"


def test_outcome_pickles() -> None:
    outcome = ToolManager().run(call())
    assert pickle.loads(pickle.dumps(outcome)) == outcome


def test_manager_of_module_level_tools_pickles() -> None:
    manager = ToolManager([FunctionTool(divmod_tool)], timeout_s=3.0)
    twin = pickle.loads(pickle.dumps(manager))
    assert twin(call("divmod_tool", '{"a": 7, "b": 2}')) == "[3, 1]"
    assert twin.run(call("divmod_tool", '{"a": 7}')).error_kind == "invalid_arguments"


def divmod_tool(a: int, b: int) -> tuple[int, int]:
    """Divide."""
    return divmod(a, b)


def test_calls_from_many_threads_do_not_disturb_each_other() -> None:
    manager = ToolManager([Scripted(lambda n, a: a["n"])], timeout_s=WAIT_S)
    results: dict[int, list[str]] = {}

    def caller(start: int) -> None:
        numbers = range(start, start + 100)
        results[start] = [manager(call(arguments={"n": number})) for number in numbers]

    callers = [threading.Thread(target=caller, args=(start,)) for start in range(0, 800, 100)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(WAIT_S)
    assert results == {s: [str(n) for n in range(s, s + 100)] for s in range(0, 800, 100)}


# --- time limits


def test_sync_call_that_hangs_is_given_up() -> None:
    go = threading.Event()
    tool = Scripted(lambda n, a: go.wait(WAIT_S), timeout_s=SOON_S)
    outcome = ToolManager([tool], timeout_s=WAIT_S).run(call())
    assert outcome.text == "Error: tool 'scripted' gave no result within 0.01 s"
    assert outcome.error_kind == "timeout"
    assert tool.reasons == ["no result within 0.01 s"]
    go.set()


async def test_blocking_tool_that_hangs_is_given_up_and_its_place_freed() -> None:
    go, pool = threading.Event(), ThreadPool(1)
    use_pool(pool)
    tool = Scripted(lambda n, a: go.wait(WAIT_S), timeout_s=SOON_S)
    assert (await ToolManager([tool]).arun(call())).error_kind == "timeout"
    assert tool.reasons == ["no result within 0.01 s"]
    assert await pool.run(int) == 0
    go.set()


async def test_coroutine_tool_that_hangs_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def hang(tool_name: str, arguments: dict[str, Any]) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    tool = AsyncScripted(hang)
    assert (await ToolManager([tool], timeout_s=SOON_S).arun(call())).error_kind == "timeout"
    await asyncio.wait_for(cancelled.wait(), WAIT_S)
    assert tool.reasons == ["no result within 0.01 s"]


async def test_coroutine_tool_that_swallows_its_cancellation_does_not_hold_the_caller() -> None:
    go, ended = asyncio.Event(), asyncio.Event()

    async def stubborn(tool_name: str, arguments: dict[str, Any]) -> Any:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue
        ended.set()
        raise ValueError("too late")

    outcome = await ToolManager([AsyncScripted(stubborn)], timeout_s=SOON_S).arun(call())
    assert outcome.error_kind == "timeout"
    go.set()
    await asyncio.wait_for(ended.wait(), WAIT_S)
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    await asyncio.sleep(0)
    gc.collect()
    assert errors == []  # nobody asks for its exception, and nobody is told about that


@pytest.mark.parametrize("timeout_s", [None, WAIT_S])
@pytest.mark.parametrize("kind", [Scripted, AsyncScripted])
async def test_cancelled_call_goes_on_at_once_and_tells_the_tool(
    timeout_s: float | None, kind: Any
) -> None:
    go, started = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(tool_name: str, arguments: dict[str, Any]) -> Any:
        loop.call_soon_threadsafe(started.set)
        return go.wait(WAIT_S)

    async def ahang(tool_name: str, arguments: dict[str, Any]) -> Any:
        started.set()
        await asyncio.Event().wait()

    tool = kind(hang if kind is Scripted else ahang)
    task = asyncio.create_task(ToolManager([tool], timeout_s=timeout_s).arun(call()))
    await asyncio.wait_for(started.wait(), WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tool.reasons == ["the call was cancelled"]
    go.set()


def test_call_that_never_started_is_not_abandoned() -> None:
    go, pool, started = threading.Event(), ThreadPool(1), threading.Event()
    token = use_pool(pool)
    try:
        pool.submit(lambda: (started.set(), go.wait(WAIT_S)))
        assert started.wait(WAIT_S)
        tool = Scripted(echo, timeout_s=SOON_S)
        outcome = ToolManager([tool]).run(call())
    finally:
        token.var.reset(token)
        go.set()
    assert outcome.error_kind == "timeout"
    assert "all 1 threads were busy" in outcome.text
    assert tool.reasons == []


async def test_tool_whose_abandon_raises_is_answered_all_the_same() -> None:
    class Broken(AsyncScripted):
        def abandon(self, reason: str) -> None:
            raise RuntimeError("no")

    async def hang(tool_name: str, arguments: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    outcome = await ToolManager([Broken(hang)], timeout_s=SOON_S).arun(call())
    assert outcome.error_kind == "timeout"


async def test_own_limit_of_a_tool_goes_before_that_of_the_manager() -> None:
    tool = Scripted(echo, timeout_s=WAIT_S)
    assert (await both(ToolManager([tool], timeout_s=1e-9), call())).error is None


async def test_thousand_concurrent_calls_all_end() -> None:
    async def work(tool_name: str, arguments: dict[str, Any]) -> Any:
        if arguments["n"] % 3 == 0:
            await asyncio.Event().wait()
        if arguments["n"] % 3 == 1:
            raise ValueError(arguments["n"])
        return arguments["n"]

    manager = ToolManager([AsyncScripted(work)], timeout_s=0.2)
    calls = [manager.arun(call(arguments={"n": n})) for n in range(1000)]
    outcomes = await asyncio.wait_for(asyncio.gather(*calls), WAIT_S)
    kinds = [outcome.error_kind for outcome in outcomes]
    assert kinds[::3] == ["timeout"] * 334
    assert kinds[1::3] == ["tool"] * 333
    assert [outcomes[n].text for n in range(2, 1000, 3)] == [str(n) for n in range(2, 1000, 3)]
