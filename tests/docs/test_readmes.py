"""Every Python snippet of every README runs, against real servers in place of the named ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from twinkle_agentic.rollout.testing import ServerProcess

ROOT = Path(__file__).parents[2]
READMES = sorted(
    path.relative_to(ROOT)
    for pattern in ("README.md", "packages/*/README.md", "services/*/README.md")
    for path in ROOT.glob(pattern)
)
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_the_python_of_a_readme_runs(
    readme: Path,
    tmp_path: Path,
    coding_server: ServerProcess,
    scripted_endpoint: ServerProcess,
    sandbox_server: ServerProcess,
) -> None:
    blocks: list[str] = _BLOCK.findall((ROOT / readme).read_text(encoding="utf-8"))
    assert blocks, f"{readme} shows no Python"
    source = "\n".join(blocks)
    for port, server in (
        (8001, scripted_endpoint),
        (8000, coding_server),
        (8800, sandbox_server),
    ):
        source = re.sub(rf"http://(localhost|127\.0\.0\.1):{port}", server.url, source)
    path = tmp_path / "snippet.py"
    path.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_the_first_commands_of_the_readme_are_those_of_the_project() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "pip install uv && uv run twinkle-rollout quickstart" in text
    assert "pip install uv && uv run nox" in text
    assert "pip install uv && uv run nox" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_the_tests_that_security_names_are_there() -> None:
    tests = {
        f"{path.name}::{name}"
        for folder in ("packages/twinkle-isolation", "services/sandbox_server")
        for path in (ROOT / folder / "tests").glob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+\.py::\w+)`", (ROOT / "SECURITY.md").read_text("utf-8")))
    assert len(named) > 30
    assert named <= tests, named - tests
