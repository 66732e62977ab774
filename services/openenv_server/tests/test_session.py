"""Sessions in this process: what is kept, what is lost, and which limit is named."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from openenv_server.limits import Failure, SessionLimits
from openenv_server.session import CodeResult, CodeSession, Sessions
from twinkle_isolation import Launcher, Sandbox, SandboxLostError, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = SessionLimits(
    step_timeout_s=2.0,
    step_cpu_s=30.0,
    interrupt_grace_s=0.3,
    memory_mb=160,
    processes=16,
    disk_mb=8,
    open_files=64,
    max_output_chars=20_000,
    max_output_mb=4,
    max_code_chars=100_000,
    spares=1,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sessions() -> AsyncIterator[Sessions]:
    async with Sessions(LIMITS) as sessions:
        yield sessions


@pytest_asyncio.fixture(loop_scope="module")
async def session(sessions: Sessions) -> AsyncIterator[CodeSession]:
    session = await sessions.create()
    yield session
    await session.close()


async def test_names_and_files_stay(session: CodeSession) -> None:
    await session.run("x = 41\nopen('kept', 'w').write('here')")
    result = await session.run("print(x + 1, open('kept').read())")
    assert result == CodeResult(stdout="42 here\n")


ENDS = {
    "os._exit": ("import os\nos._exit(3)", 3, Failure.CRASH),
    "exit code 0": ("import os\nos._exit(0)", 1, Failure.CRASH),
    "segfault": ("import ctypes\nctypes.string_at(0)", 139, Failure.CRASH),
    "abort": ("import os\nos.abort()", 134, Failure.CRASH),
    "SIGKILL": ("import os\nos.kill(os.getpid(), 9)", 137, Failure.CRASH),
    "SIGTERM": ("import os\nos.kill(os.getpid(), 15)", 143, Failure.CRASH),
    "SIGALRM": ("import signal, time\nsignal.alarm(1)\ntime.sleep(9)", 142, Failure.CRASH),
    "C loop": ("sum(range(10**12))", 1, Failure.TIMEOUT),
    "lock": (
        "import threading\nl = threading.Lock()\nl.acquire()\nwhile True:\n    try: l.acquire()\n"
        "    except BaseException: pass",
        1,
        Failure.TIMEOUT,
    ),
}


@pytest.mark.parametrize("name", ENDS)
async def test_an_interpreter_that_ended_is_named_in_this_step_and_the_next(
    session: CodeSession, name: str
) -> None:
    code, exit_code, failure = ENDS[name]
    await session.run("x = 1\nopen('kept', 'w').write('here')")
    result = await session.run(f"print('said')\n{code}")
    assert (result.stdout, result.exit_code, result.failure) == ("said\n", exit_code, failure)
    assert result.state == "lost"
    assert "all names are lost" in result.stderr
    result = await session.run("print('x' in globals(), open('kept').read())")
    assert (result.stdout, result.exit_code, result.state) == ("False here\n", 0, "lost")
    assert "names are lost" in result.stderr
    assert await session.run("print(1)") == CodeResult(stdout="1\n")


KEPT = {
    "loop": ("while True: pass", Failure.TIMEOUT),
    "sleep": ("import time\ntime.sleep(10**6)", Failure.TIMEOUT),
    "queue": ("import queue\nqueue.Queue().get()", Failure.TIMEOUT),
    "asyncio": ("import asyncio\nasyncio.run(asyncio.sleep(10**6))", Failure.TIMEOUT),
    "subprocess": ("import subprocess\nsubprocess.run(['sleep', '1000'])", Failure.TIMEOUT),
    "memory": ("y = bytearray(10**9)", Failure.MEMORY),
    "growing memory": ("y = []\nwhile True: y.append(bytearray(10**7))", Failure.MEMORY),
    "threads": (
        "import threading, time\n"
        "for _ in range(99): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        Failure.PROCESSES,
    ),
    "disk": ("with open('big', 'wb') as f:\n    while True: f.write(b'x' * 10**6)", Failure.DISK),
    "open files": ("y = []\nwhile True: y.append(open('/dev/null'))", Failure.OPEN_FILES),
    "output": ("while True: print('x' * 10**5)", Failure.OUTPUT),
    "syntax": ("def f(:", Failure.SYNTAX),
    "exception": ("1 / 0", Failure.EXCEPTION),
    "exit": ("exit(3)", Failure.EXCEPTION),
    "too long": ("#" * 100_001, Failure.TOO_LONG),
    "recursion": ("def f(): f()\nf()", Failure.EXCEPTION),
}


@pytest.mark.parametrize("name", KEPT)
async def test_a_limit_that_is_met_is_named_and_the_names_are_kept(
    session: CodeSession, name: str
) -> None:
    code, failure = KEPT[name]
    await session.run("x = 42")
    result = await session.run(code)
    assert (result.failure, result.state) == (failure, "kept")
    assert result.exit_code != 0
    if failure not in (Failure.SYNTAX, Failure.EXCEPTION):
        assert f"[{failure}: " in result.stderr
    assert (await session.run("print(x)\ny = None")).stdout == "42\n"


async def test_processor_time_of_threads_and_children_counts() -> None:
    limits = SessionLimits(step_cpu_s=0.5, step_timeout_s=20.0, spares=0)
    async with Sessions(limits) as sessions:
        session = await sessions.create()
        result = await session.run("import os\nos.fork()\nwhile True: pass")
    assert result.failure is Failure.CPU


async def test_a_fork_bomb_ends_within_the_step(session: CodeSession) -> None:
    result = await session.run(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    )
    assert result.failure in (Failure.TIMEOUT, Failure.PROCESSES)
    assert (await session.run("print('again')")).stdout == "again\n"


async def test_long_output_keeps_head_and_tail_and_the_true_count(session: CodeSession) -> None:
    result = await session.run("print('first' + 'x' * 3_000_000 + 'last')")
    assert result.stdout.startswith("firstx")
    assert result.stdout.endswith("xlast\n")
    cut = 3_000_010 - 20_000
    assert f"\n[{cut:,} characters cut]\n" in result.stdout


async def test_output_that_is_no_text_is_replaced_and_counted_once(session: CodeSession) -> None:
    result = await session.run("import os\nos.write(1, b'\\xff' + 'ä'.encode()[:1])\nNone")
    assert result.stdout == "\ufffd\ufffd"


async def test_a_fresh_run_sees_nothing_of_the_session(
    sessions: Sessions, session: CodeSession
) -> None:
    await session.run("import json\njson.dumps = None\nx = 1\nopen('kept', 'w').close()")
    code = "import json, os\nprint('x' in globals(), json.dumps is None, os.listdir())"
    result = await sessions.run_fresh(code)
    assert (result.stdout, result.report) == ("False False []\n", "")
    assert (await session.run("print(x)")).stdout == "1\n"


async def test_a_fresh_run_reports_what_it_wrote_before_it_failed(sessions: Sessions) -> None:
    code = "import os\nos.write(int(os.environ['TWINKLE_REPORT_FD']), b'seen')\n"
    result = await sessions.run_fresh(code + "os._exit(0)")
    assert (result.report, result.failure, result.report_truncated) == ("seen", "crash", False)
    result = await sessions.run_fresh(code + "while True: pass", timeout_s=0.2)
    assert (result.report, result.failure) == ("seen", "timeout")
    long = "import os\nwith open(int(os.environ['TWINKLE_REPORT_FD']), 'wb') as f:\n"
    result = await sessions.run_fresh(long + "    f.write(b'x' * 2_000_000)")
    assert result.report is not None
    assert (len(result.report), result.report_truncated, result.exit_code) == (1 << 20, True, 0)


async def test_a_fresh_run_ends_as_a_program_does(sessions: Sessions) -> None:
    code = (
        "import atexit, threading, time\natexit.register(print, 'exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n'value'"
    )
    assert (await sessions.run_fresh(code)).stdout == "thread\nexit\n"


END_FROM_OUTSIDE: dict[str, Callable[[Sandbox], None]] = {
    "kill of the interpreter": lambda sandbox: sandbox.kill_programs_soon(),
    "end of the sandbox": lambda sandbox: sandbox.abandon("killed by the test"),
}


def end_fresh_runs(
    monkeypatch: pytest.MonkeyPatch, times: int, end: Callable[[Sandbox], None]
) -> list[asyncio.Task[None]]:
    """End the next runs as something outside would, once their interpreter has begun."""
    create = Launcher.create
    tasks: list[asyncio.Task[None]] = []

    async def end_begun(sandbox: Sandbox) -> None:
        while (await sandbox.usage()).processes < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        end(sandbox)

    async def watched(self: Launcher, spec: SandboxSpec | None = None, **more: Any) -> Sandbox:
        sandbox = await create(self, spec, **more)
        if len(tasks) < times:
            tasks.append(asyncio.create_task(end_begun(sandbox)))
        return sandbox

    monkeypatch.setattr(Launcher, "create", watched)
    return tasks


@pytest.mark.parametrize("how", END_FROM_OUTSIDE)
async def test_a_fresh_run_that_is_killed_from_outside_is_run_again(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with Sessions(dataclasses.replace(LIMITS, spares=0)) as sessions:
        tasks = end_fresh_runs(monkeypatch, 1, END_FROM_OUTSIDE[how])
        code = (
            "import os, time\ntime.sleep(1)\nos.write(int(os.environ['TWINKLE_REPORT_FD']), b'1')"
        )
        result = await sessions.run_fresh(code)
        await asyncio.gather(*tasks)
    assert len(tasks) == 1
    assert (result.report, result.failure) == ("1", None)


async def test_a_sandbox_that_ends_under_a_fresh_run_is_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Sessions(dataclasses.replace(LIMITS, spares=0)) as sessions:
        end_fresh_runs(monkeypatch, 2, END_FROM_OUTSIDE["end of the sandbox"])
        with pytest.raises(SandboxLostError, match="ended under it"):
            await sessions.run_fresh("import time\ntime.sleep(1)")


async def test_a_fresh_run_that_kills_itself_is_a_crash(sessions: Sessions) -> None:
    result = await sessions.run_fresh("import os\nos.kill(os.getpid(), 9)")
    assert (result.failure, result.exit_code) == (Failure.CRASH, 137)


async def test_what_the_kernel_kills_at_the_memory_limit_is_named_so(session: CodeSession) -> None:
    shared = "import mmap\nflags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE\n"
    result = await session.run(shared + "mmap.mmap(-1, 1 << 31, flags=flags)")
    assert (result.failure, result.state) == (Failure.MEMORY, "lost")


async def test_sessions_do_not_see_each_other(sessions: Sessions) -> None:
    one, two = await sessions.create(), await sessions.create()
    await one.run("x = 1\nopen('/tmp/file', 'w').write('secret')\nimport json\njson.mine = 1")
    code = (
        "import json, os\nprint('x' in globals(), hasattr(json, 'mine'), os.listdir('/tmp'), "
        "len([p for p in os.listdir('/proc') if p.isdigit()]))"
    )
    assert (await two.run(code)).stdout == "False False [] 2\n"
    await one.close()
    await two.close()


async def test_the_network_is_off(session: CodeSession) -> None:
    code = "import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=1)"
    assert "Network is unreachable" in (await session.run(code)).stderr


async def test_a_seed_repeats_and_sessions_without_one_differ(sessions: Sessions) -> None:
    async def drawn(seed: int | None) -> str:
        session = await sessions.create(seed=seed)
        try:
            code = "import random, tempfile\nprint(random.random(), tempfile.mktemp())"
            return (await session.run(code)).stdout
        finally:
            await session.close()

    one, two = await drawn(None), await drawn(None)
    assert one.split()[0] != two.split()[0]
    assert one.split()[1] != two.split()[1]
    assert (await drawn(2**70)).split()[0] == (await drawn(2**70)).split()[0]


async def test_a_cancelled_step_ends_its_session(sessions: Sessions) -> None:
    session = await sessions.create()
    running = asyncio.create_task(session.run("print('started')\nwhile True: pass"))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for(session.close(), 5)


async def test_packages_and_preload() -> None:
    limits = SessionLimits(packages=("numpy",), preload=("numpy",), spares=0)
    async with Sessions(limits) as sessions:
        session = await sessions.create(seed=3)
        code = (
            "import numpy as np\nprint(np.random.rand(), np.ones((50, 50)).dot(np.ones(50)).sum())"
        )
        first = await session.run(code)
        assert (first.stderr, first.stdout.split()[1]) == ("", "2500.0")
        again = await (await sessions.create(seed=3)).run(code)
        other = await (await sessions.create()).run(code)
        assert first.stdout == again.stdout != other.stdout
        result = await session.run("import openenv_server")
        assert "No module named 'openenv_server'" in result.stderr
