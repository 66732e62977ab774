from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import twinkle_isolation
from twinkle_isolation import (
    GuestError,
    IsolationMode,
    IsolationUnavailableError,
    Launcher,
    Limits,
    Sandbox,
    SandboxSpec,
    SandboxStartError,
    jail,
)
from twinkle_isolation import launcher as launcher_module
from twinkle_isolation._guest import seccomp
from twinkle_isolation.scratch import make_scratch


def test_all_names_resolve() -> None:
    for name in twinkle_isolation.__all__:
        assert getattr(twinkle_isolation, name).__name__ == name or name == "IsolationMode"
    with pytest.raises(AttributeError):
        _ = twinkle_isolation.nothing  # type: ignore[attr-defined]


def test_data_pickles() -> None:
    spec = SandboxSpec(env={"a": "b"}, limits=Limits(processes=3))
    assert pickle.loads(pickle.dumps(spec)) == spec
    error = pickle.loads(pickle.dumps(GuestError("not_found", "no file")))
    assert (error.code, str(error)) == ("not_found", "no file")


@pytest.mark.parametrize("name", ["memory_bytes", "processes", "disk_bytes", "open_files"])
def test_limits_that_cannot_work_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: 0})  # type: ignore[arg-type]


async def test_info_says_what_is_given() -> None:
    async with Launcher() as launcher:
        assert launcher.info.mode == "bubblewrap"
        assert launcher.info.sandbox_uid != 0
    with pytest.raises(SandboxStartError):
        await launcher.create()
    with pytest.raises(RuntimeError):
        _ = Launcher().info
    with pytest.raises(ValueError, match="docker"):
        Launcher(isolation="docker")  # type: ignore[arg-type]


async def test_a_machine_without_a_system_call_filter_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Launcher() as launcher:
        assert launcher.info.syscall_filter

    def of_another_machine(machine: str, *, accounted: bool) -> seccomp.Filter:
        return seccomp.Filter("vax", accounted=accounted)

    monkeypatch.setattr(launcher_module, "filter_for", of_another_machine)
    async with Launcher() as launcher:
        assert not launcher.info.syscall_filter
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "no system call filter" in warnings[0]


async def test_nothing_takes_the_place_of_a_bubblewrap_that_is_missing_or_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jail, "find_bwrap", lambda: None)
    with pytest.raises(IsolationUnavailableError, match=r"needs the bwrap program.*no boundary"):
        await Launcher().start()
    monkeypatch.setattr(jail, "find_bwrap", lambda: "/bin/false")
    with pytest.raises(IsolationUnavailableError, match=r"does not work here.*no boundary"):
        await Launcher().start()


async def test_isolation_process_says_loudly_that_it_is_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Launcher(isolation="process") as launcher, await launcher.create() as sandbox:
        assert launcher.info.mode == "process"
        assert (await sandbox.exec(["true"])).end.exit_code == 0
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "NOT isolated" in warning.getMessage()


async def test_spares_are_handed_out_and_made_again() -> None:
    spec = SandboxSpec(limits=Limits(processes=50))
    async with Launcher(spares=2, spare_spec=spec) as launcher:
        seen: set[Sandbox] = set()
        for _ in range(6):
            sandbox = await launcher.create(spec)
            assert (await sandbox.exec(["true"])).end.exit_code == 0
            seen.add(sandbox)
        assert len(seen) == 6
        assert launcher.sandboxes == 6


@pytest.fixture
def share(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)  # sandboxes are another user
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "my-tool"
    tool.write_text("#!/bin/sh\necho shared\n")
    tool.chmod(0o755)
    return tmp_path


async def test_shares_are_read_only_and_in_the_path(share: Path) -> None:
    launcher = Launcher(shares=[share], isolation="bubblewrap")
    async with launcher, await launcher.create() as sandbox:
        assert (await sandbox.exec(["my-tool"])).stdout == b"shared\n"
        result = await sandbox.exec(["touch", f"{share}/new"])
        assert result.end.exit_code != 0
        assert b"Read-only" in result.stderr


async def test_a_share_that_is_not_there_is_an_error_and_no_reason_to_degrade() -> None:
    with pytest.raises(NotADirectoryError, match="/no/such/place"):
        await Launcher(shares=["/no/such/place"]).start()


async def test_sandboxes_of_root_are_users_of_their_own() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give sandboxes users of their own")
    for mode in ("bubblewrap", "process"):
        async with Launcher(isolation=mode) as launcher:
            sandboxes = await asyncio.gather(*(launcher.create() for _ in range(4)))
            processes = [await sandbox.start(["sleep", "1000.25"]) for sandbox in sandboxes]
            owners = [path.stat().st_uid for path in map(Path, running("sleep", "1000.25"))]
            assert len(set(owners)) == len(processes) == 4
            assert all(owner >= launcher.info.sandbox_uid > 0 for owner in owners)


