"""Shell command templates: checked at registration, filled in so that values arrive verbatim."""

from __future__ import annotations

import json
import re
import shlex
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from twinkle_agentic.envs.agentenv.errors import ToolFaultError
from twinkle_agentic.tools.types import ToolInfo

__all__ = ["CommandTemplate"]


@dataclass(frozen=True, slots=True)
class _Field:
    """A place in a template that an argument goes to."""

    name: str
    spec: str
    context: str
    """`""` outside quotes, else the quote character it stands between."""


@dataclass(frozen=True, slots=True)
class CommandTemplate:
    """A command with `{argument}` places.

    Values are quoted for the shell as the place demands: outside quotes as one word, between single
    or double quotes so that they stay inside. A list outside quotes becomes one word per item. A
    literal brace is written twice. Quoting protects from the shell that runs the template, not from
    a program that interprets its own arguments (`eval`, `python -c`, a file name that begins with a
    dash).

    Attributes:
        parts: Literal text and places, in order.
        defaults: Values of arguments the model left out, from the schema.
        quote: Whether values are quoted.
    """

    parts: tuple[str | _Field, ...]
    defaults: Mapping[str, Any]
    quote: bool

    @classmethod
    def parse(cls, template: str, tool_info: ToolInfo, *, quote: bool = True) -> CommandTemplate:
        """Check a template against the schema of its tool.

        Args:
            template: The command.
            tool_info: The tool; each place must be one of its parameters, where it lists any.
            quote: False puts values in as they are: only for values that are shell code on purpose.

        Raises:
            ValueError: The template is faulty, whatever the arguments: unbalanced braces, a place
                that is no parameter, a place where quoting cannot be right.
        """
        name, properties = _schema_of(tool_info)
        where = f"the command template of tool {name!r}"
        try:
            pieces = list(string.Formatter().parse(template))
        except ValueError as error:
            raise ValueError(
                f"{where} has unbalanced braces ({error}) in {template!r}: write a literal brace "
                "twice"
            ) from None
        scan = _ShellScan()
        parts: list[str | _Field] = []
        for literal, place, spec, conversion in pieces:
            if literal:
                parts.append(literal)
                scan.feed(literal)
            if place is None:
                continue
            if not place.isidentifier() or conversion:
                raise ValueError(
                    f"{where} has the place {{{place}{'!' + conversion if conversion else ''}}}, "
                    "which names no argument: write {argument}, and a literal brace twice"
                )
            if spec and not _formats_something(spec):
                raise ValueError(f"{where} has {{{place}:{spec}}}, whose format fits no value")
            if properties is not None and place not in properties:
                raise ValueError(
                    f"{where} uses {{{place}}}, which is no parameter of the tool: there are "
                    f"{sorted(properties)}"
                )
            if quote and scan.trouble:
                raise ValueError(
                    f"{where} has {{{place}}} {scan.trouble}, where no quoting is right: move it "
                    "out, for instance into a variable, or pass quote=False"
                )
            parts.append(_Field(place, spec or "", scan.quote))
            scan.placed()
        defaults: dict[str, Any] = {
            key: value["default"] for key, value in (properties or {}).items() if "default" in value
        }
        return cls(tuple(parts), defaults, quote)

    def fill(self, arguments: Mapping[str, Any]) -> str:
        """Make the command.

        Raises:
            ToolFaultError: An argument is missing or cannot be put into the template.
        """
        filled: list[str] = []
        for part in self.parts:
            if isinstance(part, str):
                filled.append(part)
                continue
            value = arguments.get(part.name, self.defaults.get(part.name))
            if value is None:
                raise ToolFaultError(f"missing argument {part.name!r}")
            filled.append(self._placed(part, value))
        return "".join(filled)

    def _placed(self, place: _Field, value: Any) -> str:
        if isinstance(value, list) and self.quote and not place.context:
            return " ".join(shlex.quote(_plain(place, item)) for item in cast("list[Any]", value))
        text = _plain(place, value)
        if not self.quote:
            return text
        if place.context == "'":
            return text.replace("'", "'\\''")
        if place.context == '"':
            return re.sub(r'([\\$`"])', r"\\\1", text)
        return shlex.quote(text)


