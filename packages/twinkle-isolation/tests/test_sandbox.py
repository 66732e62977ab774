from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from twinkle_isolation import (
    GuestError,
    Launcher,
    Limits,
    Sandbox,
    SandboxLostError,
    SandboxSpec,
    SandboxStartError,
)

if TYPE_CHECKING:
    from pathlib import Path

BASH = ["/bin/bash", "-c"]


async def test_exec_returns_output_and_exit_code(sandbox: Sandbox) -> None:
    result = await sandbox.exec([*BASH, "echo out; echo err >&2; exit 3"])
    assert (result.stdout, result.stderr, result.end.exit_code) == (b"out\n", b"err\n", 3)
    assert result.end.signal is None
    assert result.end.reason is None


async def test_environment_is_the_specs_and_nothing_of_ours(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "x")
    result = await sandbox.exec(["env"], env={"MINE": "1"})
    lines = dict(line.split("=", 1) for line in result.stdout.decode().splitlines())
    assert lines["FROM_SPEC"] == "yes"
    assert lines["MINE"] == "1"
    assert lines["USER"] == "user"
    assert "SECRET_OF_THE_HOST" not in lines
    assert "VIRTUAL_ENV" not in lines


async def test_stdin_of_any_length(sandbox: Sandbox) -> None:
    data = os.urandom(10_000_000)
    result = await sandbox.exec(["cat"], stdin=data)
    assert result.stdout == data


async def test_stdin_that_is_not_read_does_not_hang(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["true"], stdin=b"x" * 20_000_000, timeout_s=30)
    assert result.end.exit_code == 0


async def test_timeout_keeps_what_was_printed(sandbox: Sandbox) -> None:
    result = await sandbox.exec([*BASH, "echo early; sleep 100"], timeout_s=0.3)
    assert result.stdout == b"early\n"
    assert result.end.reason == "timeout"


async def test_timeout_reaches_a_daemon_that_holds_the_output(sandbox: Sandbox) -> None:
    result = await asyncio.wait_for(
        sandbox.exec([*BASH, "setsid sleep 100 & echo on"], timeout_s=0.3), 20
    )
    assert result.stdout == b"on\n"
    assert result.end.reason == "timeout"


async def test_output_limit(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["yes"], output_limit=100_000)
    assert len(result.stdout) == 100_000
    assert result.end.reason == "output"


async def test_cancelled_exec_kills_the_program(sandbox: Sandbox) -> None:
    started = asyncio.create_task(sandbox.exec([*BASH, "echo $$ > pid; sleep 100"]))
    while (await sandbox.exec([*BASH, "test -s pid"])).end.exit_code != 0:
        pass
    started.cancel()
    with pytest.raises(asyncio.CancelledError):
        await started
    async with asyncio.timeout(10):
        while (await sandbox.exec([*BASH, "kill -0 $(cat pid)"])).end.exit_code == 0:
            pass


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"args": ["no-such-program"]}, "not_found"),
        ({"args": ["true"], "cwd": "/nowhere"}, "invalid_argument"),
        ({"args": ["true"], "user": "mallory"}, "invalid_argument"),
    ],
)
async def test_programs_that_cannot_start(
    sandbox: Sandbox, arguments: dict[str, object], code: str
) -> None:
    with pytest.raises(GuestError) as caught:
        await sandbox.exec(**arguments)  # type: ignore[arg-type]
    assert caught.value.code == code
    assert (await sandbox.exec(["true"])).end.exit_code == 0


async def test_streaming_stdin_signals_and_detach(sandbox: Sandbox) -> None:
    process = await sandbox.start([*BASH, "read a; echo got $a; sleep 100"], stdin=True)
    await process.write_stdin(b"hello\n")
    output = process.output()
    assert await anext(output) == ("stdout", b"got hello\n")
    process.detach()
    await process.signal(15)
    end = await process.wait()
    assert (end.exit_code, end.signal) == (-1, 15)
    with pytest.raises(GuestError) as caught:
        await process.signal(15)
    assert caught.value.code == "not_found"


