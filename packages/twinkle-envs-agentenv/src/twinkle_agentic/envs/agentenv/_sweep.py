"""Killing the sandboxes that dead trainers left, paused ones included."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from e2b import Sandbox, SandboxInfo, SandboxQuery

from twinkle_agentic.envs.agentenv import _labels as labels
from twinkle_agentic.envs.agentenv._config import Connection
from twinkle_agentic.envs.agentenv._sdk_errors import FailureKind, read_failure
from twinkle_agentic.envs.errors import SandboxError

_PAGE = 100
_MAX_PAGES = 1_000  # a server whose paging never ends must not hold the sweep
_AT_ONCE = 16


@dataclass(slots=True, kw_only=True)
class SweepReport:
    """What a sweep found and did.

    Attributes:
        found: Sandboxes that carry our label (and the run's, where one was asked for).
        killed: Ids of those that have ended now.
        reasons: Id to the reason, of those in `killed`.
        spared: Id to the reason, of those that were left alone.
        failed: Id to the error, of those that could not be killed.
    """

    found: int = 0
    killed: list[str] = field(default_factory=list[str])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    spared: dict[str, str] = field(default_factory=dict[str, str])
    failed: dict[str, str] = field(default_factory=dict[str, str])


def sweep(
    *,
    api_url: str | None = None,
    api_key: str | None = None,
    run: str | None = None,
    older_than_s: float | None = None,
    include_live: bool = False,
    dry_run: bool = False,
    request_timeout: float = 60.0,
) -> SweepReport:
    """Kill sandboxes that were created by an `AgentEnv` and whose trainer has ended.

    Only sandboxes with our label are looked at. One whose trainer still runs on this host is
    spared. Of a trainer on another host, in another container, or from before a restart of this
    host nothing is known: its sandboxes are killed only where `run` or `older_than_s` names them.

    Args:
        api_url: The server; by default `E2B_API_URL`.
        api_key: The key; by default `E2B_API_KEY`.
        run: Only sandboxes with this run label.
        older_than_s: Only sandboxes started longer ago than this many seconds.
        include_live: Kill those of running trainers too.
        dry_run: Kill nothing; `killed` then lists what would be.
        request_timeout: Seconds one request may take.

    Raises:
        SandboxError: The server could not be asked for its sandboxes.
        ValueError: An argument has an impossible value.
    """
    if older_than_s is not None and older_than_s < 0:
        raise ValueError(f"older_than_s must be 0 or more seconds, found {older_than_s!r}")
    connection = Connection.resolve(
        api_url=api_url, api_key=api_key, request_timeout=request_timeout
    )
    params = connection.params()
    report = SweepReport()
    to_kill: dict[str, str] = {}
    for info in _ours(connection, params, run):
        report.found += 1
        kill_it, reason = _decide(info, run, older_than_s, include_live)
        (to_kill if kill_it else report.spared)[info.sandbox_id] = reason
    if dry_run:
        report.killed, report.reasons = list(to_kill), to_kill
        return report

    def kill(sandbox_id: str) -> str | None:
        try:
            Sandbox.kill(sandbox_id, **params)
        except Exception as error:
            failure = read_failure(error)
            return None if failure.kind is FailureKind.NOT_FOUND else failure.words
        return None

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for sandbox_id, trouble in zip(to_kill, threads.map(kill, to_kill), strict=True):
            if trouble is None:
                report.killed.append(sandbox_id)
                report.reasons[sandbox_id] = to_kill[sandbox_id]
            else:
                report.failed[sandbox_id] = trouble
    return report


def _ours(connection: Connection, params: dict[str, Any], run: str | None) -> Iterable[SandboxInfo]:
    wanted = {labels.CREATED_BY: labels.MAKER}
    if run is not None:
        wanted[labels.RUN] = run
    found: dict[str, SandboxInfo] = {}
    try:
        pages = Sandbox.list(query=SandboxQuery(metadata=wanted), limit=_PAGE, **params)
        for _ in range(_MAX_PAGES):
            if not pages.has_next:
                break
            for info in pages.next_items():
                found[info.sandbox_id] = info
    except Exception as error:
        raise SandboxError(
            f"the server at {connection.address} does not list its sandboxes: "
            f"{read_failure(error).words}{connection.proxy_hint()}"
        ) from error
    # The server may not filter: the labels decide.
    return [
        info
        for info in found.values()
        if all(info.metadata.get(key) == value for key, value in wanted.items())
    ]


def _decide(
    info: SandboxInfo, run: str | None, older_than_s: float | None, include_live: bool
) -> tuple[bool, str]:
    """Return whether a sandbox is to be killed, and why or why not."""
    age_s = (datetime.datetime.now(datetime.UTC) - _aware(info.started_at)).total_seconds()
    if older_than_s is not None and age_s <= older_than_s:
        return False, f"started {age_s:.0f} s ago"
    lives = labels.owner_lives(info.metadata)
    if lives is False:
        return True, "its trainer is gone"
    where = "its trainer runs on this host" if lives else "its trainer is elsewhere"
    if include_live:
        return True, f"{where}, and include_live is set"
    if lives:
        return False, where
    if run is None and older_than_s is None:
        return False, f"{where}: name it with run or older_than_s"
    return True, f"{where}, and {'older_than_s' if run is None else 'run'} names it"


def _aware(moment: datetime.datetime) -> datetime.datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)
