from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Generator
from concurrent.futures import wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest

from twinkle_agentic._aio import threads
from twinkle_agentic._aio.threads import (
    BlockingCallError,
    ThreadPool,
    current_pool,
    run_blocking,
    use_pool,
)

WAIT_S = 30.0


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_call_returns_its_value_and_passes_arguments() -> None:
    assert ThreadPool().submit(divmod, 7, 2).result(WAIT_S) == (3, 1)


def test_call_raises_what_the_function_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        ThreadPool().submit(divmod, 1, 0).result(WAIT_S)


def test_max_threads_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_threads must be at least 1, found 0"):
        ThreadPool(0)


def test_threads_are_reused() -> None:
    pool = ThreadPool(1)
    first = pool.submit(threading.get_ident).result(WAIT_S)
    assert [pool.submit(threading.get_ident).result(WAIT_S) for _ in range(50)] == [first] * 50


def test_never_more_than_max_threads_run_at_once() -> None:
    pool, lock = ThreadPool(3), threading.Lock()
    running = peak = 0
    together = threading.Barrier(3)

    def call() -> None:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        together.wait(WAIT_S)
        with lock:
            running -= 1

    futures = [pool.submit(call) for _ in range(30)]
    assert not wait(futures, WAIT_S).not_done
    assert peak == 3


def test_ten_thousand_queued_calls_all_run_in_order() -> None:
    pool, go, seen = ThreadPool(1), threading.Event(), list[int]()
    pool.submit(go.wait, WAIT_S)
    futures = [pool.submit(seen.append, number) for number in range(10_000)]
    go.set()
    assert not wait(futures, WAIT_S).not_done
    assert seen == list(range(10_000))


def test_calls_from_many_threads_all_finish() -> None:
    pool = ThreadPool(4)
    results: list[int] = []

    def caller(start: int) -> None:
        futures = [pool.submit(abs, -number) for number in range(start, start + 200)]
        results.extend(future.result(WAIT_S) for future in futures)

    callers = [threading.Thread(target=caller, args=(start,)) for start in range(0, 1600, 200)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(WAIT_S)
    assert sorted(results) == list(range(1600))


def test_calls_that_block_get_a_thread_each() -> None:
    pool, together = ThreadPool(100), threading.Barrier(100)
    for _ in range(3):
        futures = [pool.submit(together.wait, WAIT_S) for _ in range(100)]
        assert sorted(future.result(WAIT_S) for future in futures) == list(range(100))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError()], ids=type)
def test_done_callback_that_raises_costs_no_place(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: object) -> None:
        raise error

    pool, go = ThreadPool(1), threading.Event()
    future = pool.submit(go.wait, WAIT_S)
    future.add_done_callback(fails)
    go.set()
    assert pool.submit(int).result(WAIT_S) == 0
    assert "callback" in caplog.text


def test_abandoned_call_frees_its_place() -> None:
    pool, go, started = ThreadPool(1), threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        go.wait(WAIT_S)

    hung = pool.submit(hang)
    assert started.wait(WAIT_S)
    queued = pool.submit(int)
    pool.abandon(hung)
    assert queued.result(WAIT_S) == 0
    go.set()


def test_abandon_frees_the_place_in_the_pool_of_the_call() -> None:
    one, other, go, started = ThreadPool(1), ThreadPool(1), threading.Event(), threading.Event()
    hung = one.submit(lambda: (started.set(), go.wait(WAIT_S)))
    assert started.wait(WAIT_S)
    other.abandon(hung)
    assert one.submit(int).result(WAIT_S) == 0
    assert (one.abandoned, other.abandoned) == (1, 0)
    blocker = other.submit(go.wait, WAIT_S)
    queued = other.submit(int)
    assert not queued.done()
    go.set()
    assert blocker.result(WAIT_S)
    assert queued.result(WAIT_S) == 0


def test_abandoning_twice_frees_one_place() -> None:
    pool, go = ThreadPool(1), threading.Event()
    started = threading.Event()
    hung = pool.submit(lambda: (started.set(), go.wait(WAIT_S)))
    assert started.wait(WAIT_S)
    pool.abandon(hung)
    pool.abandon(hung)
    blocker_started = threading.Event()
    pool.submit(lambda: (blocker_started.set(), go.wait(WAIT_S)))
    assert blocker_started.wait(WAIT_S)
    third = pool.submit(int)
    assert not third.running()
    assert not third.done()
    go.set()
    assert third.result(WAIT_S) == 0


