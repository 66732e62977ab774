"""The first thing a newcomer runs: whole episodes on this machine, without a model."""

from __future__ import annotations

import sys
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from twinkle_agentic.rollout.cli.options import Concurrency
from twinkle_agentic.rollout.cli.output import RunOutput
from twinkle_agentic.rollout.cli.refusal import RefusedError
from twinkle_agentic.rollout.cli.tasks import read_tasks
from twinkle_agentic.rollout.testing import ServerProcess

__all__ = ["quickstart"]

_START_TIMEOUT_S = 60.0  # the coding server imports openenv, which takes 10 s on a small machine


def quickstart(
    console: Console,
    *,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/quickstart"),
    concurrency: Concurrency = 32,
    faults: Annotated[
        bool,
        typer.Option(
            "--faults", help="Let the endpoint misbehave: 500s, hangs, broken calls, null ids."
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite/--keep", help="Replace the result of an earlier run.")
    ] = True,
) -> int:
    """Run 32 coding tasks on this machine, with a scripted policy in place of a model.

    Starts a coding server and a chat-completions endpoint on free ports, rolls out the packaged
    tasks, prints a table, writes trajectories and traces, and stops what it started.
    """
    for module, distribution in (
        ("openenv_server", "twinkle-openenv-server"),
        ("twinkle_agentic.envs.openenv", "twinkle-envs-openenv"),
    ):
        if find_spec(module) is None:
            raise RefusedError(
                f"quickstart needs {distribution}: run `pip install 'twinkle-rollout[quickstart]'`"
            )
    from twinkle_agentic.envs.openenv import CodingTaskEnv
    from twinkle_agentic.protocol.openai import OpenAI
    from twinkle_agentic.rollout.cli.execution import execute

    output = RunOutput(out, overwrite=overwrite)
    with as_file(files("twinkle_agentic.rollout.cli") / "data/tasks.jsonl") as path:
        tasks = read_tasks(path, needs=("tests",))
    coding = ServerProcess(
        "coding server",
        lambda port: [sys.executable, "-m", "openenv_server", "--port", str(port)],
        env={"MAX_CONCURRENT_ENVS": str(concurrency)},
    )
    module = "twinkle_agentic.rollout.cli.scripted_endpoint"
    options = ["--delay-s", "0.05", *(["--faults"] if faults else [])]
    endpoint = ServerProcess(
        "scripted endpoint",
        lambda port: [sys.executable, "-m", module, "--port", str(port), *options],
    )
    console.print(
        "[bold]A scripted policy answers here, not a model[/]: it knows the packaged tasks and "
        "hands in prepared attempts."
    )
    with output, coding, endpoint:
        with console.status("starting the coding server and the scripted endpoint"):
            endpoint.wait_ready(_START_TIMEOUT_S)
            coding.wait_ready(_START_TIMEOUT_S)
        console.print(
            f"coding server {coding.url}, chat-completions endpoint {endpoint.url}/v1",
            soft_wrap=True,
        )
        return execute(
            console,
            tasks=tasks,
            api=OpenAI("scripted-policy", api_key="none", base_url=f"{endpoint.url}/v1"),
            env_factory=lambda _: CodingTaskEnv(coding.url),
            output=output,
            max_turns=6,
            concurrency=concurrency,
            request_timeout_s=5.0 if faults else 60.0,
            deadline_s=120.0,
        )
