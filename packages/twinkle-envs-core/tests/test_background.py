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

from twinkle_agentic.envs.background import background_loop, run_sync

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
    thread = run_sync(value(None)) or threading.current_thread()
    with pytest.raises(type(error), match=str(error)):
        run_sync(fail(error))
    assert run_sync(value("still there")) == "still there"
    assert thread.is_alive()


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


def test_ctrl_c_before_the_coroutine_starts_returns_at_once() -> None:
    ended = run_script("""
        import asyncio, gc, os, signal, sys, threading, time
        from twinkle_agentic.envs.background import background_loop, run_sync

        go = threading.Event()
        def waiting():
            frame = sys._current_frames()[threading.main_thread().ident]
            while frame is not None and frame.f_code.co_name != "run_sync":
                frame = frame.f_back
            return frame is not None and "call" in frame.f_locals
        def block():  # the loop is busy, so the coroutine cannot start
            while not waiting():
                go.wait(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            go.wait(20)
        background_loop().call_soon_threadsafe(block)
        ran = []
        async def work():
            ran.append(1)
        threading.Timer(0.3, go.set).start()
        start = time.monotonic()
        try:
            run_sync(work())
        except KeyboardInterrupt:
            print("interrupted", ran, time.monotonic() - start < 4)
        gc.collect()
    """)
    assert (ended.stdout, ended.stderr) == ("interrupted [] True\n", "")


def test_clean_up_that_never_ends_does_not_hold_ctrl_c() -> None:
    ended = run_script("""
        import asyncio, os, signal
        from twinkle_agentic.envs.background import run_sync
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
        from twinkle_agentic.envs.background import run_sync
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
        from twinkle_agentic.envs.background import run_sync
        started = threading.Event()
        async def hang():
            started.set()
            await asyncio.Event().wait()
        threading.Thread(target=lambda: run_sync(hang()), daemon=True).start()
        started.wait()
        print("leaving")
    """)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "leaving\n", "")


def test_forked_child_has_its_own_loop_and_the_parents_goes_on() -> None:
    ended = run_script("""
        import asyncio, gc, os, warnings
        from twinkle_agentic.envs.background import background_loop, run_sync
        async def read(fd):
            loop, done = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(fd, done.set)
            try:
                await asyncio.wait_for(done.wait(), 10)
            finally:
                loop.remove_reader(fd)
            return os.read(fd, 10)
        r, w = os.pipe()
        os.write(w, b"one")
        assert run_sync(read(r)) == b"one"
        parents = id(background_loop())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            gc.collect()
            rc, wc = os.pipe()
            os.write(wc, b"child")
            assert run_sync(read(rc)) == b"child"
            assert id(background_loop()) != parents
            gc.collect()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        os.write(w, b"two")
        assert run_sync(read(r)) == b"two"
        print("ok")
    """)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ok\n", "")


def test_thousand_sessions_cost_one_thread() -> None:
    async def session() -> int:
        await asyncio.sleep(0)
        return threading.active_count()

    async def all_sessions() -> list[int]:
        return await asyncio.gather(*(session() for _ in range(1000)))

    before = threading.active_count()
    assert max(run_sync(all_sessions())) <= before + 1
