"""A chat-completions reply, read without trust."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from twinkle_agentic.protocol._fields import fields_of, items_of
from twinkle_agentic.protocol.errors import (
    ApiErrorKind,
    ApiReplyError,
    ApiStatusError,
    ContextLengthError,
)
from twinkle_agentic.protocol.retry import parse_retry_after

try:  # an extra; it halves the time of a reply with tokens
    from orjson import loads as _fast_loads
except ImportError:
    _fast_loads = json.loads

__all__ = ["Completion", "completion_of", "error_of", "read_completion"]

_SHOWN_CHARS = 500  # of a provider's text in an error

# How servers say that a prompt is too long (lower case). Codes first, then wordings.
_CONTEXT_CODES = ("context_length_exceeded", "exceed_context_size_error", "string_above_max_length")
_CONTEXT_WORDS = (
    "context length",
    "context_length",
    "context window",
    "context size",
    "maximum model length",
    "max_model_len",
    "prompt is too long",
    "prompt too long",
    "input is too long",
    "too many tokens",
    "token count exceeds",
    "exceeds the maximum number of tokens",
    "tokens + `max_new_tokens` must be",
)
# The setting is too large for any prompt: an error of the caller, not a long conversation.
_SETTING_WORDS = "cannot be greater than max_model_len"
_PASSING_STATUSES = frozenset({408, 409, 429})  # and 5xx


@dataclass(slots=True, kw_only=True)
class Completion:
    """What came back for one request.

    Attributes:
        messages: One assistant message per choice, in order: `role`, `content` (text, `""` for
            null), `finish_reason`, and `reasoning`, `reasoning_content`, `refusal`, `tool_calls`
            where they are there. Calls are as the server sent them, unchecked.
        usage: The server's token counts; empty where it sent none.
        prompt_token_ids: Token ids of the prompt, where asked for (`return_token_ids`).
        token_ids: Sampled token ids of the first choice, where asked for.
        logprobs: Log probability of each sampled token of the first choice, where asked for.
    """

    messages: list[dict[str, Any]]
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[Any] | None = None


def completion_of(reply: Any) -> Completion:
    """Return what an API object returned (a message, or a list of them) as a completion.

    Raises:
        ValueError: The list is empty.
    """
    if isinstance(reply, Completion):
        return reply
    if isinstance(reply, (list, tuple)):
        if not reply:
            raise ValueError("the API object returned an empty list")
        reply = cast("list[Any]", reply)[0]
    if isinstance(reply, Mapping):
        given = cast("Mapping[str, Any]", reply)
        return Completion(messages=[dict(given)], usage=dict(fields_of(given.get("usage"))))
    return Completion(messages=[reply])


def read_completion(status: int, headers: Mapping[str, str], body: bytes) -> Completion:
    """Turn an HTTP reply into a completion.

    Args:
        status: HTTP status.
        headers: Response headers, asked for by names in lower case.
        body: The complete body.

    Raises:
        ContextLengthError: The prompt is too long for the model.
        ApiStatusError: Any other status than 200, or an `error` object in the reply.
        ApiReplyError: Status 200, but no completion.
    """
    if status != 200:
        raise error_of(status, headers, body)
    try:
        reply: Any = _loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiReplyError(
            f"the reply is no JSON ({error}): {_shown(body)!r}; is base_url right?", status=status
        ) from None
    if not isinstance(reply, dict):
        raise ApiReplyError(f"the reply is no JSON object: {_shown(body)!r}", status=status)
    fields = fields_of(cast("object", reply))
    choices = items_of(fields.get("choices"))
    if not choices:
        if fields.get("error"):
            raise _in_band_error(fields["error"], headers)
        raise ApiReplyError(f"the reply has no choices: {_shown(body)!r}", status=status)
    messages: list[dict[str, Any]] = []
    for choice in choices:
        if (error := fields_of(choice).get("error")) is not None:
            raise _in_band_error(error, headers)
        messages.append(_message(choice, body))
    first = fields_of(choices[0])
    return Completion(
        messages=messages,
        usage=dict(fields_of(fields.get("usage"))),
        prompt_token_ids=_ids(fields.get("prompt_token_ids") or first.get("prompt_token_ids")),
        token_ids=_ids(first.get("token_ids")),
        logprobs=_logprobs(first.get("logprobs")),
    )


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> ApiStatusError:
    """Make the error for a reply whose status is not 200."""
    try:
        decoded: Any = json.loads(body)
    except (ValueError, RecursionError):
        decoded = None
    detail: Any = decoded
    if isinstance(decoded, dict):
        fields = cast("dict[str, Any]", decoded)
        detail = fields.get("error") or fields.get("detail") or fields.get("message") or fields
    text, code = _words(detail if detail is not None else _shown(body))
    if 300 <= status < 400:
        text = f"redirect to {headers.get('location')!r}, which is not followed: correct base_url"
    return _classified(status, text, code, parse_retry_after(headers))


def _in_band_error(error: Any, headers: Mapping[str, str]) -> ApiStatusError:
    """Make the error for a reply with status 200 and an error in it."""
    text, code = _words(error)
    status = int(code) if code.isdecimal() and 400 <= int(code) < 600 else 200
    return _classified(status, text, code, parse_retry_after(headers))


def _classified(status: int, text: str, code: str, retry_after_s: float | None) -> ApiStatusError:
    message = f"HTTP {status}: {text}"
    low = text.lower()
    says_so = code in _CONTEXT_CODES or any(words in low for words in _CONTEXT_WORDS)
    if status in (200, 400, 413, 422) and says_so and _SETTING_WORDS not in low:
        return ContextLengthError(message, status=status)
    if status == 429:
        # A used-up quota does not come back within a request's time.
        passing = code != "insufficient_quota" and "insufficient_quota" not in low
        kind = ApiErrorKind.RATE_LIMITED
    else:
        passing = status in _PASSING_STATUSES or status >= 500
        kind = ApiErrorKind.SERVER_ERROR if passing else ApiErrorKind.REFUSED
        if status == 200:
            kind = ApiErrorKind.BAD_REPLY
    return ApiStatusError(
        message, kind=kind, status=status, retryable=passing, retry_after_s=retry_after_s
    )


def _words(error: Any) -> tuple[str, str]:
    """Return what a provider says went wrong, and its code or type."""
    if isinstance(error, dict):
        fields = cast("dict[str, Any]", error)
        code: Any = fields.get("code")
        if code is None or code == "":
            code = fields.get("type")
        message: Any = fields.get("message")
        text = message if isinstance(message, str) and message else json.dumps(error, default=str)
        return text[:_SHOWN_CHARS], "" if code is None else str(code)
    if isinstance(error, str):
        return error[:_SHOWN_CHARS] or "(no text)", ""
    return json.dumps(error, default=str)[:_SHOWN_CHARS], ""


def _message(choice: Any, body: bytes) -> dict[str, Any]:
    given = fields_of(fields_of(choice).get("message"))
    if not given:
        raise ApiReplyError(f"a choice has no message: {_shown(body)!r}", status=200)
    content: Any = given.get("content")
    message: dict[str, Any] = {"role": "assistant", "content": "" if content is None else content}
    for name in ("reasoning", "reasoning_content", "refusal", "tool_calls", "function_call"):
        if given.get(name):
            message[name] = given[name]
    finish = fields_of(choice).get("finish_reason")
    if finish is not None:
        message["finish_reason"] = finish
    return message


def _loads(body: bytes) -> Any:
    try:
        return _fast_loads(body)
    except ValueError:
        return json.loads(body)  # takes more: NaN, halves of characters, deeper nesting


def _ids(value: Any) -> list[int] | None:
    return cast("list[int]", value) if isinstance(value, list) else None


def _logprobs(value: Any) -> list[Any] | None:
    content = fields_of(value).get("content")
    if not isinstance(content, list):
        return None
    try:
        return [entry["logprob"] for entry in cast("list[Any]", content)]
    except (KeyError, TypeError, IndexError):
        return [fields_of(entry).get("logprob") for entry in items_of(cast("object", content))]


def _shown(body: bytes) -> str:
    return body[: _SHOWN_CHARS * 4].decode("utf-8", "replace")[:_SHOWN_CHARS]
