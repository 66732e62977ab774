"""Many clients, few sessions, signals, tokens: real servers under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import runpy
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

HOSTILE: dict[str, tuple[str, set[str]]] = runpy.run_path(
    str(Path(__file__).with_name("hostile_programs.py"))
)["HOSTILE"]
LIMIT_S = 60.0
TOKEN = "a-secret-of-the-tests"


def fetch(server: Any, path: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(server.url + path, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def capacity(server: Any) -> dict[str, Any]:
    return json.loads(fetch(server, "/capacity")[1])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110  # over HTTP
            await asyncio.sleep(0.02)


async def ask(ws: ClientConnection, kind: str, **data: Any) -> dict[str, Any]:
    await ws.send(json.dumps({"type": kind, "data": data}))
    return json.loads(await asyncio.wait_for(ws.recv(), LIMIT_S))


@contextlib.asynccontextmanager
async def session(server: Any, **headers: str) -> AsyncGenerator[ClientConnection]:
    async with connect(server.ws_url, proxy=None, additional_headers=headers) as ws:
        answer = await ask(ws, "reset")
        assert answer["type"] == "observation", answer
        yield ws


async def run(ws: ClientConnection, code: str) -> str:
    answer = await ask(ws, "step", code=code)
    assert answer["type"] == "observation", answer
    return answer["data"]["observation"]["stdout"]


async def test_four_times_more_clients_than_sessions_all_complete(serve: Any, command: Any) -> None:
    options = ["--workers", "2", "--max-concurrent-envs", "4"]
    with serve([*command, *options]) as server:

        async def episode(number: int) -> list[str]:
            async with session(server) as ws:
                said = [await run(ws, f"x = {number}")]
                return [*said, await run(ws, "print(x)")]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(episode(n)) for n in range(16)]
        assert [task.result() for task in tasks] == [["", f"{n}\n"] for n in range(16)]
        await until(lambda: capacity(server)["sessions"] == 0)
        metrics = fetch(server, "/metrics")[1]  # of both workers, whichever answers
        assert "openenv_sessions_started_total 16.0" in metrics
        assert re.search(r'seconds_count\{outcome="ok",request="step"\} 32\.0', metrics)
        log = "".join(server.lines)
        opened = re.findall(r"session=(\w+) opened", log)
        assert len(set(opened)) == 16
        assert sorted(re.findall(r"session=(\w+) closed after 2 steps", log)) == sorted(opened)


async def test_a_client_that_waits_is_not_cut_off_by_its_pings(serve: Any, command: Any) -> None:
    with serve([*command, "--max-concurrent-envs", "1"]) as server:
        async with session(server) as first:
            waiting = connect(server.ws_url, proxy=None, ping_interval=0.1, ping_timeout=0.3)
            async with waiting as second:
                await second.send(json.dumps({"type": "reset", "data": {}}))
                await until(lambda: capacity(server)["queue"] == 1)
                for _ in range(5):  # pongs come while it waits
                    await asyncio.wait_for(await second.ping(), LIMIT_S)
                await first.close()
                answer = json.loads(await asyncio.wait_for(second.recv(), LIMIT_S))
                assert answer["type"] == "observation"


async def test_the_queue_has_a_deadline_and_leaving_it_frees_the_place(
    serve: Any, command: Any
) -> None:
    options = ["--max-concurrent-envs", "1", "--max-queue", "1", "--queue-timeout-s", "60"]
    with serve([*command, *options]) as server:
        async with session(server):
            async with connect(server.ws_url, proxy=None):
                await until(lambda: capacity(server)["queue"] == 1)
                async with connect(server.ws_url, proxy=None) as third:
                    answer = json.loads(await asyncio.wait_for(third.recv(), LIMIT_S))
                    assert answer["data"]["code"] == "CAPACITY_REACHED"
                    assert answer["data"]["reason"] == "queue_full"
                    assert "--max-concurrent-envs" in answer["data"]["message"]
            await until(lambda: capacity(server)["queue"] == 0)  # the second has left
            soon = {"X-OpenEnv-Queue-Timeout-S": "0.1"}
            async with connect(server.ws_url, proxy=None, additional_headers=soon) as fourth:
                answer = json.loads(await asyncio.wait_for(fourth.recv(), LIMIT_S))
                assert answer["data"]["reason"] == "queue_timeout"
        metrics = fetch(server, "/metrics")[1]
        assert 'openenv_refused_total{reason="queue_timeout"} 1.0' in metrics


async def test_one_client_does_not_keep_out_another(serve: Any, command: Any) -> None:
    with serve([*command, "--max-concurrent-envs", "1"]) as server:
        order: list[str] = []

        async def play(name: str) -> None:
            async with session(server, **{"X-OpenEnv-Client": name}) as ws:
                order.append(name)
                await run(ws, "print(1)")

        async with session(server, **{"X-OpenEnv-Client": "greedy"}) as first:
            tasks: list[asyncio.Task[None]] = []
            for number, name in enumerate(["greedy"] * 5 + ["modest"], 1):
                tasks.append(asyncio.create_task(play(name)))
                await until(lambda number=number: capacity(server)["queue"] == number)
            await first.close()
        await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)
        assert order.index("modest") <= 1


BUSY = "while True: pass"


async def test_health_is_quick_while_every_session_is_busy(serve: Any, command: Any) -> None:
    options = ["--max-concurrent-envs", "8", "--step-timeout-s", "60", "--drain-timeout-s", "0"]
    with serve([*command, *options]) as server:
        async with contextlib.AsyncExitStack() as stack:
            held = [await stack.enter_async_context(session(server)) for _ in range(8)]
            for ws in held:
                await ws.send(json.dumps({"type": "step", "data": {"code": BUSY}}))
            for _ in range(20):
                status, _ = await asyncio.wait_for(asyncio.to_thread(fetch, server, "/health"), 5)
                assert status == 200
            for ws in held:  # without waiting for an answer
                ws.transport.abort()


@pytest.mark.parametrize("code", [BUSY, "import time\ntime.sleep(1000)", "sum(range(10**12))"])
async def test_a_client_that_goes_in_the_middle_of_a_step_stops_its_code(
    serve: Any, command: Any, code: str
) -> None:
    options = ["--max-concurrent-envs", "1", "--max-queue", "0", "--step-timeout-s", "600"]
    with serve([*command, *options]) as server:
        async with session(server) as ws:
            await ws.send(json.dumps({"type": "step", "data": {"code": code}}))
            await asyncio.sleep(0.2)  # it runs; nothing tells from outside
            ws.transport.abort()
            gone = time.monotonic()
            await until(lambda: capacity(server)["sessions"] == 0)
            assert time.monotonic() - gone < 2
        async with session(server) as again:
            assert await run(again, "print('in')") == "in\n"
        metrics = fetch(server, "/metrics")[1]
        assert 'openenv_kills_total{reason="client_gone"} 1.0' in metrics


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_sigterm_ends_the_server_in_time_whatever_the_sessions_do(
    serve: Any, command: Any, workers: str
) -> None:
    options = ["--max-concurrent-envs", "4", "--step-timeout-s", "600", "--workers", workers]
    with serve([*command, *options, "--drain-timeout-s", "1"]) as server:
        async with contextlib.AsyncExitStack() as stack:
            held = [await stack.enter_async_context(session(server)) for _ in range(4)]
            for ws in held:
                await ws.send(json.dumps({"type": "step", "data": {"code": BUSY}}))
            waiting = await stack.enter_async_context(connect(server.ws_url, proxy=None))
            await until(lambda: capacity(server)["queue"] == 1)
            started = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            refused = json.loads(await asyncio.wait_for(waiting.recv(), LIMIT_S))
            assert refused["data"]["reason"] == "draining"
            with pytest.raises(ConnectionClosed):
                await asyncio.wait_for(held[0].recv(), LIMIT_S)
            assert await asyncio.to_thread(server.process.wait, LIMIT_S) == 0
            assert time.monotonic() - started < 1 + 5 + 2  # drain, stop, and a loaded machine


async def test_sigterm_ends_the_server_while_every_hostile_program_runs(
    serve: Any, command: Any
) -> None:
    programs = [code for code, _ in HOSTILE.values()]
    options = ["--max-concurrent-envs", str(len(programs)), "--step-timeout-s", "600"]
    options += ["--memory-mb", "128", "--processes", "16", "--drain-timeout-s", "1"]
    with serve([*command, *options]) as server:
        async with contextlib.AsyncExitStack() as stack:
            for code in programs:
                ws = await stack.enter_async_context(session(server))
                await ws.send(json.dumps({"type": "step", "data": {"code": code}}))
            tree = _descendants(server.process.pid)
            assert len(tree) > len(programs)
            started = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.process.wait, LIMIT_S) == 0
            assert time.monotonic() - started < 1 + 5 + 10  # drain, stop, and two busy cores
            await until(
                lambda: not [pid for pid, start in tree.items() if _start_of(pid) == start != ""]
            )


async def test_a_drain_lets_running_sessions_finish(serve: Any, command: Any) -> None:
    options = ["--max-concurrent-envs", "4", "--drain-timeout-s", "60"]
    with serve([*command, *options]) as server:
        async with session(server) as ws:
            server.process.send_signal(signal.SIGTERM)
            await until(lambda: fetch(server, "/health")[0] == 503)
            assert capacity(server)["draining"]
            assert await run(ws, "print('still here')") == "still here\n"
            async with connect(server.ws_url, proxy=None) as late:
                refused = json.loads(await asyncio.wait_for(late.recv(), LIMIT_S))
                assert "use another server" in refused["data"]["message"]
        assert await asyncio.to_thread(server.process.wait, LIMIT_S) == 0


async def test_a_worker_that_dies_is_replaced_and_its_slots_come_back(
    serve: Any, command: Any
) -> None:
    with serve([*command, "--max-concurrent-envs", "2", "--max-queue", "0"]) as server:
        async with session(server) as ws:
            (worker,) = _children(server.process.pid)
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(ConnectionClosed):
                await asyncio.wait_for(ws.recv(), LIMIT_S)
        await until(lambda: capacity(server)["sessions"] == 0)
        async with session(server) as one, session(server) as two:
            assert (await run(one, "print(1)"), await run(two, "print(2)")) == ("1\n", "2\n")
        assert any(f"worker {worker} ended with -9" in line for line in server.lines)


async def test_a_replacement_that_dies_before_it_serves_is_replaced_too(
    serve: Any, command: Any
) -> None:
    with serve([*command, "--workers", "2", "--max-concurrent-envs", "4"]) as server:
        before = _children(server.process.pid)
        async with session(server) as one, session(server) as two, session(server) as three:
            held = [one, two, three]
            for number, ws in enumerate(held):
                await run(ws, f"x = {number}")
            os.kill(before[0], signal.SIGKILL)

            def replacement() -> bool:
                for pid in set(_children(server.process.pid)) - set(before):
                    os.kill(pid, signal.SIGKILL)
                    return True
                return False

            await until(replacement)
            await until(lambda: "ended with -9" in str(server.lines[-3:]))
            for number, ws in enumerate(held):
                with contextlib.suppress(ConnectionClosed):  # of the worker that was killed
                    assert await run(ws, "print(x)") == f"{number}\n"
        assert server.process.poll() is None
        await until(lambda: len(_children(server.process.pid)) == 2)
        async with session(server) as ws:
            assert await run(ws, "print(1)") == "1\n"


def _children(pid: int) -> list[int]:
    tasks = f"/proc/{pid}/task/{pid}/children"
    with open(tasks) as file:
        return [int(child) for child in file.read().split()]


def _descendants(pid: int) -> dict[int, str]:
    """Return the processes below one, each with the time of its start."""
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        with contextlib.suppress(OSError):  # it has ended
            for child in _children(waiting.pop()):
                waiting.append(child)
                found[child] = _start_of(child)
    return found


def _start_of(pid: int) -> str:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer something-else"}])
async def test_without_its_token_nobody_gets_in(
    serve: Any, command: Any, headers: dict[str, str]
) -> None:
    env = {"OPENENV_SERVER_TOKEN": TOKEN}
    with serve([*command, "--host", "127.0.0.1"], env=env) as server:
        assert fetch(server, "/health", **headers)[0] == 200
        for path in ("/capacity", "/metrics", "/schema", "/state"):
            status, text = fetch(server, path, **headers)
            assert status == 401
            assert "OpenEnvClient(token=...)" in text
        with pytest.raises(InvalidStatus) as caught:
            async with session(server, **headers):
                pass
        assert caught.value.response.status_code == 401
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert fetch(server, "/capacity", **right)[0] == 200
        async with session(server, **right) as ws:
            assert await run(ws, "print('in')") == "in\n"
        assert TOKEN not in "".join(server.lines)


async def test_an_idle_session_is_closed_and_told(serve: Any, command: Any) -> None:
    with serve([*command, "--idle-timeout-s", "0.2"]) as server:
        async with session(server) as ws:
            told = json.loads(await asyncio.wait_for(ws.recv(), LIMIT_S))
            assert told["data"]["code"] == "SESSION_ERROR"
            assert "--idle-timeout-s" in told["data"]["message"]
        await until(lambda: capacity(server)["sessions"] == 0)
