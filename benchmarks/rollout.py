"""Whole episodes against an endpoint on this machine: what the rollout costs beside the waiting.

    python benchmarks/rollout.py
    python benchmarks/rollout.py --episodes 512 2048 --kit-python KIT/bin/python

Each client is a process of its own, in turn, with its own endpoint (also a process) that answers
after `--latency`. An episode has `--turns` model messages, all but the last with one call of a
trivial tool. The ideal is turns x latency. CPU is that of the client alone, imports and warm-up
left out. The median of `--repeat` runs is shown.

`--kit-python` names the interpreter of an environment that has `twinkle-kit` 0.5.1 and `openai`, to
run its `APIMultiTurnRollout` next to ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOOL = {
    "type": "function",
    "function": {
        "name": "echo",
        "description": "Repeat a text.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
        },
    },
}
Batch = Callable[[int], Any]


def prompt() -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": "You solve tasks with the tools you have."},
            {"role": "user", "content": "Repeat some text, then say that you are done. " * 8},
        ]
    }


def echo(text: str) -> str:
    """Repeat a text."""
    return text


async def aecho(text: str) -> str:
    """Repeat a text."""
    return text


def bare(post: Callable[[bytes], Any]) -> Any:
    """The least an episode takes: write JSON, post, read JSON, answer the calls."""

    async def episode() -> None:
        messages = prompt()["messages"]
        while True:
            body = {"model": "bench", "messages": messages, "tools": [TOOL]}
            reply = json.loads(await post(json.dumps(body).encode()))["choices"][0]["message"]
            messages.append(reply)
            if not reply.get("tool_calls"):
                return
            for call in reply["tool_calls"]:
                text = echo(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    return episode


def bare_aiohttp(url: str) -> Batch:
    import asyncio

    import aiohttp

    async def batch(count: int) -> None:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

            async def post(body: bytes) -> bytes:
                async with session.post(url, data=body) as response:
                    return await response.read()

            await asyncio.gather(*(bare(post)() for _ in range(count)))

    return lambda count: asyncio.run(batch(count))


def bare_pyqwest(url: str) -> Batch:
    import asyncio

    import pyqwest

    async def batch(count: int) -> None:
        transport = pyqwest.HTTPTransport(enable_otel=False, pool_max_idle_per_host=8192)
        client = pyqwest.Client(transport)

        async def post(body: bytes) -> bytes:
            response = await client.post(url, {"content-type": "application/json"}, body)
            return bytes(response.content)

        await asyncio.gather(*(bare(post)() for _ in range(count)))

    return lambda count: asyncio.run(batch(count))


def ours(function: Any, *, stream: bool = False, **options: Any) -> Callable[[str], Batch]:
    def make(url: str) -> Batch:
        from twinkle_agentic.protocol import OpenAI
        from twinkle_agentic.rollout import APIMultiTurnRollout
        from twinkle_agentic.tools import FunctionTool, ToolManager

        api = OpenAI("bench", "key", url.removesuffix("/chat/completions"))
        if function is not None:
            options["tool_manager"] = ToolManager([FunctionTool(function, name="echo")])
        rollout = APIMultiTurnRollout(api, max_turns=8, concurrency=None, **options)

        def batch(count: int) -> None:
            given: Any = [prompt() for _ in range(count)]
            outs: Any = list(rollout.stream(given)) if stream else rollout(given)
            assert all(out["stop_reason"] == "stop" for out in outs), outs[0]

        return batch

    return make


def ours_env(url: str, **options: Any) -> Batch:
    from twinkle_agentic.envs.base import Env, StepResult

    class Echo(Env):
        async def areset(self, trajectory: Any = None) -> StepResult:
            return StepResult()

        async def astep(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            return StepResult(arguments["text"], 1.0)

        def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            return StepResult(arguments["text"], 1.0)

        def tools(self) -> list[Any]:
            return [TOOL]

        async def aclose(self) -> None:
            pass

    async def factory(trajectory: Any) -> Env:
        return Echo()

    return ours(None, env_factory=factory, **options)(url)


def ours_stream(url: str) -> Batch:
    return ours_env(url, stream=True)


def kit(threads: int) -> Callable[[str], Batch]:
    def make(url: str) -> Batch:
        from twinkle_agentic.protocol.openai import OpenAI  # type: ignore[attr-defined]
        from twinkle_agentic.rollout.api_multi_turn import APIMultiTurnRollout
        from twinkle_agentic.tools.base import Tool
        from twinkle_agentic.tools.tool_manager import ToolManager

        class Echo(Tool):
            def tool_info(self) -> Any:
                return TOOL

            def __call__(self, tool_name: str, arguments: dict[str, Any]) -> str:
                return echo(**arguments)

        limits = {"max_retries": 0}
        api = OpenAI("bench", "key", url.removesuffix("/chat/completions"), limits)
        rollout = APIMultiTurnRollout(api, ToolManager([Echo()]), max_turns=8, concurrency=threads)

        def batch(count: int) -> None:
            outs: Any = rollout([prompt() for _ in range(count)])  # type: ignore[misc]
            assert all(out["stop_reason"] == "stop" for out in outs), outs[0]

        return batch

    return make


CLIENTS: dict[str, Callable[[str], Batch]] = {
    "bare loop, aiohttp": bare_aiohttp,
    "bare loop, pyqwest": bare_pyqwest,
    "rollout, coroutine tool": ours(aecho),
    "rollout, plain function as tool": ours(echo),
    "rollout, env per trajectory": ours_env,
    "rollout, env per trajectory, streamed": ours_stream,
    "twinkle-kit, 64 threads": kit(64),
    "twinkle-kit, 512 threads": kit(512),
}


def work(name: str, url: str, count: int, repeat: int) -> None:
    """Run one client in this process and print its figures."""
    batch = CLIENTS[name](url)
    batch(8)
    runs: list[tuple[float, float]] = []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        batch(count)
        runs.append((time.perf_counter() - wall, time.process_time() - cpu))
    print(json.dumps(runs))


def measure(name: str, python: str, count: int, options: argparse.Namespace) -> Any:
    server = subprocess.Popen(
        [
            *(sys.executable, str(HERE / "model_endpoint.py")),
            *("--turns", str(options.turns), "--latency", str(options.latency)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin and server.stdout
    try:
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1/chat/completions"
        repeat = 1 if name.startswith("twinkle-kit") else options.repeat
        command = [python, __file__, "--work", name, url, str(count), str(repeat)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr
    finally:
        server.stdin.close()
        server.wait()


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
        return
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--episodes", type=int, nargs="+", default=[512])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--latency", type=float, default=0.2, help="seconds per reply")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--kit-python", help="interpreter with twinkle-kit and openai")
    options = parser.parse_args()
    console = Console()
    ideal = options.turns * options.latency
    for count in options.episodes:
        table = Table(
            "client",
            "wall s",
            "x ideal",
            "CPU ms per turn",
            title=f"{count} episodes x {options.turns} turns, ideal {ideal:g} s",
        )
        for name in CLIENTS:
            foreign = name.startswith("twinkle-kit")
            if foreign and (options.kit_python is None or count > 512):
                continue
            python = str(options.kit_python) if foreign else sys.executable
            runs = measure(name, python, count, options)
            if isinstance(runs, str):
                console.print(f"[red]{name} failed[/red]: {runs[-400:]}")
                continue
            wall = statistics.median(run[0] for run in runs)
            cpu = statistics.median(run[1] for run in runs) / count / options.turns * 1000
            table.add_row(name, f"{wall:.2f}", f"{wall / ideal:.2f}", f"{cpu:.2f}")
        console.print(table)


if __name__ == "__main__":
    main()
