from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from twinkle_agentic._aio.mailbox import Mailbox

WAIT_S = 30.0


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    loop.call_later(WAIT_S, loop.stop)
    yield loop
    loop.close()


def test_ctrl_c_between_posted_calls_loses_none(loop: asyncio.AbstractEventLoop) -> None:
    mailbox, seen = Mailbox(loop), list[int]()

    def interrupted() -> None:
        if 2 not in seen:
            seen.append(2)
            signal.raise_signal(signal.SIGINT)
        seen.append(3)

    for function, *args in ((seen.append, 1), (interrupted,), (seen.append, 4), (loop.stop,)):
        mailbox.post(function, *args)
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    loop.run_forever()  # as who cleans up after Ctrl-C does
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit("no")], ids=type)
def test_posted_call_that_raises_leaves_the_others_alone(
    loop: asyncio.AbstractEventLoop, error: BaseException
) -> None:
    mailbox, seen, told = Mailbox(loop), list[int](), list[str]()
    loop.set_exception_handler(lambda _, context: told.append(str(context["exception"])))

    def fails() -> None:
        raise error

    for function, *args in ((fails,), (seen.append, 1), (loop.stop,)):
        mailbox.post(function, *args)
    loop.run_forever()
    assert (seen, told) == ([1], ["no"])


def test_calls_posted_by_a_posted_call_are_made_too(loop: asyncio.AbstractEventLoop) -> None:
    mailbox, seen = Mailbox(loop), list[int]()

    def posts() -> None:
        mailbox.post(seen.append, 1)
        mailbox.post(loop.stop)

    mailbox.post(posts)
    loop.run_forever()
    assert seen == [1]