def test_abandoned_queued_call_never_runs() -> None:
    pool, go, ran = ThreadPool(1), threading.Event(), list[int]()
    pool.submit(go.wait, WAIT_S)
    dropped = pool.submit(ran.append, 1)
    pool.abandon(dropped)
    last = pool.submit(ran.append, 2)
    go.set()
    last.result(WAIT_S)
    assert ran == [2]
    assert dropped.cancelled()


def test_abandoned_queued_calls_are_forgotten_while_the_pool_hangs() -> None:
    pool, go = ThreadPool(1), threading.Event()
    pool.submit(go.wait, WAIT_S)

    class Payload:
        pass

    payload = Payload()
    alive = weakref.ref(payload)
    keep = pool.submit(id, 1)
    pool.abandon(pool.submit(id, payload))
    del payload
    assert alive() is None
    go.set()
    assert keep.result(WAIT_S) == id(1)


def test_abandoning_a_finished_call_changes_nothing() -> None:
    pool = ThreadPool(1)
    future = pool.submit(int)
    future.result(WAIT_S)
    for _ in range(5):
        pool.abandon(future)
    go = threading.Event()
    first = pool.submit(go.wait, WAIT_S)
    second = pool.submit(int)
    assert not second.done()
    go.set()
    assert first.result(WAIT_S)
    assert second.result(WAIT_S) == 0


def test_abandon_racing_with_the_end_of_the_call_keeps_the_number_of_places() -> None:
    pool = ThreadPool(2)
    for _ in range(500):
        futures = [pool.submit(int) for _ in range(4)]
        for future in futures:
            pool.abandon(future)
    # Whatever the races did, exactly two calls run side by side now and a third one waits.
    together, go = threading.Barrier(3), threading.Event()

    def meet() -> None:
        together.wait(WAIT_S)
        go.wait(WAIT_S)

    pair = [pool.submit(meet) for _ in range(2)]
    third = pool.submit(int)
    together.wait(WAIT_S)
    assert not third.done()
    go.set()
    assert [future.result(WAIT_S) for future in pair] == [None, None]
    assert third.result(WAIT_S) == 0


def test_result_is_freed_with_its_future_without_garbage_collection() -> None:
    class Big:
        pass

    pool = ThreadPool(1)
    gc.disable()
    try:
        future = pool.submit(Big)
        alive = weakref.ref(future.result(WAIT_S))
        del future
        pool.submit(int).result(WAIT_S)  # the worker is past the first call now
        assert alive() is None
    finally:
        gc.enable()


def test_arguments_are_freed_when_the_call_has_run() -> None:
    class Big:
        pass

    pool, big = ThreadPool(1), Big()
    alive = weakref.ref(big)
    future = pool.submit(id, big)
    del big
    future.result(WAIT_S)
    pool.submit(int).result(WAIT_S)
    assert alive() is None


def test_exception_is_freed_with_its_future_without_garbage_collection() -> None:
    class Boom(Exception):
        pass

    def fail() -> None:
        raise Boom

    pool = ThreadPool(1)
    gc.disable()
    try:
        future = pool.submit(fail)
        alive = weakref.ref(future.exception(WAIT_S))  # type: ignore[arg-type]
        del future
        pool.submit(int).result(WAIT_S)
        assert alive() is None
    finally:
        gc.enable()


