"""One turn with a tool, asked for before a run: what the endpoint lacks is said once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinkle_agentic._aio.bounded import Deadline
from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic._aio.threads import ThreadPool
from twinkle_agentic.protocol._fields import fields_of
from twinkle_agentic.protocol.base import API
from twinkle_agentic.rollout._chat import Chat, Endpoint
from twinkle_agentic.rollout._episode import SourceEnded
from twinkle_agentic.rollout._pause import RequestPause
from twinkle_agentic.rollout.cli.refusal import RefusedError

__all__ = ["check_first_turn"]

_MAX_ASKED = 3  # one call that cannot be read may be the model's fault; three are not
_TOOL_CALLS = (
    "serve tool calls (vLLM: --enable-auto-tool-choice and the --tool-call-parser of the model)"
)


def check_first_turn(
    api: API,
    task: Mapping[str, Any],
    *,
    sampling_params: Any,
    body: Mapping[str, Any],
    timeout_s: float,
    tokens: bool,
) -> str | None:
    """Ask for the first turn of a task, with a tool, as the run will.

    Args:
        api: The endpoint.
        task: Its messages are sent.
        sampling_params: Those of the run.
        body: Added to the request; a tool named in its `tool_choice` is the one that is offered.
        timeout_s: Limit of one request.
        tokens: Token ids must come back.

    Returns:
        A warning, where the endpoint may serve all the same; else `None`.

    Raises:
        RefusedError: It cannot serve this run; the message says what it lacks.
    """
    chosen = fields_of(fields_of(body.get("tool_choice")).get("function"))
    name: str = chosen.get("name", "submit_solution")
    code = {"type": "object", "properties": {"code": {"type": "string"}}}
    tool: dict[str, Any] = {"type": "function", "function": {"name": name, "parameters": code}}
    endpoint = Endpoint(
        api,
        sampling_params,
        body,
        request_timeout_s=timeout_s,
        pool=ThreadPool(1),
        pause=RequestPause(),
    )

    async def ask() -> tuple[bool, Mapping[str, Any]]:
        chat = Chat(endpoint, {"messages": task.get("messages")})
        chat.begin([tool])
        _, broken = await chat.next(Deadline(None))
        return broken, chat.fields()

    for _ in range(_MAX_ASKED):
        try:
            broken, found = run_sync(ask())
        except SourceEnded as ended:
            return _judge(ended)
        turns: Any = found.get("token_turns") or ()
        problem = next((turn["problem"] for turn in turns if turn["problem"]), None)
        if tokens and problem is not None:
            raise RefusedError(
                f"--tokens: the endpoint's first turn cannot be trained on: {problem}. vLLM sends "
                "token ids for `return_token_ids`; leave out --tokens, or pass --no-probe"
            )
        if not broken:
            return None
    raise RefusedError(
        f"--model-url: the endpoint left the tool call of {_MAX_ASKED} replies in the text: "
        f"{_TOOL_CALLS}, or pass --no-probe"
    )


def _judge(ended: SourceEnded) -> str | None:
    failure = ended.failure
    if failure is None or failure.kind == "context_length":
        return None  # of this task alone
    if failure.retryable:
        return f"the first turn that was asked for failed: {failure.text}"
    todo = f": {_TOOL_CALLS}" if "tool" in failure.text.lower() else ""
    raise RefusedError(
        f"--model-url: the endpoint refused a turn with a tool: {failure.text}{todo} "
        "(--no-probe starts without asking)"
    )
