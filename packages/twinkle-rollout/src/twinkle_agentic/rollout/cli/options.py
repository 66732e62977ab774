"""The options of the commands, each declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

__all__ = ["Concurrency", "RunFolder", "RunIds", "RunOptions", "as_parameters", "seconds"]

_LONGEST_S = 1e9  # `MAX_LIMIT_S` of twinkle_agentic._aio.limits


def _finite(value: float | None) -> float | None:
    if value is not None and not value <= _LONGEST_S:
        raise typer.BadParameter(f"{value:g} is not in the range x<={_LONGEST_S:g}")
    return value


def _number(help: str, *, metavar: str, at_least: float, panel: str | None = None) -> Any:
    return typer.Option(
        help=help, min=at_least, callback=_finite, metavar=metavar, rich_help_panel=panel
    )


def seconds(help: str, *, at_least: float = 0.001, panel: str | None = None) -> Any:
    """Declare a limit in seconds."""
    return _number(help, metavar="SEC", at_least=at_least, panel=panel)


def _count(help: str, *, panel: str | None = None) -> Any:
    return typer.Option(help=help, min=1, metavar="N", rich_help_panel=panel)


def _text(help: str, *names: str, panel: str, **options: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **options)


Concurrency = Annotated[int, _count("Episodes at once.")]
RunFolder = Annotated[Path, typer.Argument(help="The output folder of a run.")]
RunIds = Annotated[
    list[str] | None, typer.Argument(help="Trajectories by their id; without any: all.")
]

_ENV, _MODEL, _LIMITS, _OUTPUT = "Environment", "Model", "Limits", "Output"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of `twinkle-rollout run`; its help explains them."""

    tasks: Annotated[
        Path, typer.Argument(help="JSON Lines: one task a line, with `prompt` or `messages`.")
    ]
    env: Annotated[
        str,
        _text(
            "`coding_env` (scored by the column `tests`), another OpenEnv package name, or "
            "`module:name` of a callable that takes the trajectory and returns an Env.",
            panel=_ENV,
        ),
    ]
    base_url: Annotated[
        list[str] | None,
        _text(
            "The OpenEnv server. Repeat it, or separate by commas, for several servers that "
            "share the episodes. OPENENV_TOKEN is sent as their token.",
            panel=_ENV,
            envvar="OPENENV_BASE_URL",
        ),
    ] = None
    model: Annotated[str, _text("Model name, as the endpoint knows it.", panel=_MODEL)]
    model_url: Annotated[
        str, _text("Base URL of the endpoint, with its /v1: http://host:8000/v1", panel=_MODEL)
    ]
    api_key: Annotated[
        str | None, _text("Key of the endpoint.", panel=_MODEL, envvar="OPENAI_API_KEY")
    ] = None
    max_tokens: Annotated[
        int | None, _count("Tokens the model may write per turn.", panel=_MODEL)
    ] = None
    temperature: Annotated[
        float, _number("Sampling temperature.", metavar="X", at_least=0.0, panel=_MODEL)
    ] = 1.0
    tokens: Annotated[
        bool,
        _text(
            "Keep the token ids and log probabilities of each turn, to train on (`token_turns`). "
            "The endpoint must know `return_token_ids`, as vLLM does.",
            "--tokens",
            panel=_MODEL,
        ),
    ] = False
    samples: Annotated[
        int,
        _count("Trajectories per task, as group-relative methods need them.", panel=_LIMITS),
    ] = 1
    attempts: Annotated[
        int,
        _count(
            "How often an episode is played at most, where a failure that may pass ended it.",
            panel=_LIMITS,
        ),
    ] = 1
    concurrency: Annotated[int, _count("Episodes at once.", panel=_LIMITS)] = 64
    max_turns: Annotated[int, _count("Model turns per episode.", panel=_LIMITS)] = 10
    request_timeout_s: Annotated[
        float, seconds("Limit of one model turn, with its retries.", panel=_LIMITS)
    ] = 600.0
    deadline_s: Annotated[float | None, seconds("Limit of one episode.", panel=_LIMITS)] = None
    step_timeout_s: Annotated[
        float, seconds("Limit of one step on the OpenEnv server.", panel=_LIMITS)
    ] = 120.0
    out: Annotated[Path, typer.Option(help="Output folder.", rich_help_panel=_OUTPUT)] = Path(
        "runs/latest"
    )
    overwrite: Annotated[
        bool, _text("Replace the result of an earlier run.", "--overwrite", panel=_OUTPUT)
    ] = False
    resume: Annotated[
        bool,
        _text(
            "Keep what an earlier run in --out has scored, and play the rest; start where there "
            "is no earlier run.",
            "--resume",
            panel=_OUTPUT,
        ),
    ] = False

    @property
    def base_urls(self) -> list[str]:
        """The OpenEnv servers, one by one."""
        parts = ",".join(self.base_url or ()).split(",")
        return [url.strip() for url in parts if url.strip()]


def as_parameters(body: Callable[..., Any]) -> tuple[list[inspect.Parameter], type | None]:
    """Return what a command takes from the command line, and the dataclass it wants it in.

    Args:
        body: Takes a console, and either its options one by one or one dataclass of them.
    """
    hints = get_type_hints(body, include_extras=True)
    taken = [p for p in inspect.signature(body).parameters.values() if hints[p.name] is not Console]
    first = hints[taken[0].name]
    if not is_dataclass(first):
        return [p.replace(annotation=hints[p.name]) for p in taken], None
    kinds = get_type_hints(first, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=kinds[field.name],
        )
        for field in fields(first)
    ]
    return parameters, first if isinstance(first, type) else type(first)
