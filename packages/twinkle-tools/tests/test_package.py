from __future__ import annotations

import importlib
import subprocess
import sys


def test_package_exports_what_it_says() -> None:
    package = importlib.import_module("twinkle_agentic.tools")
    assert package.__all__ == sorted(package.__all__)
    assert set(package.__all__) == {
        "ArgumentsError",
        "FunctionTool",
        "Message",
        "Tool",
        "ToolCall",
        "ToolErrorKind",
        "ToolInfo",
        "ToolManager",
        "ToolOutcome",
        "Trajectory",
    }
    assert all(hasattr(package, name) for name in package.__all__)


def test_import_loads_neither_the_validator_nor_pydantic() -> None:
    script = (
        "import sys, twinkle_agentic.tools; "
        "print(sorted({m.partition('.')[0] for m in sys.modules} & "
        "{'jsonschema', 'referencing', 'pydantic', 'numpy', 'httpx', 'aiohttp'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
