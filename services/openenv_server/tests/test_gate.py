"""Admission: the order of the queue, its bound and its deadline, and no slot that gets lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncGenerator, Callable

import pytest

from openenv_server._gate import Admission, Gate, RefusedError, Ticket
from openenv_server._gate_link import RemoteGate, serve_worker

LIMIT_S = 20.0


def _gate(limit: int = 1, max_queue: int = 10, queue_timeout_s: float = LIMIT_S) -> Gate:
    return Gate(limit=limit, max_queue=max_queue, queue_timeout_s=queue_timeout_s)


@contextlib.asynccontextmanager
async def _linked(gate: Gate) -> AsyncGenerator[RemoteGate]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    serving = asyncio.create_task(serve_worker(gate, reader, writer, lambda: None))
    remote = RemoteGate(lambda: None)
    await remote.connect(theirs)
    try:
        yield remote
    finally:
        writer.close()
        await serving
        await remote.wait_closed()


@contextlib.asynccontextmanager
async def _direct(gate: Gate) -> AsyncGenerator[Gate]:
    yield gate


Side = Callable[[Gate], contextlib.AbstractAsyncContextManager[Admission]]
both = pytest.mark.parametrize("side", [_direct, _linked])


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110  # the gate has no event for it
            await asyncio.sleep(0)


@both
async def test_a_free_slot_goes_to_the_client_that_holds_fewest(side: Side) -> None:
    gate = _gate(limit=2)
    order: list[str] = []
    async with side(gate) as admission:

        async def wait(client: str) -> Ticket:
            ticket = await admission.enter(client)
            order.append(client)
            return ticket

        held = [await admission.enter("greedy") for _ in range(2)]
        waiting: list[asyncio.Task[Ticket]] = []
        for number, client in enumerate(("greedy", "greedy", "first", "second", "first"), 1):
            waiting.append(asyncio.create_task(wait(client)))
            await _until(lambda number=number: gate.now().queue == number)
        for ticket in held:
            ticket.release()
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
        assert gate.now().queue == 0
        await gate.wait_empty()


@both
async def test_the_queue_has_a_bound(side: Side) -> None:
    gate = _gate(max_queue=1)
    async with side(gate) as admission:
        held = await admission.enter("a")
        waiting = asyncio.create_task(admission.enter("b"))
        await _until(lambda: gate.now().queue == 1)
        with pytest.raises(RefusedError, match="1 of 1 sessions are in use and 1 clients wait"):
            await admission.enter("c")
        held.release()
        (await waiting).release()


@both
async def test_the_wait_has_a_deadline_and_the_clients_own_may_be_shorter(side: Side) -> None:
    gate = _gate(queue_timeout_s=0.05)
    async with side(gate) as admission:
        ticket = await admission.enter("a")
        with pytest.raises(RefusedError, match=r"none became free in 0\.05 s") as caught:
            await admission.enter("b", wait_s=60.0)
        assert caught.value.reason == "queue_timeout"
        with pytest.raises(RefusedError, match="--max-concurrent-envs") as caught:
            await admission.enter("b", wait_s=0.0)
        assert caught.value.reason == "full"
        assert gate.now().queue == 0
        ticket.release()


@both
async def test_a_client_that_leaves_the_queue_frees_its_place(side: Side) -> None:
    gate = _gate()
    async with side(gate) as admission:
        held = await admission.enter("a")
        leaving = asyncio.create_task(admission.enter("b"))
        staying = asyncio.create_task(admission.enter("c"))
        await _until(lambda: gate.now().queue == 2)
        leaving.cancel()
        await _until(lambda: gate.now().queue == 1)
        held.release()
        (await staying).release()
        await gate.wait_empty()


@both
async def test_draining_refuses_those_that_wait_and_those_that_come(side: Side) -> None:
    gate = _gate()
    async with side(gate) as admission:
        held = await admission.enter("a")
        waiting = asyncio.create_task(admission.enter("b"))
        await _until(lambda: gate.now().queue == 1)
        gate.drain()
        with pytest.raises(RefusedError, match="shutting down"):
            await waiting
        with pytest.raises(RefusedError, match="use another server"):
            await admission.enter("c")
        assert (await admission.status()).free == 0
        held.release()
        await gate.wait_empty()


async def test_a_worker_that_dies_gives_everything_back() -> None:
    gate = _gate(limit=2)
    async with _linked(gate) as remote:
        await remote.enter("a")
        await remote.enter("a")
        waiting = asyncio.create_task(remote.enter("a"))
        await _until(lambda: gate.now().queue == 1)
    await gate.wait_empty()
    assert gate.now().queue == 0
    with pytest.raises(RefusedError, match="main process has ended"):
        await waiting


@both
async def test_no_slot_is_lost_whatever_comes_together(side: Side) -> None:
    """Cancellations, deadlines and returns in the same turns of the loop."""
    gate = _gate(limit=3, max_queue=20, queue_timeout_s=0.002)
    draw = random.Random(7)
    most = 0

    async def use(admission: Admission, client: str) -> None:
        nonlocal most
        ticket = await admission.enter(client)
        most = max(most, gate.now().sessions)
        try:
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)
        finally:
            ticket.release()
            ticket.release()

    async with side(gate) as admission:
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
        await asyncio.wait_for(gate.wait_empty(), LIMIT_S)
    assert most == 3
    assert gate.now().queue == 0
