"""The next message from a chat-completions endpoint, and the conversation with it."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, cast

from twinkle_agentic._aio.bounded import Deadline, TimeLimitError, bounded
from twinkle_agentic._aio.threads import ThreadPool, use_pool
from twinkle_agentic.protocol._fields import fields_of, items_of
from twinkle_agentic.protocol._messages import Reply, holds_call, read_reply, wire_history
from twinkle_agentic.protocol._reply import Completion, completion_of
from twinkle_agentic.protocol._request import Conversation
from twinkle_agentic.protocol.base import API
from twinkle_agentic.protocol.errors import ApiStatusError
from twinkle_agentic.rollout._episode import SourceEnded
from twinkle_agentic.rollout._failures import failure_of
from twinkle_agentic.rollout._pause import RequestPause
from twinkle_agentic.rollout._tokens import TokenLog
from twinkle_agentic.rollout.types import Failure, StopReason

__all__ = ["Chat", "Endpoint"]

logger = logging.getLogger(__name__)

_DEFAULT_REQUEST_TIMEOUT_S = 600.0  # of API objects that have no limit of their own


class Endpoint:
    """The API object of a rollout, with what all its requests share.

    Args:
        api: An `API`, or any callable with its arguments, which then runs in threads of `pool`.
        sampling_params: For each request.
        extra_body: Merged into each request.
        request_timeout_s: Limit of one request with its retries; `None` leaves it to the client
            (600 s for one that has none).
        pool: Threads for blocking API objects.
        pause: Holds requests back while the rollout is paused.
        reasoning: Whether requests carry the reasoning of earlier turns.

    Attributes:
        keep_reasoning: As asked for, until the endpoint refuses it.
    """

    def __init__(
        self,
        api: Any,
        sampling_params: Any,
        extra_body: Mapping[str, Any],
        *,
        request_timeout_s: float | None,
        pool: ThreadPool,
        pause: RequestPause,
        reasoning: Literal["keep", "drop"] = "keep",
    ) -> None:
        self._api: API = api if isinstance(api, API) else _ForeignAPI(api)
        self._params = sampling_params
        self._extra: dict[str, Any] = {"extra_body": dict(extra_body)} if extra_body else {}
        self._timeout_s = request_timeout_s
        self._pool = pool
        self.pause = pause
        self.keep_reasoning = reasoning == "keep"
        self.wants_ids = bool(extra_body.get("return_token_ids"))
        self.wants_logprobs = bool(
            extra_body.get("logprobs") or getattr(sampling_params, "logprobs", None) is not None
        )

    @property
    def sends_finish_reason(self) -> bool:
        """Whether the API object gives the finish reason of every turn."""
        return self._api.sends_finish_reason

    def lease(self) -> AbstractAsyncContextManager[Any]:
        """Keep the connections open inside the block, where the API object has any."""
        return self._api.lease()

    async def ask(self, trajectory: dict[str, Any], deadline: Deadline) -> Completion:
        """Ask for the next message.

        Args:
            trajectory: `messages` and `tools`; its list is not changed, and is copied for API
                objects that are not ours.
            deadline: Of the trajectory.

        Raises:
            TimeoutError: No reply within the limit or before the deadline.
            Exception: Whatever the API object raised.
        """
        default_s = self._api.timeout_s or _DEFAULT_REQUEST_TIMEOUT_S
        limit_s = deadline.cap_s(self._timeout_s or default_s)
        if self._api.bounds_itself:
            request = cast("Any", trajectory)
            return await self._api.acomplete(
                request, self._params, timeout_s=limit_s, **self._extra
            )
        request = cast("Any", {**trajectory, "messages": list(trajectory["messages"])})
        work = self._api.acomplete(request, self._params, timeout_s=limit_s, **self._extra)
        try:
            # Blocking API objects must not take the threads of the steps.
            return await _in_pool(self._pool, work, limit_s)
        except TimeLimitError as error:
            raise TimeoutError(f"no reply from the API object within {limit_s or 0:g} s") from error


class Chat:
    """The conversation of one trajectory with an endpoint: a `MessageSource`.

    Args:
        endpoint: Whom to ask.
        trajectory: The input; not changed.
    """

    def __init__(self, endpoint: Endpoint, trajectory: Mapping[str, Any]) -> None:
        self._endpoint = endpoint
        self.messages: list[dict[str, Any]] = [
            dict(fields_of(message)) for message in items_of(trajectory.get("messages"))
        ]
        self.turns = 0
        self.paused_s = 0.0
        self.raw_replies: list[dict[str, Any]] = []
        self._policy_versions: list[Any] = []
        self._tools: Sequence[Any] | None = None
        self._wire = Conversation([])
        self._used_ids: set[str] = set()
        self._offered: frozenset[str] = frozenset()
        self._tokens = TokenLog(want_ids=endpoint.wants_ids, want_logprobs=endpoint.wants_logprobs)
        self._sends_reasoning = endpoint.keep_reasoning
        self._dropped_reasoning = False

    @property
    def total_tokens(self) -> int | None:
        """Tokens of the prompt and the latest reply together, by the server's count."""
        return self._tokens.latest

    def begin(self, tools: Sequence[Any] | None) -> Sequence[Any] | None:
        """Bring what was said so far into the form of the protocol; all tools are offered."""
        self._tools = tools
        self._offered = frozenset(
            str(fields_of(fields_of(tool).get("function")).get("name")) for tool in tools or ()
        )
        self._wire = Conversation(
            wire_history(
                self.messages,
                used_ids=self._used_ids,
                offered=self._offered,
                keep_reasoning=self._sends_reasoning,
            )
        )
        return tools

    async def next(self, deadline: Deadline) -> tuple[Reply, bool]:
        """Ask for one message and take it in."""
        if not self._wire:
            nothing = "the trajectory has no messages: nothing to ask the model"
            raise SourceEnded(StopReason.API_ERROR, Failure(nothing, "refused"))
        try:
            completion = await self._complete(deadline)
        except Exception as error:
            failure = failure_of(error)
            full = failure.kind == "context_length"
            stop = StopReason.LENGTH if full else StopReason.API_ERROR
            raise SourceEnded(stop, failure) from error
        self.turns += 1
        message = completion.messages[0]
        reply = read_reply(
            message,
            turn=self.turns,
            used_ids=self._used_ids,
            offered=self._offered,
            keep_reasoning=self._sends_reasoning,
        )
        if reply.repaired:
            self.raw_replies.append({"turn": self.turns, "message": message})
        self.messages.append(reply.message)
        self._wire.append(reply.wire)
        self._tokens.add(self.turns, completion)
        return reply, reply.unreadable_calls or (bool(self._tools) and holds_call(reply))

    def add(self, messages: Sequence[dict[str, Any]]) -> None:
        """Append answers to calls, or a user message."""
        self.messages.extend(messages)
        self._wire.extend(messages)

    def leave(self) -> None:
        """Do nothing: no other trajectory waits for this one."""

    def fields(self) -> dict[str, Any]:
        """Return usage, tokens and policy versions."""
        found: dict[str, Any] = {"usage": dict(self._tokens.usage) or None}
        if any(version is not None for version in self._policy_versions):
            found["policy_versions"] = list(self._policy_versions)
        if self._tokens.turns:
            found["token_turns"] = list(self._tokens.turns)
        if self._dropped_reasoning:
            found["reasoning_dropped"] = True
        return found

    async def _complete(self, deadline: Deadline) -> Completion:
        if self._sends_reasoning and not self._endpoint.keep_reasoning:
            self._drop_reasoning()  # another trajectory has found out
        try:
            return await self._ask(deadline)
        except ApiStatusError as error:
            if error.status not in (400, 422) or not self._drop_reasoning():
                raise
            try:
                completion = await self._ask(deadline)
            except Exception:
                raise error from None  # the reasoning was not why
        if self._endpoint.keep_reasoning:
            self._endpoint.keep_reasoning = False
            logger.warning(
                "the endpoint refuses the reasoning of earlier turns: it is left out from here on "
                "(reasoning='drop' avoids the attempt)"
            )
        return completion

    async def _ask(self, deadline: Deadline) -> Completion:
        """Send a request, again where a pause of the rollout aborted it."""
        pause = self._endpoint.pause
        while True:
            self.paused_s += await pause.wait(deadline)
            request = None
            try:
                # The API object's own limit does not count the wait for a connection.
                async with asyncio.timeout(deadline.left_s()) as limit:
                    request = pause.enter(limit)
                    if request is None:
                        continue
                    try:
                        completion = await self._endpoint.ask(self._request(), deadline)
                    finally:
                        pause.leave(request)
            except TimeoutError:
                if request is None or not request.aborted or deadline.passed:
                    raise
                continue
            self._policy_versions.append(request.version)
            return completion

    def _drop_reasoning(self) -> bool:
        """Leave the reasoning out of the requests; returns whether there was any."""
        shorter = [
            {k: v for k, v in message.items() if k not in ("reasoning", "reasoning_content")}
            for message in self._wire
        ]
        if shorter == list(self._wire):
            return False
        self._wire = Conversation(shorter)
        self._sends_reasoning, self._dropped_reasoning = False, True
        return True

    def _request(self) -> dict[str, Any]:
        asked: dict[str, Any] = {"messages": self._wire}
        if self._tools:
            asked["tools"] = self._tools
        return asked


