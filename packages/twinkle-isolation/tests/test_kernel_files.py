"""What the kernel serves as files, and which sockets, are out of reach of a sandbox."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from twinkle_isolation import GuestError, Launcher, Sandbox

SLACK = "/proc/self/timerslack_ns"
HUGE = b"1000000000000000000"


@pytest.mark.parametrize("path", [SLACK, "/proc/self/comm", "/proc/1/timerslack_ns"])
async def test_no_file_of_proc_is_written(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(GuestError) as refused:
        await sandbox.write_file(path, HUGE)
    assert refused.value.code in ("permission_denied", "not_found")


@pytest.mark.parametrize("path", ["/proc/self/maps", "/proc/version", "/sys/kernel/uevent_seqnum"])
async def test_no_file_of_the_kernel_is_read(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(GuestError) as refused:
        await sandbox.read_file(path)
    assert refused.value.code in ("permission_denied", "not_found")


async def test_a_link_does_not_lead_there(sandbox: Sandbox) -> None:
    await sandbox.exec(["ln", "-s", SLACK, "answer.txt"])
    await sandbox.exec(["ln", "-s", "/proc/self", "folder"])
    for path in ("answer.txt", "folder/timerslack_ns"):
        with pytest.raises(GuestError, match="proc"):
            await sandbox.write_file(path, HUGE)
    with pytest.raises(GuestError, match="proc"):
        await sandbox.list_dir("folder")
    # Its timers are as they were: the limit of a command holds.
    result = await sandbox.exec(["sleep", "60"], timeout_s=0.2)
    assert result.end.reason == "timeout"


async def test_a_listing_of_everything_leaves_the_kernel_out(jailed: Launcher) -> None:
    async with await jailed.create() as sandbox:
        paths = [entry.path for entry in await sandbox.list_dir("/", depth=2)]
    assert "/proc" in paths
    assert "/home/user" in paths
    assert not [path for path in paths if path.startswith(("/proc/", "/sys/"))]


async def test_programs_start_with_the_usual_timer_slack(launcher: Launcher) -> None:
    async with await launcher.create() as sandbox:
        result = await sandbox.exec(["cat", SLACK])
    assert result.stdout == b"50000\n"


def _spoil_timers(pid: int) -> None:
    slack = Path(f"/proc/{pid}/timerslack_ns")
    slack.write_bytes(HUGE)
    assert slack.read_bytes().strip() == HUGE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may spoil the timers of another process")
async def test_a_deadline_holds_where_the_timers_of_the_supervisor_do_not() -> None:
    async with Launcher(isolation="process") as launcher, await launcher.create() as sandbox:
        _spoil_timers(sandbox.pid)
        process = await sandbox.start(["sleep", "60"], timeout_s=0.3)
        end = await asyncio.wait_for(process.wait(), 20)
    assert end.reason == "timeout"


async def test_only_the_usual_families_of_sockets_can_be_made(jailed: Launcher) -> None:
    program = (
        "import errno, socket\n"
        "for family in (1, 2, 10, 16, 17, 29, 31, 38, 40, 44):\n"
        "    for kind in (1, 2, 3, 5):\n"
        "        try:\n"
        "            socket.socket(family, kind).close()\n"
        "            print(family, 'open')\n"
        "        except OSError as error:\n"
        "            if error.errno == errno.EAFNOSUPPORT: print(family, 'refused')\n"
    )
    async with await jailed.create() as sandbox:
        result = await sandbox.exec(["python3", "-c", program])
    lines = set(result.stdout.decode().splitlines())
    assert {"1 open", "2 open", "16 open"} <= lines
    assert {f"{family} refused" for family in (17, 29, 31, 38, 40, 44)} <= lines
    assert not {f"{family} open" for family in (17, 29, 31, 38, 40, 44)} & lines
