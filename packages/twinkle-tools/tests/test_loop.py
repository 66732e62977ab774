from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from contextvars import ContextVar
from typing import Any

import pytest

from twinkle_agentic._aio.loop import background_loop, run_sync

WAIT_S = 30.0


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


async def value(result: Any) -> Any:
    await asyncio.sleep(0)
    return result


async def fail(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


def test_coroutine_gives_its_value() -> None:
    assert run_sync(value(3)) == 3


@pytest.mark.parametrize(
    "error",
    [ValueError("bad"), TimeoutError("late"), SystemExit(3), KeyboardInterrupt("inner")],
    ids=lambda error: type(error).__name__,
)
def test_coroutine_raises_in_the_caller_and_the_loop_goes_on(error: BaseException) -> None:
    loop = background_loop()
    with pytest.raises(type(error), match=str(error)):
        run_sync(fail(error))
    assert run_sync(value("still there")) == "still there"
    assert background_loop() is loop


def test_coroutine_that_was_cancelled_raises_in_the_caller() -> None:
    with pytest.raises((asyncio.CancelledError, Exception)) as caught:
        run_sync(fail(asyncio.CancelledError()))
    assert type(caught.value).__name__ == "CancelledError"


def test_exit_raised_by_one_coroutine_does_not_hang_the_others() -> None:
    started = threading.Event()
    go: list[Any] = []
    results: list[Any] = []

    async def waiting() -> str:
        event = asyncio.Event()
        go.append(event)
        started.set()
        await event.wait()
        return "done"

    thread = threading.Thread(target=lambda: results.append(run_sync(waiting())))
    thread.start()
    assert started.wait(WAIT_S)
    with pytest.raises(SystemExit):
        run_sync(fail(SystemExit(1)))
    background_loop().call_soon_threadsafe(go[0].set)
    thread.join(WAIT_S)
    assert results == ["done"]


def test_loop_that_was_stopped_goes_on() -> None:
    async def stop() -> str:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return "stopped"

    assert run_sync(stop()) == "stopped"
    assert run_sync(value(1)) == 1


def test_all_callers_share_one_loop_and_one_thread() -> None:
    async def where() -> tuple[Any, int]:
        return asyncio.get_running_loop(), threading.get_ident()

    places: list[Any] = []
    callers = [threading.Thread(target=lambda: places.append(run_sync(where()))) for _ in range(64)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(WAIT_S)
    assert len(places) == 64
    assert len(set(places)) == 1
    assert places[0][0] is background_loop()


def test_coroutine_sees_the_callers_context() -> None:
    colour: ContextVar[str] = ContextVar("colour", default="none")
    colour.set("red")

    async def look() -> str:
        return colour.get()

    assert run_sync(look()) == "red"


async def test_works_in_a_thread_that_runs_a_loop() -> None:
    assert run_sync(value(3)) == 3


def test_call_on_the_loop_itself_is_refused() -> None:
    async def inner() -> None:
        run_sync(value(1))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="await its async twin"):
            run_sync(inner())
        gc.collect()


def test_result_and_error_are_freed_without_garbage_collection() -> None:
    class Big(Exception):
        pass

    gc.disable()
    try:
        alive = weakref.ref(run_sync(value(Big())))
        run_sync(value(None))
        assert alive() is None

        async def fail_afresh() -> None:
            raise Big

        def failing() -> Any:
            try:
                run_sync(fail_afresh())
            except Big as error:
                return weakref.ref(error)

        alive = failing()
        run_sync(value(None))
        assert alive() is None
    finally:
        gc.enable()


def test_ctrl_c_cancels_the_coroutine_and_waits_for_its_clean_up() -> None:
    cleaned: list[str] = []

    async def session() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)  # closing takes a moment
            cleaned.append("closed")

    with pytest.raises(KeyboardInterrupt):
        run_sync(session())
    assert cleaned == ["closed"]
    assert run_sync(value(1)) == 1


def test_clean_up_that_never_ends_does_not_hold_ctrl_c() -> None:
    ended = run_script("""
        import asyncio, os, signal
        from twinkle_agentic._aio.loop import run_sync
        async def stubborn():
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    pass
        try:
            run_sync(stubborn(), clean_up_s=0.05)
        except KeyboardInterrupt:
            print("interrupted")
    """)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "interrupted\n", "")


def test_finalizer_that_needs_the_loop_while_it_is_made_does_not_hang() -> None:
    ended = run_script("""
        import asyncio, faulthandler, threading
        from twinkle_agentic._aio.loop import run_sync
        faulthandler.dump_traceback_later(20, exit=True)
        make = asyncio.new_event_loop
        async def value():
            return threading.current_thread().name
        def collecting():  # garbage is collected at any moment, this one for instance
            asyncio.new_event_loop = make
            run_sync(value())
            return make()
        asyncio.new_event_loop = collecting
        print(run_sync(value()), threading.active_count())
    """)
    assert (ended.stdout, ended.stderr) == ("twinkle-background-loop 2\n", "")


def test_interpreter_exits_while_a_coroutine_hangs() -> None:
    ended = run_script("""
        import asyncio, threading
        from twinkle_agentic._aio.loop import run_sync
        started = threading.Event()
        async def hang():
            started.set()
            await asyncio.Event().wait()
        threading.Thread(target=lambda: run_sync(hang()), daemon=True).start()
        started.wait()
        print("leaving")
    """)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "leaving\n", "")


def test_thousand_sessions_cost_one_thread() -> None:
    async def session() -> int:
        await asyncio.sleep(0)
        return threading.active_count()

    async def all_sessions() -> list[int]:
        return await asyncio.gather(*(session() for _ in range(1000)))

    before = threading.active_count()
    assert max(run_sync(all_sessions())) <= before + 1