def _plain(place: _Field, value: Any) -> str:
    """Return the text of a value: as it is where it is text, as JSON writes it where it is not."""
    if place.spec:
        try:
            return format(value, place.spec)
        except (TypeError, ValueError) as error:
            raise ToolFaultError(
                f"argument {place.name!r} is {value!r}, which does not fit the format "
                f"{place.spec!r} of the command template: {error}"
            ) from None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _formats_something(spec: str) -> bool:
    for value in ("", 0, 0.0):
        try:
            format(value, spec)
        except ValueError:
            continue
        return True
    return False


def _schema_of(tool_info: ToolInfo) -> tuple[str, dict[str, dict[str, Any]] | None]:
    function = tool_info.get("function", {})
    properties: object = function.get("parameters", {}).get("properties")
    if not isinstance(properties, dict):
        return function.get("name", ""), None
    schemas = cast("dict[str, Any]", properties)
    return function.get("name", ""), {
        name: cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
        for name, schema in schemas.items()
    }


class _ShellScan:
    """Follows the quoting of a shell command from piece to piece.

    It knows single and double quotes, backslashes, comments and command substitution. Where it
    knows that it does not know (backquotes, here-documents, `${...}`, `$'...'`, arithmetic), it
    says so.
    """

    def __init__(self) -> None:
        self._stack = [""]  # the innermost last: "", ', ", or a construct no value may stand in
        self._escaped = False
        self._word = False  # the last character was part of a word, so that `#` begins no comment
        self._previous = ""
        self._here_document = False
        self._case = False

    @property
    def quote(self) -> str:
        """The quote the next character stands in; empty outside of any."""
        return self._stack[-1]

    @property
    def trouble(self) -> str:
        """Why a value cannot be quoted here; empty where it can."""
        if self._here_document:
            return "in or after a here-document"
        if self._case:
            return "in or after a case statement"
        if self._escaped:
            return "after a backslash"
        for construct, name in _CONSTRUCTS.items():
            if construct in self._stack:
                return name
        return ""

    def placed(self) -> None:
        """Take note of a value at this place."""
        self._word, self._previous = True, "x"

    def feed(self, text: str) -> None:
        """Read literal text of the template."""
        index = 0
        while index < len(text):
            index += self._read(text, index)

    def _read(self, text: str, index: int) -> int:
        """Read one token at `index` and return its length."""
        character, state = text[index], self._stack[-1]
        previous, self._previous = self._previous, character
        if self._escaped:
            self._escaped = False
            self._word = True
            return 1
        if state in ("'", "$'"):
            if character == "\\" and state == "$'":
                self._escaped = True
            elif character == "'":
                self._stack.pop()
            return 1
        if state == "#":
            if character == "\n":
                self._stack.pop()
                self._word = False
            return 1
        if character == "\\":
            self._escaped = True
            return 1
        if character == "`":
            self._stack.pop() if state == "`" else self._stack.append("`")
            return 1
        if character == "$":
            for opening in ("$((", "$(", "${", "$'"):
                if text.startswith(opening, index) and not (opening == "$'" and state == '"'):
                    self._stack.append({"$(": ""}.get(opening, opening))
                    self._word = opening == "$'"
                    return len(opening)
        if state == '"':
            if character == '"':
                self._stack.pop()
            return 1
        return self._unquoted(text, index, previous)

    def _unquoted(self, text: str, index: int, previous: str) -> int:
        character, state = text[index], self._stack[-1]
        if character in "'\"":
            self._stack.append(character)
        elif character == "}" and state == "${":
            self._stack.pop()
        elif state == "$((" and text.startswith("))", index):
            self._stack.pop()
            return 2
        elif not self._word and _CASE.match(text, index):
            self._case = True  # its patterns end with an unpaired parenthesis
        elif character == "(":
            self._stack.append("((" if previous == "(" else "")
        elif character == ")" and len(self._stack) > 1 and state in ("", "(("):
            self._stack.pop()
        elif text.startswith("<<<", index):
            return 3
        elif text.startswith("<<", index):
            self._here_document = True
            return 2
        elif character == "#" and not self._word and state != "${":
            self._stack.append("#")
        self._word = not (character.isspace() or character in ";&|()")
        return 1


_CASE = re.compile(r"case\s")

_CONSTRUCTS = {
    "`": "between backquotes",
    "#": "in a comment",
    "${": "in ${...}",
    "$'": "in $'...'",
    "$((": "in an arithmetic expression",
    "((": "in an arithmetic expression",
}
