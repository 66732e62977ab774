"""Cost of one tool call: `ToolManager`, `EnvTool`, and blocking calls in threads.

Each figure is the median over the rounds, in microseconds of CPU a call (all threads). The rivals
are what one would write without the package: the bare function, `asyncio.to_thread`, and
`concurrent.futures`.

    python benchmarks/tools.py --rounds 7 --calls 2000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table

from twinkle_agentic._aio.threads import ThreadPool
from twinkle_agentic.envs import Env, EnvTool, StepResult
from twinkle_agentic.tools import FunctionTool, Tool, ToolInfo, ToolManager

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"code": {"type": "string"}, "limit": {"type": "integer"}},
    "required": ["code"],
}
ARGUMENTS = {"code": "print(1 + 1)", "limit": 3}
TEXT = json.dumps(ARGUMENTS)
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "run", "arguments": TEXT},
}


class Direct(Tool):
    """A tool that answers at once, in either way."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.parameters = parameters

    def tool_info(self) -> ToolInfo:
        return {"type": "function", "function": {"name": "run", "parameters": self.parameters}}

    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> str:
        return "2"

    async def acall(self, tool_name: str, arguments: dict[str, Any]) -> str:
        return "2"


class DirectEnv(Env):
    """An env that answers at once, in either way."""

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        return StepResult("2", 1.0)

    async def astep(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        return StepResult("2", 1.0)

    def tools(self) -> list[ToolInfo]:
        return [{"type": "function", "function": {"name": "run", "parameters": SCHEMA}}]


def run(code: str, limit: int = 1) -> str:
    """Run code."""
    return "2"


class Bench:
    """Measures calls."""

    def __init__(self, rounds: int, calls: int) -> None:
        self.rounds, self.calls = rounds, calls

    def sync(self, call: Callable[[], Any]) -> float:
        times: list[float] = []
        for _ in range(self.rounds):
            start = time.process_time()
            for _ in range(self.calls):
                call()
            times.append((time.process_time() - start) / self.calls)
        return statistics.median(times) * 1e6

    def coroutine(self, call: Callable[[], Awaitable[Any]]) -> float:
        async def measure() -> float:
            times: list[float] = []
            for _ in range(self.rounds):
                start = time.process_time()
                for _ in range(self.calls):
                    await call()
                times.append((time.process_time() - start) / self.calls)
            return statistics.median(times) * 1e6

        return asyncio.run(measure())

    def many(self, call: Callable[[], Awaitable[Any]], at_once: int) -> float:
        async def measure() -> float:
            times: list[float] = []
            for _ in range(self.rounds):
                start = time.process_time()
                await asyncio.gather(*(call() for _ in range(at_once)))
                times.append((time.process_time() - start) / at_once)
            return statistics.median(times) * 1e6

        return asyncio.run(measure())


def manager_table(bench: Bench) -> Table:
    table = Table("one call", "sync, us", "async, us", title="ToolManager")
    bare = Direct(SCHEMA)
    table.add_row(
        "json.loads and the bare tool",
        f"{bench.sync(lambda: bare('run', json.loads(TEXT))):.1f}",
        "",
    )
    managers = {
        "no schema": ToolManager([Direct({})]),
        "schema": ToolManager([Direct(SCHEMA)]),
        "schema, timeout": ToolManager([Direct(SCHEMA)], timeout_s=30),
        "EnvTool, schema": ToolManager(EnvTool.from_env(DirectEnv())),
        "EnvTool, schema, timeout": ToolManager(EnvTool.from_env(DirectEnv(), timeout_s=30)),
        "FunctionTool (async: in a thread)": ToolManager([FunctionTool(run)]),
    }
    for name, manager in managers.items():
        table.add_row(
            name,
            f"{bench.sync(lambda m=manager: m(CALL)):.1f}",
            f"{bench.coroutine(lambda m=manager: m.acall(CALL)):.1f}",
        )
    return table


def threads_table(bench: Bench, at_once: int) -> Table:
    table = Table(
        "a call that does nothing",
        "awaited one by one, us",
        f"{at_once} at once, us each",
        "from a thread, us",
        title="Blocking calls (32 threads)",
    )
    pool, executor = ThreadPool(32), ThreadPoolExecutor(32)

    async def in_executor() -> Any:
        return await asyncio.get_running_loop().run_in_executor(executor, int)

    rows: dict[str, tuple[Callable[[], Awaitable[Any]], Callable[[], Any] | None]] = {
        "ThreadPool": (lambda: pool.run(int), lambda: pool.submit(int).result()),
        "concurrent.futures": (in_executor, lambda: executor.submit(int).result()),
        "asyncio.to_thread": (lambda: asyncio.to_thread(int), None),
    }
    for name, (coroutine, sync) in rows.items():
        table.add_row(
            name,
            f"{bench.coroutine(coroutine):.1f}",
            f"{bench.many(coroutine, at_once):.1f}",
            "" if sync is None else f"{bench.sync(sync):.1f}",
        )
    executor.shutdown()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=2000, help="calls a round")
    parser.add_argument("--at-once", type=int, default=512, help="concurrent blocking calls")
    options = parser.parse_args()
    bench = Bench(options.rounds, options.calls)
    console = Console()
    console.print(manager_table(bench))
    console.print(threads_table(bench, options.at_once))


if __name__ == "__main__":
    main()
