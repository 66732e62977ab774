"""The tool `run_code`: Python in the code interpreter of a sandbox, which keeps its names."""

from __future__ import annotations

import base64
import binascii
import time
from typing import TYPE_CHECKING, Any, cast

from e2b_code_interpreter import Sandbox as CodeSandbox

from twinkle_agentic.envs.agentenv._commands import COMMANDS_AT_ONCE
from twinkle_agentic.envs.agentenv._limits import limiter_of
from twinkle_agentic.envs.agentenv._output import HeadTail
from twinkle_agentic.envs.agentenv._retry import check_alive, repeated
from twinkle_agentic.envs.agentenv._sdk_calls import calls
from twinkle_agentic.envs.agentenv._sdk_errors import FailureKind, read_failure
from twinkle_agentic.envs.agentenv.errors import CommandBrokenError
from twinkle_agentic.envs.base import StepResult
from twinkle_agentic.tools.text import MAX_TEXT_CHARS, clean_text

if TYPE_CHECKING:
    from e2b_code_interpreter.models import Execution, OutputMessage, Result

    from twinkle_agentic.envs.agentenv._handle import SandboxHandle

_MAX_IMAGES = 8
_FORMATS = ("text", "markdown", "json", "latex", "html", "svg")  # the first that a result has


class _Seen:
    """What the code printed and showed so far, in bounded memory."""

    def __init__(self) -> None:
        self.texts = {name: HeadTail() for name in ("stdout", "results", "stderr")}
        self.images: list[bytes] = []
        self.dropped_images = 0

    @property
    def any(self) -> bool:
        """Tell whether anything has come of the code."""
        return bool(self.images) or any(text.length for text in self.texts.values())

    def on_stdout(self, message: OutputMessage) -> None:
        self.texts["stdout"].add(message.line)

    def on_stderr(self, message: OutputMessage) -> None:
        self.texts["stderr"].add(message.line)

    def on_result(self, result: Result) -> None:
        picture = result.png or result.jpeg
        if picture:
            if len(self.images) >= _MAX_IMAGES:
                self.dropped_images += 1
                return
            try:
                self.images.append(base64.b64decode(picture, validate=True))
            except (binascii.Error, ValueError):
                self.texts["results"].add("[an image that cannot be read]\n")
                return
            self.texts["results"].add(f"[image {len(self.images)}]\n")
            return
        for name in _FORMATS:
            value: Any = getattr(result, name)
            if value:
                self.texts["results"].add(f"{value}\n")
                return

    def result(self, *more: str, **info: Any) -> StepResult:
        """Render it for a model: output and results, then marked what went wrong."""
        if self.dropped_images:
            more = (f"[{self.dropped_images} further images left out]", *more)
        whole = HeadTail(MAX_TEXT_CHARS)
        parts = [text.text().rstrip("\n") for text in self.texts.values()]
        parts[-1] = parts[-1] and f"[stderr]\n{parts[-1]}"
        whole.add("\n".join(part for part in (*parts, *more) if part))
        if self.images:
            info["images"] = self.images
        return StepResult.scored(whole.text(), None, info=info)


def run_code(handle: SandboxHandle, code: str, *, timeout_s: float, outlasted: bool) -> StepResult:
    """Run code after what this sandbox has run before, and wait for its end.

    Raises:
        CommandBrokenError: The connection broke while it ran.
        Exception: As `repeated`.
    """
    code = clean_text(code)
    sandbox = cast("CodeSandbox", handle.sandbox)
    if outlasted:
        handle.extend_lifetime_to_cover(timeout_s)
    seen = _Seen()
    started = 0.0

    def request() -> Execution | Exception:
        nonlocal seen, started
        seen, started = _Seen(), time.monotonic()
        try:
            return sandbox.run_code(
                code,
                on_stdout=seen.on_stdout,
                on_stderr=seen.on_stderr,
                on_result=seen.on_result,
                timeout=timeout_s,
                request_timeout=handle.spec.connection.request_timeout,
            )
        except Exception as error:
            if is_late(error) or seen.any:
                return error  # it must not run twice
            raise

    def is_late(error: Exception) -> bool:
        late = time.monotonic() - started >= timeout_s * 0.95 - 0.1
        return late and read_failure(error).kind is FailureKind.TIMEOUT

    limiter = limiter_of(handle.spec.connection.address, "commands")
    with limiter.place(COMMANDS_AT_ONCE, timeout_s=handle.spec.queue_timeout_s), calls:
        execution = repeated(handle, "running code", request, repeatable=False)
    if isinstance(execution, Exception):
        words = read_failure(execution).words
        timed_out = is_late(execution)
        check_alive(handle, words)
        if timed_out:
            text = f"[interrupted: no end within {timeout_s:g} s; names may be lost]"
            return seen.result(text, timed_out=True)
        raise CommandBrokenError(
            f"the connection to sandbox {handle.sandbox_id} broke while code ran ({words}); it was "
            "interrupted, and what it had done stays",
            output=seen.result().observation,
        ) from execution
    if execution.error is None:
        return seen.result()
    error = execution.error
    text = error.traceback.rstrip("\n") or f"{error.name}: {error.value}"
    if error.traceback and error.value not in error.traceback:  # the server's own words
        text = f"{text}\n[{error.name}: {error.value}]"
    return seen.result(text, code_error=error.name)
