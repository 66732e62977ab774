"""Python sessions that show values as a notebook does, in a sandbox that others use too."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from twinkle_isolation import Launcher, Limits, Sandbox, SandboxSpec
from twinkle_isolation.python import PythonResult, PythonSession

LIMIT_S = 30.0
SPEC = SandboxSpec(limits=Limits(memory_bytes=512 << 20, processes=32, disk_bytes=16 << 20))


@pytest.fixture(params=["bubblewrap", "process"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    preload = ["twinkle_isolation._guest.notebook", "subprocess"]
    async with (
        Launcher(isolation=request.param, preload=preload) as launcher,
        await launcher.create(SPEC) as sandbox,
    ):
        yield sandbox


@pytest.fixture
async def session(sandbox: Sandbox) -> PythonSession:
    return await PythonSession.start(sandbox, notebook=True, shared=True)


async def run(
    session: PythonSession, code: str, **options: Any
) -> tuple[list[dict[str, Any]], str, PythonResult]:
    texts = {"stdout": b"", "stderr": b"", "report": b""}

    async def keep(stream: str, data: bytes) -> None:
        texts[stream] += data

    options.setdefault("timeout_s", LIMIT_S)
    result = await session.run(code, on_output=keep, **options)
    records = [json.loads(line) for line in texts["report"].splitlines() if line]
    return records, (texts["stdout"] + texts["stderr"]).decode(), result


async def test_the_last_value_is_a_bundle(session: PythonSession) -> None:
    records, printed, _ = await run(session, "print('seen')\n{'a': 1}")
    assert printed == "seen\n"
    assert records == [{"main": True, "data": {"text/plain": "{'a': 1}"}}]


async def test_values_say_how_they_look(session: PythonSession) -> None:
    code = """
class Table:
    def _repr_html_(self): return "<table>"
    def _repr_png_(self): return b"PNG", {"width": 1}
    def _repr_json_(self): return {"rows": [1, float("nan")]}
    def _repr_latex_(self): raise ValueError
    def __repr__(self): return "a table"
display(Table(), 5)
Table"""
    records, _, result = await run(session, code)
    assert result == PythonResult(exit_code=0)
    assert records[0]["main"] is False
    assert records[0]["data"].pop("application/json")["rows"][0] == 1
    assert records[0]["data"] == {
        "text/plain": "a table",
        "text/html": "<table>",
        "image/png": base64.b64encode(b"PNG").decode(),
    }
    assert records[1:] == [
        {"main": False, "data": {"text/plain": "5"}},
        {"main": True, "data": {"text/plain": "<class '__main__.Table'>"}},
    ]


async def test_an_exception_is_a_record_and_is_not_printed(session: PythonSession) -> None:
    records, printed, result = await run(session, "def f():\n    1 / 0\nf()")
    error = records[0]["error"]
    assert (error["name"], error["value"]) == ("ZeroDivisionError", "division by zero")
    assert error["traceback"].startswith("Traceback")
    assert "<step-1>" in error["traceback"] and "repl.py" not in error["traceback"]
    assert printed == "" and result.exit_code == 1
    records, _, result = await run(session, "import sys; sys.exit(0)")
    assert records[0]["error"]["name"] == "SystemExit" and result.end is None
    assert (await run(session, "f.__name__"))[0][0]["data"] == {"text/plain": "'f'"}


async def test_variables_of_one_run_are_gone_after_it(session: PythonSession) -> None:
    read = "import os; (os.environ.get('A'), os.environ['HOME'])"
    home = json.loads(
        (await run(session, "import os, json; print(json.dumps(os.environ['HOME']))"))[1]
    )
    records, _, _ = await run(session, read, env={"A": "1", "HOME": "/x"})
    assert records[0]["data"] == {"text/plain": "('1', '/x')"}
    assert (await run(session, read))[0][0]["data"] == {"text/plain": repr((None, home))}


async def test_a_kill_leaves_the_other_programs_of_the_sandbox(
    sandbox: Sandbox, session: PythonSession
) -> None:
    other = await PythonSession.start(sandbox, notebook=True, shared=True)
    await run(other, "x = 1")
    code = """
import signal, subprocess
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, flush=True)
while True: pass
"""
    _, printed, result = await run(session, code, timeout_s=0.5, grace_s=0.2)
    assert result.stopped == "timeout"
    assert result.end is not None and result.end.signal == 9
    assert (await run(other, "x"))[0][0]["data"] == {"text/plain": "1"}
    alive = await sandbox.exec(["sh", "-c", f"kill -0 {printed.split()[0]}"])
    assert alive.end.exit_code != 0, "a child of the killed interpreter lives"


async def test_code_can_be_stopped(session: PythonSession) -> None:
    started = asyncio.Event()

    def on_output(stream: str, data: bytes) -> None:
        started.set()

    code = "x = 7\nprint(1, flush=True)\nwhile True: pass"
    work = asyncio.create_task(session.run(code, on_output=on_output))
    await asyncio.wait_for(started.wait(), LIMIT_S)
    session.stop_soon()
    result = await asyncio.wait_for(work, LIMIT_S)
    assert result.stopped == "asked" and result.end is None
    assert (await run(session, "x"))[0][0]["data"] == {"text/plain": "7"}


async def test_output_waits_for_its_reader(session: PythonSession) -> None:
    """The program stands still while the reader of its output does."""
    go = asyncio.Event()
    sizes: list[int] = []

    async def slow(stream: str, data: bytes) -> None:
        await go.wait()
        sizes.append(len(data))

    code = "for i in range(160): print('x' * 65535)\nopen('done', 'w').close()"
    work = asyncio.create_task(session.run(code, on_output=slow))
    done = await asyncio.wait({work}, timeout=1)
    assert not done[0]
    assert "done" not in [entry.name for entry in await session.sandbox.list_dir(".")]
    go.set()
    assert (await asyncio.wait_for(work, 3 * LIMIT_S)).exit_code == 0
    assert sum(sizes) == 160 * 65536


async def test_figures_are_pictures() -> None:
    pytest.importorskip("matplotlib", reason="the group `figures` is not installed")
    preload = ["twinkle_isolation._guest.notebook"]
    async with (
        Launcher(shares=[Path(sys.prefix)], preload=preload) as launcher,
        await launcher.create(SPEC) as sandbox,
    ):
        session = await PythonSession.start(sandbox, notebook=True, shared=True)
        code = """
import matplotlib.pyplot as plt
plt.plot([1, 2]); plt.show()
plt.figure(); figure = plt.figure()
figure"""
        # The first import makes a list of fonts.
        records, printed, result = await run(session, code, timeout_s=150.0)
        assert result.exit_code == 0, (records, printed)
        assert "Fontconfig" not in printed and "non-interactive" not in printed
        pictures = [base64.b64decode(record["data"].get("image/png", "")) for record in records]
        assert all(picture.startswith(b"\x89PNG") for picture in pictures), records
        assert [record["main"] for record in records] == [False, True, False]
        records, _, _ = await run(session, "plt.get_fignums()")
        assert records == [{"main": True, "data": {"text/plain": "[]"}}]
