"""The user's own tasks, model and environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from twinkle_agentic.rollout.cli.environments import EnvChoice, choose_env
from twinkle_agentic.rollout.cli.output import RunOutput
from twinkle_agentic.rollout.cli.probes import Probe, probe_coding, probe_model, probe_openenv
from twinkle_agentic.rollout.cli.refusal import RefusedError
from twinkle_agentic.rollout.cli.run_record import RunRecord
from twinkle_agentic.rollout.cli.tasks import read_tasks, repeat_tasks

__all__ = ["RunOptions", "run"]

# Results that differ in one of these are not of one run. Limits of time are none of them, but the
# deadline: what it cuts has a reward.
_DECIDES = (
    "env",
    "model",
    "samples",
    "max_turns",
    "max_tokens",
    "temperature",
    "deadline_s",
    "tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of `twinkle-rollout run`, as its help explains them."""

    tasks: Path
    env: str
    base_urls: Sequence[str]
    model: str
    model_url: str
    api_key: str | None
    out: Path
    concurrency: int
    max_turns: int
    max_tokens: int | None
    temperature: float
    request_timeout_s: float
    deadline_s: float | None
    step_timeout_s: float
    samples: int
    attempts: int
    tokens: bool
    overwrite: bool
    resume: bool
    plots: bool | None


def run(console: Console, options: RunOptions) -> int:
    """Check everything that can be checked, then roll out.

    Returns:
        The exit code of `execute`.

    Raises:
        RefusedError: A file, a name or a server is not as it should be; nothing was started or
            written.
    """
    choice = choose_env(
        options.env, base_urls=options.base_urls, message_timeout_s=options.step_timeout_s
    )
    if options.resume and options.overwrite:
        raise RefusedError("--resume keeps an earlier result, --overwrite replaces it: give one")
    tasks = read_tasks(options.tasks, needs=choice.needs, ignores=choice.ignores)
    tasks = repeat_tasks(tasks, options.samples)
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

    output = RunOutput(
        options.out,
        record=RunRecord.of(
            tasks, {name: getattr(options, name) for name in _DECIDES}, choice.source
        ),
        overwrite=options.overwrite,
        resume=options.resume,
    )
    with output:
        return execute(
            console,
            tasks=tasks,
            api=OpenAI(options.model, api_key=options.api_key, base_url=options.model_url),
            env_factory=choice.make,
            output=output,
            plots=options.plots,
            sampling_params=SamplingParams(
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                logprobs=0 if options.tokens else None,  # of the sampled tokens only
            ),
            extra_body={"return_token_ids": True} if options.tokens else None,
            max_turns=options.max_turns,
            max_attempts=options.attempts,
            concurrency=options.concurrency,
            request_timeout_s=options.request_timeout_s,
            deadline_s=options.deadline_s,
        )


def _require_a_server(console: Console, choice: EnvChoice) -> None:
    """One of several servers is enough to start with; of the others it is said that they fail."""
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
        said = f"--base-url: the {probe.name} at {probe.url} does not serve: {probe.detail}"
        console.print(said, style="yellow", markup=False)


def _require(probe: Probe, option: str) -> None:
    if not probe.ok:
        raise RefusedError(
            f"{option}: the {probe.name} at {probe.url} does not serve: {probe.detail}"
        )
