"""What a sandbox costs: `AgentEnv` next to the bare e2b SDK, on the local sandbox server.

Usage:
    python benchmarks/sandboxes.py [--rounds 200] [--at-once 32 128]

Starts the server in a process of its own on loopback. One at a time the two take turns, so that
a noisy machine hits both; with many at once they run one after the other. All calls are made in
threads, as a rollout makes them. Budgets of the design, warm: create <= 15 ms median, 128 at once
<= 2 s, command <= 10 ms median; `AgentEnv` adds <= 10 %.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from e2b import Sandbox
from rich.console import Console
from rich.table import Table

from twinkle_agentic.envs import AgentEnv

SMALL, LARGE = "x" * 1_024, "x" * 2**20
OPERATIONS = ("create", "run true", "write 1 KB", "read 1 KB", "write 1 MB", "read 1 MB", "kill")


class Face(Protocol):
    """One way to use a sandbox."""

    def create(self) -> None: ...
    def run(self) -> None: ...
    def write(self, path: str, text: str) -> None: ...
    def read(self, path: str) -> str: ...
    def kill(self) -> None: ...


class Ours:
    def __init__(self, url: str) -> None:
        self.env = AgentEnv(
            template="base", api_url=url, on_timeout="kill", max_concurrent_creates=512
        )

    def create(self) -> None:
        self.env.reset()

    def run(self) -> None:
        assert self.env.step("run_command", {"command": "true"}).info["exit_code"] == 0

    def write(self, path: str, text: str) -> None:
        assert self.env.step("write_file", {"path": path, "content": text}).error is None

    def read(self, path: str) -> str:
        result = self.env.step("read_file", {"path": path})
        assert result.error is None
        return result.observation

    def kill(self) -> None:
        self.env.close()


class Bare:
    def __init__(self, url: str) -> None:
        self.options: dict[str, Any] = {"api_url": url, "sandbox_url": url, "api_key": "any"}
        self.sandbox: Sandbox | None = None

    def create(self) -> None:
        self.sandbox = Sandbox.create(
            "base", timeout=300, lifecycle={"on_timeout": "kill"}, **self.options
        )

    @property
    def held(self) -> Sandbox:
        assert self.sandbox is not None
        return self.sandbox

    def run(self) -> None:
        assert self.held.commands.run("true").exit_code == 0

    def write(self, path: str, text: str) -> None:
        self.held.files.write(path, text)  # pyright: ignore[reportUnknownMemberType]

    def read(self, path: str) -> str:
        return self.held.files.read(path)

    def kill(self) -> None:
        self.held.kill()


@dataclass
class Times:
    """Seconds per operation: wall time, and CPU time of this process."""

    of: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in OPERATIONS})
    cpu: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in OPERATIONS})

    def take(self, name: str, action: Callable[[], object]) -> None:
        begun, used = time.perf_counter(), time.process_time()
        action()
        self.of[name].append(time.perf_counter() - begun)
        self.cpu[name].append(time.process_time() - used)


def actions(face: Face) -> list[tuple[str, Callable[[], object]]]:
    return [
        ("run true", face.run),
        ("write 1 KB", lambda: face.write("small", SMALL)),
        ("read 1 KB", lambda: face.read("small")),
        ("write 1 MB", lambda: face.write("large", LARGE)),
        ("read 1 MB", lambda: face.read("large")),
    ]


def take_turns(faces: Sequence[Face], rounds: int) -> list[Times]:
    """One at a time; the order changes every round."""
    times = [Times() for _ in faces]
    pairs = list(zip(faces, times, strict=True))
    for index in range(rounds):
        for face, kept in pairs if index % 2 else reversed(pairs):
            kept.take("create", face.create)
        for step in range(len(actions(faces[0]))):
            for face, kept in pairs if index % 2 else reversed(pairs):
                kept.take(*actions(face)[step])
        for face, kept in pairs if index % 2 else reversed(pairs):
            kept.take("kill", face.kill)
    return times


def together(make: Callable[[], Face], count: int) -> dict[str, tuple[float, float]]:
    """All at once: per operation the wall time and the median latency, in seconds."""
    faces = [make() for _ in range(count)]
    found: dict[str, tuple[float, float]] = {}
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(time.sleep, [0.01] * count))  # the threads exist

        def all_do(name: str, pick: Callable[[Face], Callable[[], object]]) -> None:
            def timed(face: Face) -> float:
                begun = time.perf_counter()
                pick(face)()
                return time.perf_counter() - begun

            begun = time.perf_counter()
            latencies = list(threads.map(timed, faces))
            found[name] = (time.perf_counter() - begun, statistics.median(latencies))

        all_do("create", lambda face: face.create)
        for step, (name, _) in enumerate(actions(faces[0])):
            all_do(name, lambda face, step=step: actions(face)[step][1])
        all_do("kill", lambda face: face.kill)
    return found


@contextmanager
def server() -> Generator[str]:
    """Run a sandbox server; give its address."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "sandbox_server", "--port", "0", "--max-sandboxes", "1000"),
            *("--log-level", "warning"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on "), line
        url = line.split()[2]
        wait_until_ready(url)
        yield url
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(url: str) -> None:
    import urllib.request

    for _ in range(200):
        try:
            urllib.request.urlopen(url + "/health", timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError("the server does not answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--at-once", type=int, nargs="*", default=[32, 128])
    parser.add_argument("--repeats", type=int, default=3, help="of the runs with many at once")
    options = parser.parse_args()
    console = Console()
    with server() as url:
        with ThreadPoolExecutor(1) as thread:
            warm_up = thread.submit(take_turns, [Ours(url), Bare(url)], 10)
            warm_up.result()  # imports, connections, the server's warm processes
            turns = thread.submit(take_turns, [Ours(url), Bare(url)], options.rounds)
            ours, bare = turns.result()
        table = Table("one at a time, median ms", "AgentEnv", "e2b", "ratio", "CPU", "e2b", "ratio")
        for name in OPERATIONS:
            row = [name]
            for mine, theirs in ((ours.of, bare.of), (ours.cpu, bare.cpu)):
                a, b = statistics.median(mine[name]) * 1e3, statistics.median(theirs[name]) * 1e3
                row += [f"{a:.2f}", f"{b:.2f}", f"{a / b:.2f}"]
            table.add_row(*row)
        console.print(table)
        for count in options.at_once:
            table = Table(f"{count} at once, wall ms", "AgentEnv", "e2b", "ratio")
            runs: dict[str, dict[str, list[float]]] = {"ours": {}, "bare": {}}
            for repeat in range(options.repeats + 1):
                for label, make in (("ours", lambda: Ours(url)), ("bare", lambda: Bare(url))):
                    for name, (wall, _) in together(make, count).items():
                        if repeat:  # the first run warms up
                            runs[label].setdefault(name, []).append(wall)
            for name in OPERATIONS:
                mine = statistics.median(runs["ours"][name]) * 1e3
                theirs = statistics.median(runs["bare"][name]) * 1e3
                table.add_row(name, f"{mine:.0f}", f"{theirs:.0f}", f"{mine / theirs:.2f}")
            console.print(table)


if __name__ == "__main__":
    main()
