"""Where the other tests run as root, the boundaries are tried once more as an ordinary user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import twinkle_isolation

_NOBODY = 65534
_HERE = Path(__file__).parent
_FILES = ["test_attacks.py", "test_kernel_files.py", "test_shared_resources.py"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as a user already")


@pytest.mark.parametrize("file", _FILES)
def test_the_boundaries_hold(file: str) -> None:
    paths = [Path(twinkle_isolation.__file__).parents[1], Path(pytest.__file__).parents[1]]
    environment = {
        "HOME": "/tmp",
        "PATH": os.environ["PATH"],
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(_HERE / file)]
    done = subprocess.run(
        [_interpreter(environment), *arguments],
        cwd=_HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=220,
        user=_NOBODY,
        group=_NOBODY,
        extra_groups=[],
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def _interpreter(environment: dict[str, str]) -> str:
    """Return a Python of this version that the user may run, with what the tests need."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        try:
            subprocess.run(
                [candidate, "-c", "import pytest, pytest_asyncio, twinkle_isolation"],
                env=environment,
                cwd="/",
                check=True,
                capture_output=True,
                timeout=60,
                user=_NOBODY,
                group=_NOBODY,
                extra_groups=[],
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return candidate
    pytest.skip(f"user {_NOBODY} may not run {version}, or not read {environment['PYTHONPATH']}")