async def test_terminal(sandbox: Sandbox) -> None:
    process = await sandbox.start([*BASH, "stty size; tty; read x; stty size"], pty=(10, 20))
    output = process.output()
    seen = b""
    while seen.count(b"\n") < 2:
        seen += (await anext(output))[1]
    await process.resize(rows=33, cols=44)
    await process.write_stdin(b"\n")
    async for _, data in output:
        seen += data
    assert seen.startswith(b"10 20")
    assert b"/dev/pts/" in seen
    assert seen.rstrip().endswith(b"33 44")


async def test_a_slow_reader_holds_only_its_own_program(sandbox: Sandbox) -> None:
    process = await sandbox.start(["yes"])
    output = process.output()
    await anext(output)
    for _ in range(20):
        assert (await sandbox.exec(["echo", "free"])).stdout == b"free\n"
    usage = await sandbox.usage()
    assert usage.processes >= 1
    await process.signal(9)
    await process.wait()


async def test_files(sandbox: Sandbox) -> None:
    data = os.urandom(3_000_001)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 700_000):
            yield data[start : start + 700_000]

    entry = await sandbox.write_file("d/blob", pieces())
    assert entry.size == len(data)
    assert await sandbox.read_file("d/blob") == data
    assert [e.name for e in await sandbox.list_dir(".", depth=2)] == ["d", "blob"]
    moved = await sandbox.move("d/blob", "other/name")
    assert (await sandbox.stat(moved.path)).size == len(data)
    await sandbox.remove("other")
    with pytest.raises(GuestError) as caught:
        await sandbox.stat("other")
    assert caught.value.code == "not_found"


async def test_a_read_that_is_given_up_leaves_the_sandbox_free(sandbox: Sandbox) -> None:
    await sandbox.write_file("blob", b"x" * 15_000_000)
    _, pieces = await sandbox.open_read("blob")
    assert len(await anext(pieces)) > 0
    await pieces.aclose()  # type: ignore[attr-defined]
    assert (await sandbox.exec(["true"])).end.exit_code == 0


async def test_read_limit(sandbox: Sandbox) -> None:
    await sandbox.write_file("blob", b"x" * 1000)
    with pytest.raises(GuestError) as caught:
        await sandbox.read_file("blob", limit_bytes=999)
    assert caught.value.code == "resource_exhausted"
    assert len(await sandbox.read_file("blob", limit_bytes=1000)) == 1000


async def test_watch(sandbox: Sandbox) -> None:
    await sandbox.make_dir("w")
    watch = await sandbox.watch("w")
    await sandbox.write_file("w/f", b"x")
    async for event in watch.events():
        assert (event.kind, event.name) == ("create", "f")
        break
    await watch.close()


async def test_pause_stops_the_clock_of_a_timeout(sandbox: Sandbox) -> None:
    process = await sandbox.start([*BASH, "sleep 0.2; echo lived"], timeout_s=1.0)
    await sandbox.pause()
    assert (await sandbox.stat(".")).type == "dir"  # files are served meanwhile
    await asyncio.sleep(1.5)
    await sandbox.resume()
    assert [data async for _, data in process.output()] == [b"lived\n"]


async def test_snapshot_makes_an_equal_sandbox(
    launcher: Launcher, sandbox: Sandbox, tmp_path: Path
) -> None:
    await sandbox.exec(
        [*BASH, "mkdir -p a/b; echo x > a/b/f; ln -s b/f a/l; chmod 700 a/b; mkfifo q"]
    )
    archive = tmp_path / "files.tar"
    await sandbox.pause()
    archive.write_bytes(b"".join([piece async for piece in sandbox.snapshot()]))
    async with await launcher.create(archive=archive) as copy:
        assert await copy.read_file("a/l") == b"x\n"
        assert (await copy.stat("a/b")).mode == 0o700
        assert (await copy.stat("q")).type == "other"


