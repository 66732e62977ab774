"""Client of any endpoint that speaks `POST /chat/completions`: OpenAI, vLLM, SGLang, Ollama, ..."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

from twinkle_agentic._aio.limits import check_count, check_limit
from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic.protocol._fields import fields_of
from twinkle_agentic.protocol._reply import Completion, read_completion
from twinkle_agentic.protocol._request import request_body
from twinkle_agentic.protocol._transport import HttpTransport, connection_limit, proxy_for
from twinkle_agentic.protocol.base import API
from twinkle_agentic.protocol.errors import ApiConnectionError, ApiError, ApiTimeoutError
from twinkle_agentic.protocol.retry import RetryPolicy
from twinkle_agentic.tools.types import Message, Trajectory

__all__ = ["OpenAI"]

_NO_FIELDS: Mapping[str, Any] = {}
_DEFAULT_BASE_URL = "https://api.openai.com/v1"
_DEFAULT_TIMEOUT_S = 600.0
_DEFAULT_MAX_RESPONSE_BYTES = 64 * 2**20
_CLIENT_KWARGS = (
    "timeout",
    "max_retries",
    "default_headers",
    "default_query",
    "organization",
    "project",
    "max_connections",
    "max_response_bytes",
    "proxy",
    "trust_env",
    "verify",
)


class OpenAI(API):
    """Asks a chat-completions endpoint for the next message.

    Usable from threads and from several event loops; it holds no connection between calls, except
    while a rollout runs. It does not pickle: make one per process.

    Args:
        model: Name of the model, as the server knows it.
        api_key: Sent as bearer token; by default `OPENAI_API_KEY`. Without either no such header is
            sent, which suits local servers.
        base_url: Up to and including `/v1`; by default `OPENAI_BASE_URL`, else the OpenAI service.
        client_kwargs: `timeout` (seconds for one request including its retries, 600), `max_retries`
            (3), `default_headers`, `default_query`, `organization`, `project`, and, not known to
            the `openai` package: `max_connections` (requests on the wire at once, by default what
            the open-file limit allows, up to 4,096), `max_response_bytes` (64 MiB), `proxy` (URL),
            `trust_env` (take the proxy from the environment, `True`; loopback never uses one),
            `verify` (certificate checks: bool or `ssl.SSLContext`).
        retry: How failed requests are repeated; `max_retries` is the short form.

    Raises:
        TypeError: `client_kwargs` has a key that is not listed.
        ValueError: A value is out of its range, or `base_url` is no http(s) URL.

    Example:
        >>> api = OpenAI("qwen", base_url="http://127.0.0.1:8000/v1")
        >>> prompt = {"messages": [{"role": "user", "content": "Hello"}]}
        >>> api(prompt, SamplingParams())
        {'role': 'assistant', 'content': 'Hi!', 'finish_reason': 'stop'}
    """

    bounds_itself = True
    sends_finish_reason = True

    def __init__(
        self,
        model: str,
        api_key: str | None = None,
        base_url: str | None = None,
        client_kwargs: Mapping[str, Any] | None = None,
        *,
        retry: RetryPolicy | None = None,
    ) -> None:
        options = dict(client_kwargs or {})
        unknown = sorted(set(options) - set(_CLIENT_KWARGS))
        if unknown:
            raise TypeError(
                f"client_kwargs has {unknown}, which this client does not know; it takes "
                f"{', '.join(_CLIENT_KWARGS)}"
            )
        self.model = model
        self.base_url = (base_url or os.environ.get("OPENAI_BASE_URL") or _DEFAULT_BASE_URL).rstrip(
            "/"
        )
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must start with http:// or https://, found {base_url!r}")
        timeout: Any = options.get("timeout", _DEFAULT_TIMEOUT_S)
        check_limit("timeout", timeout)
        self.timeout_s = self._timeout_s = float(timeout)
        if retry is None:
            retries: Any = options.get("max_retries")
            check_count("max_retries", retries, at_least=0, allow_none=True)
            retry = RetryPolicy() if retries is None else RetryPolicy(max_attempts=retries + 1)
        self.retry = retry
        query = fields_of(options.get("default_query"))
        self.default_query = {name: str(value) for name, value in query.items()}
        limits = {
            "max_connections": options.get("max_connections") or connection_limit(),
            "max_response_bytes": options.get("max_response_bytes") or _DEFAULT_MAX_RESPONSE_BYTES,
        }
        for name, value in limits.items():
            check_count(name, value)
        proxy: Any = options.get("proxy")
        if proxy is None and options.get("trust_env", True):
            proxy = proxy_for(self.base_url)
        self._http = HttpTransport(
            f"{self.base_url}/chat/completions",
            _headers(api_key or os.environ.get("OPENAI_API_KEY"), options),
            proxy=proxy,
            tls=options.get("verify", True),
            **limits,
        )

    def __call__(
        self, trajectory: Trajectory, sampling_params: Any, **kwargs: Any
    ) -> Message | list[Message]:
        """Ask for the next message and wait for it; as `acomplete`.

        Returns:
            The message, with `finish_reason`; a list for `num_samples` above 1.
        """
        completion = run_sync(self.acomplete(trajectory, sampling_params, **kwargs))
        messages = cast("list[Message]", completion.messages)
        return messages if getattr(sampling_params, "num_samples", 1) > 1 else messages[0]

    async def acomplete(
        self,
        trajectory: Trajectory,
        sampling_params: Any,
        *,
        timeout_s: float | None = None,
        extra_body: Mapping[str, Any] | None = None,
        extra_headers: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> Completion:
        """Ask for the next message.

        Args:
            trajectory: `messages` and, where there are any, `tools`.
            sampling_params: An object with the attributes of `SamplingParams`.
            timeout_s: Seconds for all attempts together, by default `timeout` of the client.
                Waiting for a free connection does not count.
            extra_body: Merged into the request, after `overrides`.
            extra_headers: Sent with this request.
            **overrides: Fields of the request, such as `tool_choice`.

        Raises:
            ContextLengthError: The prompt is too long for the model.
            ApiError: The request failed for good; see `twinkle_agentic.protocol.errors`.
            ValueError: Streaming was asked for, or the request cannot be written as JSON.
        """
        fields = extra_body or _NO_FIELDS
        if overrides:
            fields = {**overrides, **fields}
        body = request_body(self.model, trajectory, sampling_params, fields)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        async with self._http.lease() as shared, shared.slots:
            deadline = time.monotonic() + limit_s
            attempt, anew = 1, False
            while True:
                try:
                    return await self._attempt(
                        shared, body, deadline, limit_s, extra_headers, anew=anew
                    )
                except ApiError as error:
                    error.attempts = attempt
                    delay = self.retry.delay_s(error, attempt)
                    # Where the pause would outlast the limit, the error at hand says more than a
                    # timeout.
                    if delay is None or time.monotonic() + delay >= deadline:
                        raise
                    # Where one kept connection is dead, the others may well be.
                    anew = isinstance(error, (ApiConnectionError, ApiTimeoutError))
                attempt += 1
                await asyncio.sleep(delay)

    def lease(self) -> AbstractAsyncContextManager[Any]:
        """Keep the connections of the running event loop open inside the `async with` block."""
        return self._http.lease()

    async def _attempt(
        self,
        shared: Any,
        body: bytes,
        deadline: float,
        limit_s: float,
        headers: Mapping[str, str] | None,
        *,
        anew: bool,
    ) -> Completion:
        left = deadline - time.monotonic()
        single = self.retry.attempt_timeout_s
        try:
            async with asyncio.timeout(left if single is None else min(left, single)):
                status, found, reply = await self._http.post(
                    shared,
                    body,
                    headers=dict(headers) if headers else None,
                    params=self.default_query or None,
                    anew=anew,
                )
        except TimeoutError as error:
            if isinstance(error, ApiError):
                raise
            waited = limit_s if single is None else min(limit_s, single)
            raise ApiTimeoutError(
                f"no complete reply from {self._http.url} within {waited:g} s"
            ) from error
        return read_completion(status, found, reply)


def _headers(api_key: str | None, options: Mapping[str, Any]) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    for option, header in (("organization", "OpenAI-Organization"), ("project", "OpenAI-Project")):
        if options.get(option):
            headers[header] = str(options[option])
    headers.update(options.get("default_headers") or {})
    return headers
