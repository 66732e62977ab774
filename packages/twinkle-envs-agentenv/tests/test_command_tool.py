import subprocess
from typing import Any

import pytest

from twinkle_agentic.envs.agentenv._command_tool import CommandTemplate
from twinkle_agentic.envs.agentenv.errors import ToolFaultError
from twinkle_agentic.tools.types import ToolInfo

NASTY = [
    "plain",
    "two words",
    "",
    "it's",
    'say "hi"',
    "a; echo INJECTED",
    "$(echo INJECTED)",
    "`echo INJECTED`",
    "$HOME ${HOME} \\ \\\\",
    "line\nbreak",
    "{braces} {{}} {0}",
    "*?[a-z]",
    "-n",
    "'; echo INJECTED; '",
    '"; echo INJECTED; "',
    "!history # comment",
    "héé 你好 🎉",
    "trailing\\",
]


def tool(*names: Any, **schemas: Any) -> Any:
    properties = {name: {"type": "string"} for name in names} | schemas
    return {
        "type": "function",
        "function": {
            "name": "t",
            "parameters": {"type": "object", "properties": properties},
        },
    }


def bash(command: Any) -> Any:
    return subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True).stdout


@pytest.mark.parametrize("value", NASTY)
@pytest.mark.parametrize(
    "template",
    [
        "printf %s {x}",
        "printf %s '{x}'",
        'printf %s "{x}"',
        'v=a{x}b; v=${{v#a}}; printf %s "${{v%b}}"',
        'printf %s "$(printf %s {x})"',
        'v={x}; printf %s "$v"',
        "(printf %s {x})",
        "true # it's a comment\nprintf %s {x}",
        'echo "$#" >/dev/null; printf %s {x}',
        "printf %s \\{{ >/dev/null; printf %s {x}",
        'printf "%s" "it\'s" >/dev/null; printf %s {x}',
    ],
)
def test_values_arrive_verbatim(template: Any, value: Any) -> None:
    command = CommandTemplate.parse(template, tool("x")).fill({"x": value})
    assert bash(command).removesuffix("\n") == value


def test_a_list_becomes_one_word_per_item() -> None:
    template = CommandTemplate.parse("printf '<%s>' {x}", tool(x={"type": "array"}))
    assert bash(template.fill({"x": ["a b", "c;d", 3]})) == "<a b><c;d><3>"


def test_values_that_are_no_text_are_as_json_writes_them() -> None:
    template = CommandTemplate.parse("printf '%s ' {a} {b} {c}", tool("a", "b", "c"))
    assert bash(template.fill({"a": True, "b": 1.5, "c": {"k": "v"}})) == 'true 1.5 {"k": "v"} '


def test_quote_false_puts_values_in_as_they_are() -> None:
    template = CommandTemplate.parse("echo {x}", tool("x"), quote=False)
    assert template.fill({"x": "a; b"}) == "echo a; b"


def test_literal_braces_are_doubled() -> None:
    template = CommandTemplate.parse("awk '{{print $1}}' {x}", tool("x"))
    assert template.fill({"x": "f"}) == "awk '{print $1}' f"


def test_a_default_of_the_schema_fills_in() -> None:
    template = CommandTemplate.parse("echo {x}", tool(x={"type": "string", "default": "d e"}))
    assert template.fill({}) == "echo 'd e'"
    assert template.fill({"x": "z"}) == "echo z"


def test_a_format_is_applied() -> None:
    template = CommandTemplate.parse("echo {n:03d}", tool(n={"type": "integer"}))
    assert template.fill({"n": 7}) == "echo 007"
    with pytest.raises(ToolFaultError, match="'n' is 'x', which does not fit the format '03d'"):
        template.fill({"n": "x"})


def test_a_missing_argument_is_named() -> None:
    template = CommandTemplate.parse("echo {x}", tool("x"))
    with pytest.raises(ToolFaultError, match="missing argument 'x'"):
        template.fill({})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("echo {x", "unbalanced braces"),
        ("echo x}", "unbalanced braces"),
        ("awk '{print $1}' {x}", "names no argument"),
        ("echo {}", "names no argument"),
        ("echo {0}", "names no argument"),
        ("echo {x.__class__}", "names no argument"),
        ("echo {x[0]}", "names no argument"),
        ("echo {x!r}", "names no argument"),
        ("echo {y}", r"no parameter of the tool: there are \['x'\]"),
        ("echo {x:Q}", "format fits no value"),
        ("echo `cat {x}`", "between backquotes"),
        ("cat <<END\n{x}\nEND", "here-document"),
        ("echo ${{v:-{x}}}", r"in \$\{...\}"),
        ("echo $'{x}'", r"in \$'...'"),
        ("echo $(( {x} + 1 ))", "arithmetic"),
        ("(( {x} > 1 ))", "arithmetic"),
        ("true # {x}", "in a comment"),
        ("echo \\{x}", "after a backslash"),
        ('echo "$(case a in a) echo {x};; esac)"', "case statement"),
    ],
)
def test_a_faulty_template_is_refused_at_registration(template: Any, words: Any) -> None:
    with pytest.raises(ValueError, match=words):
        CommandTemplate.parse(template, tool("x"))


def test_a_tool_without_properties_may_use_any_name() -> None:
    info: ToolInfo = {"type": "function", "function": {"name": "t"}}
    assert CommandTemplate.parse("echo {x}", info).fill({"x": 1}) == "echo 1"


def test_a_here_string_is_no_here_document() -> None:
    template = CommandTemplate.parse("cat <<< {x}", tool("x"))
    assert bash(template.fill({"x": "a; b"})) == "a; b\n"