async def test_a_broken_archive_is_an_error(launcher: Launcher, tmp_path: Path) -> None:
    archive = tmp_path / "files.tar"
    archive.write_bytes(b"no tar" * 1000)
    with pytest.raises(SandboxStartError):
        await launcher.create(archive=archive)
    with pytest.raises(FileNotFoundError):
        await launcher.create(archive=tmp_path / "missing")
    async with await launcher.create() as sandbox:
        assert (await sandbox.exec(["true"])).end.exit_code == 0


async def test_kill_ends_what_waits(sandbox: Sandbox) -> None:
    waiting = asyncio.create_task(sandbox.exec(["sleep", "100"]))
    process = await sandbox.start(["sleep", "100"])
    await sandbox.kill()
    with pytest.raises(SandboxLostError):
        await waiting
    with pytest.raises(SandboxLostError):
        await process.wait()
    with pytest.raises(SandboxLostError):
        await sandbox.exec(["true"])
    assert sandbox.ended
    await sandbox.kill()


async def test_open_files_are_limited(sandbox: Sandbox) -> None:
    result = await sandbox.exec(
        ["python3", "-c", "files = [open('/dev/null') for _ in range(100)]"], timeout_s=30
    )
    assert b"Too many open files" in result.stderr


async def test_memory_of_one_process_is_limited(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["python3", "-c", "bytearray(200 << 20)"], timeout_s=30)
    assert b"MemoryError" in result.stderr