async def test_network_can_be_shared() -> None:
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connect = ["/bin/bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo in"]
    async with server, Launcher(isolation="bubblewrap") as launcher:
        async with await launcher.create(SandboxSpec(network=True)) as sandbox:
            assert (await sandbox.exec(connect)).stdout == b"in\n"
        async with await launcher.create(SandboxSpec(network=False)) as sandbox:
            assert (await sandbox.exec(connect)).end.exit_code != 0


async def test_the_jail_is_what_it_should_be() -> None:
    look = (
        "cat /proc/self/status; echo; ls -A / /etc /dev; id -u; cat /etc/passwd; hostname; "
        "cat /proc/self/mounts; ls /proc | grep -c '^[0-9]'"
    )
    launcher = Launcher(isolation="bubblewrap")
    async with launcher, await launcher.create(SandboxSpec(hostname="box")) as sandbox:
        result = await sandbox.exec(["/bin/bash", "-c", look])
    text = result.stdout.decode()
    assert "CapBnd:\t0000000000000000" in text
    assert "NoNewPrivs:\t1" in text
    assert "Seccomp:\t2" in text
    assert "shadow" not in text
    assert "\nbox\n" in text
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 6 and fields[1].startswith(("/usr", "/bin", "/lib")):
            assert "ro" in fields[3].split(","), line


async def test_root_without_its_powers_still_confines_the_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if os.geteuid() != 0:
        pytest.skip("what is left to a root that may not change users")
    command = jail.jail_command

    def without_powers(
        bwrap: str, fd: int, *, shares: Sequence[str], privileged: bool
    ) -> list[str]:
        if privileged:
            return ["/bin/false"]
        return command(bwrap, fd, shares=shares, privileged=privileged)

    monkeypatch.setattr(jail, "jail_command", without_powers)
    launcher = Launcher(isolation="bubblewrap")
    async with launcher, await launcher.create() as sandbox:
        assert launcher.info.sandbox_uid == 0
        for path in (
            "/proc/sys/kernel/core_pattern",
            "/proc/sys/vm/drop_caches",
            "/usr/x",
            "/etc/x",
        ):
            result = await sandbox.exec(["/bin/bash", "-c", f"echo 1 > {path}"])
            if path != "/etc/x":  # that is its own
                assert b"Read-only file system" in result.stderr, path
        assert (await sandbox.exec(["umount", "/proc/sys"])).end.exit_code != 0
        assert (await sandbox.exec(["id", "-u"], user="root")).stdout == b"0\n"
    assert not os.path.exists("/etc/x")  # noqa: ASYNC240  (a moment)


async def test_files_that_only_the_host_should_see_are_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    async with Launcher(isolation="bubblewrap") as launcher, await launcher.create() as sandbox:
        for path in (
            str(secret),
            "/etc/shadow",
            "/run/twinkle",
            f"/proc/{os.getpid()}/environ",
        ):
            with pytest.raises(GuestError):
                await sandbox.read_file(path)


@pytest.mark.parametrize("mode", ["bubblewrap", "process"])
async def test_a_zygote_that_dies_takes_its_sandboxes_and_is_replaced(mode: IsolationMode) -> None:
    launcher = Launcher(isolation=mode)
    await launcher.start()
    sandbox = await launcher.create()
    zygote = launcher._zygote  # pyright: ignore[reportPrivateUsage]
    assert zygote is not None
    zygote.process.kill()
    await asyncio.wait_for(sandbox.wait_ended(), 10)
    await eventually(lambda: not zygote.alive)
    async with await launcher.create() as other:
        assert (await other.exec(["true"])).end.exit_code == 0
    await launcher.close()
    await launcher.close()


def test_directories_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    stale = tmp_path / f"twinkle-x-{gone.pid}-abc"
    stale.mkdir()
    ours = make_scratch("x", tmp_path)
    again = make_scratch("x", tmp_path)
    assert not stale.exists()
    assert ours.is_dir()
    assert again.is_dir()


@pytest.mark.parametrize("mode", ["bubblewrap", "process"])
def test_a_killed_host_process_leaves_nothing(mode: str) -> None:
    program = (
        "import asyncio, sys\n"
        "from twinkle_isolation import Launcher\n"
        "async def main():\n"
        f"    launcher = Launcher(isolation={mode!r}, spares=2)\n"
        "    await launcher.start()\n"
        "    sandbox = await launcher.create()\n"
        "    await sandbox.start(['/bin/bash', '-c', 'setsid sleep 1234567 & sleep 1234567'])\n"
        "    count = ['pgrep', '-c', '-x', 'sleep']\n"
        "    while (await sandbox.exec(count)).stdout.strip() < b'2':\n"
        "        pass\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    host = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    assert host.stdout.readline() == "ready\n"
    host.send_signal(signal.SIGKILL)
    host.wait()
    host.stdout.close()
    deadline = time.monotonic() + 15
    while sleepers():
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not check():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def sleepers() -> list[str]:
    return running("sleep", "1234567")


def running(*command: str) -> list[str]:
    """Return the directories in /proc of the processes with this command line."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:-1] == [word.encode() for word in command]:
            found.append(str(path.parent))
    return found