@contextmanager
def no_further_threads() -> Generator[None, None, None]:
    """Make the system refuse threads, by asking for more stack than it has addresses."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


def test_thread_that_cannot_be_started_loses_no_place() -> None:
    pool = ThreadPool(1)
    with no_further_threads(), pytest.raises(RuntimeError, match="the system gives no thread"):
        pool.submit(int)
    assert pool.submit(int).result(WAIT_S) == 0


def test_call_waits_for_a_running_one_where_the_system_gives_no_further_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool, go = ThreadPool(8), threading.Event()
    first = pool.submit(go.wait, WAIT_S)
    with no_further_threads():
        queued = [pool.submit(abs, -number) for number in range(3)]
        assert not any(future.done() for future in queued)
        go.set()
        assert [future.result(WAIT_S) for future in (first, *queued)] == [True, 0, 1, 2]
    assert "no further thread" in caplog.text
    together = threading.Barrier(8)
    assert not wait([pool.submit(together.wait, WAIT_S) for _ in range(8)], WAIT_S).not_done


class Unprintable(BaseException):
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Unprintable()], ids=type
)
def test_exit_raised_by_a_call_arrives_wrapped(error: BaseException) -> None:
    def leave() -> None:
        raise error

    with pytest.raises(BlockingCallError) as caught:
        ThreadPool().submit(leave).result(WAIT_S)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [StopIteration("end"), concurrent.futures.CancelledError(), asyncio.CancelledError()],
)
async def test_exceptions_that_mean_something_to_asyncio_arrive_wrapped(
    error: BaseException,
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(BlockingCallError) as caught:
        await asyncio.wait_for(run_blocking(fail), WAIT_S)
    assert caught.value.__cause__ is error


async def test_run_blocking_sees_the_callers_context() -> None:
    colour: ContextVar[str] = ContextVar("colour", default="none")
    colour.set("red")
    assert await run_blocking(colour.get) == "red"


async def test_use_pool_is_seen_by_child_tasks_and_blocking_calls() -> None:
    pool = ThreadPool(2)

    async def child() -> tuple[ThreadPool, ThreadPool]:
        return current_pool(), await run_blocking(current_pool)

    async def rollout() -> tuple[ThreadPool, ThreadPool]:
        use_pool(pool)
        return await asyncio.create_task(child())

    assert await asyncio.create_task(rollout()) == (pool, pool)
    assert current_pool() is not pool


async def test_cancelled_await_goes_on_at_once_and_frees_the_place() -> None:
    pool, go, started = ThreadPool(1), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang() -> None:
        loop.call_soon_threadsafe(started.set)
        go.wait(WAIT_S)

    task = asyncio.create_task(pool.run(hang))
    await asyncio.wait_for(started.wait(), WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(pool.run(int), WAIT_S) == 0
    go.set()


async def test_many_cancelled_awaits_leave_a_working_pool() -> None:
    pool = ThreadPool(4)
    for delay in range(200):
        tasks = [asyncio.create_task(pool.run(int)) for _ in range(8)]
        for _ in range(delay % 4):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert await asyncio.gather(*(pool.run(abs, -n) for n in range(100))) == list(range(100))


def test_loop_that_ends_before_its_call_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pool, go = ThreadPool(1), threading.Event()

    async def leave_behind() -> None:
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def hang() -> None:
            loop.call_soon_threadsafe(started.set)
            go.wait(WAIT_S)

        task = asyncio.create_task(pool.run(hang))
        await started.wait()
        assert not task.done()

    asyncio.run(leave_behind())
    go.set()
    pool.submit(int).result(WAIT_S)
    assert not [
        record for record in caplog.records if record.name != "twinkle_agentic._aio.threads"
    ]


def test_future_awaited_on_a_closed_loop_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pool, go, loop = ThreadPool(1), threading.Event(), asyncio.new_event_loop()
    run: Any = pool.run(go.wait, WAIT_S)
    task = loop.create_task(run)
    loop.run_until_complete(asyncio.sleep(0))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    go.set()
    pool.submit(int).result(WAIT_S)
    assert not caplog.records
    run.close()


def test_abandoned_running_call_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    pool, go, started = ThreadPool(1), threading.Event(), threading.Event()
    hung = pool.submit(lambda: (started.set(), go.wait(WAIT_S)))
    assert started.wait(WAIT_S)
    assert pool.abandoned == 0
    pool.abandon(hung)
    assert pool.abandoned == 1
    assert "1 abandoned" in caplog.text
    go.set()
    hung.result(WAIT_S)
    pool.submit(int).result(WAIT_S)
    pool.submit(int).result(WAIT_S)
    assert pool.abandoned == 0


def test_interpreter_exits_while_calls_hang() -> None:
    ended = run_script("""
        import threading
        from twinkle_agentic._aio.threads import ThreadPool
        pool = ThreadPool(2)
        started = threading.Barrier(3)
        for _ in range(2):
            pool.submit(lambda: (started.wait(), threading.Event().wait()))
        pool.submit(print, "never")
        started.wait()
        print("leaving")
    """)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "leaving\n", "")


def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_IDLE_EXIT_S", 0.01)
    pool = ThreadPool(4)
    worker = pool.submit(threading.current_thread).result(WAIT_S)
    worker.join(WAIT_S)
    assert not worker.is_alive()
    assert pool.submit(int).result(WAIT_S) == 0


def test_calls_given_while_threads_retire_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_IDLE_EXIT_S", 0.0)
    pool = ThreadPool(2)
    for _ in range(300):
        assert pool.submit(int).result(WAIT_S) == 0
