"""What programs try against the supervisor of their own sandbox."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from twinkle_isolation import GuestError, Launcher, Sandbox, SandboxLostError
from twinkle_isolation._wire import encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PYTHON = ["python3", "-I", "-S", "-c"]
CALL = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.argtypes = [ctypes.c_long] * 7
numbers = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
def call(name, *arguments):
    number = {
        "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
        "pidfd_getfd": (438, 438), "kcmp": (312, 272), "pidfd_open": (434, 434),
        "prlimit64": (302, 261), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
        "sched_setattr": (314, 274), "sched_setaffinity": (203, 122), "setpriority": (141, 140),
        "ioprio_set": (251, 30), "fcntl": (72, 25), "bpf": (321, 280), "keyctl": (250, 219),
        "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    }[name][numbers]
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments, *[0] * (6 - len(arguments)))
    return 0 if result >= 0 else ctypes.get_errno()
"""


@pytest.fixture
async def victim(jailed: Launcher) -> AsyncIterator[Sandbox]:
    async with await jailed.create() as sandbox:
        yield sandbox


async def run(sandbox: Sandbox, program: str, **arguments: Any) -> str:
    result = await sandbox.exec([*PYTHON, CALL + program], timeout_s=30, **arguments)
    return (result.stdout + result.stderr).decode()


async def test_no_program_looks_into_another(victim: Sandbox) -> None:
    program = (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    import time; time.sleep(30); os._exit(0)\n"
        "print(call('ptrace', 0x4206, child, 0, 0), call('ptrace', 16, child, 0, 0),\n"
        "      call('process_vm_readv', child, 0, 0, 0, 0, 0),\n"
        "      call('process_vm_writev', child, 0, 0, 0, 0, 0),\n"
        "      call('pidfd_getfd', os.pidfd_open(child), 0, 0),\n"
        "      call('kcmp', child, child, 1, 0, 0), call('bpf', 0, 0, 0),\n"
        "      call('keyctl', 0, -3, 0),\n"
        "      call('perf_event_open', 0, 0, -1, -1, 0), call('userfaultfd', 1))\n"
        "os.kill(child, 9)\n"
    )
    for user in ("user", "root"):
        assert await run(victim, program, user=user) == " ".join(["1"] * 10) + "\n"


async def test_a_program_of_root_is_closed_before_it_begins(victim: Sandbox) -> None:
    """Its process is forked from the supervisor, and may show nothing of it on the way."""
    spy = await victim.start(
        [
            *PYTHON,
            "import os\n"
            "print('ready', flush=True)\n"
            "own = str(os.getpid())\n"
            "while not os.path.exists('/tmp/stop'):\n"
            "    for name in os.listdir('/proc'):\n"
            "        if not name.isdigit() or name in ('1', own):\n"
            "            continue\n"
            "        try:\n"
            "            for fd in os.listdir(f'/proc/{name}/fd'):\n"
            "                target = os.readlink(f'/proc/{name}/fd/{fd}')\n"
            "                if target.startswith(('socket:', 'anon_inode:', '/proc/sys')):\n"
            "                    print('saw', target, flush=True)\n"
            "        except OSError:\n"
            "            pass\n",
        ],
        timeout_s=60,
    )
    output = spy.output()
    assert await anext(output) == ("stdout", b"ready\n")
    for _ in range(60):
        assert (await victim.exec(["true"], user="root")).end.exit_code == 0
    await victim.write_file("/tmp/stop", b"")
    assert [data async for _, data in output] == []


async def test_root_is_one_namespace_made_before_any_program(victim: Sandbox) -> None:
    look = ["readlink", "/proc/self/ns/user"]
    first = await victim.exec(look, user="root")
    second = await victim.exec(look, user="root")
    plain = await victim.exec(look)
    assert first.stdout == second.stdout != plain.stdout
    status = (await victim.exec(["cat", "/proc/self/status"], user="root")).stdout.decode()
    for line in ("CapPrm:\t0000000000000000", "CapBnd:\t0000000000000000", "Uid:\t0\t0\t0\t0"):
        assert line in status
    count = await victim.exec(["cat", "/proc/sys/user/max_user_namespaces"])
    assert count.stdout == b"0\n"


async def test_programs_go_before_their_supervisor_when_memory_ends(victim: Sandbox) -> None:
    for user in ("user", "root"):
        look = await victim.exec(["cat", "/proc/self/oom_score_adj"], user=user)
        assert look.stdout == b"1000\n"
    assert (await victim.exec(["cat", "/proc/1/oom_score_adj"])).stdout != b"1000\n"


def _may_set_a_least_score() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & 1 << 24)  # CAP_SYS_RESOURCE
    return False


async def test_no_program_is_spared_longer_than_the_host(victim: Sandbox) -> None:
    program = (
        "from pathlib import Path\n"
        "score = Path('/proc/self/oom_score_adj')\n"
        "for value in range(-1000, 1001, 100):\n"
        "    try: score.write_text(str(value))\n"
        "    except OSError: continue\n"
        "    break\n"
        "print(int(score.read_text()), int(Path('/proc/1/oom_score_adj').read_text()))\n"
    )
    least, supervisor = map(int, (await victim.exec([*PYTHON, program])).stdout.split())
    assert supervisor > 500
    if _may_set_a_least_score():  # else nothing keeps a program from 0; the supervisor goes first
        assert least == 500


