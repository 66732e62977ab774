"""Python sessions: functions forked from the warm zygote, and the loop that runs code in them."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from twinkle_isolation import IsolationUnavailableError, Launcher, Limits, Sandbox, SandboxSpec
from twinkle_isolation.python import PythonResult, PythonSession
from twinkle_isolation.types import IsolationMode

LIMIT_S = 30.0
LOOP = "twinkle_isolation._guest.repl"
# With `process` and as root the code is another user, who may not be able to read the library.
PRELOAD = [LOOP, "ctypes", "random", "resource", "subprocess"]


@pytest.fixture(params=["bubblewrap", "process"])
async def warm(request: pytest.FixtureRequest) -> AsyncIterator[Launcher]:
    async with Launcher(isolation=request.param, preload=PRELOAD) as launcher:
        yield launcher


@pytest.fixture
async def session(warm: Launcher) -> AsyncIterator[PythonSession]:
    spec = SandboxSpec(limits=Limits(memory_bytes=256 << 20, processes=24, disk_bytes=16 << 20))
    async with await warm.create(spec) as sandbox:
        yield await PythonSession.start(sandbox)


async def run(
    session: PythonSession,
    code: str,
    *,
    finish: bool = False,
    timeout_s: float = LIMIT_S,
    **limits: float,
) -> tuple[str, str, PythonResult]:
    texts = {"stdout": b"", "stderr": b"", "report": b""}

    def keep(stream: str, data: bytes) -> None:
        texts[stream] += data

    result = await asyncio.wait_for(
        session.run(code, on_output=keep, timeout_s=timeout_s, finish=finish, **limits),  # type: ignore[arg-type]
        3 * LIMIT_S,
    )
    return texts["stdout"].decode(), texts["stderr"].decode(), result


async def test_names_stay_and_the_last_value_is_shown(session: PythonSession) -> None:
    assert await run(session, "x = 20") == ("", "", PythonResult(exit_code=0))
    assert await run(session, "print(x)\nx + 1") == ("20\n21\n", "", PythonResult(exit_code=0))
    assert (await run(session, "__name__, 'twinkle_isolation' in __import__('sys').modules"))[
        0
    ] == ("('__main__', False)\n")


async def test_output_of_a_step_comes_before_its_end(session: PythonSession) -> None:
    code = (
        "import os, subprocess\nprint(1)\nsubprocess.run(['echo', '2'])\n"
        "os.write(1, b'3' * 300_000)"
    )
    out, _, _ = await run(session, code)
    assert out == "1\n2\n" + "3" * 300_000 + "300000\n"
    assert (await run(session, "print('next')"))[0] == "next\n"


async def test_a_traceback_shows_the_code_of_the_steps_only(session: PythonSession) -> None:
    await run(session, "def f():\n    return 1 / 0")
    _, err, result = await run(session, "x = 1\nf()")
    assert err.splitlines()[:5] == [
        "Traceback (most recent call last):",
        '  File "<step-2>", line 2, in <module>',
        "    f()",
        '  File "<step-1>", line 2, in f',
        "    return 1 / 0",
    ]
    assert err.endswith("\nZeroDivisionError: division by zero\n")
    assert result.error is not None
    assert (result.error.type, result.exit_code) == ("ZeroDivisionError", 1)


async def test_it_is_the_main_thread_with_the_whole_stack(session: PythonSession) -> None:
    code = (
        "import signal, sys, threading\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "print(threading.current_thread() is threading.main_thread(), threading.active_count())\n"
        "def deep(n): return n and 1 + deep(n - 1)\n"
        "print(deep(990), sys.getrecursionlimit())\n"
        "sys.setrecursionlimit(10_000)\n"
        "print(deep(5_000))"
    )
    assert (await run(session, code))[:2] == ("True 1\n990 1000\n5000\n", "")


async def test_it_holds_no_descriptor_of_the_supervisor(session: PythonSession) -> None:
    code = "import os\nprint([os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in range(4)])"
    out, err, _ = await run(session, code)
    assert (out, err) == ("['/dev/null', 'pipe', 'pipe', 'socket']\n", "")
    out, _, _ = await run(session, "print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])")
    assert out == "[0, 1, 2, 3]\n"


async def test_it_has_the_privileges_of_an_executed_program(
    warm: Launcher, session: PythonSession
) -> None:
    code = (
        "lines = dict(l.split(':', 1) for l in open('/proc/self/status'))\n"
        "print([lines[n].strip() for n in ('CapEff', 'CapBnd', 'NoNewPrivs', 'Seccomp')])\n"
        "import os, resource\n"
        "print([resource.getrlimit(n) for n in range(resource.RLIMIT_NOFILE + 1)])\n"
        "print(sorted(os.environ), os.getsid(0) == os.getpid(), oct(os.umask(0o22)))"
    )
    forked, err, _ = await run(session, code)
    assert err == ""
    if warm.info.mode == "process" and os.geteuid() == 0:
        return  # that user may not be able to start this Python
    executed, err, _ = await run(
        session,
        f"import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {code!r}], start_new_session=True)\nNone",
    )
    assert (forked, err) == (executed, "")


async def test_an_interrupt_keeps_the_names_and_a_kill_follows(session: PythonSession) -> None:
    await run(session, "x = 5")
    out, err, result = await run(session, "while True: pass", timeout_s=0.2)
    assert (out, result.stopped, result.end) == ("", "timeout", None)
    assert err.endswith("\n    while True: pass\nKeyboardInterrupt\n")
    assert (await run(session, "x"))[0] == "5\n"
    _, _, result = await run(session, "sum(range(10**12))", timeout_s=0.2, grace_s=0.2)
    assert (result.stopped, result.exit_code) == ("timeout", 137)
    assert result.end is not None
    assert not session.alive


@pytest.mark.parametrize(
    "trick",
    [
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import os\nos.fork()\nwhile True: pass",
        "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: 1 / 0)\nwhile True:\n"
        "    try:\n        signal.setitimer(signal.ITIMER_REAL, 0.001)\n        while True: pass\n"
        "    except BaseException: pass",
    ],
)
async def test_no_code_outlives_its_time(session: PythonSession, trick: str) -> None:
    _, _, result = await run(session, trick, timeout_s=0.3, grace_s=0.3)
    assert result.stopped == "timeout"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("import os\nos._exit(3)", 3),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import ctypes\nctypes.string_at(0)", 139),
        ("import os, subprocess\nsubprocess.Popen(['sleep', '1000'])\nos._exit(4)", 4),
        ("import os\nos.closerange(3, 100)", 1),
        ("import os\nos.write(3, b'x' * 100)\nwhile True: pass", 137),
    ],
)
async def test_the_end_of_the_interpreter_is_told(
    session: PythonSession, code: str, exit_code: int
) -> None:
    out, _, result = await run(session, f"print('kept')\n{code}")
    assert out == "kept\n"
    assert result.end is not None
    assert result.exit_code == exit_code
    assert not session.alive


async def test_a_child_that_runs_to_the_end_is_not_taken_for_the_session(
    session: PythonSession,
) -> None:
    code = (
        "import os\npid = os.fork()\n"
        "if pid: os.waitpid(pid, 0)\nprint('parent' if pid else 'child')"
    )
    assert (await run(session, code))[0] == "child\nparent\n"
    assert (await run(session, "'alive'"))[0] == "'alive'\n"


async def test_threads_stand_still_between_two_steps(session: PythonSession) -> None:
    code = (
        "import threading, time\ncount = 0\ndef work():\n    global count\n"
        "    while True: count += 1\n"
        "threading.Thread(target=work, daemon=True).start()\ntime.sleep(0.05)"
    )
    await run(session, code)
    seen = int((await run(session, "before = count\nprint(count)"))[0])
    used = (await session.sandbox.usage()).cpu_s
    await session.sandbox.exec(["true"])
    assert seen > 0
    assert (await session.sandbox.usage()).cpu_s - used < 0.5


async def test_seeded_sessions_repeat_and_others_do_not(warm: Launcher) -> None:
    async def drawn(seed: int | None) -> str:
        async with await warm.create() as sandbox:
            session = await PythonSession.start(sandbox)
            if seed is not None:
                session.seed(seed)
            return (await run(session, "import random\nprint(random.random())"))[0]

    assert await drawn(3) == await drawn(3)
    assert await drawn(None) != await drawn(None)


async def test_a_report_comes_back_apart(warm: Launcher) -> None:
    async with await warm.create() as sandbox:
        session = await PythonSession.start(sandbox, report=True)
        pieces: list[tuple[str, bytes]] = []
        code = "import os\nprint('out')\nos.write(int(os.environ['TWINKLE_REPORT_FD']), b'report')"
        result = await session.run(
            code, on_output=lambda stream, data: pieces.append((stream, data)), display=False
        )
    assert sorted(pieces) == [("report", b"report"), ("stdout", b"out\n")]
    assert result == PythonResult(exit_code=0)


async def test_limits_of_processor_time_and_output(session: PythonSession) -> None:
    _, _, result = await run(session, "while True: pass", cpu_s=0.5)
    assert result.stopped == "cpu"
    out, _, result = await run(session, "while True: print('x' * 1000)", output_bytes=100_000)
    assert (result.stopped, result.end, len(out)) == ("output", None, 100_000)


async def test_a_kill_that_crosses_the_answer_belongs_to_the_step_that_was_killed(
    session: PythonSession,
) -> None:
    blocked = False

    def block(stream: str, data: bytes) -> None:
        nonlocal blocked
        if not blocked:  # past the grace, so that the kill goes out as the answer comes in
            blocked = True
            time.sleep(0.5)

    code = "x = 1\nwhile True: print('x')"
    result = await session.run(code, on_output=block, output_bytes=10, grace_s=0.1)
    assert result.stopped == "output"
    if result.end is None:
        assert (await run(session, "print(x)"))[0] == "1\n"
    else:
        assert not session.alive


async def test_finish_waits_for_threads_and_runs_exit_handlers(session: PythonSession) -> None:
    code = (
        "import atexit, threading, time\natexit.register(print, 'exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\nprint('end')"
    )
    assert (await run(session, code, finish=True))[0] == "end\nthread\nexit\n"


async def test_long_code_arrives_whole(session: PythonSession) -> None:
    code = "text = '''" + "\u4e16" * 4_000_000 + "'''\nprint(len(text))"
    assert (await run(session, code))[:2] == ("4000000\n", "")


@pytest.fixture
def packages() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        path.chmod(0o755)
        (path / "given.py").write_text("import os\nloaded_by = os.getpid()\n")
        yield path


async def test_packages_are_importable_and_preloaded(packages: Path) -> None:
    preload = [LOOP, "given"]
    async with (
        Launcher(isolation="bubblewrap", packages=packages, preload=preload) as launcher,
        await launcher.create() as sandbox,
    ):
        session = await PythonSession.start(sandbox)
        code = "import given, os, sys\nprint(given.loaded_by != os.getpid())"
        assert (await run(session, code))[:2] == ("True\n", "")
        code = (
            "import subprocess\nsubprocess.run([sys.executable, '-c', 'import given'], check=True)"
        )
        assert (await run(session, code))[2].exit_code == 0


@pytest.mark.parametrize("mode", ["bubblewrap", "process"])
async def test_a_module_that_cannot_be_preloaded_is_named(mode: IsolationMode) -> None:
    launcher = Launcher(isolation=mode, preload=["no_such_module"])
    with pytest.raises(IsolationUnavailableError, match="cannot preload 'no_such_module'"):
        await launcher.start()


async def test_what_is_killed_leaves_the_files(warm: Launcher) -> None:
    async with await warm.create() as sandbox:
        await _lose(sandbox)
        session = await PythonSession.start(sandbox)
        assert (await run(session, "print(open('kept').read())"))[0] == "here\n"


async def _lose(sandbox: Sandbox) -> None:
    session = await PythonSession.start(sandbox)
    await run(session, "open('kept', 'w').write('here')")
    await run(session, "import os\nos._exit(1)")
