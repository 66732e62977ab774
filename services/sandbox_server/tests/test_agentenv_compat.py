"""The steps of AgentENV's own compatibility check, in our words."""

# The SDK leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from e2b import Sandbox, Template, wait_for_file
from e2b.exceptions import BuildException

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Server


def test_build_create_list_run_pause_connect_kill(server: Server) -> None:
    if server.mode != "bubblewrap":
        pytest.skip("guest paths such as /tmp/NAME need a root directory of the sandbox's own")
    name = f"compat-{int(time.time() * 1000)}"
    workdir = f"/tmp/{name}"
    template = (
        Template()
        .from_image("docker.io/library/debian:12-slim")
        .run_cmd(f"mkdir -p {workdir}")
        .set_workdir(workdir)
        .set_envs({"MARKER": "one"})
        .run_cmd('printf %s "$MARKER" > marker.txt')
        .run_cmd("pwd > workdir.txt")
        .set_envs({"MARKER": "two"})
        .set_start_cmd(
            f"printf ready > {workdir}/startup-ready.txt; exec -a {name}-start sleep 1000",
            wait_for_file(f"{workdir}/startup-ready.txt"),
        )
    )
    built = Template.build(
        template, name, cpu_count=1, memory_mb=128, skip_cache=True, **server.opts
    )
    assert built.template_id
    assert built.build_id
    assert built.name == name
    assert Template.exists(name, **server.opts)

    sandbox = server.sandbox(name, timeout=90, metadata={"suite": "compat"}, secure=True)
    assert sandbox.sandbox_id in [
        info.sandbox_id for info in Sandbox.list(limit=20, **server.opts).next_items()
    ]
    run = sandbox.commands.run
    assert run("cat marker.txt", cwd=workdir).stdout == "one"
    assert run("cat workdir.txt").stdout.strip() == workdir
    assert run("cat startup-ready.txt").stdout == "ready"
    assert run('printf %s "$MARKER"').stdout == "two"
    assert run(f"pgrep -f '^{name}-start'").stdout.strip().isdigit()
    assert sandbox.files.read("marker.txt") == "one"

    assert sandbox.beta_pause()
    sandbox = sandbox.connect(timeout=90)
    assert sandbox.commands.run("printf resumed").stdout == "resumed"
    assert sandbox.kill()

    child = f"{name}-child"
    Template.build(
        Template().from_template(name).run_cmd("echo more >> marker.txt"), child, **server.opts
    )
    sandbox = server.sandbox(child)
    assert sandbox.commands.run("cat marker.txt; pwd").stdout == f"onemore\n{workdir}\n"
    sandbox.kill()
    assert Sandbox.delete_snapshot(built.template_id, **server.opts)
    assert not Template.exists(name, **server.opts)


def test_a_failing_step_fails_the_build(server: Server) -> None:
    logs: list[str] = []
    template = Template().from_image("any").run_cmd("echo so far").run_cmd("exit 9")
    with pytest.raises(BuildException, match="exit code 9"):
        Template.build(
            template,
            "failing",
            on_build_logs=lambda entry: logs.append(entry.message),
            **server.opts,
        )
    assert "so far" in logs
    assert not [
        r for r in Sandbox.list(**server.opts).next_items() if "twinkle.build" in r.metadata
    ]


def test_user_steps(server: Server) -> None:
    name = f"users-{int(time.time() * 1000)}"
    template = (
        Template().from_image("any").set_user("root").run_cmd("echo $USER > who").set_user("user")
    )
    Template.build(template, name, **server.opts)
    assert server.sandbox(name).commands.run("echo $USER").stdout == "user\n"
    assert server.sandbox(name).files.read("who", user="root") == "root\n"


def test_copy_steps_are_refused_with_a_reason(server: Server, tmp_path: object) -> None:
    import pathlib

    (pathlib.Path(str(tmp_path)) / "f").write_text("x")
    template = Template(file_context_path=str(tmp_path)).from_image("any").copy("f", "/f")
    with pytest.raises(Exception, match="COPY steps are not supported"):
        Template.build(template, "copying", **server.opts)


def test_templates_outlive_a_restart_with_a_data_dir(
    start: Callable[..., Server], tmp_path: object
) -> None:
    server = start("bubblewrap", "--data-dir", str(tmp_path))
    sandbox = server.sandbox()
    sandbox.files.write("kept", "yes")
    sandbox.create_snapshot(name="prepared")
    server.stop()
    server = start("bubblewrap", "--data-dir", str(tmp_path))
    assert server.sandbox("prepared").files.read("kept") == "yes"
    server.stop()
