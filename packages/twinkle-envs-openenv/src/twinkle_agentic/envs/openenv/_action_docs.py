"""What the docstring of an Action says to a model: prose, and a line about each field.

Authors put into it what the values mean (`0 = straight on, 1 = left`), and seldom anywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = ["read_action_docs"]

_SECTION = re.compile(r"(\w+)\b[^:]*:\s*$")  # "Example (two players):" too
_FIELDS = ("Args", "Arguments", "Attributes", "Fields", "Parameters")
_PYTHON = ("Example", "Examples", "Usage")
_ENTRY = re.compile(r"(\s*)(\w+)\s*(?:\([^)]*\))?:\s*(\S.*)")


def read_action_docs(docstring: str, fields: Collection[str] | None) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring.

    Args:
        docstring: Without indentation, as `inspect.cleandoc` leaves it.
        fields: Names of the fields; `None` takes any name for one.

    Returns:
        The description, without examples of Python, and the texts about fields. A section of
        attributes of which some are no fields stays in the description, too.
    """
    description: list[str] = []
    about: dict[str, str] = {}
    for title, lines in _sections(docstring):
        if title in _PYTHON:
            continue
        entries = _entries(lines) if title in _FIELDS else {}
        known = entries.keys() - {""} if fields is None else set(fields)
        about.update({name: text for name, text in entries.items() if name in known})
        if not entries or not entries.keys() <= known:
            description += [line for line in lines if not line.lstrip().startswith((">>>", "..."))]
    return "\n".join(description).strip(), about


def _sections(docstring: str) -> list[tuple[str, list[str]]]:
    """Split at headings in the first column; the heading is the first line of its section."""
    sections: list[tuple[str, list[str]]] = [("", [])]
    for line in docstring.strip().splitlines():
        heading = _SECTION.match(line)
        if heading or (line[:1].strip() and sections[-1][0]):
            sections.append((heading[1] if heading else "", []))
        sections[-1][1].append(line.rstrip())
    return sections


def _entries(lines: list[str]) -> dict[str, str]:
    """Read `name: text` lines with their continuations; anything else is an entry without name."""
    entries: dict[str, str] = {}
    current, margin = "", -1
    for line in lines[1:]:
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        if current and indent > margin:
            entries[current] += f" {line.strip()}"
            continue
        entry = _ENTRY.match(line)
        current, margin = (entry[2], indent) if entry else ("", indent)
        entries[current] = entry[3] if entry else ""
    return entries