async def test_memory_of_all_processes_is_limited_without_cgroups() -> None:
    async with Launcher(cgroups=False) as launcher:
        limits = Limits(memory_bytes=96 << 20, processes=24)
        async with await launcher.create(SandboxSpec(limits=limits)) as sandbox:
            hog = "import time; x = bytearray(b'x') * (50 << 20); time.sleep(100)"
            await sandbox.write_file("hog.py", hog.encode())
            processes = [await sandbox.start(["python3", "hog.py"]) for _ in range(4)]
            first, *_ = [
                task.result()
                for task in (
                    await asyncio.wait(
                        [asyncio.create_task(process.wait()) for process in processes],
                        timeout=30,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                )[0]
            ]
            assert (first.signal, first.reason) == (9, "memory")
            await sandbox.kill()


async def test_disk_is_limited(sandbox: Sandbox) -> None:
    fill = "i=0; while head -c 1M /dev/zero > ~/f$i; do i=$((i+1)); sleep 0.05; done; echo $i"
    result = await sandbox.exec([*BASH, fill], timeout_s=60)
    # A tmpfs is full at once; where there is none, the watch sees it within a second.
    assert result.end.reason == "disk" or int(result.stdout) <= 16
    with pytest.raises(GuestError) as caught:
        await sandbox.write_file("one-more", b"x" * (2 << 20))
    assert caught.value.code == "no_space"
    await sandbox.exec([*BASH, "rm ~/f*"])


async def test_processes_are_limited(sandbox: Sandbox) -> None:
    program = (
        "import os, time\n"
        "try:\n"
        "    for n in range(200):\n"
        "        if os.fork() == 0: time.sleep(20); os._exit(0)\n"
        "    time.sleep(20)\n"
        "except OSError as error:\n"
        "    print(error.errno, flush=True)\n"
        "    os.killpg(0, 9)\n"
    )
    result = await sandbox.exec(["python3", "-c", program], timeout_s=30)
    assert result.end.signal == 9
    # The kernel refuses the process (EAGAIN), or the watch sees too many.
    assert result.end.reason == "processes" or result.stdout == b"11\n"


async def test_many_sandboxes_at_once(launcher: Launcher) -> None:
    sandboxes = await asyncio.gather(*(launcher.create() for _ in range(24)))
    results = await asyncio.gather(*(s.exec([*BASH, "echo x > f; cat f"]) for s in sandboxes))
    assert [r.stdout for r in results] == [b"x\n"] * 24
    assert launcher.sandboxes == 24
    await asyncio.gather(*(s.kill() for s in sandboxes))
    assert launcher.sandboxes == 0


async def test_a_sandbox_that_ends_by_itself_is_noticed() -> None:
    async with Launcher(isolation="process") as launcher:
        sandbox = await launcher.create()
        with contextlib.suppress(SandboxLostError):
            # Without isolation nothing protects the supervisor from its own programs.
            await sandbox.exec([*BASH, "setsid sleep 1000 & kill -9 $PPID; sleep 1000"])
        await asyncio.wait_for(sandbox.wait_ended(), 10)
        assert sandbox.ended
        async with await launcher.create() as other:
            assert (await other.exec(["true"])).end.exit_code == 0


async def test_a_watch_that_nobody_reads_is_bounded_and_says_what_it_lost(
    sandbox: Sandbox,
) -> None:
    await sandbox.make_dir("w")
    watch = await sandbox.watch("w")
    channel = sandbox._channel  # pyright: ignore[reportPrivateUsage]
    call = watch._call  # pyright: ignore[reportPrivateUsage]
    churn = (
        "import os\n"
        "for _ in range(2000):\n"
        "    os.close(os.open('w/f', os.O_CREAT | os.O_WRONLY)); os.unlink('w/f')\n"
    )
    for _ in range(12):
        assert (await sandbox.exec(["python3", "-c", churn], timeout_s=60)).end.exit_code == 0
    held = call._bytes  # pyright: ignore[reportPrivateUsage]
    assert held < 8 << 20
    assert not channel.closed
    async with asyncio.timeout(30):
        async for event in watch.events():
            if event.kind == "overflow":
                break
    await sandbox.write_file("w/after", b"")
    async with asyncio.timeout(30):
        async for event in watch.events():
            if event.name == "after":
                break
    await watch.close()


async def test_what_is_killed_for_memory_is_named_on_its_own_command_only() -> None:
    async with Launcher(cgroups=False) as launcher:
        limits = Limits(memory_bytes=96 << 20, processes=24)
        async with await launcher.create(SandboxSpec(limits=limits)) as sandbox:
            hog = "import time; x = bytearray(b'x') * (60 << 20); time.sleep(100)"
            await sandbox.write_file("hog.py", hog.encode())
            # Of a command that has ended already.
            await sandbox.exec(
                [*BASH, "for i in 1 2; do setsid python3 hog.py >/dev/null 2>&1 & done"]
            )
            waiting = "while [ $(pgrep -fc '^python3 hog') != 1 ]; do sleep 0.1; done; echo ok"
            other = await sandbox.exec([*BASH, "sleep 1; " + waiting], timeout_s=30)
            assert (other.stdout, other.end.reason, other.end.exit_code) == (b"ok\n", None, 0)
            # Of a command that waits for it.
            both = "python3 hog.py & python3 hog.py & wait -n; pkill -f '^python3 hog'"
            own = await sandbox.exec([*BASH, f"pkill -f '^python3 hog'; {both}"], timeout_s=30)
            assert own.end.reason == "memory"


async def test_memory_that_no_process_owns_is_refused_where_nobody_counts_it() -> None:
    program = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "print(libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600), libc.shmget(0, 4096, 0o1600))\n"
    )
    async with Launcher(cgroups=False) as launcher, await launcher.create() as sandbox:
        assert "kernel_memory" in launcher.info.unbounded
        assert (await sandbox.exec(["python3", "-c", program])).stdout == b"-1 -1 -1\n"
        limit = await sandbox.exec([*BASH, "ulimit -n"])
        assert limit.stdout == b"256\n"
        few = SandboxSpec(limits=Limits(processes=8))
        async with await launcher.create(few) as other:
            assert (await other.exec([*BASH, "ulimit -n"])).stdout == b"1024\n"
