"""Shell command templates: checked at registration, filled so that values arrive verbatim."""

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


@dataclass(frozen=True, slots=True)
class _Field:
    """A place in a template that an argument goes to."""

    name: str
    spec: str
    quote: str
    """The quote character it stands between; empty outside quotes."""


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
        if _PLACE in template:
            raise ValueError(f"{where} holds a NUL character, which no shell accepts")
        try:
            pieces = list(string.Formatter().parse(template))
        except ValueError as error:
            raise ValueError(
                f"{where} has unbalanced braces ({error}) in {template!r}: write a literal brace "
                "twice"
            ) from None
        text = "".join(
            literal + ("" if place is None else _PLACE) for literal, place, _, _ in pieces
        )
        contexts = iter(_contexts(text))
        parts: list[str | _Field] = []
        for literal, place, spec, conversion in pieces:
            if literal:
                parts.append(literal)
            if place is None:
                continue
            context, trouble = next(contexts)
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
            if quote and trouble:
                raise ValueError(
                    f"{where} has {{{place}}} {trouble}, where no quoting is right: move it "
                    "out, for instance into a variable, or pass quote=False"
                )
            parts.append(_Field(place, spec or "", context))
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
        if isinstance(value, list) and self.quote and not place.quote:
            return " ".join(shlex.quote(_plain(place, item)) for item in cast("list[Any]", value))
        text = _plain(place, value)
        if not self.quote:
            return text
        if place.quote == "'":
            return text.replace("'", "'\\''")
        if place.quote == '"':
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


_PLACE = "\0"  # stands for a value while a template is scanned; no command may hold it
_TOKEN = re.compile(
    r"\\.|\0|[`'\"]|\$\(\(|\$\(|\$\{|\$'|\(\(|[()}#\n]|<<<|<<|case(?=\s)", re.DOTALL
)
_TROUBLE = {
    "`": "between backquotes",
    "#": "in a comment",
    "${": "in ${...}",
    "$'": "in $'...'",
    "$((": "in an arithmetic expression",
    "((": "in an arithmetic expression",
}


def _contexts(text: str) -> list[tuple[str, str]]:
    """Return the quote each `_PLACE` of a shell command stands in, and why none is right there.

    Known are single and double quotes, backslashes, comments and command substitution. Where a
    value cannot be quoted (backquotes, here-documents, `${...}`, `$'...'`, arithmetic, `case` with
    its unpaired parentheses), the second text says so; it is empty elsewhere.
    """
    found: list[tuple[str, str]] = []
    stack = [""]  # the innermost last: "" where commands are read, ', ", or a key of `_TROUBLE`
    blocked = ""
    index = escaped_end = 0
    while match := _TOKEN.search(text, index):
        token, start, index = match[0], match.start(), match.end()
        state = stack[-1]
        before = text[start - 1 : start]
        starts_word = not before or (
            start != escaped_end and (before.isspace() or before in ";&|()<>")
        )
        if token == _PLACE:
            inside = next((name for key, name in _TROUBLE.items() if key in stack), "")
            found.append((state, blocked or inside))
        elif state in ("'", "#"):
            if token == ("'" if state == "'" else "\n"):
                stack.pop()
            index = start + 1
        elif token[0] == "\\":
            if token[1] == _PLACE:
                found.append((state, "after a backslash"))
            escaped_end = index
        elif state == "$'":
            if token == "'":
                stack.pop()
            index = start + 1
        elif token == "`":
            stack.pop() if state == "`" else stack.append("`")
        elif token[0] == "$" and not (token == "$'" and state == '"'):
            stack.append("" if token == "$(" else token)
        elif state == '"':
            if token == '"':
                stack.pop()
            index = start + 1
        elif token in ("'", '"'):
            stack.append(token)
        elif token == "}" and state == "${":
            stack.pop()
        elif token == ")" and state == "$((" and text.startswith("))", start):
            stack.pop()
            index = start + 2
        elif token == ")" and len(stack) > 1 and state in ("", "(("):
            stack.pop()
        elif token[0] == "(":
            stack += ["", "(("] if token == "((" else [""]
        elif token == "<<":
            blocked = "in or after a here-document"
        elif token == "case" and starts_word:
            blocked = "in or after a case statement"
        elif token == "#" and starts_word and state != "${":
            stack.append("#")
    return found
