"""The unmodified SDKs of npm against a real server: `nox -s typescript` runs this.

Scripts of AgentENV run as they are from the checkout that `AGENTENV_CHECKOUT` names, if it does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .conftest import KEY, NOBODY, start_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Server

CHECKS = Path(__file__).parent / "typescript"
NODE = Path(os.environ["NODE_PROJECT"])  # with `node_modules`, which has e2b and tsx
CHECKOUT = os.environ.get("AGENTENV_CHECKOUT")
SCRIPTS = Path(CHECKOUT or "", "scripts/tests/e2e")


@pytest.fixture(params=["root", "nobody"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("only root can start a server as root")
    uid = NOBODY if request.param == "nobody" and os.geteuid() == 0 else None
    server = start_server("bubblewrap", "--api-key", KEY, uid=uid)
    yield server
    server.stop()
    assert server.process.stdout is not None
    server.process.stdout.close()


def run(server: Server, *command: str | Path) -> str:
    """Run a client program in the folder of `node_modules`; return what it said."""
    environment = {
        **os.environ,
        "E2B_API_URL": server.url,
        "E2B_SANDBOX_URL": server.url,
        "E2B_API_KEY": KEY,
        "AENV_TEMPLATE_ID": "base",
    }
    done = subprocess.run(
        list(map(str, command)),
        cwd=NODE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_checks_pass(server: Server) -> None:
    for name, count in (("checks.mjs", 32), ("interpreter_checks.mjs", 8)):
        said = run(server, "node", shutil.copy(CHECKS / name, NODE))
        lines = said.splitlines()
        assert len(lines) == count, said
        assert all(line.startswith("ok ") for line in lines), said


@pytest.mark.skipif(CHECKOUT is None, reason="AGENTENV_CHECKOUT names no checkout of AgentENV")
def test_the_typescript_script_of_agentenv_passes(server: Server) -> None:
    script = shutil.copy(SCRIPTS / "e2b_ts_sdk_compat.ts", NODE)  # so that it finds node_modules
    run(server, NODE / "node_modules/.bin/tsx", script)


@pytest.mark.skipif(CHECKOUT is None, reason="AGENTENV_CHECKOUT names no checkout of AgentENV")
def test_the_python_script_of_agentenv_passes(server: Server) -> None:
    run(server, sys.executable, SCRIPTS / "e2b_python_sdk_compat.py")
