"""The model endpoint as the rollout sees it: one question, a limit, a classified failure."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, cast

from twinkle_agentic._aio.bounded import Deadline, bounded
from twinkle_agentic._aio.threads import ThreadPool
from twinkle_agentic.envs.errors import TwinkleEnvError
from twinkle_agentic.protocol.errors import ApiError
from twinkle_agentic.protocol.fields import fields_of
from twinkle_agentic.protocol.reply import Completion, error_of
from twinkle_agentic.rollout.types import Failure
from twinkle_agentic.tools.outcome import describe_error
from twinkle_agentic.tools.text import to_text

__all__ = ["Ask", "failure_of"]

_DEFAULT_REQUEST_TIMEOUT_S = 600.0  # of API objects that have no limit of their own


class Ask:
    """Asks an API object for the next message.

    Args:
        api: `OpenAI`, anything with its `acomplete`, or any callable of the `API` interface, which
            then runs in threads of `pool`.
        sampling_params: For each request.
        extra_body: Merged into each request.
        request_timeout_s: Limit of one request with its retries; `None` leaves it to the client
            (600 s for one that has none).
        pool: Threads for blocking API objects.
    """

    def __init__(
        self,
        api: Any,
        sampling_params: Any,
        extra_body: Mapping[str, Any],
        *,
        request_timeout_s: float | None,
        pool: ThreadPool,
    ) -> None:
        self._api = api
        self._bounds_itself = bool(getattr(api, "bounds_itself", False))
        self._acomplete = getattr(api, "acomplete", None)
        self._params = sampling_params
        self._extra: dict[str, Any] = {"extra_body": dict(extra_body)} if extra_body else {}
        self._timeout_s = request_timeout_s
        self._pool = pool
        self.wants_ids = bool(extra_body.get("return_token_ids"))
        self.wants_logprobs = bool(
            extra_body.get("logprobs") or getattr(sampling_params, "logprobs", None) is not None
        )

    def lease(self) -> AbstractAsyncContextManager[Any]:
        """Keep the connections open inside the block, where the API object has such a thing."""
        lease = getattr(self._api, "lease", None)
        return nullcontext() if lease is None else lease()

    async def __call__(self, trajectory: dict[str, Any], deadline: Deadline) -> Completion:
        """Ask for the next message.

        Args:
            trajectory: `messages` and `tools`; its list is not changed, and is copied for API
                objects not ours.
            deadline: Of the trajectory.

        Raises:
            TimeoutError: No reply within the limit or before the deadline.
            Exception: Whatever the API object raised.
        """
        if not self._bounds_itself:
            trajectory = {**trajectory, "messages": list(trajectory["messages"])}
        if self._acomplete is not None:
            default_s: Any = getattr(self._api, "timeout_s", _DEFAULT_REQUEST_TIMEOUT_S)
            limit_s = deadline.cap_s(self._timeout_s or default_s)
            work = self._acomplete(trajectory, self._params, timeout_s=limit_s, **self._extra)
            if not self._bounds_itself:
                return await bounded(work, limit_s)
            # Our client keeps its own limit, which does not count the wait for a connection.
            async with asyncio.timeout(deadline.left_s()):
                return await work
        limit_s = deadline.cap_s(self._timeout_s or _DEFAULT_REQUEST_TIMEOUT_S)
        try:
            reply: Any = await bounded(self._blocking(trajectory), limit_s)
        except TimeoutError as error:
            if str(error):
                raise  # the API object's own
            raise TimeoutError(f"no reply from the API object within {limit_s or 0:g} s") from error
        return _completion(reply)

    async def _blocking(self, trajectory: dict[str, Any]) -> Any:
        reply = await self._pool.run(self._api, trajectory, self._params, **self._extra)
        return await reply if inspect.isawaitable(reply) else reply


def failure_of(error: BaseException, *, default: str = "client") -> Failure:
    """Classify an exception of an API object or an env; `default` is the kind of any other."""
    text = describe_error(error)
    if isinstance(error, ApiError):
        return Failure(text, error.kind.value, error.retryable)
    if isinstance(error, TwinkleEnvError):
        return Failure(text, str(error.kind), error.retryable)
    status: Any = getattr(error, "status_code", None)
    if isinstance(status, int):  # the exceptions of the openai package and its like
        words = error_of(status, {}, to_text(error).encode())
        return Failure(text, words.kind.value, words.retryable)
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return Failure(text, "timeout", True)
    if isinstance(error, ConnectionError) or "Connection" in type(error).__name__:
        return Failure(text, "connection", True)
    return Failure(text, default, False)


def _completion(reply: Any) -> Completion:
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