class _ForeignAPI(API):
    """An object with the methods of `API` that is none: what it lacks is taken from `API`."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self.bounds_itself = bool(getattr(api, "bounds_itself", False))
        self.sends_finish_reason = bool(getattr(api, "sends_finish_reason", False))
        timeout_s: Any = getattr(api, "timeout_s", None)
        self.timeout_s = timeout_s if isinstance(timeout_s, (int, float)) else None

    def __call__(self, trajectory: Any, sampling_params: Any, **kwargs: Any) -> Any:
        return self._api(trajectory, sampling_params, **kwargs)

    async def acomplete(
        self, trajectory: Any, sampling_params: Any, *, timeout_s: float | None = None, **kw: Any
    ) -> Completion:
        acomplete = getattr(self._api, "acomplete", None)
        if acomplete is None:
            return await super().acomplete(trajectory, sampling_params, timeout_s=timeout_s, **kw)
        reply: Any = acomplete(trajectory, sampling_params, timeout_s=timeout_s, **kw)
        return completion_of(await reply if inspect.isawaitable(reply) else reply)

    def lease(self) -> AbstractAsyncContextManager[Any]:
        lease = getattr(self._api, "lease", None)
        return super().lease() if lease is None else lease()


async def _in_pool(pool: ThreadPool, work: Any, limit_s: float | None) -> Any:
    async def run() -> Any:
        use_pool(pool)
        return await work

    return await bounded(asyncio.create_task(run()), limit_s)
