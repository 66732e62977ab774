"""`run`: the user's own tasks, model and environment."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from twinkle_agentic.rollout.cli.environments import EnvChoice, choose_env
from twinkle_agentic.rollout.cli.options import RunOptions
from twinkle_agentic.rollout.cli.output import RunOutput
from twinkle_agentic.rollout.cli.probes import Probe, probe_coding, probe_model, probe_openenv
from twinkle_agentic.rollout.cli.refusal import EXIT_FAILED, RefusedError
from twinkle_agentic.rollout.cli.run_record import RunRecord
from twinkle_agentic.rollout.cli.tasks import read_tasks, repeat_tasks
from twinkle_agentic.tools.types import Trajectory

if TYPE_CHECKING:
    from twinkle_agentic.protocol.base import API

__all__ = ["run"]


def run(console: Console, options: RunOptions) -> int:
    """Roll out your own tasks with your own model and environment.

    A task is one JSON object a line, for example

    {"prompt": "Write add(a, b) ...", "tests": "assert add(2, 3) ==
    5"}

    Columns: `prompt` (the user message) or `messages` (the whole conversation);
    `system`, a system message before it; `tests`, Python source with assert
    statements, which the model does not see; `seed`, for the reset of the
    environment; `id`, by default the line number; `user_data`, an object
    passed to the reset and kept in the output.

    With `--env coding_env` the model gets run_python(code), without reward, and
    submit_solution(code), which runs the code and then `tests`: if all pass, the
    reward is 1.0 and the episode ends. With another environment it gets the
    tools of the server, or of your Env.

    The whole file, the model and the servers are checked before anything
    starts; `--dry-run` also plays one episode.

    twinkle-rollout run tasks.jsonl --env coding_env --base-url
    http://10.0.0.5:8000 --model my-model --model-url http://10.0.0.6:8000/v1

    twinkle-rollout run --config run.toml --samples 8 --resume

    Exit codes: 0, every episode has a reward; 1, some have none, or tokens
    that were asked for are missing, or the run was stopped; 2, refused before
    anything started.
    """
    choice = choose_env(
        options.env, base_urls=options.base_urls, message_timeout_s=options.step_timeout_s
    )
    if options.resume and options.overwrite:
        raise RefusedError("--resume keeps an earlier result, --overwrite replaces it: give one")
    tasks = read_tasks(options.tasks, needs=choice.needs, ignores=choice.ignores)
    record = RunRecord.of(tasks, options, choice.source)
    tasks = repeat_tasks(tasks, options.samples)
    output = RunOutput(
        options.out, record=record, overwrite=options.overwrite, resume=options.resume
    )
    if choice.urls:
        _require_a_server(console, choice)
    model = probe_model(options.model_url, api_key=options.api_key, lenient=True)
    _require(model, "--model-url")
    if model.models and options.model not in model.models:
        raise RefusedError(
            f"--model {options.model}: the endpoint serves {', '.join(model.models[:5])}"
        )

    from twinkle_agentic.protocol.openai import OpenAI
    from twinkle_agentic.protocol.sampling import SamplingParams
    from twinkle_agentic.rollout.cli.execution import execute
    from twinkle_agentic.rollout.cli.first_turn import check_first_turn
    from twinkle_agentic.rollout.cli.guards import Servers

    try:
        sampling = SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            stop=options.stop or None,
            logprobs=0 if options.tokens else None,  # of the sampled tokens only
        )
    except ValueError as error:
        raise RefusedError(str(error)) from error
    api = OpenAI(options.model, api_key=options.api_key, base_url=options.model_url)
    if options.probe:
        warning = check_first_turn(
            api,
            tasks[0],
            sampling_params=sampling,
            body=options.body,
            timeout_s=options.request_timeout_s,
            tokens=options.tokens,
        )
        if warning:
            console.print(f"--model-url: {warning}", style="yellow", markup=False)
    episode: dict[str, Any] = {
        "sampling_params": sampling,
        "extra_body": options.body,
        "max_turns": options.max_turns,
        "max_attempts": options.attempts,
        "concurrency": options.concurrency,
        "request_timeout_s": options.request_timeout_s,
        "deadline_s": options.deadline_s,
        "tool_timeout_s": options.tool_timeout_s,
        "reset_timeout_s": options.reset_timeout_s,
        "evaluate_timeout_s": options.evaluate_timeout_s,
    }
    if options.dry_run:
        output.check()
        return _play_one(console, tasks[0], api, choice, episode)
    servers = Servers(
        [
            [partial(probe_openenv, url) for url in choice.urls],
            [partial(probe_model, options.model_url, api_key=options.api_key, lenient=True)],
        ],
        options.wait_for_server_s,
    )
    with output:
        output.write_config(options.to_toml())
        return execute(
            console,
            tasks=tasks,
            api=api,
            env_factory=choice.make,
            output=output,
            servers=servers,
            max_same_failures=options.max_same_failures,
            **episode,
        )


def _play_one(
    console: Console, task: Trajectory, api: API, choice: EnvChoice, episode: Mapping[str, Any]
) -> int:
    from twinkle_agentic.rollout.api_multi_turn import APIMultiTurnRollout
    from twinkle_agentic.rollout.cli.show import print_trajectory

    (row,) = APIMultiTurnRollout(api, env_factory=choice.make, **episode)([task])
    print_trajectory(console, row)
    console.print("dry run: everything was checked, nothing was written")
    return EXIT_FAILED if row["reward"] is None else 0


def _require_a_server(console: Console, choice: EnvChoice) -> None:
    """Require one of the servers, and warn of each that does not serve."""
    failed: list[Probe] = []
    for url in choice.urls:
        probe = probe_openenv(url)
        if probe.ok and choice.runs_code:
            probe = probe_coding(url)
        if not probe.ok:
            failed.append(probe)
    if len(failed) == len(choice.urls):
        _require(failed[0], "--base-url")
    for probe in failed:
        console.print(f"--base-url: {_fault(probe)}", style="yellow", markup=False)


def _require(probe: Probe, option: str) -> None:
    if not probe.ok:
        raise RefusedError(f"{option}: {_fault(probe)}")


def _fault(probe: Probe) -> str:
    return f"the {probe.name} at {probe.url} does not serve: {probe.detail}"
