# The data of the tests is free-form JSON.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportArgumentType=false
"""No session that nobody asked for, no call that waits for ever."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from twinkle_agentic._aio.loop import background_loop
from twinkle_agentic._aio.mailbox import Mailbox
from twinkle_agentic._aio.threads import ThreadPool, use_pool
from twinkle_agentic.envs.base import StepResult
from twinkle_agentic.envs.errors import SessionClosedError
from twinkle_agentic.envs.openenv import OpenEnvClient

pytestmark = pytest.mark.timeout(120)

Url = Callable[[str], str]
Stats = Callable[[], dict[str, Any]]
Eventually = Callable[[Callable[[], bool]], None]


def client(url: str, **settings: Any) -> OpenEnvClient:
    settings.setdefault("tools", [])
    settings.setdefault("message_timeout_s", 20.0)
    return OpenEnvClient("no_such_package", base_url=url, **settings)


def test_session_that_drops_between_reset_and_listing_fails_the_reset(
    rude_url: Url, rude_stats: Stats
) -> None:
    with client(rude_url("drops_listing"), tools=None) as env:
        with pytest.raises(SessionClosedError, match="without a close frame"):
            env.reset()
        assert rude_stats()["all"] == 1
        assert env.step("look", {}).info["error_kind"] == "session_lost"
        assert env.reset().observation == "ready"
        assert [tool.get("function", {}).get("name") for tool in env.tools()] == ["look"]
        assert rude_stats()["all"] == 2


def test_tools_before_the_first_reset_open_a_session(rude_url: Url, rude_stats: Stats) -> None:
    with client(rude_url("drops_listing"), tools=None) as env:
        with pytest.raises(SessionClosedError):
            env.tools()
        assert [tool.get("function", {}).get("name") for tool in env.tools()] == ["look"]
        assert rude_stats()["all"] == 2


def open_door(url: str, key: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url.partition('/slow_door')[0]}/open_door/{key}", timeout=10):
        pass


def reset_in_thread(env: OpenEnvClient) -> Future[StepResult]:
    future: Future[StepResult] = Future()

    def reset() -> None:
        try:
            future.set_result(env.reset())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=reset, daemon=True).start()
    return future


def test_close_ends_a_reset_that_is_connecting(
    rude_url: Url, rude_stats: Stats, eventually: Eventually
) -> None:
    url = rude_url("slow_door")
    env = client(url)
    reset = reset_in_thread(env)
    eventually(lambda: rude_stats()["knocks"] == 1)
    env.close()
    open_door(url, url.rpartition("/")[2])
    with pytest.raises(SessionClosedError, match="closed"):
        reset.result(20)
    eventually(lambda: rude_stats()["open"] == 0)
    assert rude_stats()["all"] <= 1
    assert env.step("any", {}).info["error_kind"] == "session_lost"
    assert env.reset().observation == "ready"  # the door is open, and a closed client may go on
    env.close()


def test_close_ends_a_reset_that_waits_for_room(rude_url: Url, rude_stats: Stats) -> None:
    env = client(rude_url("full"), capacity_timeout_s=60.0)
    reset = reset_in_thread(env)
    while not rude_stats()["all"]:
        assert not reset.done()
    env.close()
    with pytest.raises(SessionClosedError, match="closed"):
        reset.result(20)


def test_close_ends_a_reset_in_flight_and_nothing_is_opened_in_its_place(
    rude_url: Url, rude_stats: Stats, eventually: Eventually
) -> None:
    env = client(rude_url("echo"))
    env.reset()
    env.reset_kwargs = {"hang": True}
    reset = reset_in_thread(env)
    eventually(lambda: rude_stats()["held"] == 1)
    env.close()
    with pytest.raises(SessionClosedError, match="closed"):
        reset.result(20)
    eventually(lambda: rude_stats()["open"] == 0)
    assert rude_stats()["all"] == 1


class InterruptedLoop(asyncio.SelectorEventLoop):
    """Raises in the first call from another thread, as Ctrl-C does."""

    interrupts = 1

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        return super().call_soon_threadsafe(callback, *args, context=context)


def test_post_that_is_interrupted_leaves_later_ones_alone() -> None:
    loop = InterruptedLoop()
    mailbox = Mailbox(loop)
    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        mailbox.post(seen.append, 1)
    mailbox.post(seen.append, 2)
    mailbox.post(loop.stop)
    loop.call_later(20, loop.stop)
    loop.run_forever()
    loop.close()
    assert seen == [1, 2]


def test_post_to_a_closed_loop_raises_each_time() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            mailbox.post(print)


def test_step_gives_up_when_the_background_thread_is_stuck(rude_url: Url) -> None:
    release = threading.Event()
    with client(rude_url("mute"), message_timeout_s=0.2) as env:
        env.reset()
        try:
            background_loop().call_soon_threadsafe(release.wait, 60)
            result = env.step("any", {})
            assert not release.is_set()
        finally:
            release.set()
        assert (result.done, result.info["error_kind"]) == (True, "timeout")
        assert result.error is not None and "background thread" in result.error
        assert env.step("any", {}).info["error_kind"] == "session_lost"


def test_coroutine_handler_needs_no_second_thread_of_a_pool(rude_url: Url) -> None:
    async def handler(env: Any, arguments: dict[str, Any]) -> str:
        return f"awaited {arguments['x']}"

    def step() -> StepResult:
        with client(rude_url("echo")) as env:
            env.register_tool({"function": {"name": "slow"}}, handler)
            env.reset()
            return env.step("slow", {"x": 1})

    pool = ThreadPool(max_threads=1)
    future: list[Future[StepResult]] = []

    def in_pool() -> None:
        use_pool(pool)
        future.append(pool.submit(step))

    thread = threading.Thread(target=in_pool)
    thread.start()
    thread.join()
    assert future[0].result(20).observation == "awaited 1"
