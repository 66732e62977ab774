"""Which distribution a module comes from, and what servers answer."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from twinkle_agentic.rollout.cli.doctor import doctor, module_origins
from twinkle_agentic.rollout.cli.probes import probe_model, probe_openenv
from twinkle_agentic.rollout.cli.servers import ServerProcess, free_port


def test_our_modules_come_from_our_distributions() -> None:
    origins = {origin.module: origin for origin in module_origins()}
    assert origins["twinkle_agentic.tools.tool_manager"].provider == "twinkle-tools"
    assert origins["twinkle_agentic.envs.base"].provider == "twinkle-envs-core"
    assert all(origin.ok for origin in origins.values())


def test_a_foreign_module_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = tmp_path / "twinkle_agentic"
    (foreign / "protocol").mkdir(parents=True)
    for path in (foreign / "__init__.py", foreign / "protocol/__init__.py"):
        path.write_text("")
    (foreign / "protocol/openai.py").write_text("class OpenAI: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # pyright: ignore[reportUnknownMemberType]
    for name in [m for m in sys.modules if m.split(".")[0] == "twinkle_agentic"]:
        monkeypatch.delitem(sys.modules, name)
    origins = {origin.module: origin for origin in module_origins()}
    wrong = origins["twinkle_agentic.protocol.openai"]
    assert wrong.provider == "?"
    assert not wrong.ok
    text = io.StringIO()
    assert doctor(Console(file=text, width=200), probes=[]) == 1
    assert "--force-reinstall --no-deps twinkle-rollout" in text.getvalue()


def test_a_live_endpoint_is_ok_and_a_dead_one_is_exit_code_1() -> None:
    module = "twinkle_agentic.rollout.cli.scripted_endpoint"
    with ServerProcess(
        "endpoint", lambda port: [sys.executable, "-m", module, "--port", str(port)]
    ) as server:
        server.wait_ready(30)
        alive = probe_model(f"{server.url}/v1")
        assert (alive.ok, alive.detail) == (True, "models: scripted-policy")
    dead = probe_openenv(f"http://127.0.0.1:{free_port()}", timeout_s=2)
    assert not dead.ok
    text = io.StringIO()
    assert doctor(Console(file=text, width=200), probes=[alive, dead]) == 1
    assert "ConnectError" in text.getvalue()


def test_a_url_that_is_none_is_an_answer_not_a_crash() -> None:
    assert not probe_openenv("nonsense").ok
    assert not probe_openenv("http://[::bad").ok
