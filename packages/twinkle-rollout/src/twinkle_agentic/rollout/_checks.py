"""What is refused before a rollout starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from twinkle_agentic._aio.limits import check_count
from twinkle_agentic.protocol.retry import RetryPolicy
from twinkle_agentic.protocol.sampling import SamplingParams
from twinkle_agentic.rollout._tool_calls import env_tools
from twinkle_agentic.rollout.failures import FailurePolicy

__all__ = [
    "attempts_of",
    "check_attempts",
    "check_body",
    "check_choice",
    "check_exclusive",
    "check_failures",
    "check_overrides",
    "check_trajectories",
    "descriptor_limit",
    "one_sample",
    "resolve_managers",
    "tools_or_envs",
]

logger = logging.getLogger(__name__)


def check_trajectories(trajectories: Any) -> list[Mapping[str, Any]]:
    """Return the trajectories as a list.

    Raises:
        TypeError: Not a sequence of mappings with a list of messages.
    """
    if isinstance(trajectories, (Mapping, str, bytes)):
        raise TypeError(
            f"trajectories must be a list, found {type(cast('object', trajectories)).__name__}: "
            "wrap a single one as [trajectory]"
        )
    given = list(cast("Sequence[Any]", trajectories))
    for position, trajectory in enumerate(given):
        if not isinstance(trajectory, Mapping):
            raise TypeError(f"trajectory {position} must be a dict, found {trajectory!r}")
        fields = cast("Mapping[str, Any]", trajectory)
        messages: Any = fields.get("messages")
        if messages is None and "prompt" in fields:
            raise TypeError(
                f"trajectory {position} has a 'prompt' and no 'messages': write it as "
                '{"messages": [{"role": "user", "content": prompt}]}'
            )
        if messages is not None and not isinstance(messages, (list, tuple)):
            raise TypeError(
                f"'messages' of trajectory {position} must be a list, found "
                f"{type(messages).__name__}"
            )
        for message in cast("Sequence[Any]", messages or ()):
            if not isinstance(message, Mapping):
                raise TypeError(
                    f"a message of trajectory {position} must be a dict, found {message!r}"
                )
    return given


def resolve_managers(manager: Any, count: int, *, group_size: int = 1) -> list[Any]:
    """Give each trajectory its tool manager.

    Args:
        manager: One for all, or a list of `count`.
        count: Number of trajectories.
        group_size: How often each is played.

    Raises:
        ValueError: None given, a list of another length, or one env behind the tools of several
            trajectories.
    """
    if manager is None:
        raise ValueError(
            "tool_manager is missing: pass it, or env_factory, to the rollout or to the call"
        )
    if isinstance(manager, (list, tuple)):
        managers = list(cast("Sequence[Any]", manager))
        if len(managers) != count:
            raise ValueError(
                f"a list of tool managers must have one per trajectory: {len(managers)} managers, "
                f"{count} trajectories"
            )
    else:
        managers = [manager] * count
    users: dict[int, int] = {}
    played = [one for one in managers for _ in range(group_size)]
    for position, one in enumerate(played):
        for tool in env_tools(one).values():
            first = users.setdefault(id(tool.env), position)
            if first != position:
                raise ValueError(
                    f"trajectories {first} and {position} would act on the same env "
                    f"({type(tool.env).__name__}): pass env_factory, or a list of managers with an "
                    "env each"
                )
    return managers


def descriptor_limit(concurrency: int) -> int:
    """Lower a concurrency that the open-file limit of this process cannot carry.

    A trajectory may hold one connection to the model and one to its environment.
    """
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError, ValueError):
        return concurrency
    if soft == resource.RLIM_INFINITY:
        return concurrency
    carried = max(1, (soft - 128) // 2)
    if carried < concurrency:
        logger.warning(
            "concurrency lowered from %d to %d: the open-file limit is %d (ulimit -n)",
            concurrency,
            carried,
            soft,
        )
    return min(concurrency, carried)


def tools_or_envs(manager: Any, factory: Any, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the tool manager and the env factory of one call, at most one of which is not `None`.

    Args:
        manager: The rollout's.
        factory: The rollout's.
        given: To the call: where it has either, the rollout's do not count.

    Raises:
        ValueError: The call has both, or a factory that cannot be called.
    """
    own_manager, own_factory = given.get("tool_manager"), given.get("env_factory")
    if own_manager is None and own_factory is None:
        return manager, factory
    check_exclusive(own_manager, own_factory)
    return own_manager, own_factory


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a value that is none of those of a `Literal`.

    Raises:
        ValueError: It is none of them.
    """
    if value not in get_args(choices):
        words = " or ".join(map(repr, get_args(choices)))
        raise ValueError(f"{name} must be {words}, found {value!r}")


def check_overrides(given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse keyword arguments of a call that it does not know.

    Raises:
        TypeError: There is one.
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise TypeError(f"unknown overrides {unknown}: a call takes {', '.join(known)}")


def attempts_of(max_attempts: int, retry: RetryPolicy | None, env_factory: Any) -> RetryPolicy:
    """Return how trajectories are played again.

    Raises:
        ValueError: Less than once, or more than once without a new env each time.
    """
    if retry is None:
        check_attempts(max_attempts, env_factory)
        return RetryPolicy(max_attempts=max_attempts, base_delay_s=0.5, max_delay_s=30.0)
    check_attempts(retry.max_attempts, env_factory)
    return retry


def check_failures(policy: FailurePolicy, max_attempts: int, group_size: int) -> None:
    """Check what becomes of failures.

    Raises:
        ValueError: The size of a group is below 1 or below the policy's `min_group`, or the policy
            retries what may be played once only.
    """
    check_count("group_size", group_size)
    if policy.min_group is not None and policy.min_group > group_size:
        raise ValueError(
            f"min_group={policy.min_group} would leave out every group: group_size={group_size}"
        )
    if policy.retries and max_attempts < 2:
        raise ValueError("the failure policy says 'retry': set max_attempts to 2 or more")


def check_attempts(max_attempts: int, env_factory: Any) -> None:
    """Check how often a trajectory may be played.

    Raises:
        ValueError: Less than once, or more than once without a new env each time.
    """
    check_count("max_attempts", max_attempts)
    if max_attempts > 1 and env_factory is None:
        raise ValueError(
            f"max_attempts={max_attempts} needs env_factory: the tools of a tool_manager keep what "
            "an attempt that failed did to them"
        )


def check_exclusive(tool_manager: Any, env_factory: Any) -> None:
    """Refuse a tool manager next to an env factory.

    Raises:
        ValueError: Both are given, or the factory cannot be called.
    """
    if tool_manager is not None and env_factory is not None:
        raise ValueError("tool_manager and env_factory exclude each other: pass one of them")
    if env_factory is not None and not callable(env_factory):
        raise ValueError(f"env_factory must be callable with a trajectory, found {env_factory!r}")


def one_sample(params: Any) -> Any:
    """Return sampling settings as an object; a mapping becomes `SamplingParams`.

    Raises:
        ValueError: They ask for more than one sample.
    """
    if isinstance(params, Mapping):
        params = SamplingParams(**cast("dict[str, Any]", params))
    if getattr(params, "num_samples", 1) != 1:
        raise ValueError(
            f"a rollout takes num_samples=1, found {params.num_samples}: repeat the trajectory "
            "for a group"
        )
    return params


def check_body(extra_body: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of `extra_body`.

    Raises:
        ValueError: It asks for a stream or for several replies.
    """
    body = dict(extra_body or {})
    if body.get("stream"):
        raise ValueError("extra_body asks for stream=True: the rollout reads whole replies")
    if body.get("n", 1) != 1:
        raise ValueError(
            f"extra_body asks for n={body['n']!r}: the rollout takes one reply per turn"
        )
    return body
