"""The options of the commands, each declared once."""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import typer
from rich.console import Console

from twinkle_agentic.protocol._fields import items_of

__all__ = ["Concurrency", "RunFolder", "RunIds", "RunOptions", "as_parameters", "seconds"]

_LONGEST_S = 1e9  # `MAX_LIMIT_S` of twinkle_agentic._aio.limits


def _finite(value: float | None) -> float | None:
    if value is not None and not value <= _LONGEST_S:
        raise typer.BadParameter(f"{value:g} is not in the range x<={_LONGEST_S:g}")
    return value


def _json_object(value: str | None) -> str | None:
    try:
        found = json.loads(value or "{}")
    except ValueError as error:
        raise typer.BadParameter(f"it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f"it must be a JSON object, found {value!r:.80}")
    return value


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take options that are not given otherwise from a TOML file; click checks their values."""
    if path is None:
        return None
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error
    known = {field.name: field.type for field in fields(RunOptions) if field.name != "config"}
    defaults: dict[str, Any] = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise typer.BadParameter(f"{path}: {key!r} is no option of `run`{hint}")
        several = "list[str]" in str(known[name])
        if isinstance(value, dict):
            value = json.dumps(value)
        if isinstance(value, list) != several and not (several and isinstance(value, str)):
            kind = "a list of texts" if several else "a single value"
            raise typer.BadParameter(f"{path}: {key!r} must be {kind}, found {value!r:.80}")
        # As text: typer and the file read numbers by the same rules.
        items = items_of(cast("object", value)) or [value]
        texts = [_toml_text(item) for item in items]
        defaults[name] = texts if several else texts[0]
    context.default_map = defaults
    return path


def _toml_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    top_p: Annotated[
        float, _number("Nucleus sampling, in (0, 1].", metavar="X", at_least=0.0, panel=_MODEL)
    ] = 1.0
    stop: Annotated[
        list[str] | None, _text("Text that ends a turn; repeat it for several.", panel=_MODEL)
    ] = None
    tool_choice: Annotated[
        str | None,
        _text("auto, required, none, or the name of the tool to call.", panel=_MODEL),
    ] = None
    extra_body: Annotated[
        str | None,
        _text(
            'A JSON object of further fields of each request, such as {"top_k": 20}.',
            panel=_MODEL,
            callback=_json_object,
        ),
    ] = None
    probe: Annotated[
        bool,
        _text(
            "Ask the model for one turn with a tool first, and refuse to start where the endpoint "
            "cannot serve it.",
            "--probe/--no-probe",
            panel=_MODEL,
        ),
    ] = True
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
    tool_timeout_s: Annotated[float, seconds("Limit of one tool call.", panel=_LIMITS)] = 600.0
    reset_timeout_s: Annotated[
        float, seconds("Limit of making and resetting an env.", panel=_LIMITS)
    ] = 600.0
    evaluate_timeout_s: Annotated[float, seconds("Limit of scoring an episode.", panel=_LIMITS)] = (
        600.0
    )
    wait_for_server_s: Annotated[
        float,
        seconds(
            "How long to wait for a server that stops answering, before the run stops; the "
            "episodes it took with it are played again. 0: do not wait, fail them.",
            at_least=0.0,
            panel=_LIMITS,
        ),
    ] = 300.0
    max_same_failures: Annotated[
        int,
        typer.Option(
            help="Stop after so many equal failures in a row that no retry mends. 0: never.",
            min=0,
            metavar="N",
            rich_help_panel=_LIMITS,
        ),
    ] = 8
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
    dry_run: Annotated[
        bool,
        _text(
            "Check everything, play the first task once and print it; write nothing.",
            "--dry-run",
            panel=_OUTPUT,
        ),
    ] = False
    config: Annotated[
        Path | None,
        _text(
            "A TOML file with any of these options (max_turns = 20). The command line comes "
            "first, then environment variables, then the file. A run leaves its own as "
            "config.toml in --out.",
            panel=_OUTPUT,
            is_eager=True,
            callback=_read_config,
        ),
    ] = None

    @property
    def body(self) -> dict[str, Any]:
        """What is added to each request."""
        body: dict[str, Any] = {"return_token_ids": True} if self.tokens else {}
        if self.tool_choice in ("auto", "required", "none"):
            body["tool_choice"] = self.tool_choice
        elif self.tool_choice:
            body["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice}}
        return {**body, **json.loads(self.extra_body or "{}")}

    def recorded(self) -> dict[str, Any]:
        """Return what describes the run, as JSON values; without its key."""
        skipped = ("api_key", "config", "dry_run", "overwrite", "resume")
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skipped}
        return {k: str(v) if isinstance(v, Path) else v for k, v in given.items()}

    def to_toml(self) -> str:
        """Return a file for `--config` that gives these options again."""
        # A text, number, flag or list in JSON is one in TOML, but for the character DEL.
        lines = [
            f"{name} = {json.dumps(value, ensure_ascii=False)}\n".replace("\x7f", "\\u007f")
            for name, value in self.recorded().items()
            if value is not None
        ]
        return "".join(lines)

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
