"""Admission: the order of the queue, its bound and its deadline, and no slot that gets lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncGenerator, Callable

import pytest

from openenv_server._admission import Admission, AdmissionQueue, RefusedError, SessionPermit
from openenv_server._admission_link import RemoteAdmissionQueue, serve_worker

LIMIT_S = 20.0


def _queue(limit: int = 1, max_queue: int = 10, queue_timeout_s: float = LIMIT_S) -> AdmissionQueue:
    return AdmissionQueue(limit=limit, max_queue=max_queue, queue_timeout_s=queue_timeout_s)


@contextlib.asynccontextmanager
async def _linked(queue: AdmissionQueue) -> AsyncGenerator[RemoteAdmissionQueue]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    serving = asyncio.create_task(serve_worker(queue, reader, writer, lambda: None))
    remote = RemoteAdmissionQueue(lambda: None)
    await remote.connect(theirs)
    try:
        yield remote
    finally:
        writer.close()
        await serving
        await remote.wait_closed()


@contextlib.asynccontextmanager
async def _direct(queue: AdmissionQueue) -> AsyncGenerator[AdmissionQueue]:
    yield queue


Side = Callable[[AdmissionQueue], contextlib.AbstractAsyncContextManager[Admission]]
both = pytest.mark.parametrize("side", [_direct, _linked])


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110  # the queue has no event for it
            await asyncio.sleep(0)


@both
async def test_a_free_slot_goes_to_the_client_that_holds_fewest(side: Side) -> None:
    queue = _queue(limit=2)
    order: list[str] = []
    async with side(queue) as admission:

        async def wait(client: str) -> SessionPermit:
            permit = await admission.enter(client)
            order.append(client)
            return permit

        held = [await admission.enter("greedy") for _ in range(2)]
        waiting: list[asyncio.Task[SessionPermit]] = []
        for number, client in enumerate(("greedy", "greedy", "first", "second", "first"), 1):
            waiting.append(asyncio.create_task(wait(client)))
            await _until(lambda number=number: queue.now().queue == number)
        for permit in held:
            permit.release()
        await _until(lambda: len(order) == 2)
        assert order == ["first", "second"]
        (await waiting[2]).release()
        await _until(lambda: len(order) == 3)
        assert order[2] == "greedy"  # it was let in before "first" was
        (await waiting[3]).release()
        await _until(lambda: len(order) == 4)
        assert order[3] == "first"  # "greedy" holds one
        for task in waiting:
            (await task).release()
        assert queue.now().queue == 0
        await queue.wait_empty()


@both
async def test_the_queue_has_a_bound(side: Side) -> None:
    queue = _queue(max_queue=1)
    async with side(queue) as admission:
        held = await admission.enter("a")
        waiting = asyncio.create_task(admission.enter("b"))
        await _until(lambda: queue.now().queue == 1)
        with pytest.raises(RefusedError, match="1 of 1 sessions are in use and 1 clients wait"):
            await admission.enter("c")
        held.release()
        (await waiting).release()


@both
async def test_the_wait_has_a_deadline_and_the_clients_own_may_be_shorter(side: Side) -> None:
    queue = _queue(queue_timeout_s=0.05)
    async with side(queue) as admission:
        permit = await admission.enter("a")
        with pytest.raises(RefusedError, match=r"none became free in 0\.05 s") as caught:
            await admission.enter("b", wait_s=60.0)
        assert caught.value.reason == "queue_timeout"
        with pytest.raises(RefusedError, match="--max-concurrent-envs") as caught:
            await admission.enter("b", wait_s=0.0)
        assert caught.value.reason == "full"
        assert queue.now().queue == 0
        permit.release()


@both
async def test_a_client_that_leaves_the_queue_frees_its_place(side: Side) -> None:
    queue = _queue()
    async with side(queue) as admission:
        held = await admission.enter("a")
        leaving = asyncio.create_task(admission.enter("b"))
        staying = asyncio.create_task(admission.enter("c"))
        await _until(lambda: queue.now().queue == 2)
        leaving.cancel()
        await _until(lambda: queue.now().queue == 1)
        held.release()
        (await staying).release()
        await queue.wait_empty()


@both
async def test_draining_refuses_those_that_wait_and_those_that_come(side: Side) -> None:
    queue = _queue()
    async with side(queue) as admission:
        held = await admission.enter("a")
        waiting = asyncio.create_task(admission.enter("b"))
        await _until(lambda: queue.now().queue == 1)
        queue.drain()
        with pytest.raises(RefusedError, match="shutting down"):
            await waiting
        with pytest.raises(RefusedError, match="use another server"):
            await admission.enter("c")
        assert (await admission.status()).free == 0
        held.release()
        await queue.wait_empty()


async def test_a_worker_that_dies_gives_everything_back() -> None:
    queue = _queue(limit=2)
    async with _linked(queue) as remote:
        await remote.enter("a")
        await remote.enter("a")
        waiting = asyncio.create_task(remote.enter("a"))
        await _until(lambda: queue.now().queue == 1)
    await queue.wait_empty()
    assert queue.now().queue == 0
    with pytest.raises(RefusedError, match="main process has ended"):
        await waiting


@both
async def test_no_slot_is_lost_whatever_comes_together(side: Side) -> None:
    """Cancellations, deadlines and returns in the same turns of the loop."""
    queue = _queue(limit=3, max_queue=20, queue_timeout_s=0.002)
    draw = random.Random(7)
    most = 0

    async def use(admission: Admission, client: str) -> None:
        nonlocal most
        permit = await admission.enter(client)
        most = max(most, queue.now().sessions)
        try:
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)
        finally:
            permit.release()
            permit.release()

    async with side(queue) as admission:
        for _ in range(60):
            tasks = [asyncio.create_task(use(admission, f"c{n % 4}")) for n in range(30)]
            for task in draw.sample(tasks, 12):
                for _ in range(draw.randrange(3)):
                    await asyncio.sleep(0)
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            unexpected = [
                r
                for r in results
                if r is not None and not isinstance(r, RefusedError | asyncio.CancelledError)
            ]
            assert unexpected == []
        await asyncio.wait_for(queue.wait_empty(), LIMIT_S)
    assert most == 3
    assert queue.now().queue == 0
