"""The protocol, spoken over a bare WebSocket to a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

LIMIT_S = 20.0


async def ask(ws: ClientConnection, kind: str, **data: Any) -> dict[str, Any]:
    await ws.send(json.dumps({"type": kind, "data": data} if kind != "state" else {"type": kind}))
    return json.loads(await asyncio.wait_for(ws.recv(), LIMIT_S))


async def step(ws: ClientConnection, code: str) -> dict[str, Any]:
    answer = await ask(ws, "step", code=code)
    assert answer["type"] == "observation", answer
    return answer["data"]["observation"]


@contextlib.asynccontextmanager
async def session(server: Any) -> AsyncGenerator[ClientConnection]:
    """Open a session, waiting for a slot that another test has just given back."""
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while asyncio.get_running_loop().time() < deadline:
        async with connect(server.ws_url, proxy=None, max_size=None) as ws:
            try:
                refused = (await ask(ws, "state"))["type"] == "error"
            except ConnectionClosed:  # refused, and closed before we asked
                refused = True
            if not refused:
                await ask(ws, "reset")
                yield ws
                return
    pytest.fail("no slot became free")


def get(server: Any, path: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(server.url + path, timeout=LIMIT_S) as answer:
        return json.load(answer)


def test_health(server: Any) -> None:
    assert get(server, "/health") == {"status": "healthy"}


def test_schema_is_that_of_coding_env(server: Any) -> None:
    schema = get(server, "/schema")
    assert schema["action"]["required"] == ["code"]
    assert {"stdout", "stderr", "exit_code"} <= set(schema["observation"]["properties"])
    assert {"episode_id", "step_count", "last_exit_code"} <= set(schema["state"]["properties"])


async def test_step_answers_with_the_fields_of_coding_env(server: Any) -> None:
    async with session(server) as ws:
        answer = await ask(ws, "step", code="print(1 + 1)")
    data = answer["data"]
    observation = data["observation"]
    assert set(observation) == {"stdout", "stderr", "exit_code", "metadata"}
    assert (observation["stdout"], observation["stderr"], observation["exit_code"]) == (
        "2\n",
        "",
        0,
    )
    assert observation["metadata"]["state"] == "kept"
    assert observation["metadata"]["executor"] == "cpython"
    assert data["done"] is False
    assert isinstance(data["reward"], float)


async def test_reset_takes_seed_and_episode_id(server: Any) -> None:
    drawn: list[str] = []
    async with session(server) as ws:
        for _ in range(2):
            await ask(ws, "reset", seed=3, episode_id="mine")
            drawn.append((await step(ws, "import random\nprint(random.random())"))["stdout"])
        state = await ask(ws, "state")
    assert drawn[0] == drawn[1]
    assert state["data"] == {"episode_id": "mine", "step_count": 1, "last_exit_code": 0}


async def test_reset_refuses_what_it_does_not_know_and_the_session_lives(server: Any) -> None:
    async with session(server) as ws:
        answer = await ask(ws, "reset", difficulty="hard")
        assert answer["data"]["code"] == "EXECUTION_ERROR"
        assert "'difficulty'" in answer["data"]["message"]
        assert "seed and episode_id" in answer["data"]["message"]
        assert (await step(ws, "print('alive')"))["stdout"] == "alive\n"


async def test_reset_forgets_the_names(server: Any) -> None:
    async with session(server) as ws:
        await step(ws, "x = 1")
        assert (await step(ws, "print(x)"))["stdout"] == "1\n"
        await ask(ws, "reset")
        observation = await step(ws, "print(x)")
    assert observation["exit_code"] == 1
    assert "NameError: name 'x' is not defined" in observation["stderr"]


async def test_sessions_see_nothing_of_each_other(server: Any) -> None:
    async with session(server) as one, session(server) as two:
        for turn in range(5):
            code = "x = '{0}'\nfor i in range(50): print(x, {1})"
            a, b = await asyncio.gather(
                step(one, code.format("a", turn)), step(two, code.format("b", turn))
            )
            assert a["stdout"] == f"a {turn}\n" * 50
            assert b["stdout"] == f"b {turn}\n" * 50
        await step(one, "only_here = 1")
        assert (await step(two, "print(only_here)"))["exit_code"] == 1


async def test_seeding_in_one_session_does_not_reach_another(server: Any) -> None:
    async with session(server) as one, session(server) as two:
        draw = "print([random.randint(0, 99) for _ in range(5)])"
        await step(one, "import random\nrandom.seed(1)")
        await step(two, "from random import seed\nimport random\nseed(1)")
        first = await step(one, draw)
        second = await step(two, draw)
    assert first["stdout"] == second["stdout"] != ""


async def test_one_session_too_many_is_refused_until_a_slot_is_free(server: Any) -> None:
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(session(server)) for _ in range(4)]
        async with connect(server.ws_url, proxy=None) as fifth:
            answer = json.loads(await asyncio.wait_for(fifth.recv(), LIMIT_S))
        assert answer["type"] == "error"
        assert answer["data"]["code"] == "CAPACITY_REACHED"
        assert answer["data"]["max_sessions"] == 4
        await held[0].close()
        async with session(server) as again:
            assert (await step(again, "print('in')"))["stdout"] == "in\n"
            assert (await step(held[1], "print('still')"))["stdout"] == "still\n"


@pytest.mark.parametrize(
    ("code", "exit_code", "name"),
    [
        ("print('kept')\nraise KeyboardInterrupt()", 130, "KeyboardInterrupt"),
        ("print('kept')\nraise SystemExit(4)", 4, ""),
        ("print('kept')\nraise GeneratorExit", 1, "GeneratorExit"),
        ("print('kept')\nraise BaseException('own')", 1, "BaseException: own"),
        ("print('kept')\n1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("print('kept')\ndef f(): f()\nf()", 1, "RecursionError"),
        ("print('kept')\nprint(nothing)", 1, "NameError"),
    ],
)
async def test_what_the_code_raises_is_a_failed_step_and_the_session_lives(
    server: Any, code: str, exit_code: int, name: str
) -> None:
    async with session(server) as ws:
        await step(ws, "x = 41")
        observation = await step(ws, code)
        assert observation["stdout"] == "kept\n"
        assert observation["exit_code"] == exit_code
        assert name in observation["stderr"]
        assert "twinkle" not in observation["stderr"]
        assert observation["metadata"]["failure"] == "exception"
        assert (await step(ws, "print(x + 1)"))["stdout"] == "42\n"
        state = await ask(ws, "state")
    assert state["data"]["step_count"] == 3


async def test_exit_without_a_code_is_no_failure(server: Any) -> None:
    async with session(server) as ws:
        observation = await step(ws, "print('done')\nraise SystemExit")
    assert (observation["stdout"], observation["exit_code"]) == ("done\n", 0)


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("while True: pass", "timeout"),
        ("try:\n    while True: pass\nexcept Exception: print('swallowed')", "timeout"),
        ("for i in range(10**12): x = i", "timeout"),
        ("def f(:\n    pass", "syntax"),
        ("return 1", "syntax"),
        ("x = (" * 5000, "syntax"),
    ],
)
async def test_each_kind_of_failure_is_named(server: Any, code: str, failure: str) -> None:
    async with session(server) as ws:
        observation = await step(ws, code)
        assert observation["metadata"]["failure"] == failure
        assert observation["exit_code"] == 1
        assert observation["stderr"]
        assert observation["stdout"] == ""
        assert (await step(ws, "print('alive')"))["stdout"] == "alive\n"


@pytest.mark.parametrize(
    "code", ["x = [0] * 10**9", "x = 'y' * 10**10", "x = []\nwhile True: x.append(bytes(10**8))"]
)
async def test_a_memory_bomb_is_a_failed_step_of_its_session(server: Any, code: str) -> None:
    async with session(server) as bomb, session(server) as other:
        observation = await step(bomb, code)
        assert "\nMemoryError\n[memory: " in observation["stderr"]
        assert observation["metadata"]["failure"] == "memory"
        assert (await step(other, "print('unharmed')"))["stdout"] == "unharmed\n"
        assert (await step(bomb, "x = None\nprint('alive')"))["stdout"] == "alive\n"


async def test_sleeping_is_bounded(server: Any) -> None:
    async with session(server) as ws:
        observation = await step(ws, "import time\ntime.sleep(10**6)\nprint('woke')")
    assert (observation["metadata"]["failure"], observation["stdout"]) == ("timeout", "")


async def test_an_endless_loop_leaves_the_other_sessions_alone(server: Any) -> None:
    async with session(server) as loop, session(server) as other:
        stuck = asyncio.create_task(step(loop, "while True: pass"))
        answers = 0
        while not stuck.done():
            assert (await step(other, "print('free')"))["stdout"] == "free\n"
            answers += 1
        assert (await stuck)["metadata"]["failure"] == "timeout"
    assert answers >= 2


@pytest.mark.parametrize(
    "code",
    [
        "print('first'); print('x' * 3_000_000); print('last')",
        "print('first')\nfor i in range(3000): print('x' * 100)\nprint('last')",
        "'first' + 'x' * 3_000_000 + 'last'",
    ],
)
async def test_long_output_keeps_head_and_tail(server: Any, code: str) -> None:
    async with session(server) as ws:
        observation = await step(ws, code)
        assert observation["exit_code"] == 0
        assert observation["stdout"].lstrip("'").startswith("first")
        assert observation["stdout"].rstrip("'\n").endswith("last")
        assert "characters cut]" in observation["stdout"]
        assert len(observation["stdout"]) < 20_100
        observation = await step(ws, "raise ValueError('y' * 500_000 + 'end')")
        assert len(observation["stderr"]) < 20_100
        assert observation["stderr"].endswith("end\n")


async def test_long_code_is_refused_with_the_limit_and_the_session_lives(server: Any) -> None:
    async with session(server) as ws:
        observation = await step(ws, "x = '" + "y" * 1_900_000 + "'\nprint(len(x))")
        assert observation["stdout"] == "1900000\n"
        observation = await step(ws, "#" * 20_000_000)
        assert observation["metadata"]["failure"] == "too_long"
        assert "CODE_MAX_CODE_CHARS allows 2,000,000" in observation["stderr"]
        assert (await step(ws, "print(len(x))"))["stdout"] == "1900000\n"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ('{"type": "step", "data": {"cod": "1"}}', "VALIDATION_ERROR"),
        ('{"type": "dance", "data": {}}', "UNKNOWN_TYPE"),
        ("no json", "INVALID_JSON"),
    ],
)
async def test_bad_messages_leave_the_session_usable(server: Any, message: str, code: str) -> None:
    async with session(server) as ws:
        await ws.send(message)
        answer = json.loads(await asyncio.wait_for(ws.recv(), LIMIT_S))
        assert (answer["type"], answer["data"]["code"]) == ("error", code)
        assert (await step(ws, "print('alive')"))["stdout"] == "alive\n"


async def test_a_fresh_run_is_no_step_of_the_episode(server: Any) -> None:
    code = "import os\nprint('x' in globals(), os.listdir())\n"
    code += "os.write(int(os.environ['TWINKLE_REPORT_FD']), b'told')"
    async with session(server) as ws:
        await step(ws, "x = 1")
        answer = await ask(ws, "step", code=code, metadata={"fresh": True, "timeout_s": 0.5})
        observation = answer["data"]["observation"]
        assert (observation["stdout"], observation["exit_code"]) == ("False []\n", 0)
        assert observation["metadata"]["report"] == "told"
        endless = {"code": "while True: pass", "metadata": {"fresh": True, "timeout_s": 0.2}}
        answer = await ask(ws, "step", **endless)
        assert answer["data"]["observation"]["metadata"]["failure"] == "timeout"
        answer = await ask(ws, "step", code="1", metadata={"fresh": "yes"})
        assert "give true or false" in answer["data"]["message"]
        state = await ask(ws, "state")
        assert state["data"]["step_count"] == 1
        assert (await step(ws, "print(x)"))["stdout"] == "1\n"


async def test_an_interpreter_that_ended_is_told_in_this_step_and_the_next(server: Any) -> None:
    async with session(server) as ws:
        await step(ws, "x = 1")
        observation = await step(ws, "import os\nos._exit(0)")
        assert (observation["metadata"]["failure"], observation["exit_code"]) == ("crash", 1)
        for _ in range(2):
            assert observation["metadata"]["state"] == "lost"
            assert "names are lost" in observation["stderr"]
            observation = await step(ws, "print('x' in globals())")
        assert (observation["stdout"], observation["metadata"]["state"]) == ("False\n", "kept")


async def test_code_may_catch_the_memory_error_it_raises(server: Any) -> None:
    async with session(server) as ws:
        code = "try: raise MemoryError('own')\nexcept MemoryError as e: print(e)"
        assert (await step(ws, code))["stdout"] == "own\n"
