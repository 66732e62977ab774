"""What a sandbox of the local server costs: create, run, files; one at a time and many at once.

Usage:
    python benchmarks/sandbox_server.py [--isolation bubblewrap] [--rounds 50]

Starts a server of its own in a process of its own on loopback and drives it with the unmodified
`e2b` SDK, so every figure includes the SDK's own time on the same cores. Budgets: create <= 15 ms
median, 128 at once <= 2 s, `run("true")` <= 10 ms median.
"""

# The SDK leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import argparse
import concurrent.futures
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import e2b
from rich.console import Console
from rich.table import Table


def start_server(isolation: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from sandbox_server.cli import main; main()",
            *("--port", "0", "--isolation", isolation, "--log-level", "warning"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    url = process.stdout.readline().split()[2]
    for _ in range(200):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return process, url
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the server did not become healthy")


def timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return (time.perf_counter() - begun) * 1000


def spread(samples: list[float]) -> tuple[str, str]:
    ordered = sorted(samples)
    return f"{statistics.median(ordered):.1f}", f"{ordered[int(len(ordered) * 0.95)]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isolation", default="bubblewrap", choices=["bubblewrap", "process"])
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    server, url = start_server(options.isolation)
    opts = {"api_url": url, "sandbox_url": url, "api_key": "benchmark", "debug": False}
    table = Table(title=f"sandbox server, {options.isolation}, {os.cpu_count()} CPUs")
    for column in ("what", "median ms", "p95 ms", "budget"):
        table.add_column(column, justify="left" if column == "what" else "right")
    try:
        measure(table, opts, options.rounds)
    finally:
        server.terminate()
        server.wait(30)
    Console().print(table)


def measure(table: Table, opts: dict[str, Any], rounds: int) -> None:
    def create() -> e2b.Sandbox:
        return e2b.Sandbox.create("base", timeout=300, **opts)

    sandbox = create()
    sandbox.commands.run("true")

    samples: list[float] = []
    for _ in range(rounds):
        begun = time.perf_counter()
        made = create()
        samples.append((time.perf_counter() - begun) * 1000)
        made.kill()
    table.add_row("create, one at a time", *spread(samples), "15")

    def repeat(name: str, action: Callable[[], object], budget: str = "") -> None:
        action()
        table.add_row(name, *spread([timed(action) for _ in range(rounds)]), budget)

    # What starting a program costs on this machine in this moment, for machines are noisy.
    shell = ["/bin/bash", "-c", "true"]
    repeat("(bash -c true, no sandbox)", lambda: subprocess.run(shell, env={}, check=True))
    small, large = b"x" * 1024, b"x" * (1 << 20)
    repeat("run('true')", lambda: sandbox.commands.run("true"), "10")
    repeat("write 1 KiB", lambda: sandbox.files.write("small", small))
    repeat("read 1 KiB", lambda: sandbox.files.read("small", format="bytes"))
    repeat("write 1 MiB", lambda: sandbox.files.write("large", large))
    repeat("read 1 MiB", lambda: sandbox.files.read("large", format="bytes"))
    repeat("exists", lambda: sandbox.files.exists("small"))

    for count, budget in ((32, ""), (128, "2000")):
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            begun = time.perf_counter()
            list(pool.map(lambda _: subprocess.run(shell, env={}, check=True), range(count)))
            wall = (time.perf_counter() - begun) * 1000
            table.add_row(f"(bash -c true, {count} at once, wall)", f"{wall:.0f}", "", "")
            begun = time.perf_counter()
            made_all = list(pool.map(lambda _: create(), range(count)))
            wall = (time.perf_counter() - begun) * 1000
            table.add_row(f"create, {count} at once (wall)", f"{wall:.0f}", "", budget)
            begun = time.perf_counter()
            list(pool.map(lambda s: s.commands.run("true"), made_all))
            wall = (time.perf_counter() - begun) * 1000
            table.add_row(f"run('true') in {count} at once (wall)", f"{wall:.0f}", "", "")
            list(pool.map(lambda s: s.kill(), made_all))


if __name__ == "__main__":
    main()