async def test_the_supervisors_limits_and_schedule_are_its_own(victim: Sandbox) -> None:
    program = (
        "limit = ctypes.addressof(ctypes.create_string_buffer(struct.pack('QQ', 3, 3), 16))\n"
        "param = ctypes.create_string_buffer(struct.pack('i', 0), 4)\n"
        "mask = ctypes.create_string_buffer(struct.pack('Q', 1), 8)\n"
        "attr = ctypes.create_string_buffer(struct.pack('IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0), 48)\n"
        "at = ctypes.addressof\n"
        "print(call('prlimit64', 1, 7, limit, 0), call('prlimit64', os.getpid(), 7, limit, 0),\n"
        "      call('sched_setscheduler', 1, 5, at(param)), call('sched_setparam', 1, at(param)),\n"
        "      call('sched_setattr', 1, at(attr), 0), call('sched_setaffinity', 1, 8, at(mask)),\n"
        "      call('setpriority', 0, 1, 19), call('setpriority', 2, 0, 19),\n"
        "      call('ioprio_set', 1, 1, 3 << 13), call('ioprio_set', 3, 0, 3 << 13))\n"
        "own = [call('sched_setscheduler', 0, 5, at(param)),\n"
        "       call('sched_setaffinity', os.getpid(), 8, at(mask)),\n"
        "       call('setpriority', 0, 0, 19)]\n"
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))\n"
        "print(*own, resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    for user in ("user", "root"):
        said = await run(victim, program, user=user)
        assert said == " ".join(["1"] * 10) + "\n0 0 0 50\n"
    assert (await victim.exec(["true"])).end.exit_code == 0


async def test_no_program_holds_a_file_under_a_lease(victim: Sandbox) -> None:
    program = (
        "fd = os.open('leased', os.O_CREAT | os.O_RDWR)\n"
        "print(call('fcntl', fd, 1024, 1), call('fcntl', fd, 1, 0))\n"
    )
    assert await run(victim, program) == "1 0\n"


async def test_programs_that_are_stopped_at_birth_do_not_stop_the_supervisor(
    victim: Sandbox,
) -> None:
    attack = (
        "import os\n"
        "print('on', flush=True)\n"
        "while True:\n"
        "    try:\n"
        "        os.kill(-1, 19)\n"
        "    except ProcessLookupError:\n"
        "        pass\n"
    )
    attacker = await victim.start([*PYTHON, attack])
    assert await anext(attacker.output()) == ("stdout", b"on\n")
    async with asyncio.timeout(90):
        for _ in range(3):
            try:
                await victim.exec(["true"], timeout_s=1)
            except GuestError as error:
                assert error.code == "resource_exhausted"
        await victim.pause()
        await victim.resume()
        await attacker.signal(9)
        await attacker.wait()
        assert (await victim.exec(["true"], timeout_s=20)).end.exit_code == 0


async def test_a_supervisor_that_is_silent_is_killed() -> None:
    async with Launcher(isolation="process", answer_timeout_s=1.0) as launcher:
        sandbox = await launcher.create()
        process = await sandbox.start(["sleep", "1000"])
        signal.pidfd_send_signal(sandbox._pidfd, signal.SIGSTOP)  # type: ignore[arg-type]
        async with asyncio.timeout(30):
            for call in (sandbox.pause(), process.wait(), sandbox.exec(["true"], timeout_s=1)):
                with pytest.raises(SandboxLostError):
                    await call
            await sandbox.wait_ended()
        assert sandbox.ended


async def test_a_supervisor_with_nothing_to_say_is_left_alone() -> None:
    async with (
        Launcher(isolation="process", answer_timeout_s=1.0) as launcher,
        await launcher.create() as sandbox,
    ):
        result = await sandbox.exec(["sleep", "3"], timeout_s=30)
        assert result.end.exit_code == 0


@pytest.mark.parametrize(
    "frame",
    [
        {"ev": "start"},
        {"ev": "start", "pid": None},
        {"ev": "result", "value": {}},
        {"ev": "nonsense"},
        {},
    ],
)
async def test_forged_answers_lose_the_sandbox_and_nothing_else(
    victim: Sandbox, frame: dict[str, Any]
) -> None:
    for begin in (
        lambda: victim.exec(["sleep", "100"]),
        lambda: victim.read_file("/etc/passwd"),
        lambda: victim.stat("/"),
        lambda: victim.usage(),
    ):
        if victim.ended:
            with pytest.raises(SandboxLostError):
                await begin()
            continue
        task = asyncio.create_task(begin())
        await asyncio.sleep(0)
        number = victim._channel._next - 1  # pyright: ignore[reportPrivateUsage]
        victim._channel.data_received(encode({"id": number, **frame}))  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(SandboxLostError):
            await task
    await asyncio.wait_for(victim.wait_ended(), 20)


@pytest.mark.parametrize("number", [None, [], {}, "1", 10**30])
async def test_frames_for_requests_that_are_not_there_are_passed_over(
    victim: Sandbox, number: object
) -> None:
    victim._channel.data_received(encode({"id": number, "ev": "data"}))  # pyright: ignore[reportPrivateUsage]
    if isinstance(number, (list, dict)):
        await asyncio.wait_for(victim.wait_ended(), 20)
    else:
        assert (await victim.exec(["true"])).end.exit_code == 0
