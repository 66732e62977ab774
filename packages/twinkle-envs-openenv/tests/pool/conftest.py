"""One small Ray cluster for all tests of the pool, and gates that tests hold environments at."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.envs.openenv.pool import EnvPool

HERE = Path(__file__).parent
LAB = "pool_test_envs:Lab"


@pytest.fixture(scope="session", autouse=True)
def workers_find_the_test_environments() -> Iterator[None]:
    """Put this directory on the path of this process and of the workers it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(HERE), *sys.path])
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        yield


@pytest.fixture(scope="session")
def cluster(workers_find_the_test_environments: None) -> Iterator[Any]:
    """A running cluster that this process is connected to; it notices lost nodes within seconds."""
    ray = pytest.importorskip("ray", reason="the ray extra is not installed")
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "include_dashboard": False,
            "object_store_memory": 80 * 2**20,
            "_system_config": {
                "health_check_initial_delay_ms": 500,
                "health_check_period_ms": 500,
                "health_check_failure_threshold": 3,
            },
        },
    )
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class Gate:
    """Holds environments in a call until it is opened."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def path(self) -> str:
        return str(self.directory)

    def waiting(self) -> list[Path]:
        return list(self.directory.glob("*.waiting"))

    def await_waiting(self, count: int) -> None:
        _await(lambda: len(self.waiting()) >= count, f"{count} environments at the gate")

    def open(self) -> None:
        """Let everybody through who waits now."""
        for fifo in self.waiting():
            with fifo.open("w"):
                pass
            fifo.unlink()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    directory = tmp_path / "gate"
    directory.mkdir()
    yield Gate(directory)


def _await(condition: Callable[[], bool], what: str = "", timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until a condition holds in another process."""
    return _await


@pytest.fixture
def process_lives() -> Callable[[int], bool]:
    def lives(pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state not in "ZX"

    return lives


@pytest.fixture(scope="session", params=["in the driver", "on ray"])
def num_workers(request: pytest.FixtureRequest) -> int:
    """Where the pool keeps its environments; for tests that must not see a difference."""
    if request.param == "in the driver":
        return 0
    request.getfixturevalue("cluster")
    return 2


@pytest.fixture(scope="session")
def pool(num_workers: int) -> Iterator[EnvPool]:
    """Eight slots shared by tests that leave it in working order."""
    with EnvPool(8, env_factory=LAB, num_workers=num_workers) as pool:
        yield pool


@pytest.fixture
def make_pool(num_workers: int) -> Iterator[Callable[..., EnvPool]]:
    """Make a pool of one's own, closed after the test."""
    pools: list[EnvPool] = []

    def make(pool_size: int = 4, **kwargs: Any) -> EnvPool:
        workers = min(1, num_workers)  # each one more is a process to start
        settings: dict[str, Any] = {"env_factory": LAB, "num_workers": workers, **kwargs}
        pools.append(EnvPool(pool_size, **settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
